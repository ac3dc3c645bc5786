"""Any other model of this folder in fp32, for `--precision tf32` or as it is.

    gtco bench experiments.models.floats:resnet50 --precision tf32

Names are those of the functions; one of timm's is in `timm_zoo`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from experiments.models import (
    autogtco,
    convolutional,
    dense,
    diffusion,
    transformers_zoo,
    vit,
    volumes,
)
from experiments.models.transformers_zoo import Model
from gtco.benchmarking.answers import cast_floats

FAMILIES = (vit, autogtco, convolutional, transformers_zoo, diffusion, volumes, dense)


def __getattr__(name: str) -> Callable[[], Model]:
    found = None if name.startswith("_") else _function(name)
    if found is None:
        raise AttributeError(f"no model {name!r} to have in fp32")
    return partial(_in_fp32, found)


def _function(name: str) -> Callable[[], Model] | None:
    functions = {key: value for family in FAMILIES for key, value in vars(family).items()}
    if callable(functions.get(name)):
        return cast(Callable[[], Model], functions[name])
    try:
        from experiments.models import timm_zoo
    except ImportError:
        return None
    return cast("Callable[[], Model] | None", getattr(timm_zoo, name, None))


def _in_fp32(function: Callable[[], Model]) -> Model:
    module, args = function()
    return module.float(), cast_floats(args, torch.float32)
