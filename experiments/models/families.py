"""Any family of transformers' vision models, as deep as its configuration says:
`gtco bench experiments.models.families:owlvit`.

They are those of `experiments.transformers_breadth`, which are cut to a few layers there. In fp16
with seeded random weights, and one random image; on the GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from experiments.models.transformers_zoo import Model, ready
from experiments.transformers_breadth import FAMILIES, make

CUT = frozenset({"num_hidden_layers", "encoder_layers", "decoder_layers", "global_attn_indexes"})
"""What is said of depth there: a model has as many layers as its configuration's default."""


def __getattr__(name: str) -> Callable[[], Model]:
    if name not in FAMILIES:
        raise AttributeError(f"transformers_breadth has no family {name!r}")
    return partial(_build, name)


def _build(name: str) -> Model:
    model, config, changes, shape = FAMILIES[name]
    return ready(make((model, config, _whole(changes), shape)), shape)


def _whole(changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` without those of depth, at any level."""
    return {
        key: (value[0], _whole(value[1])) if isinstance(value, tuple) else value
        for key, value in changes.items()
        if key not in CUT
    }
