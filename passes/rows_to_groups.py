"""A layer norm of rows of an image's channels becomes a group norm, whose image has them last.

%r[n, 32, l] = reshape(%x[n, c, h, w])       ->   %p[n, h, w, c] = permute(%x)
%y[n, 32, l] = layer_norm(%r)                     %g[n, h, w, c] = group_norm(%p, groups=32)
                                                  %y[n, 32, l] = reshape(permute(%g))

ONNX has no group norm below opset 21: exporters write an instance norm of reshaped images, with
factors of one and terms of zero, which are left out. What scales and shifts the channels stands
behind it.
"""

from __future__ import annotations

from typing import Any

from gtco.ir.graph import Graph, Node
from gtco.ir.views import through_views
from gtco.passes import views
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite


def _rows(edit: Editor, norm: Node) -> tuple[Node, str] | None:
    """The norm, and the image whose rows it takes."""
    rows, sizes = edit.producer(norm.inputs[0], "reshape"), norm.outputs[0].sizes
    if rows is None or len(norm.inputs) != 1 or len(sizes) != 3:
        return None
    (x,) = rows.inputs
    shape = edit.shape(x)
    if len(shape) not in (4, 5) or sizes[0] != shape[0]:
        return None
    # A row for each of dimension 1 may be a token's, whose heads are dimensions 2 and 3.
    together = sizes[1] < shape[1] and shape[1] % sizes[1] == 0
    return (norm, x) if together else None


def _one_group_norm(edit: Editor, match: tuple[Node, str]) -> str:
    norm, x = match
    (sizes,) = (spec.sizes for spec in norm.outputs)
    rank = edit.specs[x].rank
    y = edit.add("permute", x, dims=(0, *range(2, rank), 1))
    y = edit.add("group_norm", y, groups=sizes[1], eps=norm.attrs["eps"])
    y = edit.add("permute", y, dims=(0, rank - 1, *range(1, rank - 1)))
    return edit.add("reshape", y, shape=sizes)


def _unchanged(edit: Editor, node: Node) -> str | None:
    """x if `node` is x times ones, or a norm plus zeros: of others a zero may change its sign."""
    neutral = 1 if node.op == "mul" else 0
    if len(node.inputs) == 1:
        same = [x for x in node.inputs if node.attrs["other"] == neutral]
    else:
        pairs = ((x, edit.constant(c)) for x, c in (node.inputs, node.inputs[::-1]))
        same = [x for x, c in pairs if c is not None and bool((c == neutral).all())]
    x = next((x for x in same if edit.specs[x] == node.outputs[0]), None)
    if x is None or node.op == "mul":
        return x
    base, _ = through_views(edit.producer, x)
    return x if edit.producer(base, "layer_norm", "group_norm") is not None else None


RULES: tuple[Rule[Any], ...] = (
    *views.RULES,
    Rule("layer_norm(reshape(x)) -> reshape(group_norm(x))", ("layer_norm",),
         _rows, _one_group_norm, never_refused),
    Rule("x * ones, norm(x) + zeros -> x", ("mul", "add"),
         _unchanged, lambda _, x: x, never_refused),
)  # fmt: skip


def rows_to_groups(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
