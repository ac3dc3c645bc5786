"""The sketch language: a kernel family's structure with holes, and what may fill them.

A sketch is made from a group; making it fails with `Illegal` and a sentence if the group is not of
the family. A schedule gives each `Knob` a value; `emit` turns both into a `KernelProgram`, or
refuses with the limit that broke.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from gtco.codegen.binding import Binding
from gtco.codegen.program import LARGEST_GRID, Argument, KernelProgram
from gtco.ir.graph import Group
from gtco.target import Target

Schedule = Mapping[str, int]
"""Knob name to value."""


class Illegal(Exception):
    """A group or schedule that a sketch refuses; the message is the reason."""


def check(condition: bool, reason: str) -> None:
    """Refuse with `reason` unless `condition` holds.

    Raises:
        Illegal: with `reason`.
    """
    if not condition:
        raise Illegal(reason)


@dataclass(frozen=True)
class Knob:
    """One hole of a sketch and the values that may fill it.

    Args:
        name: of the knob.
        choices: what a search tries.
        legal: what a schedule of another group may bring besides.
    """

    name: str
    choices: tuple[int, ...]
    legal: range = range(0)

    def allows(self, value: object) -> bool:
        """Whether `value` may fill the hole."""
        return type(value) is int and (value in self.choices or value in self.legal)

    def __str__(self) -> str:
        values = ", ".join(map(str, self.choices))
        legal = self.legal
        if not legal:
            return f"{self.name} (of {values})"
        steps = f" in steps of {legal.step}" if legal.step > 1 else ""
        return f"{self.name} (of {values}, or {legal[0]} to {legal[-1]}{steps})"


@dataclass(frozen=True)
class BlockWork:
    """What one block of a program does, for models of its time.

    Args:
        fill_bytes: that reach its shared memory, over all steps of all tiles; what neighbours in
            its cluster ask for as well counts in part.
        l2_bytes: that it draws from L2 itself: less than `fill_bytes` where a cluster shares tiles.
        steps: of its main loop, over all tiles.
        stages: steps in flight.
        mma_flops: of its matrix products, padding included.
        tile_p, tile_q: sides of the tile of results that an epilogue handles.
        split: blocks that share the main loop of one tile.
        registers: of a thread, about; the compiler's own count comes after the choice.
        tiles: of results, one after the other.
        consumers: warpgroups that take the tiles in turn, one multiplying during the epilogues of
            the others.
        depth: steps whose products may be unfinished when the next ones are issued.
        peer_bytes: that it takes from other blocks of its cluster beside a split's partial sums.
        copies: of 16 bytes that each thread asks for itself; 0 where that is not counted.
        copy_threads: that only copy, and do none of the arithmetic.
        scales: 1 if each step multiplies an operand by factors ahead of the products.
        requests: of its warps' loads, each of bytes of one line of 128 that lie side by side; 0
            where that is not counted.
        meetings: how often its threads hand on what they have summed up, where that is often.
        warps: that copy and multiply in turns, where it may have too few of them to keep a
            multiprocessor busy; 0 where that is not counted.
        operand_bytes: that its products read from shared memory, where the sketch counts them.
        in_turns: 1 if its threads copy a step whole ahead of its products; blocks of one stage hide
            no copies behind each other's then.
        writers: threads that finish the results of one tile, where nothing hides that; else 0.
        image: 1 if each of these results waits for a value of an image in device memory.
        narrow: into how many more parts a lane's stores of eight columns are cut: 1 where it has
            four side by side, 3 where it has two.
        parts_of_b: of which it reads one for each tile, as all others of these columns do; 0 where
            B is read once.
        awaited: loads of an image that its threads ask for one after another.
        instructions: of its threads beside what the group's nodes ask for, where they are many.
        window_steps: steps of tiles of windows, where few warps hide how their places are computed.
        cut_atoms: of windows' tiles, whose last channels the copy engine fills with zeros.
        kept_bytes: of weights, for which the products of a block's first tile wait.
    """

    fill_bytes: int
    l2_bytes: int
    steps: int
    stages: int
    mma_flops: int
    tile_p: int
    tile_q: int
    split: int
    registers: int
    tiles: int = 1
    consumers: int = 1
    depth: int = 0
    peer_bytes: int = 0
    copies: int = 0
    copy_threads: int = 0
    scales: int = 0
    requests: int = 0
    meetings: int = 0
    warps: int = 0
    operand_bytes: int = 0
    in_turns: int = 0
    writers: int = 0
    image: int = 0
    narrow: int = 0
    parts_of_b: int = 0
    awaited: int = 0
    instructions: int = 0
    window_steps: int = 0
    cut_atoms: int = 0
    kept_bytes: int = 0


def launched(grid: tuple[int, int, int]) -> tuple[tuple[int, int, int], str]:
    """`grid` as CUDA launches it, one that is too long along y or z with that exchanged for x, and
    what the configuration of the kernel, which asks by `block_along` (grid.cuh), says of it."""
    for axis in (1, 2):
        if grid[axis] > LARGEST_GRID[axis]:
            exchanged = list(grid)
            exchanged[0], exchanged[axis] = grid[axis], grid[0]
            x, y, z = exchanged
            return (x, y, z), f"  static constexpr int LONG_AXIS = {axis};\n"
    return grid, ""


LARGEST = 2**31 - 1
"""Most elements of one tensor: kernels index with 32 bits."""


class Sketch(ABC):
    """A kernel family's structure for one group on one target.

    Class attributes:
        name: unique among sketches, such as "gemm_wgmma".
        family: the group family it serves, such as "gemm".
        version: moves when the code made from the same schedule takes another time.
        schedule_version: the first `version` whose knobs mean what they mean now: it moves to
            `version` when one changes its meaning, and then only.
        later_knobs: those that came since `schedule_version`, and the value that says what a
            schedule without them did.
        ring: the knobs that say how its main loop is fed, and leave the tile as it is.

    Attributes:
        group: what it computes.
        target: what for.
        origins: how many bytes further on each input begins that does not begin where it is told.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    version: ClassVar[int]
    schedule_version: ClassVar[int]
    later_knobs: ClassVar[Mapping[str, int]] = {}
    ring: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, group: Group, target: Target) -> None:
        self.group = group
        self.target = target
        self.origins: Mapping[str, int] = {}
        for name, spec in group.graph.specs.items():
            check(0 not in spec.sizes, f"%{name}: {spec} has no element")
        made = (name for node in group.compute for name in node.values)
        for name in (*group.graph.inputs, *group.graph.constants, *made):
            spec = group.graph.specs[name]
            large = f"%{name}: {spec} has {spec.numel:,} elements, and kernels count to {LARGEST:,}"
            check(spec.numel <= LARGEST, f"{large}; smaller batches have kernels")

    @abstractmethod
    def knobs(self) -> tuple[Knob, ...]:
        """The holes, with every value worth trying for this group."""

    def emit(self, schedule: Schedule) -> KernelProgram:
        """Fill the holes.

        Args:
            schedule: a value for each knob, from wherever: a search, a record, a file.

        Raises:
            Illegal: it lacks a knob, has one that is not the sketch's, or a value that a knob does
                not allow; or it breaks a limit. The message names which.
        """
        self._check_knobs(schedule)
        return self._emit(schedule)

    @abstractmethod
    def _emit(self, schedule: Schedule) -> KernelProgram:
        """The same for a schedule whose every value its knob allows.

        Raises:
            Illegal: the schedule breaks a limit, which the message names.
        """

    @abstractmethod
    def defaults(self) -> Iterable[Schedule]:
        """Good schedules before anything was measured, best first; at least one is legal."""

    def block_work(self, program: KernelProgram) -> BlockWork | None:
        """What one block of `program` does; None if it only takes an even share of the bytes."""
        return None

    def requests(self, program: KernelProgram) -> int:
        """`BlockWork.requests` of a program that takes an even share of the bytes."""
        return 0

    def read_again(self, program: KernelProgram) -> int:
        """Bytes that each block of such a program reads beside its share."""
        return 0

    @cached_property
    def _knobs(self) -> dict[str, Knob]:
        return {knob.name: knob for knob in self.knobs()}

    def _check_knobs(self, schedule: Schedule) -> None:
        """Refuse a schedule of other knobs than the sketch's, or of other values than theirs.

        Raises:
            Illegal: naming the first.
        """
        for name in schedule:
            check(name in self._knobs, f"the sketch has no knob {name!r}")
        for name, knob in self._knobs.items():
            check(name in schedule, f"the schedule lacks the knob {knob}")
            check(knob.allows(schedule[name]), f"{schedule[name]!r} is no value of the knob {knob}")

    def check_smem(self, nbytes: int) -> None:
        """Refuse more dynamic shared memory than a block may ask for.

        Raises:
            Illegal: with both numbers.
        """
        limit = self.target.smem_per_block
        check(
            nbytes <= limit, f"shared memory {nbytes} B, {self.target.arch} has {limit} B a block"
        )

    def program(
        self,
        schedule: Schedule,
        source: str,
        grid: tuple[int, int, int],
        block: int,
        smem_bytes: int,
        arguments: Iterable[Argument],
        cluster: tuple[int, int, int] = (1, 1, 1),
    ) -> KernelProgram:
        """The program of this sketch with `source`; see `KernelProgram` for the rest.

        Raises:
            Illegal: the grid is larger than CUDA launches.
        """
        for axis, count, most in zip("xyz", grid, LARGEST_GRID, strict=True):
            check(count <= most, f"{count} blocks along {axis}, a grid has at most {most}")
        arguments = tuple(
            replace(each, origin=self.origins.get(each.value, 0)) for each in arguments
        )
        return KernelProgram(
            self.family,
            self.name,
            schedule,
            source,
            self.target.arch,
            grid,
            block,
            smem_bytes,
            arguments,
            cluster,
            smem_bytes,
            self._binding.digest(arguments),
        )

    @cached_property
    def _binding(self) -> Binding:
        return Binding(self.group.graph)

    def schedules(self) -> Iterator[Schedule]:
        """The whole product of knobs, whether legal or not."""
        knobs = self.knobs()
        for values in itertools.product(*(knob.choices for knob in knobs)):
            yield {knob.name: value for knob, value in zip(knobs, values, strict=True)}

    def legal(self) -> Iterator[tuple[Schedule, KernelProgram]]:
        """Every legal one of `schedules`, with its program."""
        for schedule in self.schedules():
            try:
                yield schedule, self.emit(schedule)
            except Illegal:
                continue
