"""Which inputs kernels read, and which outputs they store, where the caller has them.

Every other input is copied into a buffer by each call, and every other output out of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gtco.ir.graph import Node
from gtco.runtime.plan import Launch, Plan

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
        elif not _is_whole(follow(values[base], chain), values[base]):
            reason = f"it is another selection or order of the elements of %{base}"
        else:
            reason = _refusal(plan, base)
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


def _is_whole(view: Tensor, stored: Tensor) -> bool:
    """Whether a tensor laid out as `view` has room for just the elements of `stored` in order."""
    return (
        view.data_ptr() == stored.data_ptr()
        and view.numel() == stored.numel()
        and view.stride() == torch.empty_like(view, device="meta").stride()
    )
