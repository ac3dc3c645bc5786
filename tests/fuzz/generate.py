"""Random programs: lines of `catalog` that torch runs, over inputs of odd shapes and dtypes."""

from __future__ import annotations

import contextlib
import io
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gtco.ir.graph import DTYPE_NAMES
from tests.fuzz.catalog import FAMILIES
from tests.fuzz.program import DTYPES, Maker, Program

EXTENTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16)
EXTENT_WEIGHTS = (0.25, 2, 2, 2, 2, 1, 1, 1, 3, 0.5, 0.5, 1)
RANK_WEIGHTS = (0.5, 1, 3, 3, 4, 0.7)
LARGEST = 4096
"""Elements of a value: what is larger is dropped, so that a model takes milliseconds."""

NUMBERS = (0.5, 2, -1, 3, 0, 1, 0.125, -0.5, 1.5, 1e-3, 4.0, True)
BASES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BASE_WEIGHTS = (5, 2, 2, 1)
FLOAT_CASTS = ("f16", "bf16", "f32", "f64")
INTEGER_CASTS = ("i64", "i32", "i16", "i8", "u8", "bool")


def generate(seed: int, *, small: bool = False) -> Program:
    """The program of `seed`; the same for the same seed.

    Args:
        small: as the host build likes it: no fp64, up to six lines.
    """
    return _Generator(random.Random(seed), small).run()


