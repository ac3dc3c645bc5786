"""What runs, in which order: the compiler's result and the runtime's input."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from gtco.codegen.program import KernelProgram
from gtco.ir.graph import FusedGraph, Graph, Group, Node
from gtco.options import Options
from gtco.runtime.arena import Lifetime
from gtco.target import Target


class PlanError(ValueError):
    """A plan whose launch reads what nothing has stored, or a knob of it with no such value."""


@dataclass(frozen=True, eq=False)
class Launch:
    """One step of the plan.

    Args:
        group: what it computes.
        family: the group's family, such as "gemm".
        program: the generated kernel; None calls the group's operators in ATen.
        source: where the choice comes from: "tuned here", "record" (shipped), "transferred"
            (the schedule of a similar workload, whose blocks do the same), "default" or "fallback".
        reason: why there is no generated kernel.
        predicted_us: its time from start to start: the record that was chosen, else a roofline.
        workload: `workload_digest` of the workload that the record is of; empty without one.
    """

    group: Group
    family: str
    program: KernelProgram | None
    source: str
    reason: str = ""
    predicted_us: float | None = None
    workload: str = ""

    @property
    def modules(self) -> tuple[str, ...]:
        """The user's modules that its operators come from."""
        return tuple(dict.fromkeys(n.source for n in self.group.compute if n.source))


@dataclass(frozen=True)
class PlanKnobs:
    """What a plan may vary as a whole: its time, and no bit of an answer.

    The defaults are what most plans are fastest with that nobody tuned
    (experiments/notes/15-untuned_knobs.md).

    Args:
        fetch_distance: how many launches ahead weights are fetched to L2; 0 for not at all.
        late_trigger: 1 lets the kernel behind a `gemm_wgmma` begin when that has asked for its last
            tile, so that their loads hardly share the way into shared memory; 0 at once.
        spread: 1 gives each block of a kernel that has no more of them than there are
            multiprocessors one of its own. Else a few of those that the kernel ahead left empty
            get two or three, which then share its bandwidth.

    Raises:
        PlanError: a value that is none of the knob's `CHOICES`; names both.
    """

    fetch_distance: int = 0
    late_trigger: int = 0
    spread: int = 1

    CHOICES: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "spread": (0, 1),
        "late_trigger": (0, 1),
        "fetch_distance": (0, 1, 2),
    }

    def __post_init__(self) -> None:
        for name, choices in self.CHOICES.items():
            value = getattr(self, name)
            if type(value) is not int or value not in choices:
                values = ", ".join(map(str, choices))
                raise PlanError(f"{value!r} is no value of the plan's knob {name} (of {values})")

    @classmethod
    def of(cls, schedule: Mapping[str, int]) -> PlanKnobs:
        """Those that the record of a plan names; the others as usual.

        Raises:
            PlanError: a value that none of them has.
        """
        names = {field.name for field in fields(cls)} & schedule.keys()
        return cls(**{name: schedule[name] for name in names})

    def apply(self, launches: Sequence[Launch], target: Target) -> tuple[Launch, ...]:
        """`launches` on `target`, in order and without knobs so far, with these."""
        if self.late_trigger:
            launches = [_triggering_late(launch) for launch in launches]
        if self.spread:
            launches = [_spread(launch, target) for launch in launches]
        return fetch_ahead(launches, self.fetch_distance)


def _triggering_late(launch: Launch) -> Launch:
    if launch.program is None or launch.program.sketch != "gemm_wgmma":
        return launch
    return replace(launch, program=replace(launch.program, late_trigger=True))


