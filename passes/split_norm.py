"""Layer norm and root mean square norm move into the linears that read them.

    %n = layer_norm(%x, %g, %b, eps=1e-06)          %s = row_stats(%x)
    %y = linear(%n, %w, %c)                    ->   %m, %r = merge_stats(%s, columns=768, eps=...)
                                                    %a: f32 = linear(%x, %w*g, out_dtype=f32)
                                                    %d = sub(%a, mul(%m, %colsum))
                                                    %e = add(mul(%d, %r), %c + w @ b)
                                                    %y = cast(%e, dtype=f16)

`(x - mean) * rstd * g @ w.T` is `rstd * (x @ (w * g).T - mean * colsum)` with `colsum` the sums of
the rows of `w * g`. The sums are taken in f32 from the weights as rounded, so that the part of x
that is its mean cancels to f32 accuracy however large the mean is.

A norm by the root of the mean square, `x * rsqrt(mean(x * x) + eps) * g`, has the same statistics:
its factor is `rsqrt(1 / rstd^2 + mean^2)`, one value a row, and nothing is subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import HALVES
from gtco.passes.normalization import RootMeanSquare, root_mean_square
from gtco.passes.rewrite import Editor, Log, Rule, merge_duplicates, rewrite


@dataclass(frozen=True)
class _Reader:
    """A node that reads the normalised value, and the views on the way to it."""

    node: Node
    views: tuple[Node, ...]


@dataclass(frozen=True)
class _NormOfLinears:
    """The node that ends a norm, what it normalises, and who reads it."""

    norm: Node
    x: str
    readers: tuple[_Reader, ...]
    returned: bool
    rms: RootMeanSquare | None = None


def _layer_norm(edit: Editor, norm: Node) -> _NormOfLinears | None:
    readers = _readers(edit, norm)
    return readers and _NormOfLinears(norm, norm.inputs[0], *readers)


def _root_mean_square(edit: Editor, norm: Node) -> _NormOfLinears | None:
    readers = _readers(edit, norm)
    found = readers and root_mean_square(edit, norm)
    return _NormOfLinears(norm, found.x, *readers, found) if readers and found else None


def _readers(edit: Editor, norm: Node) -> tuple[tuple[_Reader, ...], bool] | None:
    """Who reads `norm`, and whether the model returns it; None if no linear does."""
    readers: list[_Reader] = []
    pending: list[tuple[str, tuple[Node, ...]]] = [(norm.name, ())]
    returned = False
    while pending:
        value, path = pending.pop()
        returned |= edit.is_output(value)
        for user in edit.users(value):
            if user.definition.is_view and _keeps_columns(edit, user):
                pending.append((user.name, (*path, user)))
            else:
                readers.append(_Reader(user, path))
    if not any(_is_weight_product(edit, reader) for reader in readers):
        return None
    return tuple(readers), returned


def _keeps_columns(edit: Editor, view: Node) -> bool:
    """Whether the view leaves the last dimension alone."""
    before, after = edit.shape(view.inputs[0]), view.outputs[0].sizes
    if not before or not after or before[-1] != after[-1]:
        return False
    if view.op == "permute":
        return bool(view.attrs["dims"][-1] == len(before) - 1)
    if view.op == "unfold":
        return False
    return view.op != "slice" or bool(view.attrs["dim"] != len(before) - 1)


def _is_weight_product(edit: Editor, reader: _Reader) -> bool:
    node = reader.node
    if node.op != "linear" or node.attrs.get("out_dtype") is not None:
        return False
    return all(name in edit.constants for name in node.inputs[1:])


def _check(edit: Editor, match: _NormOfLinears) -> str | None:
    norm = match.norm
    dtype = norm.outputs[0].dtype
    if dtype not in HALVES:
        return f"products of {norm.outputs[0]} would be as far off as its rows' mean is large"
    if match.rms is None and any(name not in edit.constants for name in norm.inputs[1:]):
        return "its scale and shift are not constant"
    if 0 in edit.shape(match.x):
        return "it has no element"
    if match.returned:
        return f"the model returns %{norm.name}"
    for reader in match.readers:
        if not _is_weight_product(edit, reader):
            return f"%{reader.node.name} ({reader.node.op}) reads the normalised value too"
    return None


def _split_layer_norm(edit: Editor, match: _NormOfLinears) -> str:
    mean, rstd = _row_moments(edit, match.x, match.norm.attrs["eps"])
    for reader in match.readers:
        edit.root(reader.node)
        views = (_through(edit, reader.views, value) for value in (match.x, mean, rstd))
        y = _normalised(edit, reader.node, match.norm.inputs[1:], *views)
        edit.replace(reader.node.name, y)
    return match.norm.name


def _split_root_mean_square(edit: Editor, match: _NormOfLinears) -> str:
    assert match.rms is not None
    mean, rstd = _row_moments(edit, match.x, match.rms.eps)
    variance = edit.add("reciprocal", edit.add("mul", rstd, rstd))  # and eps
    factor = edit.add("rsqrt", edit.add("add", variance, edit.add("mul", mean, mean)))
    for reader in match.readers:
        edit.root(reader.node)
        views = (_through(edit, reader.views, value) for value in (match.x, factor))
        edit.replace(reader.node.name, _scaled(edit, reader.node, match.rms.scale, *views))
    return match.norm.name


def _row_moments(edit: Editor, x: str, eps: float) -> tuple[str, ...]:
    """Mean and 1 / sqrt(var + eps) of each row of `x`."""
    stats = edit.add("row_stats", x)
    return edit.add_node("merge_stats", (stats,), {"columns": edit.shape(x)[-1], "eps": eps})


def _through(edit: Editor, path: tuple[Node, ...], value: str) -> str:
    """`value`, whose last dimension may have become 1, through the views of `path`."""
    for view in path:
        attrs = dict(view.attrs)
        if "shape" in attrs:
            attrs["shape"] = (*view.outputs[0].sizes[:-1], edit.shape(value)[-1])
        value = edit.add(view.op, value, **attrs)
    return value


def _scaled(edit: Editor, linear: Node, scale: torch.Tensor | None, x: str, factor: str) -> str:
    _, weight, *bias = linear.inputs
    if scale is not None:
        w = edit.constants[weight]
        weight = edit.add_constant(f"{weight}_scaled", (w.double() * scale).to(w.dtype))
    y = edit.add("mul", edit.add("linear", x, weight, out_dtype=torch.float32), factor)
    if bias:
        offset = edit.constants[bias[0]].float()
        y = edit.add("add", y, edit.add_constant(f"{bias[0]}_offset", offset))
    return edit.add("cast", y, dtype=linear.outputs[0].dtype)


def _normalised(
    edit: Editor, linear: Node, affine: Sequence[str], x: str, mean: str, rstd: str
) -> str:
    _, weight, *bias = linear.inputs
    w = edit.constants[weight]
    scale, shift = ([edit.constants[name].double() for name in affine] + [None, None])[:2]
    # in f64, so that the only rounding is the one that the sums of columns see too
    folded = w if scale is None else (w.double() * scale).to(w.dtype)
    offset = torch.zeros(w.shape[0], dtype=torch.float64, device=w.device)
    if shift is not None:
        offset += w.double() @ shift
    if bias:
        offset += edit.constants[bias[0]]
    y = edit.add(
        "linear",
        x,
        weight if scale is None else edit.add_constant(f"{weight}_scaled", folded),
        out_dtype=torch.float32,
    )
    colsum = edit.add_constant(f"{weight}_colsum", folded.double().sum(1).float())
    y = edit.add("sub", y, edit.add("mul", mean, colsum))
    y = edit.add("mul", y, rstd)
    y = edit.add("add", y, edit.add_constant(f"{weight}_offset", offset.float()))
    return edit.add("cast", y, dtype=linear.outputs[0].dtype)


RULES: tuple[Rule[Any], ...] = (
    Rule("linear(layer_norm(x, g, b), w, c) -> "
         "(linear(x, w*g) - mean(x) * colsum) * rstd(x) + (c + w @ b)",
         ("layer_norm",), _layer_norm, _split_layer_norm, _check),
    Rule("linear(x * rsqrt(mean(x * x) + eps) * g, w, c) -> linear(x, w*g) * rrms(x) + c",
         ("mul", "div", "cast"), _root_mean_square, _split_root_mean_square, _check),
)  # fmt: skip


def split_norms(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return merge_duplicates(rewrite(graph, RULES, log), log)
