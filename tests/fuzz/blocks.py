"""Templates of whole parts of models: attention spelled in many ways, and blocks of layers.

`catalog` says what stands in a template.
"""

from __future__ import annotations

_SCORES = (
    "{x} @ {s}.mT * {k}", "{x} @ {s}.mT / {k}", "({x} * {k}) @ {s}.mT", "{x} @ {s}.mT / 0.0",
    "{x} @ {s}.mT", "({x} @ {s}.mT).to({t})", "torch.einsum('...id,...jd->...ij', {x}, {s})",
    "({x} @ {s}.mT).to({t}).to({x}.dtype)", "({x} @ {s}.mT * {k}).to({t})",
    "{x}.to({t}) @ {x}.to({t}).mT",
)  # fmt: skip

_MASKED = (
    "({c})", "({c})", "({c} + {w:()})", "({c} + {w:X[-2:-1]})", "({c} + {w:(2, 1, 1, 1)})",
    "({c} + {w:X[-2:-1]} + {w:()} + {w:X[-2:-1]})",
    "({c}).masked_fill(torch.ones_like({c}).tril() == 0, float('-inf'))", "({c}).clamp(max={k})",
    "({c}) + torch.ones_like({c}).tril().log()", "({c}).reshape(-1, ({c}).shape[-1])",
    "torch.where(({c}) > {k}, ({c}), -1e4)", "({c}).to({t})",
)  # fmt: skip

_PROBABILITIES = (
    "({c}).softmax(-1)", "({c}).softmax(-1)", "({c}).softmax(-1).to({x}.dtype)",
    "({c}).softmax(-2)",
    "({c}).softmax(-1, dtype=f32).to({x}.dtype)", "({c}).softmax(-1).to({t}).to({x}.dtype)",
    "({c}).softmax(-1).reshape(({x} @ {s}.mT).shape)", "({c}).softmax(-1) * {k}",
    "({c}).softmax(-1) + {w:()}", "({c}).exp() / ({c}).exp().sum(-1, keepdim=True)",
    "F.dropout(({c}).softmax(-1), 0.1, False)", "({c}).sigmoid()", "({c}).softmax({d})",
)  # fmt: skip


def _attentions() -> list[str]:
    spelled = []
    for index, scores in enumerate(_SCORES):
        for jndex, masked in enumerate(_MASKED):
            step = (3 * index + 5 * jndex) % len(_PROBABILITIES)
            chain = masked.replace("{c}", scores)
            final = _PROBABILITIES[step].replace("{c}", chain)
            same = ".to({x}.dtype)" if "{t}" in final else ""
            spelled.append(f"{{o}} = ({final}){same} @ {{s}}")
    return spelled


_NORMED = (
    "F.normalize({h}, dim=-1)", "{h} / {h}.sum({d}, keepdim=True)",
    "({h} * {h}.pow(2).mean(-1, keepdim=True).add({e}).rsqrt() * {w:X[-1:]})",
)  # fmt: skip
"""Of queries and of keys, of which each has weights of its own."""

_TWINS = [
    f"{{o}} = (lambda q, k, v: ({norm.replace('{h}', 'q')} @ "
    f"({norm.replace('{h}', 'k')}{scale}).mT).softmax(-1) @ v)"
    "(*F.linear({x}, {w:(3 * X[-1], X[-1])}).chunk(3, -1))"
    for norm in _NORMED
    for scale in ("", " * {w:()}")
]

ATTENTIONS = [
    *_attentions(),
    *_TWINS,
    *_attentions()[::3],
    *(
        f"{{o}} = F.scaled_dot_product_attention({call})"
        for call in (
            "{x}, {s}, {s}", "{x}, {x}, {x}, is_causal=True", "{x}, {s}, {x}, scale={k}",
            "{x}, {x}, {x}",
            "{x}, {x}, {x}, {w:bool 0 (1, 1)}", "{x}, {x}, {x}, {w:X[-2:-1]}",
            "{x}, {x}, {s}, {w:()}",
            "{x}, {x}, {x}, torch.ones({x}.shape[-2], {x}.shape[-2], dtype=bool).tril()",
            "{x}, {x}[..., :1, :], {x}[..., :1, :]", "{x}, {x}, {x}[..., :1]",
            "{x} + 1, {x}, {x} * 2",
            "*F.linear({x}, {w:(3 * X[-1], X[-1])}).chunk(3, -1)", "{x}, {x}, {x}, scale=0.0",
            "*F.linear({x}, {w:(3 * X[-1], X[-1])}, {w:(3 * X[-1],)}).unflatten(-1, (3, "
            "-1)).unbind(-2)",
        )
    ),
]  # fmt: skip

_NORM = "F.layer_norm({x}, {x}.shape[-1:], {w:X[-1:]}, {w:X[-1:]})"
_LINEAR = "F.linear({0}, {{w:(X[-1], X[-1])}}, {{w:X[-1:]}})"
_HEADS = ".unflatten(-1, (2, -1)).transpose(1, 2)"
_JOINED = ".transpose(1, 2).flatten(2)"


