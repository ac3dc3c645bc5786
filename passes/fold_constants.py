"""What is known now is computed now.

    %a: f16[1,1,768] = expand(%token)             ->    const %a
    %b: f16[1,197,768] = concat(%a, %x, dim=1)          %s = add(%x, %position[:, 1:])
    %c = add(%b, %position)                             %c = concat(%first, %s, dim=1)

The second rule makes the class token's row a constant, so that only the patches are computed. A
value that is too large to keep may still be computed for a smaller one.
"""

from __future__ import annotations

from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import HALVES
from gtco.passes.canonicalize import RULES as CANONICAL
from gtco.passes.known_masks import spreads_mask
from gtco.passes.rewrite import Editor, Log, Rule, is_random, merge_duplicates, rewrite

MAX_FOLDED_BYTES = 64 << 20
"""A folded value larger than this, and than its inputs, costs more to read than to compute."""
MAX_BYTES_ON_THE_WAY = 1 << 30
"""Of a value that is computed for another one and not kept, as a one-hot matrix is whose product
with a table of positions is small."""
MOST_ON_THE_WAY = 8
"""Such values, one behind another."""

Known = tuple[Node, ...]
"""Nodes that make the last of them of constants alone, in order."""


def _known(edit: Editor, node: Node) -> Known | None:
    found: dict[str, Node] = {}

    def visit(node: Node, left: int) -> bool:
        if not left or not node.inputs or is_random(node):
            return False
        for name in node.inputs:
            made_by = edit.producer(name)
            if name in edit.constants or (made_by is not None and made_by.name in found):
                continue
            if made_by is None or not visit(made_by, left - 1):
                return False
        found[node.name] = node
        return True

    if spreads_mask(edit, node):
        return None
    return tuple(found.values()) if visit(node, 1 + MOST_ON_THE_WAY) else None


def _too_large(edit: Editor, known: Known) -> str | None:
    made, *on_the_way = (sum(spec.nbytes for spec in node.outputs) for node in reversed(known))
    names = {name for node in known for name in node.inputs if name in edit.constants}
    read = sum(edit.specs[name].nbytes for name in names)
    if made > max(MAX_FOLDED_BYTES, read):
        return f"its value would take {made >> 20} MiB, and its inputs {read >> 20} MiB"
    largest = max(on_the_way, default=0)
    if largest > MAX_BYTES_ON_THE_WAY:
        return f"a value that it is computed of would take {largest >> 20} MiB"
    return None


def _value(edit: Editor, known: Known) -> tuple[str, ...]:
    values = {name: edit.constants[name] for node in known for name in node.inputs
              if name in edit.constants}  # fmt: skip
    for node in known:
        results = _computed(node, [values[name] for name in node.inputs])
        values.update(zip(node.values, results, strict=True))
    last = known[-1]
    # an expanded or permuted constant is stored: whoever packs it later wants plain strides
    return tuple(edit.add_constant(last.op, values[name].contiguous()) for name in last.values)


def _computed(node: Node, values: list[torch.Tensor]) -> list[torch.Tensor]:
    if node.definition.multiplies and not values[0].is_cuda:
        values = _widened(values)  # a CPU takes a hundred times as long for products in 16 bits
    with torch.no_grad():
        try:
            result = node.definition.reference(*values, **node.attrs)
        except NotImplementedError:  # some operators have no kernel of 16 bits on a CPU
            result = node.definition.reference(*_widened(values), **node.attrs)
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [tensor.to(spec.dtype) for tensor, spec in zip(results, node.outputs, strict=True)]


def _widened(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [v.float() if v.dtype in HALVES else v for v in values]


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
    Rule("f(constants) -> constant", (), _known, _value, _too_large),
    Rule("concat(c, x) + d -> concat(c + d[:n], x + d[n:])", ("add",),
         _partly_constant, _concat_of_sums, _concat_is_shared),
)  # fmt: skip


def fold_constants(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return merge_duplicates(rewrite(graph, RULES, log), log)
