"""Any model of timm by its name: `gtco bench experiments.models.timm_zoo:densenet121`.

In fp16 with seeded random weights, and one random image, or as many as the name ends in
(`densenet121_batch32`); on the GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import timm

from experiments.models.transformers_zoo import Model, ready


def __getattr__(name: str) -> Callable[[], Model]:
    model, _, batch = name.partition("_batch")
    if not timm.is_model(model) or not (batch or "1").isdecimal():
        raise AttributeError(f"timm {timm.__version__} has no model {name!r}")
    return partial(_build, model, int(batch or 1))


def _build(name: str, batch: int) -> Model:
    model = timm.create_model(name, pretrained=False)
    return ready(model, (batch, *model.pretrained_cfg["input_size"]))
