"""Which inputs kernels read, and which outputs they store, where the caller has them.

Every other input is copied into a buffer by each call, and every other output out of one. An output
may be a strided view of most of what kernels store: it then holds the memory of all of that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gtco.ir.graph import Node
from gtco.runtime.plan import Launch, Plan

LEAST_KEPT = 0.75
"""Part of the elements stored that an output has to be, for the rest is held as long as it is:
three quarters, to which `gtco.passes.channels` pads at most."""
MOST_LAUNCHES = 4
"""Launches that a call gives a new address of one value: for more, a copy costs the host less."""


def copied_inputs(plan: Plan) -> dict[str, str]:
    """The inputs that a call has to copy in, each with the reason."""
    returned = {base for base, _ in plan.outputs.values()}
    reasons: dict[str, str] = {}
    for name in plan.graph.inputs:
        reason = "the caller gets it back" if name in returned else _refusal(plan, name)
        if reason is not None:
            reasons[name] = reason
    return reasons


def copied_outputs(plan: Plan, values: Mapping[str, Tensor]) -> dict[str, str]:
    """The outputs that a call has to copy out, each with the reason.

    Args:
        plan: what runs.
        values: the stored values that outputs lead back to.
    """
    sharing = Counter(plan.outputs[name][0] for name in plan.graph.outputs)
    made = {name for launch in plan.launches for name in launch.group.graph.outputs}
    reasons: dict[str, str] = {}
    for name, (base, chain) in plan.outputs.items():
        reason: str | None
        if base not in made:
            reason = "no launch stores it"
        elif sharing[base] > 1:
            reason = "another output shares its memory"
        else:
            view = follow(values[base], chain)
            if is_whole(view, values[base]) or _is_most(view, values[base]):
                reason = _refusal(plan, base)
            else:
                reason = f"it is another selection or order of the elements of %{base}"
        if reason is not None:
            reasons[name] = reason
    return reasons


def follow(tensor: Tensor, chain: Sequence[Node]) -> Tensor:
    """What the views of `chain` make of `tensor`, one after another."""
    for node in chain:
        tensor = node.definition.reference(tensor, **node.attrs)
    return tensor


def _refusal(plan: Plan, value: str) -> str | None:
    """Why the launches cannot have `value` at an address that changes, or None."""
    users = [launch for launch in plan.launches if value in _touched(launch)]
    for launch in users:
        if launch.program is None:
            return f"{launch.group.name} calls ATen with it"
    if len(users) > MOST_LAUNCHES:
        return f"{len(users)} launches use it"
    return None


def _touched(launch: Launch) -> Iterator[str]:
    """The stored values that a launch reads or stores."""
    yield from launch.group.graph.inputs
    yield from launch.group.graph.outputs
    if launch.program is not None:
        yield from (argument.value for argument in launch.program.arguments)


def is_whole(view: Tensor, stored: Tensor) -> bool:
    """Whether a tensor laid out as `view` has room for just the elements of `stored` in order."""
    return (
        view.data_ptr() == stored.data_ptr()
        and view.numel() == stored.numel()
        and view.stride() == torch.empty_like(view, device="meta").stride()
    )


def _is_most(view: Tensor, stored: Tensor) -> bool:
    """Whether `view` is a view of `stored` that has most of its elements, none of them twice."""
    shared = view.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
    if not shared or view.numel() < LEAST_KEPT * stored.numel():
        return False
    reach = 0  # from the first element to the last along the dimensions so far
    for step, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and step <= reach:
            return False
        reach += step * (size - 1)
    return True
