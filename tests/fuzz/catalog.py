"""What a random model is made of: templates of lines, by family.

A template is text with `{x}` for a value, `{y}` for another, `{s}` for one that broadcasts with
`{x}`, `{m}` for a mask of `{x}`'s shape, `{k}` for a number, `{d}` for a dimension of `{x}`, `{ds}`
for some of them, `{t}` for a dtype, `{n}` for a small extent, `{w:...}` for a weight whose
shape follows (in terms of `X`, the shape of `{x}`, and `N`), and `{o}`, `{p}`, `{q}` for new names.
Where torch refuses what comes out, the line is dropped: templates need not be careful.
"""

from __future__ import annotations

from tests.fuzz.blocks import ATTENTIONS, BLOCKS, ROTARY, SCALED
from tests.fuzz.mixed import AUTOCAST, QUANTIZED, SUMS

UNARY = [
    f"{{o}} = {call}"
    for call in (
        *(f"torch.{name}({{x}})" for name in (
            "relu", "sigmoid", "tanh", "exp", "erf", "sin", "cos", "neg", "abs", "square",
            "reciprocal", "floor", "ceil", "round", "trunc", "sign", "isnan", "isfinite", "expm1",
            "logical_not", "bitwise_not", "signbit", "atan", "log1p", "deg2rad", "frac",
        )),
        *(f"F.{name}({{x}})" for name in (
            "silu", "gelu", "softplus", "elu", "leaky_relu", "hardswish", "hardsigmoid", "mish",
            "logsigmoid", "softsign", "selu", "celu", "relu6", "hardtanh", "tanhshrink",
        )),
        "F.gelu({x}, approximate='tanh')", "torch.log({x}.abs() + 1)", "torch.sqrt({x}.abs())",
        "torch.rsqrt({x}.abs() + 0.5)", "torch.log({x})", "torch.sqrt({x})", "{x}.clamp({k}, {k})",
        "{x}.clamp(min={k})", "{x}.clamp(max={k})", "{x} ** 2", "{x} ** 3", "{x} ** 0.5",
        "{x} ** -1", "{x} ** 0", "{x}.nan_to_num({k})", "torch.cumsum({x}, {d})",
        "torch.flip({x}, {ds})", "torch.roll({x}, {n}, {d})", "torch.roll({x}, -1)",
        "torch.tril({x})", "torch.triu({x}, 1)", "F.leaky_relu({x}, {k})", "F.glu({x}, {d})",
        "F.threshold({x}, {k}, {k})", "1 / ({x} + 0)", "1 / ({x} * 1)", "-(-{x})", "{x}.clone()",
        "F.dropout({x}, 0.3, False)", "F.normalize({x}, dim={d})", "F.prelu({x}, {w:()} )",
        "0.5 * {x} * (1 + torch.erf({x} / 1.4142135623730951))",
        "0.5 * {x} * (1 + torch.tanh(0.7978845608028654 * ({x} + 0.044715 * {x} ** 3)))",
        "{x} * torch.sigmoid(1.702 * {x})", "{x} * torch.sigmoid({x})", "{x}.contiguous()",
        "torch.zeros_like({x}) + {x}", "torch.full_like({x}, {k})", "torch.fill({x}, 2)",
    )
]  # fmt: skip

BINARY = [
    f"{{o}} = {call}"
    for call in (
        *(f"{{x}} {sign} {{s}}" for sign in ("+", "-", "*", "/", "<", ">=", "==", "+", "*")),
        *(f"{{x}} {sign} {{k}}" for sign in ("+", "-", "*", "/", "<", "<=", ">", "!=", "//", "%")),
        *(f"{{k}} {sign} {{x}}" for sign in ("+", "-", "*", "/", "<")),
        *(f"torch.{name}({{x}}, {{s}})" for name in (
            "maximum", "minimum", "atan2", "fmod", "remainder", "floor_divide", "logical_and",
            "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "hypot", "copysign", "xlogy",
        )),
        "{x}.abs() ** {s}", "torch.add({x}, {s}, alpha={k})", "torch.sub({x}, {s}, alpha={k})",
        "torch.rsub({x}, {s})", "torch.rsub({x}, {k}, alpha=2)", "torch.where({m}, {x}, {s})",
        "torch.where({m}, {x}, {k})", "torch.where({x} > {k}, {x}, {s})",
        "torch.lerp({x}, {s}, 0.3)",
        "{x}.masked_fill({m}, {k})", "{x}.masked_fill({m}, float('-inf'))",
        "{x}.masked_fill(~{m}, 0)", "torch.addcmul({x}, {s}, {s}, value={k})",
        "torch.addcdiv({x}, {s}, {s}.abs() + 1)", "{x}.clamp({s}, {s})", "F.mse_loss({x}, {s})",
        "F.smooth_l1_loss({x}, {s})", "F.cosine_similarity({x}, {s}, dim={d})",
        "{x} / {s}.shape[0]",
        "torch.div({x}, {s}, rounding_mode='floor')", "torch.div({x}, {k}, rounding_mode='trunc')",
        "{x} + {w:X[-1:]}", "{x} * {w:X[-1:]}", "{x} - {w:()}", "{x} + {w:(1,)}",
        "torch.einsum('...i,...i->...', {x}, {s})",
    )
]  # fmt: skip

