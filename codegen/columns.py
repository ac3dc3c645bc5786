"""Text of kernels that walk down columns and reduce them: `columnwise`.

What is computed of each point goes into a function of the rows under way, which the reduction
calls; behind it are scalars, one a result, as in a kernel of rows:

    const auto v_mean = tile.mean([&] {
      const auto x0 = tile.vectors([&](int row, int col, bool active) { return load<V>(...); });
      return x0;
    });
    const int row = tile.row();
    store<1>(out0 + row, map<1>([&](int) { return v_mean; }), tile.leads());
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gtco.codegen.scalars import compute_type
from gtco.codegen.sketch import check
from gtco.codegen.tile_loads import Space
from gtco.codegen.tiles import TileEmitter
from gtco.ir.graph import Group, Node
from gtco.ir.ops import Pattern
from gtco.ir.views import Layout, through_views


@dataclass(frozen=True)
class Columns(Space):
    """An iteration space whose columns are reduced: `length` rows of each piece, one after another,
    and `depth` neighbouring columns together.

    Args:
        reduced: the dimensions of `full` that are reduced.
    """

    reduced: tuple[int, ...]

    def _extent(self, dims: Sequence[int]) -> int:
        return math.prod(self.full[dim] for dim in dims)

    @property
    def length(self) -> int:
        return self._extent([dim for dim in self.reduced if dim not in self.across])

    @property
    def depth(self) -> int:
        return self._extent([dim for dim in self.reduced if dim in self.across])

    @property
    def pieces(self) -> int:
        return self.rows // self.length

    @property
    def results(self) -> int:
        return self.pieces * (self.columns // self.depth)

    def lay_row(self, layout: Layout) -> Layout:
        """The layout of a tensor with one element per result: piece after piece, by columns."""
        kept = [dim for dim in range(len(self.full)) if dim not in self.reduced]
        order = sorted(kept, key=lambda dim: (dim in self.across, dim))
        points = layout.reshape([self.full[dim] for dim in kept])
        points = points.permute([kept.index(dim) for dim in order])
        return Layout((points.reshape((self.results,)).dims[0], ()), layout.offset)


def column_spaces(full: tuple[int, ...], reduced: tuple[int, ...]) -> list[Columns]:
    """The spaces in which the `reduced` dimensions of `full` run down columns.

    Columns are the last dimensions, of which the very last may be reduced too, or one dimension
    that is kept, where memory has another order; all rows of a piece lie behind each other.
    """
    rank = len(full)
    choices = [tuple(range(first, rank)) for first in range(1, rank)]
    choices += [(dim,) for dim in range(rank) if (dim,) not in choices]
    found: dict[tuple[bool, ...], Columns] = {}
    for across in choices:
        ahead = [dim for dim in range(rank) if dim not in across and full[dim] > 1]
        behind = [dim for dim in across if full[dim] > 1]
        sides = [[dim in reduced for dim in side] for side in (ahead, behind)]
        in_order = all(side == sorted(side) for side in sides)
        if in_order and any(sides[0]) and not all(sides[1]):
            found.setdefault(tuple(dim in behind for dim in range(rank)),
                             Columns(full, across, reduced))  # fmt: skip
    return list(found.values())


class ColumnEmitter(TileEmitter):
    """Writes the body of a kernel that reduces columns once, and keeps no tile behind that."""

    space: Columns

    def __init__(self, group: Group, space: Columns, vector: int) -> None:
        super().__init__(group, space, vector, reduces=False)

    def _write_all(self, nodes: Sequence[Node]) -> None:
        reductions = [node for node in nodes if node.pattern is Pattern.REDUCTION]
        check(len(reductions) == 1, f"{len(reductions)} reductions do not walk the columns once")
        (reduction,) = reductions
        for node in nodes:
            check(not node.definition.gathers, f"{node.op} has no place in a kernel of columns")
        ahead = [node for node in nodes if node is not reduction and self._is_tile(node)]
        behind = [node for node in nodes if node is not reduction and node not in ahead]
        producer = self.graph.producers.get
        late = {value for node in (reduction, *behind) for value in node.values}
        for node in ahead:
            for base in (through_views(producer, name)[0] for name in node.inputs):
                check(base not in late, f"%{node.name} walks columns again behind %{base}")
            self._write(node)
        stored = {name: through_views(producer, name)[0] for name in self.graph.outputs}
        tiles = {value for node in ahead for value in node.values}
        for output, value in stored.items():
            if value in tiles:
                self._store(output)
        self._write(reduction)
        for node in behind:
            self._write(node)
        for output, value in stored.items():
            if value not in tiles:
                self._store(output)

    def _walk(self, name: str) -> str:
        """The function of the rows under way that all lines so far are, with the result `name`."""
        body = "".join(f"      {line}\n" for line in self.lines)
        self.lines.clear()
        return f"[&] {{\n{body}      return {name};\n    }}"

    def _is_tile(self, node: Node) -> bool:
        numel, points = node.outputs[0].numel, math.prod(self.space.full)
        results = self.space.results
        check(
            numel in (points, results),
            f"%{node.name} has {numel} elements, the kernel {points} points and {results} results",
        )
        return numel == points

    def _reduce(self, node: Node) -> None:
        row = node.definition.row
        assert row is not None
        name, dtype = self._whole(node)
        result = node.outputs[0].dtype
        if compute_type(dtype) != compute_type(result):
            name = f"vec_cast<{compute_type(result)}>({name})"
        self._define(node, row.cuda.format(self._walk(name)), tile=False)
        self.lines += ["const int row = tile.row();", "const bool active = tile.active();"]

    def _group_stats(self, node: Node) -> None:
        name = self._stored_as(node)
        out = self.region.parameter(node.values[0], "out")
        self.lines.append(f"tile.{self._store_moments(node)}({out}, {self._walk(name)});")

    def _merge_moments(self, node: Node) -> None:
        means, m2s = (self._whole(node, position)[0] for position in (0, 1))
        count = node.attrs["count"]
        self.lines.append(
            f"const auto both = map<N>([&](int i) {{ "
            f"return Moments{{{means}[i], {m2s}[i] / {count}.0f}}; }});"
        )
        out = self.region.parameter(node.values[0], "out")
        self._names[node.values[0]] = ""
        self.lines.append(f"tile.merge_moments({out}, {self._walk('both')}, {count}.0f);")
