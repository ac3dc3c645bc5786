"""What a value is made of: each element a sum of elements of one other value times constants.

    %a = mul(%x, %c)   %b = slice(%x, dim=1, start=4, end=8)   %y = sub(slice(%a, ...), %b)

Element i of %y is `x[i] * c[i] - x[i + 4]`. Passes that know an operator by what it computes, and
not by how it is spelled, look at these sums. Elements are named one by one; where all that is
computed keeps the items of a batch apart and treats them alike, those of the first item.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gtco.ir.graph import Node
from gtco.passes.rewrite import Editor
from gtco.passes.views import loses_nothing

_ARITHMETIC = frozenset(("add", "sub", "mul", "div", "neg", "cast", "concat", "copy"))
_MOST_TERMS = 6


@dataclass(frozen=True)
class WeightedSum:
    """Each element is a sum of elements of one value times constants.

    Args:
        index: of each term the element of the value, by its place in row-major order.
        factor: of each term the constant, float64.
    """

    index: tuple[Tensor, ...]
    factor: tuple[Tensor, ...]

    def moved(self, view: Node) -> WeightedSum:
        """The same, seen through a view."""
        index, factor = (
            tuple(seen(x, (view,)) for x in terms) for terms in (self.index, self.factor)
        )
        return WeightedSum(index, factor)

    def times(self, factor: Tensor | float, shape: Sequence[int]) -> WeightedSum:
        index = tuple(x.expand(shape) for x in self.index)
        return WeightedSum(index, tuple((x * factor).expand(shape) for x in self.factor))


class Unlike(Exception):
    """A value is no such sum."""


class WeightedSums:
    """The sums that lead from `result` to one value of its shape and type.

    Args:
        edit: the graph.
        result: the value that is asked about.
        source: that value, which other views of what it is a view of stand for as well; None means
            the one that no arithmetic makes.
        first: name the elements of the first item alone.

    Raises:
        Unlike: it is no such sum, or items do not stay apart.
    """

    def __init__(
        self, edit: Editor, result: str, source: str | None = None, first: bool = False
    ) -> None:
        self.edit = edit
        self.result = edit.specs[result]
        self.first = first
        self.source = source or ""
        """That value; it may be cast from the type of `result` to fp32."""
        self._seen_elsewhere = None if source is None else _Places(edit, source, first)
        self.inside: set[str] = set()
        """Values between the source and the result."""
        self._known: dict[str, WeightedSum] = {}
        self.sum = self._of(result)

    def _of(self, value: str) -> WeightedSum:
        if value not in self._known:
            self._known[value] = self._find(value)
        return self._known[value]

    def _find(self, value: str) -> WeightedSum:
        node, spec = self.edit.producer(value), self.edit.specs[value]
        if spec.dtype not in (self.result.dtype, torch.float32):
            raise Unlike
        if self.first and spec.sizes[:1] != self.result.sizes[:1]:
            raise Unlike
        if self._is_source(value):
            self.source = value
            index = numbered(first_size(spec.sizes, self.first))
            return WeightedSum((index,), (torch.ones(index.shape, dtype=torch.float64),))
        if self._seen_elsewhere is not None:
            places = self._seen_elsewhere.of(value)
            if places is not None:
                return WeightedSum((places,), (torch.ones(places.shape, dtype=torch.float64),))
        if node is None:
            raise Unlike
        self.inside.add(value)
        if node.definition.is_view:
            view = _first_item(node, self.edit.shape(node.inputs[0])) if self.first else node
            return self._of(node.inputs[0]).moved(view)
        if node.op not in _ARITHMETIC:
            raise Unlike
        return self._computed(node)

    def _is_source(self, value: str) -> bool:
        """Whether the sums are of `value`.

        Raises:
            Unlike: they are of another value as well.
        """
        if value == self.source:
            return True
        if self.edit.shape(value) != self.result.sizes or is_computed(self.edit, value):
            return False
        if self.source:
            raise Unlike
        return True

    def _computed(self, node: Node) -> WeightedSum:
        shape = first_size(node.outputs[0].sizes, self.first)
        if node.op == "concat":
            if self.first and node.attrs["dim"] % len(shape) == 0:
                raise Unlike
            return _joined([self._of(name) for name in node.inputs], node.attrs["dim"])
        first = node.inputs[0]
        if node.op == "neg":
            return self._of(first).times(-1.0, shape)
        if node.op in ("cast", "copy"):
            return self._of(first)
        second = self._constant(node, 1)
        if node.op == "div" and second is not None:
            return self._of(first).times(1.0 / second, shape)
        if node.op == "mul" and second is not None:
            return self._of(first).times(second, shape)
        if node.op == "mul" and (factor := self._constant(node, 0)) is not None:
            return self._of(node.inputs[1]).times(factor, shape)
        if node.op in ("add", "sub") and len(node.inputs) == 2:
            sign = 1.0 if node.op == "add" else -1.0
            left = self._of(first).times(1.0, shape)
            return _added(left, self._of(node.inputs[1]).times(sign, shape))
        raise Unlike

    def _constant(self, node: Node, slot: int) -> Tensor | None:
        """Operand `slot` of `node`, if it is known."""
        if slot >= len(node.inputs):
            return torch.tensor(float(node.attrs["other"]), dtype=torch.float64)
        base, _ = behind(self.edit, node.inputs[slot])
        constant = self.edit.constant(base)
        if constant is None or not constant.is_floating_point():
            return None
        factor = through(self.edit, node.inputs[slot], constant.cpu().double())
        if self.first and factor.dim() == len(node.outputs[0].sizes) and factor.shape[0] != 1:
            raise Unlike
        return factor


class _Places:
    """Where the elements of other views lie in `value`, which is a view of all of one value; of the
    first item alone if `first`.

    Raises:
        Unlike: items do not stay apart.
    """

    def __init__(self, edit: Editor, value: str, first: bool) -> None:
        self._edit = edit
        self._first = first
        self._base, _ = behind(edit, value)
        own = self._elements(value).flatten()
        self._at = torch.full((int(own.max()) + 1,), -1)
        self._at[own] = torch.arange(len(own))

    def _elements(self, value: str) -> Tensor:
        """Of each element of `value` the place in what it is a view of."""
        sizes = self._edit.shape(self._base)
        _, views = behind(self._edit, value)
        if self._first:
            views = first_items(views, sizes)
        return seen(numbered(first_size(sizes, self._first)), views)

    def of(self, value: str) -> Tensor | None:
        """The place of each element of `value`; None where it has others."""
        base, views = behind(self._edit, value)
        if base != self._base or not views:
            return None
        elements = self._elements(value)
        if int(elements.max()) >= len(self._at):
            return None
        places = self._at[elements]
        return places if bool((places >= 0).all()) else None


def numbered(sizes: Sequence[int]) -> Tensor:
    """Each element's place in row-major order."""
    return torch.arange(math.prod(sizes)).reshape(tuple(sizes))