REDUCTIONS = [
    f"{{o}} = {call}"
    for call in (
        *(f"{{x}}.{name}({{ds}}, keepdim={keep})" for keep in (True, False) for name in (
            "sum", "mean", "amax", "amin", "var", "std", "logsumexp", "norm(2, ",
        ) if "(" not in name),
        *(f"{{x}}.{name}()" for name in (
            "sum", "mean", "amax", "amin", "prod", "var", "any", "all", "argmax", "max", "min",
        )),
        *(f"{{x}}.{name}({{d}})" for name in ("prod", "any", "all", "argmax", "argmin")),
        *(f"{{x}}.{name}({{d}}).values" for name in ("max", "min", "sort", "median", "cummax")),
        "{x}.sum({ds}, dtype={t})", "{x}.mean({ds}, dtype=f32)", "{x}.var({ds}, correction=0)",
        "torch.linalg.vector_norm({x}, dim={ds})", "torch.linalg.vector_norm({x}, 1, dim={ds})",
        "{x}.softmax({d})", "{x}.softmax(-1)", "{x}.softmax({d}, dtype={t})",
        "{x}.log_softmax({d})",
        "{x}.topk(1, {d}).values", "{x}.sum(())", "{x}.mean(())", "{x}.amax(())",
        "torch.var_mean({x}, {ds})[1]", "F.softmin({x}, {d})", "{x}.cumsum({d})", "{x}.std({d})",
        "{x}.softmax({d}).sum({d})", "{x} - {x}.mean({d}, keepdim=True)", "{x}.nansum({ds})",
    )
]  # fmt: skip

VIEWS = [
    f"{{o}} = {call}"
    for call in (
        "{x}.reshape({shape})", "{x}.reshape({shape})", "{x}.reshape(-1)", "{x}.permute({order})",
        "{x}.permute({order})", "{x}.transpose({d}, {d})", "{x}.mT", "{x}.unsqueeze({d})",
        "{x}.unsqueeze(-1)", "{x}.unsqueeze(0)", "{x}.squeeze()", "{x}.squeeze({d})",
        "{x}.squeeze({ds})", "{x}.squeeze(())", "{x}.expand({n}, *{x}.shape)", "{x}[None]",
        "{x}[..., 0]", "{x}[..., -1:]", "{x}[1:]", "{x}[:-1]", "{x}[0]", "{x}[:, 1:]", "{x}[::2]",
        "{x}[..., ::3]", "{x}[..., :0]", "{x}[:, :1]", "{x}[..., None]", "{x}[2:1]",
        "{x}.view({shape})",
        "{x}.narrow({d}, 0, 1)", "{x}.select({d}, -1)", "{x}.flatten()", "{x}.flatten({d})",
        "{x}.unflatten({d}, (-1, 1))", "{x}.unflatten({d}, (2, -1))", "{x}.chunk(2, {d})[0]",
        "{x}.chunk({n}, {d})[-1]", "{x}.split(1, {d})[0]", "{x}.split({n}, {d})[-1]",
        "{x}.unbind({d})[0]", "{x}.movedim({d}, {d})", "{x}.diagonal(0, 0, 1)",
        "{x}.swapaxes(0, -1)",
        "{x}.unfold({d}, 2, 1)", "{x}.expand_as({s})", "{x}.detach()",
        "{x}.broadcast_to({s}.shape)",
        "({x} + 0).as_strided((2, 2), (1, 1))", "torch.atleast_2d({x})", "{x}.adjoint()",
        "{x}.real",
    )
]  # fmt: skip

