"""What is known of one compiled model, as plain values: a page shows it and JSON keeps it."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

FORMAT = 3
"""Of the JSON; another one is refused."""


class BuildError(ValueError):
    """A file that is no build as `gtco report --json` writes it."""


@dataclass(frozen=True)
class Judged:
    """How far values are from what they should be in fp64, as `gtco.check` sees it.

    Args:
        ok: whether they count as right.
        rmse: root of the mean squared error; None if it is no number.
        limit: what `rmse` may be.
        max_abs: the largest absolute error, if a value is a float.
        reason: why they are wrong, if they are.
    """

    ok: bool
    rmse: float | None
    limit: float | None
    max_abs: float | None
    reason: str


@dataclass(frozen=True)
class Answer:
    """One output of the whole model.

    Args:
        inputs: their kind, such as "normal".
        output: its place in the result.
        eager_rmse: of torch in the same precision; None if it is no number.
        judged: the output, held against the model in fp64.
    """

    inputs: str
    output: str
    eager_rmse: float | None
    judged: Judged


@dataclass(frozen=True)
class LaunchFacts:
    """One launch.

    Args:
        name: the group's name.
        layer: the user's module that it mainly computes; empty if none is known.
        modules: all modules that its operators come from.
        family: of the group, such as "gemm".
        ops: its operators, in order.
        kernel: entry point of the generated kernel, or "aten".
        sketch: the kernel's structure; empty for ATen.
        schedule: knob name to value.
        source: where the schedule comes from.
        reason: why there is no generated kernel, and what the user can do.
        predicted_us: by the cost model, from start to start.
        measured_us: on the GPU, from the start of its first kernel to its end, launched alone.
        floor_us: its bytes or its products alone.
        nbytes: what it reads and writes.
        reads: who makes its inputs: positions of launches, or -1, -2, ... for the model's inputs.
        error: of its outputs, given right inputs, if they were checked.
    """

    name: str
    layer: str
    modules: tuple[str, ...]
    family: str
    ops: tuple[str, ...]
    kernel: str
    sketch: str
    schedule: dict[str, int]
    source: str
    reason: str
    predicted_us: float | None
    measured_us: float | None
    floor_us: float
    nbytes: int
    reads: tuple[int, ...]
    error: Judged | None


@dataclass(frozen=True)
class KernelFacts:
    """One distinct generated kernel; the numbers are None where it was not compiled."""

    name: str
    registers: int | None
    smem_bytes: int | None
    spill_bytes: int | None
    cubin_bytes: int | None
    code: str


@dataclass(frozen=True)
class Apart:
    """An edge between two launches, by position, that was not fused, and why."""

    producer: int
    consumer: int
    edge: str
    reason: str


@dataclass(frozen=True)
class Layers:
    """The launches from `start` on are `count` times a block of `period` launches."""

    start: int
    period: int
    count: int


@dataclass(frozen=True)
class LinearFacts:
    """A linear, or another product or sum, that calibration saw.

    Args:
        name: of its node.
        layer: the user's module that it came from.
        shape: its operands and its result, such as "f16[197,768] x f16[3072,768]"; empty if they
            are not known.
        error: of the model's outputs, relative, with this one alone in 8 bits.
        kept: why it stays in 16 bits; empty for one in 8 bits.
        dtype: "fp8" or "int8".
    """

    name: str
    layer: str
    shape: str
    error: float
    kept: str
    dtype: str = "fp8"


@dataclass(frozen=True)
class Build:
    """One compiled model.

    Args:
        model: as the user named it.
        gtco_version: of the gtco that compiled it.
        target: the architecture.
        device: the GPU that it was timed on; empty if it was not.
        options: as they were given.
        summary: name and text of each fact of the compilation.
        times: name to microseconds of a whole call on `device`; empty if it was not timed.
        clock: what the launches' times are, in a sentence.
        floor_us: of the whole call.
        inputs: of the model, as `%name: f16[1,3]`.
        outputs: likewise, each with the position that `LaunchFacts.reads` would have.
        launches: in order.
        kernels: the generated ones, in order of their first launch.
        layers: repeated launches; they do not overlap.
        apart: edges that were not fused.
        answers: each output for each kind of inputs; empty if no kernel ran.
        reference: what the answers were held against, in a sentence; empty if no kernel ran.
        hints: what the user may want to change, a sentence each.
        linears: those that could be in 8 bits; empty for a build that was not calibrated, and for a
            saved artifact, which does not hold the calibration.
    """

    model: str
    gtco_version: str
    target: str
    device: str
    options: dict[str, str]
    summary: tuple[tuple[str, str], ...]
    times: dict[str, float]
    clock: str
    floor_us: float
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, int], ...]
    launches: tuple[LaunchFacts, ...]
    kernels: tuple[KernelFacts, ...]
    layers: tuple[Layers, ...]
    apart: tuple[Apart, ...]
    answers: tuple[Answer, ...]
    reference: str
    hints: tuple[str, ...]
    linears: tuple[LinearFacts, ...]

    def __post_init__(self) -> None:
        count = len(self.launches)
        end = 0
        for each in self.layers:
            if each.start < end or each.period < 1 or each.count < 2:
                raise BuildError(f"{each} overlaps the layers before it, or is none")
            end = each.start + each.period * each.count
        if end > count:
            raise BuildError(f"the layers end at launch {end} of {count}")
        for at, launch in enumerate(self.launches):
            if not all(-len(self.inputs) <= maker < at for maker in launch.reads):
                raise BuildError(f"launch {launch.name!r} reads what nothing made before it")
        if not all(-len(self.inputs) <= maker < count for _, maker in self.outputs):
            raise BuildError("an output comes from no launch")
        if not all(0 <= end < count for e in self.apart for end in (e.producer, e.consumer)):
            raise BuildError("an edge that was not fused names no launch")

    @property
    def is_measured(self) -> bool:
        """Whether each launch has a measured time."""
        return bool(self.launches) and all(each.measured_us is not None for each in self.launches)

    @property
    def wrong(self) -> tuple[str, ...]:
        """What is wrong, a sentence each: outputs, then launches."""
        lines = [
            f"{each.output} for {each.inputs} inputs is wrong: {each.judged.reason}"
            for each in self.answers
            if not each.judged.ok
        ]
        lines += [
            f"{each.name} ({' -> '.join(each.ops)}, {each.kernel}) is wrong: {each.error.reason}"
            for each in self.launches
            if each.error is not None and not each.error.ok
        ]
        return tuple(lines)

    def launch_us(self, launch: LaunchFacts) -> float | None:
        """Its measured time if all have one, else the predicted one."""
        return launch.measured_us if self.is_measured else launch.predicted_us

    @property
    def total_us(self) -> float | None:
        """Of a call: calls back to back if they were timed, else the predictions' sum."""
        if self.times:
            return self.times.get(BACK_TO_BACK)
        known = [each.predicted_us for each in self.launches if each.predicted_us is not None]
        return sum(known) if len(known) == len(self.launches) else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def of(content: Any) -> Build:
        """What `to_dict` gave.

        Raises:
            BuildError: a value is missing, unknown, or of another type; names it.
        """
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            raise BuildError(f"it is no build of format {FORMAT}")
        build: Build = _decode(
            Build, {key: each for key, each in content.items() if key != "format"}, "build"
        )
        return build


BACK_TO_BACK = "back to back"


def _decode(hint: Any, value: Any, where: str) -> Any:
    """`value`, as JSON gives it, as the type `hint`."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [each for each in inner if each is not type(None)]
        return None if value is None else _decode(kinds[0], value, where)
    if is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        names = {field.name for field in fields(hint)}
        if not isinstance(value, Mapping) or set(value) != names:
            raise BuildError(f"{where} does not have the fields {', '.join(sorted(names))}")
        return hint(
            **{name: _decode(hints[name], value[name], f"{where}.{name}") for name in names}
        )
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = [inner[0]] * len(value) if inner[-1] is ... else list(inner)
        if len(kinds) == len(value):
            pairs = enumerate(zip(kinds, value, strict=True))
            return tuple(_decode(kind, each, f"{where}[{i}]") for i, (kind, each) in pairs)
    if origin is dict and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _decode(inner[1], each, f"{where}[{key!r}]") for key, each in value.items()}
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise BuildError(f"{where} is {value!r:.60}, which is not what gtco writes there")
