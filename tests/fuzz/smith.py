"""Models that NNSmith makes (pip install nnsmith): operators joined by a solver of constraints, of
shapes that a program which grows line by line seldom meets."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.judge import Case

NODES = 8
LARGEST = 4096
"""Operators of a model, and elements of a value."""
DTYPES = ("f16", "f32", "f64", "i8", "i32", "i64", "bool")
INSTALLED = importlib.util.find_spec("nnsmith") is not None


def cases(start: int, count: int) -> Iterator[tuple[str, Case]]:
    """The models of seeds `start` to `start + count`, where NNSmith is `INSTALLED`."""
    from nnsmith.graph_gen import model_gen
    from nnsmith.materialize import Model
    from nnsmith.narrow_spec import auto_opset

    kind = Model.init("torch", backend_target="cpu")
    kind.add_seed_setter()
    operators = auto_opset(kind)
    for seed in range(start, start + count):
        torch.manual_seed(seed)
        made = model_gen(
            operators,
            "symbolic-cinit",
            seed=seed,
            max_nodes=NODES,
            max_elem_per_tensor=LARGEST,
            timeout_ms=10_000,
            dtype_choices=DTYPES,
        )
        net = kind.from_gir(made.make_concrete()).native_model
        inputs = tuple(net.get_random_inps(base="center").values())
        yield f"NNSmith, seed {seed}", case_of(net, inputs)


class Replayed(nn.Module):
    """The steps of NNSmith's module without its own checks, which read values."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.inputs, self.outputs = tuple(net.input_map), tuple(net.output_map)
        self.steps = [(step, reads, makes) for step, reads, makes, _ in net.instructions]
        self.parts = nn.ModuleList(step for step, _, _ in self.steps if isinstance(step, nn.Module))

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self.inputs, given, strict=True))
        for step, reads, makes in self.steps:
            result = step(*(values[name] for name in reads))
            results = result if isinstance(result, (list, tuple)) else [result]
            values.update(zip(makes, results, strict=True))
        return tuple(values[name] for name in self.outputs)


def case_of(net: Any, inputs: tuple[Tensor, ...]) -> Case:
    """NNSmith's module as a case, judged against itself in fp64."""
    module = Replayed(net).eval()

    def exact() -> Any:
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        return copy.deepcopy(module).double()(*wide)

    return Case(module, inputs, exact)
