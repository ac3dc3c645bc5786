"""ONNX's recurrent operators, unrolled: sizes are fixed, and torch's exporter does the same.

RNN(x, w, r, b)  -> h[t] = tanh(x[t] @ w.T + wb + h[t - 1] @ r.T + rb) for each step t
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.frontend.onnx_call import Call, Op

Step = Callable[[Tensor, list[Tensor]], list[Tensor]]
"""`(w @ x + wb, states before) -> states after`, of which the first is the result."""

FUNCTIONS: Mapping[str, Callable[[Tensor, float, float], Tensor]] = MappingProxyType(
    {
        "affine": lambda x, alpha, beta: x * alpha + beta,
        "elu": lambda x, alpha, beta: F.elu(x, alpha),
        "hardsigmoid": lambda x, alpha, beta: (x * alpha + beta).clamp(0, 1),
        "leakyrelu": lambda x, alpha, beta: F.leaky_relu(x, alpha),
        "relu": lambda x, alpha, beta: torch.relu(x),
        "scaledtanh": lambda x, alpha, beta: torch.tanh(x * beta) * alpha,
        "sigmoid": lambda x, alpha, beta: torch.sigmoid(x),
        "softplus": lambda x, alpha, beta: F.softplus(x),
        "softsign": lambda x, alpha, beta: F.softsign(x),
        "tanh": lambda x, alpha, beta: torch.tanh(x),
        "thresholdedrelu": lambda x, alpha, beta: F.threshold(x, alpha, 0.0),
    }
)
DEFAULTS = {
    "affine": (1.0, 0.0),
    "elu": (1.0, 0.0),
    "hardsigmoid": (0.2, 0.5),
    "leakyrelu": (0.01, 0.0),
    "scaledtanh": (1.0, 1.0),
    "thresholdedrelu": (1.0, 0.0),
}
"""alpha and beta of the functions that have them."""


def _functions(call: Call, count: int, default: Sequence[str]) -> list[Callable[[Tensor], Tensor]]:
    """The activation functions of one direction after the other, with clip ahead of each."""
    directions = 2 if call.attr("direction", "forward") == "bidirectional" else 1
    names = list(call.attr("activations", list(default) * directions))
    if len(names) != count * directions or any(n.lower() not in FUNCTIONS for n in names):
        raise call.refuse(
            f"activations {names} are not {count * directions} of {', '.join(sorted(FUNCTIONS))}"
        )
    alphas, betas = list(call.attr("activation_alpha", [])), list(call.attr("activation_beta", []))
    clip = call.attr("clip")

    def bound(name: str) -> Callable[[Tensor], Tensor]:
        alpha, beta = DEFAULTS.get(name, (0.0, 0.0))
        if name in DEFAULTS:  # each function that has one takes the next of the list
            alpha = alphas.pop(0) if alphas else alpha
        if name in ("affine", "hardsigmoid", "scaledtanh"):
            beta = betas.pop(0) if betas else beta
        function = FUNCTIONS[name]
        if clip is None:
            return lambda x: function(x, alpha, beta)
        return lambda x: function(x.clamp(-clip, clip), alpha, beta)

    return [bound(name.lower()) for name in names]


def _unrolled(
    call: Call,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    lengths: Tensor | None,
    initial: Sequence[Tensor | None],
    steps: Sequence[Step],
    biases: int,
) -> Any:
    """Run `steps`, one a direction, over x; each result is laid out as `layout` says.

    Args:
        x: [tokens, batch, size], or [batch, tokens, size] with layout 1.
        w: [directions, gates * hidden, size].
        b: [directions, 2 * gates * hidden]; its first half goes with w.
        lengths: [batch], behind which there is padding.
        initial: states ahead of the first step, [directions, batch, hidden] each.
        biases: elements of b that go with w.
    """
    direction, layout = call.attr("direction", "forward"), call.attr("layout", 0)
    if direction not in ("forward", "reverse", "bidirectional"):
        raise call.refuse(f"direction={direction!r} is not supported")
    hidden = call.attr("hidden_size", w.shape[1])
    x = x.transpose(0, 1) if layout else x
    tokens, batch, _ = x.shape
    rows, lasts = [], []
    for number, step in enumerate(steps):
        backwards = direction == "reverse" or number == 1
        gates = F.linear(x, w[number], None if b is None else b[number, :biases])
        states = []
        for each in initial:
            if each is None:
                states.append(x.new_zeros(batch, hidden))
            else:
                states.append(each[:, number] if layout else each[number])
        made: dict[int, Tensor] = {}
        for token in range(tokens)[::-1] if backwards else range(tokens):
            after = step(gates[token], states)
            if lengths is None:
                states, made[token] = after, after[0]
            else:  # in the padding states stay and results are zero
                inside = (token < lengths).unsqueeze(1)
                states = [torch.where(inside, a, s) for a, s in zip(after, states, strict=True)]
                made[token] = torch.where(inside, after[0], 0)
        rows.append(torch.stack([made[token] for token in range(tokens)]))
        lasts.append(states)
    y = torch.stack(rows, 2 if layout else 1)  # (tokens, directions, batch, hidden), or layout 1
    if layout:
        y = y.transpose(0, 1)
    stacked = [torch.stack(each, 1 if layout else 0) for each in zip(*lasts, strict=True)]
    return y, *stacked


def _rnn(
    call: Call,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    h: Tensor | None = None,
) -> Any:
    hidden = r.shape[2]
    functions = _functions(call, 1, ["Tanh"])

    def direction(number: int) -> Step:
        bias = None if b is None else b[number, hidden:]
        return lambda gates, states: [
            functions[number](gates + F.linear(states[0], r[number], bias))
        ]

    steps = [direction(number) for number in range(w.shape[0])]
    return _unrolled(call, x, w, b, lengths, [h], steps, hidden)


def _gru(
    call: Call,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    h: Tensor | None = None,
) -> Any:
    hidden = r.shape[2]
    functions = _functions(call, 2, ["Sigmoid", "Tanh"])
    after_product = call.attr("linear_before_reset", 0)

    def direction(number: int) -> Step:
        f, g = functions[2 * number : 2 * number + 2]
        bias = None if b is None else b[number, 3 * hidden :]
        gated, last = r[number, : 2 * hidden], r[number, 2 * hidden :]
        bias_gated = None if bias is None else bias[: 2 * hidden]
        bias_last = None if bias is None else bias[2 * hidden :]

        def step(gates: Tensor, states: list[Tensor]) -> list[Tensor]:
            before = states[0]
            both = f(gates[:, : 2 * hidden] + F.linear(before, gated, bias_gated))
            update, reset = both.chunk(2, 1)
            if after_product:
                recurrent = reset * F.linear(before, last, bias_last)
            else:
                recurrent = F.linear(reset * before, last, bias_last)
            new = g(gates[:, 2 * hidden :] + recurrent)
            return [(1 - update) * new + update * before]

        return step

    steps = [direction(number) for number in range(w.shape[0])]
    return _unrolled(call, x, w, b, lengths, [h], steps, 3 * hidden)


def _lstm(
    call: Call,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    h: Tensor | None = None,
    c: Tensor | None = None,
    peepholes: Tensor | None = None,
) -> Any:
    hidden = r.shape[2]
    functions = _functions(call, 3, ["Sigmoid", "Tanh", "Tanh"])
    coupled = call.attr("input_forget", 0)

    def direction(number: int) -> Step:
        f, g, h_of = functions[3 * number : 3 * number + 3]
        bias = None if b is None else b[number, 4 * hidden :]
        peep = None if peepholes is None else peepholes[number].chunk(3)  # input, output, forget

        def step(gates: Tensor, states: list[Tensor]) -> list[Tensor]:
            before, cell = states
            i, o, forget, new = (gates + F.linear(before, r[number], bias)).chunk(4, 1)
            if peep is not None:
                i, forget = i + peep[0] * cell, forget + peep[2] * cell
            i = f(i)
            forget = 1 - i if coupled else f(forget)
            cell = forget * cell + i * g(new)
            if peep is not None:
                o = o + peep[1] * cell
            return [f(o) * h_of(cell), cell]

        return step

    steps = [direction(number) for number in range(w.shape[0])]
    return _unrolled(call, x, w, b, lengths, [h, c], steps, 4 * hidden)


RECURRENT: Mapping[str, Op] = MappingProxyType({"GRU": _gru, "LSTM": _lstm, "RNN": _rnn})