MOVES = [
    f"{{o}} = {call}"
    for call in (
        "torch.cat([{x}, {x}], {d})", "torch.cat([{x}, {s}], {d})", "torch.cat([{x}, {y}], {d})",
        "torch.stack([{x}, {s}], {d})", "torch.stack([{x}, {x}], -1)", "{x}.repeat({n}, 1, 1)",
        "{x}.repeat_interleave(2, {d})", "{x}.tile((2,))", "F.pad({x}, (1, 2))", "{x}.repeat(2)",
        "F.pad({x}, (0, 1, 1, 0), value={k})", "F.pad({x}, (-1, 1))", "F.pad({x}, (-1, -1))",
        "F.pad({x}, (1, 1), mode='reflect')", "F.pad({x}, (1, 1), mode='replicate')",
        "F.pad({x}, (1, 1), mode='circular')", "{x}[..., [0, 0]]", "{x}[[0, -1]]",
        "{x}.index_select({d}, {w:i64 0 (3,)} % {x}.shape[{d}])",
        "{x}.gather({d}, {x}.argsort(dim={d}, stable=True))",
        "torch.take_along_dim({x}, {x}.argmax({d}, keepdim=True), {d})",
        "{x}.argsort(dim={d}, stable=True)",
        "F.embedding({x}.long().abs() % 5, {w:(5, N)})", "F.one_hot({x}.long().abs() % 3, 3)",
        "{x}.scatter(-1, {x}.argsort(dim=-1, stable=True), {x})",
        "torch.meshgrid({x}.flatten(), {x}.flatten())[0]",
        "{x}.index_add({d}, torch.zeros({x}.shape[{d}], dtype=i64), {x})", "torch.cat([{x}])",
        "torch.cat([{x}[..., :0], {s}], -1)", "torch.cat([{x}, {x}.to({t})], {d})",
        "torch.cat([{x}, {x}.to({t})], {d})[..., :1]", "torch.rot90({x})",
       
        "torch.hstack([{x}, {x}])", "torch.vstack([{x}, {x}])", "torch.arange({x}.shape[-1]) + {x}",
        "torch.arange({n}, dtype={t}) * {k}", "torch.ones({n}, {n}).tril() * {k}", "torch.eye({n})",
        "torch.broadcast_tensors({x}, {s})[0]", "torch.linspace(0, 1, {n})",
        "torch.tensor({k}) * {x}",
        "{w:X} + {w:X}", "{w:X}.max(-1).values + {x}[..., 0]", "{w:X}.topk(1).values", "{w:X} * 2",
        "{x} + torch.zeros(())", "{x} * torch.ones(1)", "{w:X}.sum(-1, keepdim=True) * {x}",
    )
]  # fmt: skip

CASTS = [
    f"{{o}} = {call}"
    for call in (
        "{x}.to({t})", "{x}.to({t})", "{x}.to({t}).to({x}.dtype)", "{x}.to({t}).to({x}.dtype)",
        "{x}.type_as({s})", "{x} + {s}.to({t})", "{x}.bool()", "({x} > {k}).to({x}.dtype)",
        "{x}.long()", "{x}.to(i32) + {k}", "({x} * 3).to(i8)", "{x}.abs().to(u8)",
    )
]  # fmt: skip