class _Generator:
    """Grows a program line by line: each line has run, on the values so far."""

    def __init__(self, rng: random.Random, small: bool) -> None:
        self.rng = rng
        self.inputs: dict[str, Maker] = {}
        self.weights: dict[str, Maker] = {}
        self.lines: list[str] = []
        self.values: dict[str, Tensor] = {}
        weights = (0, 3, 4, 2) if small else BASE_WEIGHTS
        self.base = rng.choices(BASES, weights)[0]
        self.count = rng.randint(1, 6 if small else 12)
        self.scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, **DTYPES}

    def run(self) -> Program:
        for _ in range(self.rng.choice((1, 1, 2, 2, 3))):
            self._input()
        for _ in range(6 * self.count):
            if len(self.lines) < self.count:
                self._line()
        return Program(dict(self.inputs), dict(self.weights), tuple(self.lines), self._outputs())

    # -- inputs and weights ----------------------------------------------------------------------

    def _input(self) -> None:
        rng = self.rng
        if self.inputs and rng.random() < 0.4:  # alike, so that the two meet
            shape = next(iter(self.inputs.values())).shape
        else:
            rank = rng.choices(range(6), RANK_WEIGHTS)[0]
            shape = tuple(rng.choices(EXTENTS, EXTENT_WEIGHTS, k=rank))
        while len(torch.Size(shape)) and torch.Size(shape).numel() > LARGEST:
            shape = tuple((n + 1) // 2 for n in shape)
        dtype = self.base
        if rng.random() < 0.12:
            dtype = rng.choice([*DTYPES.values(), torch.bool])
        name = f"x{len(self.inputs)}"
        kind = rng.choices(("normal", "positive", "special"), (6, 2, 2))[0]
        self._draw(self.inputs, name, shape, dtype, kind)

    def _draw(
        self,
        table: dict[str, Maker],
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        kind: str,
    ) -> None:
        maker = Maker(shape, dtype, kind, self.rng.randrange(2**31))
        table[name] = maker
        self.scope[name] = value = maker.make()
        if table is self.inputs:
            self.values[name] = value

    def _outputs(self) -> tuple[str, ...]:
        rng = self.rng
        names = list(self.values)
        made = [name for name in names if name not in self.inputs]
        if not made:
            return (names[-1],)
        read = set(re.findall(r"\w+", " ".join(line.partition(" = ")[2] for line in self.lines)))
        ends = [name for name in made if name not in read] or made[-1:]
        extra = rng.sample(names, min(len(names), rng.choice((0, 0, 0, 1, 2))))
        twice = ends[:1] if rng.random() < 0.03 else []
        return (*ends[-4:], *extra, *twice)

    # -- lines -----------------------------------------------------------------------------------

    def _line(self) -> None:
        names, weights = zip(*((name, w) for name, (_, w) in FAMILIES.items()), strict=True)
        family = self.rng.choices(names, weights)[0]
        template = self.rng.choice(FAMILIES[family][0])
        kept = dict(self.weights)
        filled = self._fill(template)
        if filled is None or not self._try(*filled):
            for name in set(self.weights) - set(kept):
                del self.weights[name], self.scope[name]

    def _fill(self, template: str) -> tuple[str, list[str]] | None:
        """The line and the names that it makes; None where no value suits."""
        rng, fresh = self.rng, [f"v{len(self.values) + i}" for i in range(3)]
        changed = self._changeable() if "{i}" in template else []
        if "{i}" in template and not changed:
            return None
        x = rng.choice(changed) if changed else self._recent()
        shape, rank = tuple(self.values[x].shape), self.values[x].dim()
        other = [n for n, v in self.values.items() if v.dim() <= rank and _broadcasts(v, shape)]
        masks = [
            n for n, v in self.values.items() if v.dtype == torch.bool and _broadcasts(v, shape)
        ]
        extent = rng.choice((1, 2, 3, 5, 7, 8, 16))
        cast = rng.choice(FLOAT_CASTS if rng.random() < 0.7 else INTEGER_CASTS)
        dims = rng.sample(range(rank), rng.randint(0, rank)) if rng.random() < 0.5 else [-1]
        fills: dict[str, Callable[[], Any]] = {
            "x": lambda: x,
            "i": lambda: x,
            "y": self._recent,
            "s": lambda: rng.choice(other) if rng.random() < 0.6 else x,
            "m": lambda: rng.choice(masks) if masks else f"({x} > {rng.choice(NUMBERS)})",
            "k": lambda: rng.choice(NUMBERS),
            "e": lambda: rng.choice((1e-5, 1e-6, 1e-12, 0.1)),
            "d": lambda: rng.randint(-max(rank, 1), max(rank, 1) - 1),
            "ds": lambda: tuple(dims),
            "n": lambda: extent,
            "t": lambda: cast,
            "shape": lambda: self._factored(shape),
            "order": lambda: tuple(rng.sample(range(rank), rank)),
            "o": lambda: fresh[0],
            "p": lambda: fresh[1],
            "q": lambda: fresh[2],
        }

        def fill(match: re.Match[str]) -> str:
            key, _, shape_of = match[1].partition(":")
            if key == "w":
                return self._weight(shape_of, shape, extent, self.values[x].dtype)
            return str(fills[key]())

        try:
            line = re.sub(r"\{(\w+(?::[^{}]*)?)\}", fill, template)
        except IndexError:  # a weight of a dimension that x has not
            return None
        return line, [
            name for name, key in zip(fresh, "opq", strict=True) if f"{{{key}}}" in template
        ]

    def _weight(self, text: str, shape: tuple[int, ...], extent: int, dtype: torch.dtype) -> str:
        words = text.split(" ", 2)
        if words[0] in (*DTYPES, "bool"):
            dtype, text = {**DTYPES, "bool": torch.bool}[words[0]], words[2]
        elif not dtype.is_floating_point:
            dtype = self.base
        wanted = tuple(eval(text, {"X": shape, "N": extent}))
        name = f"w{len(self.weights)}"
        while name in self.scope:
            name += "_"
        self._draw(self.weights, name, wanted, dtype, "normal")
        return name

    def _try(self, line: str, made: list[str]) -> bool:
        """Run the line; keep it if torch takes it and what comes out is a sensible value."""
        scope = dict(self.scope)
        before = {name: value.clone() for name, value in self.values.items()} if not made else {}
        quiet = contextlib.redirect_stderr(io.StringIO())
        try:
            with quiet, warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                exec(line, scope)
        except Exception:
            for name, value in before.items():
                changed = self.values[name]
                if value.shape == changed.shape and not _overlaps(changed):
                    changed.copy_(value)
            return False
        new = [scope[name] for name in made]
        if not all(_takes(value) for value in new):
            return False
        self.values.update(zip(made, new, strict=True))
        self.scope.update(self.values)
        self.lines.append(line)
        return True

    # -- choices ---------------------------------------------------------------------------------

    def _recent(self) -> str:
        names = list(self.values)
        return self.rng.choice(names[-3:] if self.rng.random() < 0.7 else names)

    def _changeable(self) -> list[str]:
        """Values that may be written to: no memory of an input or a weight."""
        given = [self.scope[name] for name in (*self.inputs, *self.weights)]
        outside = {tensor.untyped_storage().data_ptr() for tensor in given}
        return [
            name
            for name, value in self.values.items()
            if value.untyped_storage().data_ptr() not in outside and value.numel()
        ]

    def _factored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Another shape of as many elements."""
        numel = torch.Size(shape).numel()
        if numel == 0:
            return tuple(self.rng.sample(shape, len(shape)))
        sizes = []
        while numel > 1 and len(sizes) < 4:
            size = self.rng.choice([n for n in range(1, numel + 1) if numel % n == 0])
            sizes.append(size)
            numel //= size
        return (*sizes, numel) if numel > 1 else tuple(sizes)


def _broadcasts(value: Tensor, shape: tuple[int, ...]) -> bool:
    return all(n in (1, m) for n, m in zip(reversed(value.shape), reversed(shape), strict=False))


def _overlaps(value: Tensor) -> bool:
    """Whether elements share memory, as those of an expanded tensor; none may be written then."""
    return any(n > 1 and step == 0 for n, step in zip(value.shape, value.stride(), strict=True))


def _takes(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.numel() <= LARGEST
        and value.dim() <= 6
        and value.dtype in DTYPE_NAMES
    )
