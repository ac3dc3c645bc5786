"""Templates, as those of `catalog`, of models of several precisions: values that are rounded to
int8 and fp8 and back, regions of autocast, and running sums, which show what is rounded."""

from __future__ import annotations

_BYTES = (
    "({c} / {f}).round().clamp(-128, 127).to(i8).to({x}.dtype) * {f}",
    "(({c} / {f}).round() + 7).clamp(0, 255).to(u8).to({x}.dtype).sub(7) * {f}",
    "({c} / {f}).round().clamp(-128, 127).to(i8).to({x}.dtype).sub({z}) * {f}",
    "({c} / {f}).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to({x}.dtype) * {f}",
    "(({c} / {f}).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * {f}).to({x}.dtype)",
)
"""`{c}` rounded in steps of `{f}`."""

_STEPS = ("torch.tensor(0.0625)", "torch.tensor(0.3)", "torch.tensor([0.07])", "0.05")


def _rounded(index: int, value: str) -> str:
    """`value` rounded in one of the ways, by one of the steps."""
    way = _BYTES[index % len(_BYTES)].replace("{f}", _STEPS[index // len(_BYTES) % len(_STEPS)])
    return "(" + way.replace("{c}", value).replace("{z}", "torch.tensor(3.0)") + ")"


_WIDE = "h_ = F.relu(F.linear({x}, {w:(16, X[-1])})); w_ = {w:(8, 16)}; "
QUANTIZED = [
    *(f"{{o}} = {_rounded(i, '{x}')}" for i in range(10)),
    *(f"{{o}} = F.linear({_rounded(i, '{x}')}, {{w:(N, X[-1])}})" for i in range(5)),
    *(f"{_WIDE}{{o}} = F.linear({_rounded(i, 'h_')}, {_rounded(i, 'w_')})" for i in range(15)),
    *(
        f"{_WIDE}{{p}} = F.linear({_rounded(i, 'h_')}, {_rounded(i, 'w_')}, {{w:(8,)}}); "
        "{o} = {p} + h_[..., :8]"
        for i in (0, 3, 4, 8)
    ),
    *(f"{_WIDE}{{o}} = {_rounded(i, 'h_')} @ {_rounded(j, 'w_.t()')}" for i, j in ((0, 1), (3, 4))),
    *(
        f"w_ = {{w:(N, X[1], 3, 3)}}; "
        f"{{o}} = F.conv2d({_rounded(i, '{x}')}, {_rounded(i + 5, 'w_')}, padding=1)"
        for i in (0, 1, 3)
    ),
    *(
        f"h_ = F.relu(F.conv2d({{x}}, {{w:(16, X[1], 1, 1)}})); w_ = {{w:(8, 16, {k}, {k})}}; "
        f"y_ = F.conv2d({_rounded(i, 'h_')}, {_rounded(i, 'w_')}, padding={p}, stride={k}); "
        "{o} = F.relu(F.batch_norm(y_, {w:(8,)}, {w:(8,)} ** 2 + 0.1)) + y_.mean()"
        for i, k, p in ((0, 3, 1), (5, 3, 0), (1, 3, 1), (6, 1, 0), (2, 1, 0), (15, 2, 0))
    ),
    *(
        f"{_WIDE}q_ = torch.fake_quantize_per_tensor_affine(h_, {s}, {z}, {low}, {high}); "
        "{o} = F.linear(q_, torch.fake_quantize_per_channel_affine(w_, torch.full((8,), 0.02), "
        "torch.zeros(8, dtype=torch.int32), 0, -127, 127))"
        for s, z, low, high in (
            (0.05, 0, -128, 127),
            (0.3, 5, 0, 255),
            (0.25, -3, -8, 7),
            (0.1, 128, 0, 255),
        )
    ),
    *(f"{{o}} = {_rounded(i, 'torch.softmax({x}, -1)')} @ {_rounded(i, '{s}')}" for i in (0, 3)),
    f"{_WIDE}q_ = {_rounded(3, 'h_')}; "
    f"{{o}} = F.linear(q_, {_rounded(3, 'w_')}) + F.linear(q_, {_rounded(4, '{w:(8, 16)}')})",
    f"{_WIDE}q_ = {_rounded(0, 'F.layer_norm(h_, (16,), {w:(16,)}, {w:(16,)})')}; "
    f"{{o}} = F.gelu(F.linear(q_, {_rounded(0, 'w_')}, {{w:(8,)}})); {{p}} = q_.mean(-1)",
    _WIDE + "t_ = w_.abs().amax(1, keepdim=True) / 127; "
    "{o} = F.linear(h_, (w_ / t_).round().clamp(-128, 127).to(i8).to({x}.dtype) * t_)",
    _WIDE + "t_ = torch.tensor([[0.01], [0.02], [0.03], [0.04], [0.05], [0.06], [0.07], [0.08]]); "
    f"{{o}} = F.linear({_rounded(3, 'h_')}, "
    "(w_ / t_).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to({x}.dtype) * t_.to({x}.dtype))",
    "t_ = {x}.abs().amax() / 127 + 1e-3; "
    "{o} = ({x} / t_).round().clamp(-128, 127).to(i8).to({x}.dtype) * t_",
    "{o} = (({x} * 3).to(i8).double() @ ({w:(X[-1], N)} * 9).to(i8).double()).to(i32)",
    "{o} = ((({x} * 3).to(u8).double() - 2) @ ({w:(X[-1], N)} * 9).to(i8).double()).to(i32) * {k}",
    "{o} = ({x} * {k}).round().clamp(-8, 7)",
    "{o} = torch.round({x}, decimals=1)",
]

_PRODUCTS = (
    "{o} = {x} @ {s}.mT",
    "{o} = F.linear({x}, {w:(N, X[-1])}, {w:(N,)})",
    "{o} = F.gelu(F.linear({x}, {w:(N, X[-1])}, {w:(N,)})) + {x}[..., :1]",
    "{o} = torch.cat([F.linear({x}, {w:(N, X[-1])}), {x}], -1)",
    "{o} = F.linear(F.layer_norm({x}, {x}.shape[-1:], {w:X[-1:]}, {w:X[-1:]}), {w:(N, X[-1])})",
    "{o} = ({x} @ {x}.mT * {k}).softmax(-1) @ {x}",
    "{o} = F.scaled_dot_product_attention({x}, {s}, {x})",
    "{o}, {p} = F.linear({x}, {w:(N, X[-1])}).softmax(-1), {x}.sum(-1)",
    "{o} = F.conv2d({x}, {w:(N, X[1], 3, 3)}, {w:(N,)}, padding=1)",
    "{o} = F.relu(F.batch_norm(F.conv2d({x}, {w:(N, X[1], 1, 1)}), {w:(N,)}, {w:(N,)} ** 2 + 0.1))",
    "{o} = torch.einsum('...i,ji->...j', {x}, {w:(N, X[-1])})",
    "{o} = F.linear({x}, {w:(N, X[-1])}); {p} = ({o}.exp() + {o}.pow(2)).mean(-1)",
    "{o} = F.linear({x}, {w:(N, X[-1])}).to({x}.dtype) * {k}",
    "{o} = {x}.cumsum(-1) + F.linear({x}, {w:(1, X[-1])})",
)
_REGION = "torch.autocast({x}.device.type, dtype="
AUTOCAST = [
    *(f"with {_REGION}bf16): {body}" for body in _PRODUCTS),
    *(f"with {_REGION}f16): {body}" for body in _PRODUCTS[::2]),
    *(
        f"with {_REGION}bf16): {{o}} = {{x}} @ {{x}}.mT\n"
        f"with {_REGION}bf16), torch.autocast({{x}}.device.type, enabled=False): "
        f"{{p}} = torch.softmax({{o}}.float(), -1)\n"
        f"with {_REGION}bf16): {{q}} = {last}"
        for last in ("torch.matmul({p}, {x})", "F.linear({p} @ {x}, {w:(N, X[-1])}) + {x}[..., :1]")
    ),
]

SUMS = [
    "{o} = torch.cumsum({x}, {d}, dtype={t})",
    "{o} = ({x} > {k}).cumsum({d})",
    "{o} = ({x} > {k}).cumsum({d}, dtype=f32); {p} = {o} / ({o}[..., -1:] + 1e-6) * 6.28",
    "{o} = {x}.softmax(-1).cumsum(-1)",
    "{o} = {x}.flip(-1).cumsum(-1).flip(-1)",
    "{o} = {x}.cumsum({d}).cumsum({d})",
    "{o} = F.relu({x} * {k}).cumsum(-1)[..., -1:] + {x}",
    "{o} = {x}.unsqueeze(-1).cumsum(-1) * {k}",
    "{o} = {x}.mT.cumsum(-1).softmax(-1)",
    "{o} = {x}.cumsum(-1) - {x}.sum(-1, keepdim=True)",
    "{o} = {x}.to(i32).cumsum({d})",
    "{o} = {x}.cumprod({d})",
    "{o} = {x}.logcumsumexp({d})",
    "{o} = {x}.diff(dim={d}).cumsum({d})",
]