def first_size(sizes: tuple[int, ...], first: bool = True) -> tuple[int, ...]:
    """Of the first item alone if `first`, else of all."""
    return (1, *sizes[1:]) if first else sizes


def _first_item(view: Node, sizes: tuple[int, ...]) -> Node:
    """`view`, of a value of these sizes, as it sees the first item, which is what lies first along
    the first dimension.

    Raises:
        Unlike: items do not stay apart.
    """
    made, attrs = view.outputs[0].sizes, view.attrs
    if sizes[:1] == made[:1]:
        if view.op == "reshape":
            return replace(view, attrs=MappingProxyType({**attrs, "shape": first_size(made)}))
        if view.op == "permute" and attrs["dims"][0] == 0:
            return view
        if view.op == "slice" and attrs["dim"] % len(sizes) != 0:
            return view
    raise Unlike


def first_items(views: Sequence[Node], sizes: tuple[int, ...]) -> list[Node]:
    """Each of `views` as it sees the first item; the first of them is of a value of these sizes.

    Raises:
        Unlike: items do not stay apart.
    """
    found = []
    for view in views:
        found.append(_first_item(view, sizes))
        sizes = view.outputs[0].sizes
    return found


def is_computed(edit: Editor, value: str) -> bool:
    """Whether arithmetic makes `value`, behind views and casts to wider types."""
    node = edit.producer(behind(edit, value)[0])
    return node is not None and node.op in _ARITHMETIC