PRODUCTS = [
    f"{{o}} = {call}"
    for call in (
        "F.linear({x}, {w:(N, X[-1])})", "F.linear({x}, {w:(N, X[-1])}, {w:(N,)})",
        "F.linear({x}, {w:(1, X[-1])}, {w:(1,)})", "F.linear({x}, {w:(N, X[-1])}, {w:(1,)})",
        "F.linear({x}, {w:(N, X[-1])}, {w:()})", "F.linear({x}, {w:X[-1:]})",
        "{x} @ {w:(X[-1], N)}", "{x} @ {w:(X[-1], N)} + {w:(N,)}", "{x} @ {w:X[-1:]}",
        "{x} @ {s}.mT", "{x}.mT @ {s}", "{x} @ {x}.mT", "{x}.mT @ {x}", "{x} @ {y}",
        "torch.einsum('...i,ji->...j', {x}, {w:(N, X[-1])})", "torch.bmm({x}, {s}.mT)",
        "torch.einsum('...id,...jd->...ij', {x}, {s})",
        "torch.addmm({w:(N,)}, {x}, {w:(X[-1], N)})",
        "torch.addmm({w:(N,)}, {x}, {w:(X[-1], N)}, beta=0.5, alpha={k})",
        "torch.mv({x}, {w:X[-1:]})",
        "torch.addmm({w:(X[-2], 1)}, {x}, {w:(N, X[-1])}.t())", "torch.outer({x}, {x})",
        "torch.baddbmm({w:(1, 1, 1)}, {x}, {s}.mT, beta=2)", "{w:(N, X[-2])} @ {x}",
        "F.gelu(F.linear({x}, {w:(N, X[-1])}, {w:(N,)}))",
        "F.bilinear({x}, {s}, {w:(N, X[-1], X[-1])})",
        "F.linear(F.layer_norm({x}, {x}.shape[-1:]), {w:(N, X[-1])}, {w:(N,)})",
        "torch.dot({x}, {x})",
        "{x} + F.linear(F.relu(F.linear({x}, {w:(N, X[-1])})), {w:(X[-1], N)})",
        "torch.kron({x}, {x})",
        "F.layer_norm({x}, {x}.shape[-1:], {w:X[-1:]}, {w:X[-1:]}) @ {w:(1, X[-1], N)}",
    )
] + [
    "{o}, {p}, {q} = [F.linear({x}, w_, b_) for w_, b_ in"
    f" (({{w:(N, X[-1])}}, {a}), ({{w:(N, X[-1])}}, {b}), ({{w:(N, X[-1])}}, {c}))]"
    for a, b, c in (
        ("{w:(N,)}", "{w:(N,)}", "{w:(N,)}"), ("{w:(N,)}", "None", "{w:(N,)}"),
        ("{w:(1,)}", "{w:(N,)}", "{w:()}"), ("None", "None", "None"),
    )
] + [
    "{o}, {p} = {x} @ {w:(X[-1], N)}, {x} @ {w:(X[-1], N)}",
    "{o}, {p} = F.linear({x}, {w:(N, X[-1])}), F.linear({x}, {w:X[-1:]})",
]  # fmt: skip

NORMS = [
    f"{{o}} = {call}"
    for call in (
        "F.layer_norm({x}, {x}.shape[-1:])",
        "F.layer_norm({x}, {x}.shape[-1:], {w:X[-1:]}, {w:X[-1:]})",
        "F.layer_norm({x}, {x}.shape[-2:])", "F.layer_norm({x}, {x}.shape)",
        "F.layer_norm({x}, {x}.shape[-1:], {w:X[-1:]}, eps={e})", "F.rms_norm({x}, {x}.shape[-1:])",
        "F.rms_norm({x}, {x}.shape[-1:], {w:X[-1:]}, {e})", "F.group_norm({x}, 1)",
        "F.group_norm({x}, 2, {w:X[1:2]}, {w:X[1:2]})", "F.instance_norm({x})",
        "F.batch_norm({x}, {w:X[1:2]}, {w:X[1:2]}.abs() + 0.1)",
        "F.batch_norm({x}, {w:X[1:2]}, {w:X[1:2]} ** 2 + 0.1, {w:X[1:2]}, {w:X[1:2]}, eps={e})",
        "F.batch_norm({x}, {x}.flatten()[:{x}.shape[1]], {x}.flatten()[:{x}.shape[1]] ** 2 + 0.1)",
        "{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + {e}) * {w:X[-1:]}",
        *(
            f"F.linear({norm}, {{w:(N, X[-1])}}{bias})"
            for norm in (
                "{w:X[-1:]} * (F.rms_norm({x}.float(), {x}.shape[-1:], None, {e})).to({x}.dtype)",
                "({x}.float() * torch.rsqrt({x}.float().pow(2).mean(-1, keepdim=True) + {e}) "
                "* (1 + {w:X[-1:]})).to({x}.dtype)",
                "({x}.float() / ({x}.float() ** 2).mean(-1, keepdim=True).add({e}).sqrt())"
                ".to({t}).to({x}.dtype)",
                "({s}.float() * torch.rsqrt({x}.float().square().mean(-1, keepdim=True) + {e}))"
                ".to({x}.dtype)",
                "({x}.float() * torch.rsqrt({x}.float().square().mean({d}, keepdim=True)))"
                ".to({x}.dtype)",
            )
            for bias in ("", ", {w:(N,)}")
        ),
        *(
            f"({{x}} - {m}) {scale}{rest}"
            for m in ("{x}.mean(-1, keepdim=True)", "{s}.mean(-1, keepdim=True)")
            for scale in (
                "/ torch.sqrt({x}.var(-1, keepdim=True, unbiased=False) + {e})",
                "/ torch.sqrt({x}.var(-1, keepdim=True) + {e})",
                "/ ({x}.std(-1, keepdim=True) + {e})",
                "* torch.rsqrt(({x} - {x}.mean(-1, keepdim=True)).pow(2).mean(-1, "
                "keepdim=True) + {e})",
                "* torch.rsqrt(({x} - {x}.mean({d}, keepdim=True)).pow(2).mean({d}, "
                "keepdim=True) + {e})",
                "* torch.rsqrt(({x} - {x}.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True))",
                "/ torch.sqrt({s}.var(-1, keepdim=True, unbiased=False) + {e})",
            )
            for rest in ("", " * {w:X[-1:]} + {w:X[-1:]}")
        ),
    )
]  # fmt: skip

