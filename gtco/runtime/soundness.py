"""Whether a plan from a file may run: each launch is held against the plan and the code.

Checksums say that a file is whole, not that it is sane. Here a kernel has to be the one that was
compiled for its launch, the launch within what the kernel and the architecture take, and every
byte that it names within the values that its group reads and stores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from gtco.codegen.binding import Binding
from gtco.codegen.program import LARGEST_GRID, KernelProgram, Pointer, TensorMapArgument
from gtco.ir.spec import BYTES, HALVES, TensorSpec
from gtco.passes.origins import at_origins
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.encoding import LARGEST_BYTES
from gtco.runtime.inspection import CubinError, KernelFacts, inspect_cubin
from gtco.runtime.plan import Launch, Plan, PlanError
from gtco.target import PORTABLE_CLUSTER

_CLUSTERS_FROM = (9, 0)
_LARGEST_CLUSTER = 2 * PORTABLE_CLUSTER
_POINTER_BYTES, _MAP_BYTES = 8, 128
_MAP_DTYPES = (*HALVES, *BYTES, torch.float32)
_SWIZZLES = (0, 32, 64, 128)
_ALIGNMENT = 16  # bytes, of what a tensor map begins at and steps by
_BOX_CHANNELS, _BOX_PIXELS = 256, 1024
_CORNERS = {2: range(-128, 128), 3: range(-16, 16)}  # of windows, by the dimensions of an image


def check_soundness(plan: Plan, kernels: Mapping[str, CompiledKernel]) -> None:
    """Refuse a plan whose launches are not what its kernels were compiled for.

    Args:
        plan: its graph was verified.
        kernels: compiled kernels by entry point.

    Raises:
        PlanError: naming the launch and the limit.
    """
    _check_values(plan)
    plan.lifetimes()  # what is read was stored before
    facts = {name: _facts(plan, kernel) for name, kernel in kernels.items()}
    for launch in plan.launches:
        if launch.program is not None:
            _check_launch(plan, launch, launch.program, facts)
    used = {launch.program.name for launch in plan.launches if launch.program}
    if unused := sorted(facts.keys() - used):
        raise PlanError(f"no launch has the kernel {unused[0]}")


def _check_values(plan: Plan) -> None:
    """Each value is computed by one launch, stored by one, and of a size that memory has."""
    computed: dict[str, str] = {}
    stored: dict[str, str] = {}
    for launch in plan.launches:
        group = launch.group
        for node in group.compute:
            if (other := computed.setdefault(node.name, group.name)) is not group.name:
                raise PlanError(f"{other} and {group.name} both compute %{node.name}")
        made = {value for node in group.nodes for value in node.values}
        if not group.graph.outputs:
            raise PlanError(f"{group.name} stores nothing")
        for name in group.graph.outputs:
            if name not in made:
                raise PlanError(f"{group.name} stores %{name}, which it does not compute")
            if name in stored:
                raise PlanError(f"{stored[name]} and {group.name} both store %{name}")
            stored[name] = group.name
    for node in plan.graph.nodes:
        if not node.definition.is_view and node.name not in computed:
            raise PlanError(f"no launch computes %{node.name}")
    nbytes = sum(plan.graph.specs[name].nbytes for name in plan.stored)
    if nbytes > LARGEST_BYTES:
        raise PlanError(f"its values take {nbytes} bytes, which no GPU has")


def _facts(plan: Plan, kernel: CompiledKernel) -> KernelFacts:
    """What the code of `kernel` says, which has to be what the artifact says of it."""
    try:
        facts = inspect_cubin(kernel.cubin, kernel.name)
    except CubinError as error:
        raise PlanError(str(error)) from error
    if kernel.arch != plan.target.arch or facts.capability != plan.target.capability:
        major, minor = facts.capability
        raise PlanError(
            f"{kernel.name} is for {kernel.arch}, its code for sm_{major}{minor}, the plan for "
            f"{plan.target.arch}"
        )
    said = (kernel.registers, kernel.smem_bytes)
    if said != (facts.registers, facts.smem_bytes):
        raise PlanError(
            f"{kernel.name} is said to take {said[0]} registers and {said[1]} B of shared memory, "
            f"its code says {facts.registers} and {facts.smem_bytes} B"
        )
    return facts


def _check_launch(
    plan: Plan, launch: Launch, program: KernelProgram, kernels: Mapping[str, KernelFacts]
) -> None:
    where = f"the launch {launch.group.name}"
    facts = kernels.get(program.name)
    if facts is None:
        raise PlanError(f"{where}: the kernel {program.name} has no cubin")
    _check_shape(plan, program, facts, where)
    _check_arguments(plan, launch, program, facts, where)
    own = [
        argument
        for argument, access in zip(program.arguments, program.accesses, strict=True)
        if access != "fetch"
    ]
    graph, origins = at_origins(launch.group.graph)
    for argument in program.arguments:
        if argument.origin != origins.get(argument.value, 0):
            raise PlanError(
                f"{where}: its kernel begins to read %{argument.value} {argument.origin} bytes on"
            )
    if program.binding != Binding(graph).digest(own):
        raise PlanError(
            f"{where}: its kernel was made for other operators, or for its arguments in another "
            f"order"
        )


def _check_shape(plan: Plan, program: KernelProgram, facts: KernelFacts, where: str) -> None:
    target = plan.target
    for axis, count, most in zip("xyz", program.grid, LARGEST_GRID, strict=True):
        if not 1 <= count <= most:
            raise PlanError(f"{where}: {count} blocks along {axis}; 1 to {most} are possible")
    most = facts.max_threads or 1024
    if not 1 <= program.block <= most:
        raise PlanError(f"{where}: {program.block} threads a block, the kernel takes 1 to {most}")
    blocks = math.prod(program.cluster)
    if min(program.cluster) < 1 or blocks > _LARGEST_CLUSTER:
        raise PlanError(f"{where}: a cluster of {program.cluster} blocks")
    if blocks > 1 and target.capability < _CLUSTERS_FROM:
        raise PlanError(f"{where}: {target.arch} has no clusters, and this one is {blocks} blocks")
    if any(count % size for count, size in zip(program.grid, program.cluster, strict=True)):
        raise PlanError(f"{where}: clusters of {program.cluster} do not fill {program.grid} blocks")
    nbytes = facts.smem_bytes + program.smem_bytes
    if not 0 <= program.used_smem_bytes <= program.smem_bytes:
        raise PlanError(
            f"{where}: {program.smem_bytes} B of dynamic shared memory, the kernel uses "
            f"{program.used_smem_bytes} B"
        )
    if nbytes > target.smem_per_block:
        raise PlanError(
            f"{where}: {program.smem_bytes} B of dynamic and {facts.smem_bytes} B of static shared "
            f"memory, {target.arch} has {target.smem_per_block} B a block"
        )


def _check_arguments(
    plan: Plan, launch: Launch, program: KernelProgram, facts: KernelFacts, where: str
) -> None:
    """Kinds and sizes as the code has them, reads of what the group reads, stores of what it
    stores, and every byte within its value."""
    count = len(program.arguments)
    if count != len(facts.parameters) or count != len(program.accesses):
        raise PlanError(f"{where}: {count} arguments, the kernel has {len(facts.parameters)}")
    graph = launch.group.graph
    written = []
    for index, (argument, nbytes, access) in enumerate(
        zip(program.arguments, facts.parameters, program.accesses, strict=True)
    ):
        what = f"{where}, argument {index} (%{argument.value})"
        is_map = isinstance(argument, TensorMapArgument)
        if is_map != (access == "map") or nbytes != (_MAP_BYTES if is_map else _POINTER_BYTES):
            raise PlanError(f"{what}: a {type(argument).__name__}, the kernel takes {nbytes} bytes")
        if access == "fetch":
            _check_fetch(plan, program, argument, what)
        elif access == "write":
            written.append(argument.value)
        elif argument.value not in (*graph.inputs, *graph.constants):
            raise PlanError(f"{what}: the kernel reads it, the group does not")
        if isinstance(argument, TensorMapArgument):
            _check_map(argument, plan.graph.specs[argument.value], what)
    if sorted(written) != sorted(graph.outputs):
        raise PlanError(
            f"{where}: the kernel stores {sorted(written)}, the group {sorted(graph.outputs)}"
        )


def _check_fetch(
    plan: Plan, program: KernelProgram, argument: Pointer | TensorMapArgument, what: str
) -> None:
    constant = plan.graph.constants.get(argument.value)
    if constant is None or not 0 < program.fetch_bytes <= constant.nbytes:
        raise PlanError(f"{what}: the kernel fetches {program.fetch_bytes} bytes of a constant")


def _check_map(argument: TensorMapArgument, spec: TensorSpec, what: str) -> None:
    itemsize = spec.dtype.itemsize
    as_it_is = argument.dtype == torch.int32 and spec.dtype == torch.float32
    if not as_it_is and (argument.dtype != spec.dtype or argument.dtype not in _MAP_DTYPES):
        raise PlanError(f"{what}: a tensor map of {argument.dtype} over {spec}")
    if argument.swizzle_bytes not in _SWIZZLES:
        raise PlanError(f"{what}: a swizzle of {argument.swizzle_bytes} bytes")
    if min(argument.sizes) < 1 or min(argument.strides) < 1 or argument.offset < 0:
        raise PlanError(
            f"{what}: a tensor map of {argument.sizes} from {argument.offset} in steps of "
            f"{argument.strides}"
        )
    if any(step * itemsize % _ALIGNMENT for step in (argument.offset, *argument.strides)):
        raise PlanError(f"{what}: a tensor map does not begin and step by {_ALIGNMENT} bytes")
    channels, *others = argument.box
    most = _BOX_CHANNELS if len(others) == len(argument.strides) else _BOX_PIXELS
    widest = argument.swizzle_bytes or _BOX_CHANNELS * itemsize
    if not 1 <= channels <= _BOX_CHANNELS or channels * itemsize > widest:
        raise PlanError(f"{what}: a box of {argument.box}")
    if not all(1 <= size <= most for size in others):
        raise PlanError(f"{what}: a box of {argument.box}")
    if (window := argument.window) is not None:
        corners, steps = (*window.lower, *window.upper), window.stride
        allowed = _CORNERS[len(steps)]
        if any(corner not in allowed for corner in corners) or min(steps) < 1:
            raise PlanError(f"{what}: windows from {corners} in steps of {steps}")
    last = (
        argument.origin // itemsize
        + argument.offset
        + sum(
            (size - 1) * step
            for size, step in zip(argument.sizes, (1, *argument.strides), strict=True)
        )
    )
    if last >= spec.numel:
        raise PlanError(
            f"{what}: a tensor map of {argument.sizes} in steps of {argument.strides} from "
            f"{argument.offset} reaches beyond {spec}"
        )
