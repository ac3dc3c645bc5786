"""Run the nodes of an ONNX graph in order, what is known before the inputs are on the CPU.

If(known, then, else)  -> the nodes of one branch
Loop(3, known, x)      -> its body three times
Scan(x), 5 steps       -> its body five times
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gtco.frontend.onnx_call import Call, concrete
from gtco.frontend.onnx_shapes import KNOWN_FROM_SHAPES

MOST_STEPS = 4096
"""Steps of a loop: each adds the nodes of its body to the program."""


@dataclass(frozen=True)
class Body:
    """A graph, or the graph of a branch or a loop.

    Args:
        inputs: names of what it is given.
        outputs: names of its results.
        calls: its nodes in order.
        buffers: names of its initializers, to those of the module's buffers.
        known: its initializers whose values are known at compile time, on the CPU.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: tuple[Call, ...]
    buffers: Mapping[str, str]
    known: Mapping[str, Tensor]


@dataclass
class Scope:
    """The values that nodes see, by name.

    Args:
        device: where the model runs.
        buffer: a buffer of the module by its name.
        values: what is on that device and, while `torch.export` traces, has no data.
        known: what is known at compile time, on the CPU.
        weights: names of `values` that are initializers, or computed from these alone.
    """

    device: torch.device
    buffer: Callable[[str], Tensor]
    values: dict[str, Tensor] = field(default_factory=dict)
    known: dict[str, Tensor] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)

    def bind(self, name: str, value: Tensor, known: bool) -> None:
        (self.known if known else self.values)[name] = value
        (self.values if known else self.known).pop(name, None)
        self.weights.discard(name)

    def __getitem__(self, name: str) -> tuple[Tensor, bool]:
        """A value, and whether it is known at compile time."""
        known = name in self.known
        return (self.known if known else self.values)[name], known

    def on_device(self, name: str) -> Tensor:
        """What is known is no value of the trace: copy it into it."""
        return self.values[name] if name in self.values else self.known[name].to(self.device)

    def run(self, body: Body, inputs: Sequence[tuple[Tensor, bool]] = ()) -> Scope:
        """The scope in which `body` ran: this one's names, its own, its inputs and its results."""
        inner = Scope(
            self.device, self.buffer, dict(self.values), dict(self.known), set(self.weights)
        )
        inner.values |= {name: self.buffer(buffer) for name, buffer in body.buffers.items()}
        inner.known |= body.known
        inner.weights |= set(body.buffers)
        for name, (value, known) in zip(body.inputs, inputs, strict=False):
            inner.bind(name, value, known)
        for call in body.calls:
            _run(call, inner)
        return inner


def _run(call: Call, scope: Scope) -> None:
    if call.op in CONTROL:
        with call.refusing():
            for name, made in zip(call.outputs, CONTROL[call.op](call, scope), strict=True):
                scope.bind(name, *made)
        return
    constants = [scope.known.get(name) for name in call.inputs]
    names = [name for name in call.inputs if name]
    known = all(name in scope.known for name in names)
    of_weights = all(name in scope.known or name in scope.weights for name in names)
    if known:
        with concrete():
            found = call.run(constants, constants, of_weights)
    elif known := call.op in KNOWN_FROM_SHAPES:
        with concrete():
            found = call.run([scope.values[call.inputs[0]]], constants, of_weights)
    else:
        given = [scope.on_device(name) if name else None for name in call.inputs]
        found = call.run(given, constants, of_weights)
    for name, result in zip(call.outputs, found, strict=False):
        if name and result is not None:
            scope.bind(name, result, known)
            if of_weights and not known:
                scope.weights.add(name)
    missing = [name for name in call.outputs[len(found) :] if name]
    if missing:
        raise call.refuse(f"its results {', '.join(missing)} are not supported")


# -- control flow --------------------------------------------------------------------------------

Results = list[tuple[Tensor, bool]]


def _decided(call: Call, scope: Scope, name: str) -> Any:
    """The element of a value that decides which nodes run."""
    if name not in scope.known:
        raise call.refuse(
            f"{name!r} decides which nodes run and is not known at compile time",
            "make it a constant of the model, or compute both ways and choose with Where",
        )
    with concrete():
        return scope.known[name].reshape(-1)[0].item()