def _heads(q: str, k: str, v: str) -> str:
    operands = (_LINEAR.format(each) + _HEADS for each in (q, k, v))
    return "q_, k_, v_ = " + ", ".join(operands) + "; "


_TURNS = (
    "({v} * c_ + torch.cat([-{v}.chunk(2, -1)[1], {v}.chunk(2, -1)[0]], -1) * s_)",
    "({v} * c_ + torch.stack([-{v}[..., 1::2], {v}[..., ::2]], -1).flatten(-2) * s_)",
    "torch.cat([{v}[..., :1, :], {v}[..., 1:, :] * c_[1:] + torch.cat([-{v}.chunk(2, -1)[1], "
    "{v}.chunk(2, -1)[0]], -1)[..., 1:, :] * s_[1:]], -2)",
    "torch.cat([{v}[..., :2] * c_[:, :2] - {v}[..., :2].flip(-1) * s_[:, :2], {v}[..., 2:]], -1)",
    "({v} * c_ + {v}.roll(1, -1) * s_)",
    "({v} * c_ + torch.cat([{v}.chunk(2, -1)[1], {v}.chunk(2, -1)[0] + 1], -1) * s_)",
    "({v}.float() * c_ - torch.cat([{v}.chunk(2, -1)[1], {v}.chunk(2, -1)[0]], -1) * s_)"
    ".to({v}.dtype)",
)
"""`{v}` with rotary positions, of which c_ and s_ are the tables, and what only looks like it."""

_TABLES = "c_, s_ = {w:(X[-2], X[-1] // 2)}.cos(), {w:(X[-2], X[-1] // 2)}.sin(); "


