"""What a product reads in 8 bits is rounded in rows of what it sums over.

    %q: i8[1,32,7,6] = quantize_int8(%x)    ->    %p = permute(%x)
    %p: i8[1,7,6,32] = permute(%q)                %q: i8[1,7,6,32] = quantize_int8(%p)
    %y = linear(%p, %w)                           %y = linear(%q, %w)

No instruction transposes tiles of bytes, so that a product could not read the permute as a view;
whoever rounds may store where it likes.
"""

from __future__ import annotations

from gtco.ir.graph import Graph, Node
from gtco.passes.rewrite import Editor, Log, Rule, rewrite
from gtco.passes.views import RULES as VIEWS


def _match(edit: Editor, node: Node) -> Node | None:
    made, dims = edit.producer(node.inputs[0]), node.attrs["dims"]
    if made is None or not made.definition.quantizes or dims[-1] == len(dims) - 1:
        return None
    readers = edit.users(node.name)
    behind = [each for view in readers if view.op == "reshape" for each in edit.users(view.name)]
    return node if any(each.definition.multiplies for each in (*readers, *behind)) else None


def _replace(edit: Editor, node: Node) -> str:
    made = edit.nodes[node.inputs[0]]
    x, *numbers = made.inputs
    turned = edit.add("permute", x, **node.attrs)
    return edit.add(made.op, turned, *numbers, **made.attrs)


_RULES = (
    Rule("permute(quantize(x)) -> quantize(permute(x))", ("permute",), _match, _replace),
    *VIEWS,
)


def round_rows(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, _RULES, log)
