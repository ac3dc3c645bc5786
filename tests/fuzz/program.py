"""A model as text: lines of torch over named tensors, which run, shrink and print by themselves."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gtco.ir.graph import DTYPE_NAMES
from tests.fuzz.judge import Case

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items() if name not in ("bool", "f8_e4m3")}
"""What a program calls its dtypes, beside Python's `bool`."""

EXACT = {
    name: torch.float64 if dtype.is_floating_point else dtype for name, dtype in DTYPES.items()
}
"""The same names for a run in which every float is fp64."""


def draw(shape: Iterable[int], dtype: torch.dtype, kind: str, seed: int) -> Tensor:
    """A tensor of `shape`: "normal", "positive", "special" (with zeros of both signs), or for
    an integer dtype small numbers; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(shape)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.6
    if not dtype.is_floating_point:
        low = 0 if dtype == torch.uint8 or kind == "positive" else -4
        return torch.randint(low, 5, shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "positive":
        values = values.abs() + 0.1
    if kind == "special":
        which = torch.randint(0, 6, shape, generator=generator)
        for number, special in enumerate((0.0, -0.0, 1.0, -2.0)):
            values[which == number] = special
    return values.to(dtype)


@dataclass(frozen=True)
class Maker:
    """How an input or a weight is drawn: the arguments of `draw`. Of three dimensions and more some
    have their channels last in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    seed: int

    @property
    def last(self) -> bool:
        return len(self.shape) > 2 and self.seed % 3 == 0

    def make(self) -> Tensor:
        drawn = draw(self.shape, self.dtype, self.kind, self.seed)
        return drawn.movedim(1, -1).contiguous().movedim(-1, 1) if self.last else drawn


class Model(nn.Module):
    """A module whose `forward` is the program's text."""

    def __init__(
        self, source: str, names: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        for name, tensor in weights.items():
            self.register_buffer(name, tensor)
        scope = {"torch": torch, "F": torch.nn.functional, **names}
        exec(source, scope)
        self.run = scope["forward"]

    def forward(self, *args: Tensor) -> Any:
        return self.run(self, *args)


@dataclass(frozen=True)
class Program:
    """Inputs, weights, lines and the names that are returned.

    Args:
        inputs: name to maker, in the order of the call.
        weights: name to maker; they are buffers of the module.
        lines: statements that read and write names; a weight is read as it is named.
        outputs: what is returned, as a tuple.
    """

    inputs: Mapping[str, Maker]
    weights: Mapping[str, Maker]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]

    def forward_source(self) -> str:
        """`def forward(self, ...)` of the lines."""
        head = "\n".join(f"{name} = self.{name}" for name in self.weights)
        body = "\n".join([*self.lines, f"return ({', '.join(self.outputs)},)"])
        where = f"with torch.device({next(iter(self.inputs))}.device):"  # tensors made here too
        arguments = ", ".join(["self", *self.inputs])
        inner = f"{head}\n{where}\n{textwrap.indent(body, '    ')}"
        return f"def forward({arguments}):\n{textwrap.indent(inner.lstrip(), '    ')}"

    def module(self, *, exact: bool = False) -> Model:
        """The model; in fp64 throughout where `exact`, its own casts to floats included."""
        weights = {name: _widen(maker.make(), exact) for name, maker in self.weights.items()}
        names = EXACT if exact else DTYPES
        return Model(self.forward_source(), names, weights).eval()

    def args(self, *, exact: bool = False) -> tuple[Tensor, ...]:
        return tuple(_widen(maker.make(), exact) for maker in self.inputs.values())

    def source(self, target: str | None = None) -> str:
        """A program that runs by itself, eager and gtco side by side, compiled for `target` where
        one is named."""

        def made(maker: Maker) -> str:
            drawn = f"torch.tensor({maker.make().tolist()!r}, dtype={maker.dtype})"
            if 0 in maker.shape:
                drawn += f".reshape({maker.shape})"
            return f"{drawn}{'.movedim(1, -1).contiguous().movedim(-1, 1)' * maker.last}"

        dtypes = ", ".join(f"{name}={dtype}" for name, dtype in DTYPES.items())
        weights = [
            f'self.register_buffer("{name}", {made(maker)})' for name, maker in self.weights.items()
        ] or ["pass"]
        args = [f"{made(maker)}," for maker in self.inputs.values()]
        compiled = {
            None: [],
            "host": ["print(gtco.compile(model, args, target='host')(*args))"],
            "cuda": [
                "args = [x.cuda() for x in args]",
                "print(gtco.compile(model.cuda(), args)(*args))",
            ],
        }[target]
        return "\n".join(
            [
                "import torch",
                "import torch.nn.functional as F",
                "import gtco",
                f"globals().update(dict({dtypes}))",
                "class Model(torch.nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                textwrap.indent("\n".join(weights), "        "),
                textwrap.indent(self.forward_source(), "    "),
                "model = Model().eval()",
                f"args = ({' '.join(args)})",
                "print(model(*args))",
                "graph = gtco.capture(model, args)",
                "print(graph, gtco.interpret(graph, args), sep='\\n')",
                "fused = gtco.fuse(graph)",
                "print(fused, gtco.interpret(fused, args), sep='\\n')",
                *compiled,
            ]
        )


def case_of(program: Program) -> Case:
    """The program as a case, judged against itself in fp64."""
    return Case(
        program.module(),
        program.args(),
        lambda: program.module(exact=True)(*program.args(exact=True)),
    )


def _widen(tensor: Tensor, exact: bool) -> Tensor:
    return tensor.double() if exact and tensor.is_floating_point() else tensor