IMAGES = [
    f"{{o}} = {call}"
    for call in (
        "F.conv2d({x}, {w:(N, X[1], 3, 3)}, {w:(N,)}, padding=1)",
        "F.conv2d({x}, {w:(N, X[1], 1, 1)})",
        "F.conv2d({x}, {w:(N, X[1], 2, 2)}, stride=2)",
        "F.conv2d({x}, {w:(X[1], 1, 3, 3)}, padding=1, groups={x}.shape[1])",
        "F.conv2d({x}, {w:(N, X[1], 3, 2)}, padding=(2, 0), dilation=(2, 1))",
        "F.conv2d({x}, {w:(N, X[1], 3, 3)}, padding='same')",
        "F.conv1d({x}, {w:(N, X[1], 3)}, {w:(N,)}, padding=1)", "F.conv1d({x}, {w:(N, X[1], 1)})",
        "F.conv3d({x}, {w:(N, X[1], 1, 2, 1)})",
        "F.conv_transpose2d({x}, {w:(X[1], N, 2, 2)}, stride=2)",
        "F.conv_transpose1d({x}, {w:(X[1], N, 3)}, padding=1)",
        "F.conv2d({x}, {w:(N, X[-3], 1, 1)})",
        "F.relu(F.batch_norm(F.conv2d({x}, {w:(N, X[1], 3, 3)}, padding=1), {w:(N,)}, "
        "{w:(N,)}.abs() + 0.1, {w:(N,)}, {w:(N,)}))",
        "F.conv2d({x}, {w:(N, X[1], X[2], X[3])}).flatten(1)",
        "F.conv2d({x}, {w:(N, X[1], 2, 2)}, stride=2).flatten(2).mT",
        "F.max_pool2d({x}, 2)", "F.max_pool2d({x}, 3, 2, 1)",
        "F.max_pool2d({x}, 2, ceil_mode=True)", "F.max_pool1d({x}, 2)",
        "F.avg_pool2d({x}, 2)", "F.avg_pool2d({x}, 3, 1, 1, count_include_pad=False)",
        "F.avg_pool2d({x}, 2, ceil_mode=True)", "F.avg_pool2d({x}, 60, ceil_mode=True)",
        "F.max_pool2d({x}, (50, 2), (50, 1), ceil_mode=True)", "F.adaptive_max_pool2d({x}, (3, 4))",
        "F.avg_pool1d({x}, 2)", "F.adaptive_avg_pool2d({x}, 1)",
        "F.adaptive_avg_pool2d({x}, (1, 2))", "F.adaptive_avg_pool1d({x}, 1)",
        "F.adaptive_max_pool2d({x}, 1)", "F.interpolate({x}, scale_factor=2)",
        "F.interpolate({x}, size=(3, 5), mode='bilinear')",
        "F.interpolate({x}, size=(4, 3), mode='bilinear', align_corners=True)",
        "F.interpolate({x}, size=4, mode='linear')",
        "F.interpolate({x}, size=(5, 5), mode='bicubic')", "F.pixel_shuffle({x}, 2)",
        "F.pixel_unshuffle({x}, 2)", "F.unfold({x}, 2)",
        "F.channel_shuffle({x}, 2)", "F.local_response_norm({x}, 2)",
        "F.pad({x}, (1, 1, 1, 1), mode='reflect')", "F.lp_pool2d({x}, 2, 2)",
        "{x}.mean((2, 3))", "{x}.permute(0, 2, 3, 1)", "{x}.to(memory_format=torch.channels_last)",
        "{x}.mean((-2, -1), keepdim=True) * {x}",
    )
]  # fmt: skip

