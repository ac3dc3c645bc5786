"""What a plan launches and which kernels it has, as plain values for reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.plan import Launch, Plan


@dataclass(frozen=True)
class LaunchInfo:
    """One launch of a compiled module.

    Args:
        name: the group's name.
        kernel: entry point of the generated kernel, or "aten".
        family: of the group, such as "gemm".
        ops: the operators it computes, in order.
        modules: the user's modules that they come from.
        schedule: knob values of the generated kernel.
        source: where the choice comes from: "tuned here", "record" (shipped), "transferred"
            (the schedule of a similar workload, whose blocks do the same), "default" or "fallback".
        reason: why there is no generated kernel.
        predicted_us: its time from start to start, if something predicted it.
    """

    name: str
    kernel: str
    family: str
    ops: tuple[str, ...]
    modules: tuple[str, ...]
    schedule: Mapping[str, int]
    source: str
    reason: str
    predicted_us: float | None


@dataclass(frozen=True)
class KernelInfo:
    """One distinct kernel of a compiled module.

    Args:
        name: its entry point.
        sketch: the structure it was made from.
        launches: how often a call launches it.
        registers: of a thread.
        smem_bytes: shared memory of a block, static and dynamic.
        spill_bytes: stored to local memory for want of registers, of a thread.
        cubin_bytes: size of the code.
    """

    name: str
    sketch: str
    launches: int
    registers: int
    smem_bytes: int
    spill_bytes: int
    cubin_bytes: int


def launch_infos(plan: Plan) -> tuple[LaunchInfo, ...]:
    """One entry per launch of `plan`, in order."""
    return tuple(_launch_info(launch) for launch in plan.launches)


def kernel_infos(plan: Plan, compiled: Mapping[str, CompiledKernel]) -> tuple[KernelInfo, ...]:
    """The distinct kernels of `plan`, `compiled`, in order of their first launch."""
    programs = [launch.program for launch in plan.launches if launch.program]
    counts: dict[str, int] = {}
    for program in programs:
        counts[program.name] = counts.get(program.name, 0) + 1
    first = {program.name: program for program in reversed(programs)}
    return tuple(
        KernelInfo(
            name,
            first[name].sketch,
            count,
            compiled[name].registers,
            compiled[name].smem_bytes + first[name].smem_bytes,
            compiled[name].spill_bytes,
            len(compiled[name].cubin),
        )
        for name, count in counts.items()
    )


def _launch_info(launch: Launch) -> LaunchInfo:
    program = launch.program
    return LaunchInfo(
        launch.group.name,
        "aten" if program is None else program.name,
        launch.family,
        tuple(node.op for node in launch.group.compute),
        launch.modules,
        {} if program is None else dict(program.schedule),
        launch.source,
        launch.reason,
        launch.predicted_us,
    )
