"""Any model of timm by its name: `gtco bench experiments.models.timm_zoo:densenet121`.

In fp16 with seeded random weights, and one random image; on the GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import timm

from experiments.models.transformers_zoo import Model, ready


def __getattr__(name: str) -> Callable[[], Model]:
    if not timm.is_model(name):
        raise AttributeError(f"timm {timm.__version__} has no model {name!r}")
    return partial(_build, name)


def _build(name: str) -> Model:
    model = timm.create_model(name, pretrained=False)
    return ready(model, (1, *model.pretrained_cfg["input_size"]))