IMAGES += [
    f"{{o}} = {call}"
    for call in (
        "F.conv2d({x} + {k}, {w:(N, X[1], 3, 3)}, padding=1)",
        "F.conv2d({x}, {w:(2 * N, X[1] // 2, 3, 3)}, {w:(2 * N,)}, padding=1, groups=2)",
        "F.conv2d({x}, {w:(X[1], 1, 3, 3)}, {w:(X[1],)}, stride=2, padding=1, groups={x}.shape[1])",
        "F.conv2d({x}, {w:(2 * X[1], 1, 2, 3)}, groups={x}.shape[1])",
        "F.relu({x} + F.conv2d({x}, {w:(X[1], X[1], 3, 3)}, {w:(X[1],)}, padding=1))",
        "F.conv2d(F.pad({x}, (1, 2, 0, 1)), {w:(N, X[1], 2, 3)}, {w:(N,)})",
        "F.conv2d(F.pad({x}, (1, 1, 1, 1), value={k}), {w:(N, X[1], 3, 3)})",
        "F.conv2d({x}, {w:(N, X[1], 3, 3)}, padding=1) * {w:(N, 1, 1)} + {w:(N, 1, 1)}",
        "F.conv2d(F.relu(F.conv2d({x}, {w:(N, X[1], 1, 1)}, {w:(N,)})), {w:(X[1], N, 3, 3)})",
        "F.conv2d({x}, {w:(N, X[1], 3, 3)}, padding=1)[:, 1:]",
        "torch.cat([{x}, F.conv2d({x}, {w:(N, X[1], 3, 3)}, padding=1)], 1)",
        "torch.sigmoid({x}.mean((2, 3), keepdim=True)) * {x}",
        "F.max_pool2d(F.pad({x}, (0, 1, 0, 1)), 2)",
        "F.max_pool2d(F.relu({x}), (2, 1), (1, 2))",
        "F.max_pool2d({x}, 2, 1, dilation=2)",
        "F.avg_pool2d({x} + {k}, 3, 2, 1)",
        "F.avg_pool2d({x}, (1, 3), divisor_override=2)",
        "F.max_pool2d({x}, 3, 1, 1) - {x}",
        "F.interpolate({x}, size=(3, 5), mode='nearest-exact')",
        "F.interpolate({x}, scale_factor=0.5, mode='bilinear')",
        "F.interpolate({x}, scale_factor=1.5, mode='bilinear', recompute_scale_factor=True)",
        "F.interpolate({x}, size=(2, 3), mode='area')",
        "F.interpolate({x}, size=(7, 3))",
        "F.interpolate({x}, size=(3, 2), mode='bilinear', antialias=True)",
        "F.interpolate({x}, size=(4, 7), mode='bicubic', align_corners=True)",
        "F.interpolate(F.relu({x}), size=(6, 6), mode='bilinear') + {k}",
        "{x}.permute(0, 2, 3, 1) + {w:X[1:2]}",
        "{x}.flatten(2).mT + {w:(1, X[2] * X[3], X[1])}",
    )
]

MOVES += [
    f"{{o}} = {call}"
    for call in (
        "F.embedding({x}.argmax(-1), {w:(X[-1], N)})",
        "{w:(X[-1], N)}[{x}.argmax(-1)]",
        "F.embedding({x}.long().abs() % 5, {w:(5, N)}, padding_idx=0) + {k}",
        "{w:(5, N)}[({x}.long().abs() % 5), 0]",
        "{w:(5, N, 3)}[:, {x}.long().abs() % 1]",
        "{x}[..., torch.arange(-1, 1)]",
        "{x}[:, [0, 0], ..., [0, -1]]",
        "{x}[{x}.shape[0] - 1 - torch.arange({x}.shape[0])]",
        "{x}.gather({d}, torch.zeros_like({x}, dtype=i64))",
        "{x}.gather(-1, {x}.argmax(-1, keepdim=True)) * {k}",
        "{x}.index_select({d}, torch.tensor([0, 0]))",
        "torch.roll({x}, ({n}, -1), (0, -1))",
        "torch.roll({x}, 100, {d})",
        "torch.roll({x} + {k}, {n})",
        "{x}.roll({n}, {d}).roll(-{n}, {d})",
    )
]

