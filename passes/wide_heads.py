"""Attention whose heads no kernel holds is spelled out.

    %y = attention(%q, %k, %v, scale=0.0442, ...)
                  ->    %s: f32 = matmul(%q, permute(%k), out_dtype=f32)
                        %p = cast(softmax(mul(%s, other=0.0442), dim=-1), f16)
                        %y = matmul(%p, %v)

As three kernels, of which the scores are stored once and as they were computed, in fp32.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.passes.attention import MAX_HEAD, transpose
from gtco.passes.legality import MAX_COLUMNS
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

MOST_BYTES = 2**28
"""Of scores: torch's kernel stores none."""


def _match(edit: Editor, node: Node) -> Node | None:
    q, k, v, *_ = node.inputs
    return node if max(edit.shape(x)[-1] for x in (q, k, v)) > MAX_HEAD else None


def _check(edit: Editor, node: Node) -> str | None:
    q, k, v, *masks = node.inputs
    if masks or node.attrs["causal"]:
        return "it is masked"
    if len({edit.shape(x)[:-2] for x in (q, k, v)}) > 1:
        return "q, k and v differ in their batch dimensions"
    keys = edit.shape(k)[-2]
    if not 0 < keys <= MAX_COLUMNS:
        return f"{keys} scores of a query do not fit one block ({MAX_COLUMNS})"
    nbytes = 4 * math.prod(edit.shape(q)[:-1]) * keys
    if nbytes > MOST_BYTES:
        return f"its scores take {nbytes / 2**20:.0f} MB, of {MOST_BYTES // 2**20} at most"
    return None


def _replace(edit: Editor, node: Node) -> str:
    q, k, v = node.inputs
    dtype = edit.dtype(q)
    wide = torch.promote_types(dtype, torch.float32)
    whole = {} if dtype == wide else {"out_dtype": wide}
    scores = edit.add("matmul", q, transpose(edit, k), **whole)
    scores = edit.add("mul", scores, other=node.attrs["scale"])
    weights = edit.add("softmax", scores, dim=edit.specs[scores].rank - 1)
    if dtype != wide:
        weights = edit.add("cast", weights, dtype=dtype)
    return edit.add("matmul", weights, v)


RULES: tuple[Rule[Any], ...] = (
    Rule("attention(q, k, v, c) -> softmax(q @ k.T * c) @ v", ("attention",),
         _match, _replace, _check),
)  # fmt: skip


def spell_out_wide_heads(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