def _spread(launch: Launch, target: Target) -> Launch:
    program = launch.program
    if program is None or math.prod(program.grid) > target.sm_count:
        return launch
    # With what each block takes for the system, two of half find no room.
    nbytes = max(program.smem_bytes, target.smem_per_sm // 2)
    return replace(launch, program=replace(program, smem_bytes=nbytes))


WEIGHTS = 1 << 16
"""Bytes from which on a constant is worth fetching ahead."""


def fetch_ahead(launches: Sequence[Launch], distance: int) -> tuple[Launch, ...]:
    """Let each generated kernel bring to L2 the weights of the one `distance` launches later.

    Weights come from device memory once a call; a kernel that finds its own in L2 does not wait
    for them at every turn of its ring.
    """
    result = []
    for index, launch in enumerate(launches):
        later = launches[index + distance] if index + distance < len(launches) else None
        weights = weights_of(later) if later is not None and distance else None
        if launch.program is not None and weights is not None:
            name, nbytes = weights
            launch = replace(launch, program=launch.program.fetching(name, nbytes))
        result.append(launch)
    return tuple(result)


def weights_of(launch: Launch) -> tuple[str, int] | None:
    """Name and bytes of the largest constant that a generated kernel reads, if it is large."""
    if launch.program is None:
        return None
    graph = launch.group.graph
    read = {argument.value for argument in launch.program.arguments} & set(graph.constants)
    nbytes, name = max(((graph.specs[name].nbytes, name) for name in read), default=(0, ""))
    return (name, nbytes) if nbytes >= WEIGHTS else None


@dataclass(frozen=True, eq=False)
class Plan:
    """A fused graph and how each of its groups runs.

    Args:
        fused: the groups, in launch order.
        launches: one per group, in the same order.
        target: what the kernels are made for.
        options: the user's.
        dependent_launch: let a generated kernel start before the generated one ahead of it ended
            (sm_90 and newer).
    """

    fused: FusedGraph
    launches: tuple[Launch, ...]
    target: Target
    options: Options
    dependent_launch: bool = True

    @property
    def graph(self) -> Graph:
        """The whole graph after every rewrite."""
        return self.fused.graph

    @cached_property
    def stored(self) -> frozenset[str]:
        """Values that have a buffer: inputs, constants and the outputs of launches."""
        made = (name for launch in self.launches for name in launch.group.graph.outputs)
        return frozenset((*self.graph.inputs, *self.graph.constants, *made))

    @cached_property
    def constants(self) -> tuple[str, ...]:
        """Constants that a launch or the caller reads."""
        read = dict.fromkeys(
            name for launch in self.launches for name in launch.group.graph.constants
        )
        read.update(dict.fromkeys(base for base, _ in self.outputs.values()))
        return tuple(name for name in read if name in self.graph.constants)

    @cached_property
    def outputs(self) -> Mapping[str, tuple[str, tuple[Node, ...]]]:
        """For each output of the graph, the stored value and the views that lead from it.

        Raises:
            PlanError: it is no view of a stored value.
        """
        return {name: self._view_chain(name) for name in self.graph.outputs}

    def _view_chain(self, value: str) -> tuple[str, tuple[Node, ...]]:
        chain: list[Node] = []
        while value not in self.stored:
            node = self.graph.producers.get(value)
            if node is None or not node.definition.is_view:
                raise PlanError(f"the plan returns %{value}, which no launch stores")
            chain.insert(0, node)
            value = node.inputs[0]
        return value, tuple(chain)

    def is_dependent(self, index: int) -> bool:
        """Whether launch `index` starts before the one ahead of it ended.

        Both must be generated: only those wait for their predecessor's end themselves.
        """
        if not self.dependent_launch or not self.target.has_dependent_launch or index == 0:
            return False
        return all(launch.program is not None for launch in self.launches[index - 1 : index + 1])

    def lifetimes(self) -> list[Lifetime]:
        """When each value of the arena is alive, in launches.

        Inputs may be copied in ahead of launch 0; what the caller gets back lives to the end. A
        dependent launch changes nothing: a kernel that started early waits for the whole end of
        the one ahead, and so for all before it, ahead of its first store.

        Raises:
            PlanError: a launch reads a value before one stored it.
        """
        end = len(self.launches)
        first = dict.fromkeys(self.graph.inputs, -1)
        last = dict(first)
        for index, launch in enumerate(self.launches):
            for name in launch.group.graph.inputs:
                if name not in first:
                    raise PlanError(f"{launch.group.name} reads %{name} before a launch stores it")
                last[name] = index
            for name in launch.group.graph.outputs:
                first.setdefault(name, index)
                last[name] = index
        for base, _ in self.outputs.values():
            if base in first:
                last[base] = end
        specs = self.graph.specs
        return [Lifetime(name, specs[name].nbytes, first[name], last[name]) for name in first]


Visit = Callable[[Launch, dict[str, Tensor], Callable[[], object]], object]
"""Given one launch of a walk, the stored values by name (its own outputs are not there yet, or are
what the memory held before) and what runs it, which has to be called once."""
