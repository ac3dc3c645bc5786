"""A border around a sum of what is broadcast is a border around each addend.

    %s[h, q, y, x] = add(%rows[h, q, y, 1], %columns[h, q, 1, x])
    %m = pad(reshape(%s))    ->    %r = pad(reshape(expand(%rows)))
                                   %c = pad(reshape(expand(%columns)))
                                   %m = add(%r, %c)

The addends are small and their sum is not: it would be stored only to be copied into its border.
One kernel reads the addends where they lie (the relative positions of MViTv2 beside a class token).
"""

from __future__ import annotations

from dataclasses import dataclass

from gtco.ir.graph import Graph, Node
from gtco.ir.views import NotAView, through_views
from gtco.passes.rewrite import Editor, Log, Rule, rewrite
from gtco.passes.views import broadcast, check_broadcast

Tree = str | tuple["Tree", "Tree"]
"""A value, or the sum of two."""


@dataclass(frozen=True)
class _BorderedSum:
    pad: Node
    sum: Node
    views: tuple[Node, ...]
    """From the sum to what the border is around."""
    tree: Tree


def _match(edit: Editor, node: Node) -> _BorderedSum | None:
    base, views = through_views(edit.producer, node.inputs[0])
    made_by = edit.producer(base, "add")
    if made_by is None or len(made_by.inputs) != 2:
        return None
    return _BorderedSum(node, made_by, views, _sum_of(edit, made_by))


def _tree(edit: Editor, value: str) -> Tree:
    node = edit.producer(value, "add")
    if node is None or len(node.inputs) != 2 or not edit.read_once(value):
        return value
    return _sum_of(edit, node)


def _sum_of(edit: Editor, add: Node) -> Tree:
    left, right = (_tree(edit, each) for each in add.inputs)
    return left, right


def _leaves(tree: Tree) -> tuple[str, ...]:
    return (tree,) if isinstance(tree, str) else (*_leaves(tree[0]), *_leaves(tree[1]))


def _check(edit: Editor, match: _BorderedSum) -> str | None:
    for node in (match.sum, *match.views):
        if not edit.read_once(node.values[0]):
            return f"%{node.values[0]} is read elsewhere too, so it must be stored"
    (spec,) = match.sum.outputs
    for name in _leaves(match.tree):
        if edit.dtype(name) != spec.dtype:
            return f"%{name} is no {spec}"
        base, _ = through_views(edit.producer, name)
        if edit.specs[base].numel >= spec.numel:
            return f"%{base} is as large as the sum"
        try:
            check_broadcast(edit, name, spec.sizes, match.views)
        except NotAView as error:
            return f"%{name} has no strides over the sum: {error}"
    return None


def _replace(edit: Editor, match: _BorderedSum) -> str:
    attrs, sizes = match.pad.attrs, match.sum.outputs[0].sizes

    def bordered(tree: Tree) -> str:
        if not isinstance(tree, str):
            return edit.add("add", *(bordered(each) for each in tree))
        return edit.add("pad", broadcast(edit, tree, sizes, match.views), **attrs)

    return bordered(match.tree)


_RULES = (Rule("pad(a + b) -> pad(a) + pad(b)", ("pad",), _match, _replace, _check),)


def border_addends(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, _RULES, log)
