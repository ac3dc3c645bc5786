"""Any family of transformers' vision models, as deep as its configuration says:
`gtco bench experiments.models.families:owlvit`.

They are those of `experiments.transformers_breadth`, which are cut to a few layers there. In fp16
with seeded random weights, and one random image; on the GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from experiments.models.transformers_zoo import Model, ready
from experiments.transformers_breadth import FAMILIES, make

CUT = frozenset({"num_hidden_layers", "encoder_layers", "decoder_layers"})


def __getattr__(name: str) -> Callable[[], Model]:
    if name not in FAMILIES:
        raise AttributeError(f"transformers_breadth has no family {name!r}")
    return partial(_build, name)


def _build(name: str) -> Model:
    model, config, changes, shape = FAMILIES[name]
    kept = {key: value for key, value in changes.items() if key not in CUT}
    return ready(make((model, config, kept, shape)), shape)
