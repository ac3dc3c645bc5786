"""What is known now is computed now.

    %a: f16[1,1,768] = expand(%token)             ->    const %a
    %b: f16[1,197,768] = concat(%a, %x, dim=1)          %s = add(%x, %position[:, 1:])
    %c = add(%b, %position)                             %c = concat(%first, %s, dim=1)

The second rule makes the class token's row a constant, so that only the patches are computed.
"""

from __future__ import annotations

from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import HALVES
from gtco.passes.canonicalize import RULES as CANONICAL
from gtco.passes.rewrite import Editor, Log, Rule, is_random, merge_duplicates, rewrite

MAX_FOLDED_BYTES = 64 << 20
"""A folded value larger than this, and than its inputs, costs more to read than to compute."""


def _all_constant(edit: Editor, node: Node) -> Node | None:
    known = bool(node.inputs) and all(name in edit.constants for name in node.inputs)
    return node if known and not is_random(node) else None


def _too_large(edit: Editor, node: Node) -> str | None:
    made = sum(spec.nbytes for spec in node.outputs)
    read = sum(edit.specs[name].nbytes for name in node.inputs)
    if made > max(MAX_FOLDED_BYTES, read):
        return f"its value would take {made >> 20} MiB, and its inputs {read >> 20} MiB"
    return None


def _value(edit: Editor, node: Node) -> tuple[str, ...]:
    values = [edit.constants[name] for name in node.inputs]
    with torch.no_grad():
        try:
            result = node.definition.reference(*values, **node.attrs)
        except NotImplementedError:  # some operators have no kernel of 16 bits on a CPU
            wide = [v.float() if v.dtype in HALVES else v for v in values]
            result = node.definition.reference(*wide, **node.attrs)
    results = result if isinstance(result, (tuple, list)) else (result,)
    # an expanded or permuted constant is stored: whoever packs it later wants plain strides
    return tuple(
        edit.add_constant(node.op, tensor.to(spec.dtype).contiguous())
        for tensor, spec in zip(results, node.outputs, strict=True)
    )


def _partly_constant(edit: Editor, node: Node) -> tuple[Node, str] | None:
    """The concat with a constant operand, and the constant added to it."""
    for x, c in ((0, 1), (1, 0)) if len(node.inputs) == 2 else ():
        concat = edit.producer(node.inputs[x], "concat")
        constant = node.inputs[c]
        if concat is None or constant not in edit.constants:
            continue
        if any(name in edit.constants for name in concat.inputs):
            return concat, constant
    return None


def _concat_is_shared(edit: Editor, match: tuple[Node, str]) -> str | None:
    concat, constant = match
    if not edit.read_once(concat.name):
        return f"%{concat.name} is read elsewhere without %{constant}"
    whole = edit.specs[concat.name]
    if edit.specs[constant].rank != whole.rank:
        return f"%{constant} broadcasts over the leading dimensions"
    axis = concat.attrs["dim"]
    if edit.shape(constant)[axis] not in (1, whole.sizes[axis]):
        return f"%{concat.name} is broadcast along the dimension that it joins"
    if any(edit.dtype(value) != whole.dtype for value in concat.inputs):
        return f"%{concat.name} joins tensors of several dtypes"
    return None


def _concat_of_sums(edit: Editor, match: tuple[Node, str]) -> str:
    concat, constant = match
    dim, start = concat.attrs["dim"], 0
    whole = edit.shape(constant)[dim]
    parts = []
    for value in concat.inputs:
        end = start + edit.shape(value)[dim]
        piece = constant
        if whole != 1:
            piece = edit.add("slice", constant, dim=dim, start=start, end=end)
        parts.append(edit.add("add", value, piece))
        start = end
    return edit.add("concat", *parts, dim=dim)


RULES: tuple[Rule[Any], ...] = (
    *CANONICAL,
    Rule("f(constants) -> constant", (), _all_constant, _value, _too_large),
    Rule("concat(c, x) + d -> concat(c + d[:n], x + d[n:])", ("add",),
         _partly_constant, _concat_of_sums, _concat_is_shared),
)  # fmt: skip


def fold_constants(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return merge_duplicates(rewrite(graph, RULES, log), log)