def _if(call: Call, scope: Scope) -> Results:
    chosen = _decided(call, scope, call.inputs[0])
    body: Body = call.attr("then_branch" if chosen else "else_branch")
    inner = scope.run(body)
    return [inner[name] for name in body.outputs]


def _loop(call: Call, scope: Scope) -> Results:
    body: Body = call.attr("body")
    most = int(_decided(call, scope, call.inputs[0])) if call.has(0) else None
    goes_on = bool(_decided(call, scope, call.inputs[1])) if call.has(1) else True
    states = [scope[name] for name in call.inputs[2:]]
    rows: list[Results] = []
    while goes_on and (most is None or len(rows) < most):
        if len(rows) >= MOST_STEPS:
            raise call.refuse(f"it has more than {MOST_STEPS} steps, and each is unrolled")
        with concrete():
            step = [(torch.tensor(len(rows)), True), (torch.tensor(True), True)]
        inner = scope.run(body, [*step, *states])
        goes_on = bool(_decided(call, inner, body.outputs[0]))
        found = [inner[name] for name in body.outputs[1:]]
        states = found[: len(states)]
        rows.append(found[len(states) :])
    return [*states, *_stacked(call, scope, rows, [0] * (len(call.outputs) - len(states)))]


def _scan(call: Call, scope: Scope) -> Results:
    if call.opset < 9:
        raise call.refuse("of opset 8, whose first axis is the batch's, it is not supported")
    body: Body = call.attr("body")
    count = int(call.attr("num_scan_inputs"))
    states = [scope[name] for name in call.inputs[: len(call.inputs) - count]]
    scanned = [scope[name] for name in call.inputs[len(states) :]]
    results = len(call.outputs) - len(states)
    axes = call.attr("scan_input_axes", [0] * count)
    axes = [call.axis(axis, x.dim()) for axis, (x, _) in zip(axes, scanned, strict=True)]
    backwards = call.attr("scan_input_directions", [0] * count)
    steps = {x.shape[axis] for axis, (x, _) in zip(axes, scanned, strict=True)}
    if len(steps) != 1 or max(steps) > MOST_STEPS:
        raise call.refuse(f"its inputs have {sorted(steps)} steps, not one number to {MOST_STEPS}")
    rows: list[Results] = []
    (length,) = steps
    for step in range(length):
        given = []
        for (x, known), axis, back in zip(scanned, axes, backwards, strict=True):
            given.append((_select(x, axis, length - 1 - step if back else step, known), known))
        inner = scope.run(body, [*states, *given])
        found = [inner[name] for name in body.outputs]
        states = found[: len(states)]
        rows.append(found[len(states) :])
    flipped = call.attr("scan_output_directions", [0] * results)
    return [
        *states,
        *_stacked(call, scope, rows, call.attr("scan_output_axes", [0] * results), flipped),
    ]


def _select(x: Tensor, axis: int, index: int, known: bool) -> Tensor:
    if not known:
        return x.select(axis, index)
    with concrete():
        return x.select(axis, index)


def _stacked(
    call: Call,
    scope: Scope,
    rows: Sequence[Results],
    axes: Sequence[int],
    flipped: Sequence[int] | None = None,
) -> Results:
    """What each step adds to the scan outputs, one behind the other."""
    if axes and not rows:
        raise call.refuse("no step makes its results, so that their sizes are not known")
    stacked: Results = []
    for number, axis in enumerate(axes):
        parts = [row[number] for row in rows]
        if flipped is not None and flipped[number]:
            parts.reverse()
        known = all(is_known for _, is_known in parts)
        if known:
            with concrete():
                stacked.append((torch.stack([value for value, _ in parts], axis), True))
        else:
            each = [value.to(scope.device) if is_known else value for value, is_known in parts]
            stacked.append((torch.stack(each, axis), False))
    return stacked


CONTROL: Mapping[str, Callable[[Call, Scope], Results]] = MappingProxyType(
    {"If": _if, "Loop": _loop, "Scan": _scan}
)
"""Operators with graphs of their own, of which the nodes that run are decided at compile time."""
