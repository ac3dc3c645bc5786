"""Any model of timm by its name: `gtco bench experiments.models.timm_zoo:densenet121`.

In fp16 with seeded random weights, and one random image, or as many as the name ends in
(`densenet121_batch32`); on the GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Callable

import timm

from experiments.models.transformers_zoo import Model, by_name, ready


def __getattr__(name: str) -> Callable[[], Model]:
    return by_name(name, timm, timm.is_model, _build)


def _build(name: str, batch: int) -> Model:
    model = timm.create_model(name, pretrained=False)
    return ready(model, (batch, *model.pretrained_cfg["input_size"]))