REDUCTIONS += [
    f"{{o}} = {call}"
    for call in (
        "{x}.flatten()[{x}.flatten().argsort(stable=True)]",
        "{x}.argmax({d}, keepdim=True) + {k}",
        "{x}.topk(min(2, {x}.shape[{d}]), {d}, largest=False).values * {k}",
        "{x}.topk({x}.shape[-1], sorted=False).values.sum(-1)",
        "{x}.gather({d}, {x}.topk(1, {d}).indices)",
        "{x}.sort({d}, descending=True).values",
        "{x}.sort({d}, stable=True).values[..., :2] + {k}",
        "{x}.argmin(-1) * 2",
        "({x} * {k}).argmax({d})",
        "{x}.max({d})[1]",
        "torch.linalg.vector_norm({x}, float('inf'), dim={ds})",
        "F.normalize({x}, p=1, dim={d})",
        "torch.linalg.vector_norm({x}, 0, dim={ds})",
        "torch.linalg.vector_norm({x}, 3, dim={ds})",
        "torch.linalg.vector_norm({x}, float('-inf'), dim={ds})",
        "torch.cdist({x}, {s})",
    )
]

CASTS += [
    f"{{o}} = {call}"
    for call in (
        "({x} * 300).to(u8)",
        "({x} * 300).to(i8) + {k}",
        "({x} * 1000).to(u8).to({t})",
        "{x}.to(u8).to({x}.dtype) * {k}",
    )
]

IMAGES += [
    f"{{o}} = {call}"
    for call in (
        "F.conv2d(torch.cat([torch.zeros_like({x}[..., :1]), {x}], -1), {w:(N, X[1], 2, 3)})",
        "F.conv2d(torch.cat([{x}, {x}.new_zeros(*{x}.shape[:2], 1, {x}.shape[3])], 2), {w:(N, "
        "X[1], 2, 2)}, {w:(N,)}, stride=2)",
        "F.conv2d(torch.cat([torch.zeros_like({x}[:, :1]), {x}], 1), {w:(N, X[1] + 1, 2, 2)})",
        "F.max_pool2d(torch.cat([torch.zeros_like({x}[..., :1]), {x}], -1), 2)",
        "F.conv_transpose2d({x}, {w:(X[1], N, 3, 3)}, {w:(N,)}, stride=2, padding=1, "
        "output_padding=1)",
        "F.conv_transpose2d({x}, {w:(X[1], N, 4, 4)}, {w:(N,)}, 2, 1)",
        "F.conv_transpose2d({x}, {w:(X[1], 1, 3, 2)}, None, (1, 3), groups={x}.shape[1])",
        "F.conv_transpose2d({x}, {w:(X[1], N, 2, 2)}, stride=3, dilation=2)",
        "F.conv_transpose2d({x}, {w:(X[1], N, 3, 3)}, {w:(N,)}, padding=2)",
        "F.conv_transpose1d({x}, {w:(X[1], N, 4)}, {w:(N,)}, 2, 1)",
        "F.conv_transpose1d({x}, {w:(X[1], 2, 3)}, stride=3, groups={x}.shape[1])",
        "F.conv_transpose3d({x}, {w:(X[1], N, 1, 2, 2)}, stride=2)",
        "F.gelu(F.conv_transpose2d({x}, {w:(X[1], N, 2, 2)}, {w:(N,)}, 2)) + {k}",
        "F.adaptive_avg_pool2d({x}, (2, 2))",
        "F.adaptive_avg_pool2d({x}, 3)",
        "F.adaptive_avg_pool2d({x}, (None, 4))",
        "F.adaptive_max_pool2d({x}, (2, 1))",
        "F.adaptive_avg_pool1d({x}, 3)",
        "{x}.unfold(-1, 2, 2).unfold(-2, 1, 1)",
        "{x}.unfold({d}, 2, 2)",
        "{x}.unfold({d}, 3, 2)",
        "F.unfold({x}, 3, padding=1, stride=2)",
        "F.unfold({x}, (1, 2), dilation=2)",
        "F.fold(F.unfold({x}, 2, stride=2), {x}.shape[-2:], 2, stride=2)",
        "F.fold(F.unfold({x}, 3, padding=1, stride=2), {x}.shape[-2:], 3, padding=1, stride=2)",
        "F.fold(F.unfold({x}, (1, 2), dilation=2), {x}.shape[-2:], (1, 2), dilation=2)",
        "F.conv1d({x}, {w:(X[1], 1, 3)}, stride=2, groups={x}.shape[1])",
        "F.conv1d({x}, {w:(N, X[1], 3)}, dilation=2)",
        "F.conv1d(F.pad({x}, (2, 0)), {w:(N, X[1], 3)}, {w:(N,)})",
        "F.relu(F.conv1d({x}, {w:(N, X[1], 3)}, {w:(N,)}, stride=2, padding=1))",
        "F.grid_sample({x}, {w:(X[0], 2, 3, 2)}, align_corners=False)",
        "F.grid_sample({x}, {w:(X[0], 2, 3, 2)}, mode='nearest', padding_mode='border', "
        "align_corners=True)",
        "{x} * torch.sigmoid(F.linear(F.relu(F.linear({x}.mean((2, 3)), {w:(N, X[1])}, "
        "{w:(N,)})), {w:(X[1], N)}, {w:X[1:2]}))[..., None, None]",
        "{x} * F.conv2d(F.silu(F.conv2d({x}.mean((2, 3), keepdim=True), {w:(N, X[1], 1, 1)}, "
        "{w:(N,)})), {w:(X[1], N, 1, 1)}, {w:X[1:2]}).sigmoid()",
        "F.conv2d({x} * F.conv2d(F.silu(F.conv2d({x}.mean((2, 3), keepdim=True), {w:(N, X[1], "
        "1, 1)})), {w:(X[1], N, 1, 1)}).sigmoid(), {w:(N, X[1], 1, 1)}, {w:(N,)})",
        "{x} * F.conv1d({x}.mean((2, 3))[:, None], {w:(1, 1, 3)}, padding=1).transpose(0, "
        "1).reshape(*{x}.shape[:2], 1, 1).sigmoid()",
        "{x} * torch.sigmoid({x}.mean((2, 3), keepdim=True) * {w:(1, X[1], 1, 1)} + {w:(1, "
        "X[1], 1, 1)})",
        "F.hardsigmoid(F.adaptive_avg_pool2d({x}, 1)) * {x} + {x}",
    )
]

