"""What a value is made of: each element a sum of elements of one other value times constants.

    %a = mul(%x, %c)   %b = slice(%x, dim=1, start=4, end=8)   %y = sub(slice(%a, ...), %b)

Element i of %y is `x[i] * c[i] - x[i + 4]`. Passes that know an operator by what it computes, and
not by how it is spelled, look at these sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def moved(self, node: Node) -> WeightedSum:
        """The same, seen through a view."""
        function = node.definition.reference
        index, factor = (
            tuple(function(x, **node.attrs) for x in terms) for terms in (self.index, self.factor)
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
        source: that value; None means the one that no arithmetic makes.

    Raises:
        Unlike: it is no such sum.
    """

    def __init__(self, edit: Editor, result: str, source: str | None = None) -> None:
        self.edit = edit
        self.result = edit.specs[result]
        self.source = source or ""
        """That value; it may be cast from the type of `result` to fp32."""
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
        if self._is_source(value):
            self.source = value
            index = torch.arange(self.result.numel).reshape(self.result.sizes)
            return WeightedSum((index,), (torch.ones(self.result.sizes, dtype=torch.float64),))
        if node is None:
            raise Unlike
        self.inside.add(value)
        if node.definition.is_view:
            return self._of(node.inputs[0]).moved(node)
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
        shape = node.outputs[0].sizes
        if node.op == "concat":
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
        return through(self.edit, node.inputs[slot], constant.cpu().double())


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


def shared_sources(edit: Editor, result: str) -> list[str]:
    """Values of the shape of `result` that it is made of by arithmetic and views and that two nodes
    read, the nearest first."""
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
            if edit.shape(name) == edit.shape(result) and len(edit.users(name)) > 1:
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
