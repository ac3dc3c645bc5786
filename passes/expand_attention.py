"""Attention that no kernel takes becomes products and a softmax.

    %y = attention(%q, %k, %v, scale=0.0442, ...)
                  ->    %s: f32 = matmul(%q, permute(%k), out_dtype=f32)
                        %p = cast(softmax(mul(%s, other=0.0442), dim=-1), f16)
                        %y = matmul(%p, %v)

As three kernels, of which the scores are stored once and as they were computed, in fp32. A mask
joins the softmax: what is added is added, and what is forbidden is -inf. A query that may see no
key is 0, as from `attention`.

Which attention no kernel takes the sketches say, and whether they take the products: their limits
depend on the target and stand there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gtco.ir.graph import Graph, Group, Node
from gtco.passes.attention import transpose
from gtco.passes.dataflow import Flow, make_group, materialize_views
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

MOST_BYTES = 2**28
"""Of scores: torch's kernel stores none."""

_EQUATION = "attention(q, k, v, mask, c) -> softmax(q @ k.T * c + mask) @ v"


def expand_attention(
    graph: Graph, log: Log | None = None, *, refusal: Callable[[Group], str | None]
) -> Graph:
    """See the module's docstring.

    Args:
        graph: after all other passes, which settle how the operands lie.
        log: as of any pass.
        refusal: why no kernel computes a group of one node, or None if one does.
    """
    if not any(node.op == "attention" for node in graph.nodes):
        return graph
    flow = Flow(materialize_views(graph))
    verdicts: dict[str, str | None] = {}  # of the attention to expand: why it must not be
    known: dict[tuple[str, tuple[int, ...]], tuple[bool, str | None]] = {}
    for node in flow.compute:
        if node.op == "attention":
            group = make_group(flow, (node,))
            key = group.form, group.starts
            if key not in known:
                refused = refusal(group) is not None
                known[key] = refused, _unfit(group.graph, refusal) if refused else None
            refused, reason = known[key]
            if refused:
                verdicts[node.name] = reason
    rule = _rule(lambda edit, node: node if node.name in verdicts else None,
                 lambda edit, node: verdicts[node.name])  # fmt: skip
    return rewrite(graph, (rule,), log) if verdicts else graph


def _unfit(graph: Graph, refusal: Callable[[Group], str | None]) -> str | None:
    """Why the attention of `graph` had better stay as it is although no kernel takes it."""
    expanded = rewrite(graph, (_rule(lambda edit, node: node),))
    flow = Flow(materialize_views(expanded))
    for node in flow.compute:
        if not all(flow.graph.specs[name].numel for name in node.inputs):
            return f"its {node.op} has no element"
        if (nbytes := max(spec.nbytes for spec in node.outputs)) > MOST_BYTES:
            most = MOST_BYTES // 2**20
            return f"its scores take {nbytes / 2**20:.0f} MB, of {most} at most"
        if reason := refusal(make_group(flow, (node,))):
            return f"no kernel takes its {node.op} either: {reason}"
    return None


def _rule(
    match: Callable[[Editor, Node], Node | None],
    check: Callable[[Editor, Node], str | None] = lambda edit, node: None,
) -> Rule[Node]:
    return Rule(_EQUATION, ("attention",), match, _replace, check)


def _replace(edit: Editor, node: Node) -> str:
    q, k, v, *masks = node.inputs
    dtype = edit.dtype(q)
    wide = torch.promote_types(dtype, torch.float32)
    whole = {} if dtype == wide else {"out_dtype": wide}
    scores = edit.add("matmul", q, transpose(edit, k), **whole)
    scores = edit.add("mul", scores, other=node.attrs["scale"])
    if node.attrs["causal"]:
        sees = torch.ones(edit.shape(scores)[-2:], dtype=torch.bool).tril()
        masks.append(edit.add_constant("causal", sees))
    for mask in masks:
        scores = _masked(edit, scores, mask)
    weights = edit.add("softmax", scores, dim=edit.specs[scores].rank - 1)
    if any(_may_forbid_all(edit, mask) for mask in masks):
        most = edit.add("amax", scores, dims=(edit.specs[scores].rank - 1,), keepdim=True)
        blind = edit.add("eq", most, other=-math.inf)
        weights = edit.add("where", blind, _scalar(edit, "unseen", 0.0, wide), weights)
    if dtype != wide:
        weights = edit.add("cast", weights, dtype=dtype)
    return edit.add("matmul", weights, v)


def _masked(edit: Editor, scores: str, mask: str) -> str:
    wide = edit.dtype(scores)
    if edit.dtype(mask) == torch.bool:
        return edit.add("where", mask, scores, _scalar(edit, "forbidden", -math.inf, wide))
    return edit.add("add", scores, mask)


def _scalar(edit: Editor, hint: str, value: float, dtype: torch.dtype) -> str:
    return edit.add_constant(hint, torch.tensor(value, dtype=dtype))


def _may_forbid_all(edit: Editor, mask: str) -> bool:
    """Whether `mask` may forbid a query every key."""
    known = edit.constant(mask)
    if known is None:
        return True
    forbidden = ~known if known.dtype == torch.bool else known == -math.inf
    return bool(forbidden.all(-1).any())