def _rotated(index: int, q: str, k: str) -> str:
    turn = _TURNS[index % len(_TURNS)]
    other = _TURNS[(index + index // len(_TURNS)) % len(_TURNS)]
    return f"q_, k_ = {turn.replace('{v}', q)}, {other.replace('{v}', k)}; "


_JOINT = (
    "q_, k_, v_ = F.linear({x}, {w:(3 * X[-1], X[-1])}, {w:(3 * X[-1],)}).unflatten(-1, (3, 2, -1))"
    ".permute(2, 0, 3, 1, 4).unbind(0); "
)
_ATTEND = "{o} = F.scaled_dot_product_attention(q_, k_, v_)" + _JOINED
_NORMED = "F.normalize(q_, dim=-1), F.normalize(k_, dim=-1)"
ROTARY = [
    *(_TABLES + _JOINT + _rotated(i, "q_", "k_") + _ATTEND for i in range(9)),
    *(_TABLES + _heads("{x}", "{x}", "{x}") + _rotated(i, "q_", "k_") + _ATTEND for i in range(9)),
    *(_TABLES + _heads("{x}", "{s}", "{s}") + _rotated(i, "q_", "k_") + _ATTEND for i in range(3)),
    *(_TABLES + "v_ = {x}; " + _rotated(i, "{x}[..., : X[-1] // 2]", "{s}[..., : X[-1] // 2]")
      .replace("X[-1]", "{x}.shape[-1]") + "{o} = F.scaled_dot_product_attention(q_, k_, v_)"
      for i in range(2)),
    _heads("{x}", "{x}", "{x}") + f"q_, k_ = {_NORMED}; "
    "{o} = ((q_ @ k_.mT * {w:(2, 1, 1)}.exp().clamp(max=9.0) + {w:(2, X[-2], X[-2])}).softmax(-1) "
    "@ v_)" + _JOINED,
    _heads("{x}", "{x}", "{x}") + "a_ = q_ @ k_.mT + {w:(2, X[-2], X[-2])}; "
    "a_ = a_.unflatten(0, (1, -1)) + {w:(X[0], 1, X[-2], X[-2])}; "
    "{o} = (a_.flatten(0, 1).softmax(-1) @ v_)" + _JOINED,
]  # fmt: skip

BLOCKS = [
    "q_, k_, v_ = F.linear({x}, {w:(3 * X[-1], X[-1])}, {w:(3 * X[-1],)}).unflatten(-1, (3, 2, -1))"
    ".permute(2, 0, 3, 1, 4).unbind(0); a_ = F.scaled_dot_product_attention(q_, k_, v_); "
    "{o} = {x} + " + _LINEAR.format("a_" + _JOINED),
    f"{{p}} = {_NORM}; "
    + _heads("{p}", "{p}", "{p}")
    + "a_ = (q_ @ k_.mT * {k} + {w:(2, X[-2], X[-2])}).softmax(-1) @ v_; {o} = {x} + "
    + _LINEAR.format("a_" + _JOINED),
    _heads("{x}", "{s}", "{s}") + "{o} = F.scaled_dot_product_attention(q_, k_, v_)" + _JOINED,
    _heads("{x}", "{s}", "{x}") + "q_, k_ = F.normalize(q_, dim=-1), F.normalize(k_, dim=-1); "
    "{o} = ((q_ @ k_.mT / {k}).softmax(-1) @ v_)" + _JOINED,
    _heads("{x}", "{x}", "{x}") + "{o} = (q_ @ (k_.mT @ v_))" + _JOINED + "[:, :1]",
    _heads("{x}", "{x}", "{x}") + "m_ = torch.ones_like(q_ @ k_.mT).tril().bool(); "
    "{o} = (q_ @ k_.mT).masked_fill(~m_, -1e9).softmax(-1, dtype=f32).to({x}.dtype) @ v_",
    f"{{o}} = {{x}} + F.linear(F.gelu(F.linear({_NORM}, {{w:(N, X[-1])}}, {{w:(N,)}})), "
    "{w:(X[-1], N)}, {w:X[-1:]}) * {w:X[-1:]}",
    f"{{p}} = {_NORM}; {{o}} = F.linear({{p}}, {{w:(N, X[-1])}}, {{w:(N,)}}) "
    "* F.linear({p}, {w:(N, X[-1])})",
    f"{{p}} = {_NORM}; {{o}} = F.linear({{p}}, {{w:(N, X[-1])}}, {{w:(N,)}}) + {{p}}.mean()",
    f"{{o}} = F.linear({_NORM}[:, 0], {{w:(N, X[-1])}}, {{w:(N,)}})",
    f"{{o}} = F.linear({_NORM}.mean(1), {{w:(N, X[-1])}}, {{w:(N,)}})",
    f"{{o}} = {_NORM}.flatten(0, 1) @ {{w:(X[-1], N)}}",
    "{o} = F.linear({x} + {s}, {w:(N, X[-1])}, {w:(N,)})[:, :1].relu()",
    "{o} = torch.cat([{w:(1, 1, X[-1])}.expand({x}.shape[0], -1, -1), {x}], 1) "
    "+ {w:(1, X[-2] + 1, X[-1])}",
    "a_, b_ = F.linear({x}, {w:(2 * N, X[-1])}).chunk(2, -1); {o} = F.silu(a_) * b_",
    "c_, s_ = {w:(X[-2], X[-1] // 2)}.cos(), {w:(X[-2], X[-1] // 2)}.sin(); "
    "a_, b_ = {x}.chunk(2, -1); {o} = torch.cat([a_ * c_ - b_ * s_, a_ * s_ + b_ * c_], -1)",
    "{o} = {x}.roll((-1, 1), (1, 2)).unflatten(1, (-1, 2)).unflatten(3, (-1, 2))"
    ".transpose(2, 3).flatten(0, 2)",
    "{o} = F.linear(torch.cat([{x}, {s}.expand_as({x})], -1), {w:(N, 2 * X[-1])}, {w:(N,)})",
    "{o} = F.linear({x}, {w:(N, X[-1])}, {w:(N,)}).unflatten(-1, (-1, 1)).sum(-1)",
    "{o} = F.conv2d(F.silu(F.group_norm({x}, 1, {w:X[1:2]}, {w:X[1:2]})), {w:(N, X[1], 3, 3)}, "
    "{w:(N,)}, padding=1) + {w:(1, N, 1, 1)}",
    "{o} = {x} * F.hardsigmoid(F.conv2d(F.relu(F.conv2d(F.adaptive_avg_pool2d({x}, 1), "
    "{w:(N, X[1], 1, 1)}, {w:(N,)})), {w:(X[1], N, 1, 1)}, {w:X[1:2]}))",
    "{o} = F.conv2d({x}, {w:(N, X[1], 2, 2)}, {w:(N,)}, stride=2).flatten(2).mT; "
    "{p} = F.layer_norm({o}, {o}.shape[-1:]) @ {w:(N, N)}",
    "{o} = F.linear({x}.flatten(2).mT, {w:(N, X[1])}, {w:(N,)}).mT.unflatten(-1, {x}.shape[2:])",
]

_SIZE = "{x}.pow(2).sum((1, 2), keepdim=True).sqrt()"
_RESPONSE = f"({_SIZE} / ({_SIZE}.mean(-1, keepdim=True) + 1e-3))"
SCALED = [
    f"{{o}} = {_LINEAR.format(operand)}"
    for operand in (
        "{x} * {s}",
        "{x} * {x}.mean(1, keepdim=True).sigmoid()",
        "{w:X[-1:]} * {x} + {w:X[-1:]} + {x}",
        "{x} - {x} * {x}.mean(-2, keepdim=True) - {w:X[-1:]}",
        "({x} + {w:X[-1:]}) / (1 + {x}.mean(-2, keepdim=True).square()) + {x}",
        "({x} * {x}.amax(-2, keepdim=True) + {x}.amax(-2, keepdim=True)) * {w:X[-1:]}",
        "(({x} + {w:X[-1:]}) * {s} - {x}) * {w:X[-1:]}",
        f"{{w:X[-1:]}} * ({{x}} * {_RESPONSE}) + {{w:X[-1:]}} + {{x}}",
        f"{{x}} + torch.addcmul({{w:X[-1:]}}, {{w:X[-1:]}}, {{x}} * {_RESPONSE})",
    )
]