IN_PLACE = [
    "{i}.add_({s})", "{i}.mul_({k})", "{i}.copy_({s})", "{i}.fill_({k})", "{i}.zero_()",
    "{i}.relu_()",
    "{i}[..., 0] = {k}", "{i}[1:] = {k}", "{i}[:1] += {k}", "{i}[..., ::2] = {k}",
    "{i}[..., :1].mul_(2)",
    "{i}.masked_fill_({i} > {k}, {k})", "{i}.clamp_({k})", "{i}.sub_({s}, alpha=2)",
    "{i}.mT.add_(1)",
    "{i}.reshape(-1)[:1].zero_()", "{i}[0] = {i}[-1]", "{i}.unsqueeze(0).exp_()",
    "{i}.select({d}, 0).neg_()",
    "{i}[..., :2] = {s}[..., :2]", "{i}.transpose(0, -1).copy_({s}.transpose(0, -1))",
    "{i}.div_({s})",
    "{i}[{i} > {k}] = {k}", "{i}[..., [0]] = {k}",
    "{i}.index_fill_({d}, torch.zeros(1, dtype=i64), {k})",
    "{i} += {s}", "{i} *= {s}", "{i}.diagonal().fill_({k})", "{i}[2:1] = {k}",
    "{i}.squeeze().add_(1)",
]  # fmt: skip

FAMILIES: dict[str, tuple[list[str], float]] = {
    "unary": (UNARY, 3),
    "binary": (BINARY, 4),
    "reduction": (REDUCTIONS, 2),
    "view": (VIEWS, 4),
    "move": (MOVES, 2),
    "cast": (CASTS, 1),
    "product": (PRODUCTS, 3),
    "norm": (NORMS, 1.5),
    "attention": (ATTENTIONS, 2),
    "image": (IMAGES, 3),
    "block": (BLOCKS, 2),
    "rotary": (ROTARY, 1),
    "scaled": (SCALED, 1),
    "in place": (IN_PLACE, 1),
    "quantized": (QUANTIZED, 1),
    "autocast": (AUTOCAST, 1),
    "running sums": (SUMS, 0.5),
}
"""Templates by family, and how often each family is drawn."""
