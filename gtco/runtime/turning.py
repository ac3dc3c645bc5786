"""Which launches walk from their last tile to their first.

A kernel that reads more than L2 keeps, which the one ahead has just written from its first tile to
its last, begins with what L2 has lost, and puts that in the place of what it would have found at
the end. From the last tile to the first it finds what L2 keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gtco.runtime.plan import Launch
from gtco.target import Target

WORTH_TURNING = 1.4
"""How often what L2 keeps goes into what is worth it. On an H100, where that is 21 MB, a copy of
20 MB took 12.8 us instead of 10.9 where each goes the other way than the one ahead, of 26 MB as
long, of 51 MB 35.0 instead of 38.5, and of 205 MB 144.4 instead of 149.3."""
_BEFORE_ALL = (-1, False)


def turn(launches: Sequence[Launch], target: Target) -> tuple[Launch, ...]:
    """`launches` on `target`, in order and all forward so far, each in the direction that pays.

    One whose largest input is worth it goes the other way than the launch that touched this last;
    what the caller gives counts as written forward, and of inputs of one size the one counts that
    was touched last. All others go forward, and so do kernels that cannot turn and calls of ATen.
    """
    worth = WORTH_TURNING * target.kept_bytes
    touched: dict[str, tuple[int, bool]] = {}  # each value by which launch, and whether backward
    result = []
    for index, launch in enumerate(launches):
        graph, program = launch.group.graph, launch.program
        sizes = {name: graph.specs[name].nbytes for name in graph.inputs}
        backward = False
        if program is not None and program.turns and max(sizes.values(), default=0) > worth:
            largest = max(sizes, key=lambda name: (sizes[name], touched.get(name, _BEFORE_ALL)))
            if not touched.get(largest, _BEFORE_ALL)[1]:
                backward = True
                launch = replace(launch, program=replace(program, backward=True))
        touched.update(dict.fromkeys((*graph.inputs, *graph.outputs), (index, backward)))
        result.append(launch)
    return tuple(result)