def joins_pieces(edit: Editor, value: str) -> bool:
    """Whether arithmetic that makes `value` joins pieces, as all that moves elements does."""
    pending, known = [value], {value}
    while pending:
        node = edit.producer(pending.pop())
        if node is None or not (node.definition.is_view or node.op in _ARITHMETIC):
            continue
        if node.op == "concat":
            return True
        pending += [name for name in node.inputs if name not in known]
        known.update(node.inputs)
    return False


def spelled(edit: Editor, result: str) -> tuple[tuple[Any, ...], list[str]]:
    """(how arithmetic and views make `result`, the values on the way): values that are spelled
    alike are the same sums of what stands in the same place among the values."""
    names: list[str] = []
    lines: list[tuple[Any, ...]] = []
    places: dict[str, int] = {}

    def visit(name: str) -> int | str:
        if name in edit.constants:
            return name
        if name not in places:
            node = edit.producer(name)
            line: tuple[Any, ...] = (edit.specs[name], len(edit.users(name)) > 1)
            if node is not None and (node.definition.is_view or node.op in _ARITHMETIC):
                inputs = tuple(visit(each) for each in node.inputs)
                line = (*line, node.op, str(sorted(node.attrs.items())), inputs)
            places[name] = len(names)
            names.append(name)
            lines.append(line)
        return places[name]

    visit(result)
    return tuple(lines), names


def possible_sources(edit: Editor, result: str) -> list[str]:
    """Values of the shape of `result` that it is made of by arithmetic and views, the nearest
    first: those that two nodes read, and those that no arithmetic makes."""
    pending, known, found = [result], {result}, []
    for value in pending:
        node = edit.producer(value)
        if node is None or not (node.definition.is_view or node.op in _ARITHMETIC):
            continue
        for name in node.inputs:
            if name in known:
                continue
            known.add(name)
            pending.append(name)
            read_twice = len(edit.users(name)) > 1
            if edit.shape(name) == edit.shape(result) and (
                read_twice or not is_computed(edit, name)
            ):
                found.append(name)
    return found


def behind(edit: Editor, value: str) -> tuple[str, list[Node]]:
    """What `value` is behind views and casts that lose nothing, and these views from there on."""
    found = []
    while (node := edit.producer(value)) is not None:
        if node.definition.is_view:
            found.append(node)
        elif node.op != "cast" or not loses_nothing(
            edit.dtype(node.inputs[0]), node.outputs[0].dtype
        ):
            break
        value = node.inputs[0]
    return value, found[::-1]


def seen(base: Tensor, seen_through: Sequence[Node]) -> Tensor:
    for node in seen_through:
        base = node.definition.reference(base, **node.attrs)
    return base


def through(edit: Editor, value: str, base: Tensor) -> Tensor:
    """`base`, which stands for what is behind `value`, seen as `value`."""
    return seen(base, behind(edit, value)[1])


def _joined(pieces: Sequence[WeightedSum], dim: int) -> WeightedSum:
    count = max(len(piece.index) for piece in pieces)
    index, factor = [], []
    for term in range(count):
        parts = [(p, term) if term < len(p.index) else (p, None) for p in pieces]
        index.append(torch.cat([p.index[at or 0] for p, at in parts], dim))
        zero = [
            p.factor[at] if at is not None else torch.zeros_like(p.factor[0]) for p, at in parts
        ]
        factor.append(torch.cat(zero, dim))
    return WeightedSum(tuple(index), tuple(factor))


def _added(a: WeightedSum, b: WeightedSum) -> WeightedSum:
    index, factor = list(a.index), list(a.factor)
    for more, times in zip(b.index, b.factor, strict=True):
        same = next((at for at, x in enumerate(index) if torch.equal(x, more)), None)
        if same is None:
            index.append(more)
            factor.append(times)
        else:
            factor[same] = factor[same] + times
    if len(index) > _MOST_TERMS:
        raise Unlike
    return WeightedSum(tuple(index), tuple(factor))
