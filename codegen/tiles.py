"""Text of kernels whose threads keep their part of the tile in registers: elementwise and rowwise.

The body of such a kernel has one line a node. A value is a *tile* value (`Vec<T, N>`, the N points
of a thread) or, where rows are reduced, a *row* value (a scalar that all threads of a row hold):

    const auto x0 = tile.vectors([&](int row, int col, bool active) { return load<V>(...); });
    const auto v_softmax = tile.softmax(x0);
    tile.store(v_softmax, [&](int row, int col, bool active, const auto& x) { store<V>(...); });
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gtco.codegen.emit import index, names_of
from gtco.codegen.scalars import c_type, compute_type, convert, literal, scalar
from gtco.codegen.sketch import Illegal, check
from gtco.codegen.tile_loads import AT, Space, TileLoads
from gtco.ir.graph import Group, Node
from gtco.ir.ops import Pattern
from gtco.ir.views import PAIR, Layout, NotAView, resolve, store_layout


class TileEmitter(TileLoads):
    """Writes the body of a register-tile kernel: see `TileLoads` for what it takes."""

    def __init__(self, group: Group, space: Space, vector: int, *, reduces: bool) -> None:
        super().__init__(group, space, vector, reduces=reduces)
        # images, points of one, groups, parts of an image
        self.moments: tuple[int, int, int, int] | None = None
        nodes = [node for node in group.nodes if not node.definition.is_view]
        self._labels = names_of(nodes)
        self._write_all(nodes)
        while space.columns % self.widest:
            self.widest //= 2

    # -- nodes ----------------------------------------------------------------------------------

    def _write_all(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._write(node)
        for output in self.graph.outputs:
            self._store(output)

    def _write(self, node: Node) -> None:
        if node.definition.gathers:
            self._define(node, self._gathered(node), tile=True)
        elif node.op == "merge_stats":
            self._merge(node)
        elif node.op == "row_stats":
            self._row_stats(node)
        elif node.op in ("group_stats", "box_moments"):
            self._group_stats(node)
        elif node.op == "merge_moments":
            self._merge_moments(node)
        elif node.op == "normalize_groups":
            self._normalize_groups(node)
        elif node.pattern is Pattern.REDUCTION:
            self._reduce(node)
        else:
            self._pointwise(node)

    def _define(self, node: Node, text: str, *, tile: bool, label: str | None = None) -> str:
        label = label or self._labels[node.values[0]]
        self.lines.append(f"const auto {label} = {text};")
        self._names[node.values[0]] = label
        if tile:
            self._tiles.add(label)
        return label

    def _pointwise(self, node: Node) -> None:
        check(node.definition.is_pointwise, f"%{node.name}: {node.op} is not pointwise")
        tile = self._is_tile(node)
        like = node.outputs[0].sizes
        names = [self._input(name, node, tile=tile, like=like) for name in node.inputs]
        at = self._own_or_partner(node)
        scalars = [f"{name}[{at}]" if name in self._tiles else name for name in names]
        text = scalar(self.graph, node, scalars)
        self._define(node, f"map<N>([&](int i) {{ return {text}; }})" if tile else text, tile=tile)

    def _own_or_partner(self, node: Node) -> str:
        """Which point of a thread `node` reads at point i."""
        if not node.definition.of_pairs:
            return "i"
        last = len(self.space.full) - 1
        side_by_side = self.space.across[-1] == last and self.space.full[last] % 2 == 0
        check(side_by_side, f"%{node.name} pairs elements that are not neighbours in the tile")
        check(self.vector % 2 == 0, f"%{node.name} needs columns in vectors of at least two")
        return "i ^ 1"

    def _whole(self, node: Node, position: int = 0) -> tuple[str, torch.dtype]:
        """(name, dtype) of a reduction's tile input."""
        value = node.inputs[position]
        spec = self.graph.specs[value]
        name = self._input(value, node, tile=True, like=spec.sizes)
        if name not in self._tiles:  # one element a row, read by every thread of it
            kept = f"{name}_{len(self.lines)}"
            self.lines.append(f"const auto {kept} = map<N>([&](int) {{ return {name}; }});")
            self._tiles.add(kept)
            name = kept
        return name, spec.dtype

    def _reduce(self, node: Node) -> None:
        check(self.reduces, f"{node.op} has no place in a pointwise kernel")
        row = node.definition.row
        check(row is not None, f"no kernel of rows computes {node.op}")
        assert row is not None
        name, dtype = self._whole(node)
        result = node.outputs[0].dtype
        if row.counts:
            check(compute_type(dtype) == "float", f"{node.op} of {dtype} has no kernel")
        elif compute_type(dtype) != compute_type(result):
            name = f"vec_cast<{compute_type(result)}>({name})"
        numbers = {key: x for key, x in node.attrs.items() if isinstance(x, float)}
        text = row.cuda.format(name, **{key: literal(x, result) for key, x in numbers.items()})
        if row.whole:
            self._scaled(node, text, node.inputs[1:])
        else:
            self._define(node, text, tile=False)

    def _scaled(self, node: Node, unit: str, affine: Sequence[str]) -> None:
        """Define `node` as the tile `unit` times the first of `affine` plus the second."""
        like, result = node.outputs[0].sizes, node.outputs[0].dtype
        scaled = [self._input(value, node, tile=True, like=like) for value in affine]
        if not scaled:
            self._define(node, unit, tile=True)
            return
        label = self._labels[node.values[0]]
        self.lines.append(f"const auto {label}_unit = {unit};")
        terms = [f"{name}[i]" if name in self._tiles else name for name in scaled]
        specs = [self.graph.specs[value].dtype for value in affine]
        terms = [convert(term, kind, result) for term, kind in zip(terms, specs, strict=True)]
        formula = " + ".join([f"{label}_unit[i] * {terms[0]}", *terms[1:]])
        self._define(node, f"map<N>([&](int i) {{ return {formula}; }})", tile=True)

    def _row_stats(self, node: Node) -> None:
        name, dtype = self._whole(node)
        value = node.values[0]
        check(value in self.graph.outputs, f"%{node.name} is not stored as it is")
        self._names[value] = ""  # stored here
        out = self.region.parameter(value, "out")
        self.lines.append(f"tile.template store_row_stats<{c_type(dtype)}>({out}, {name});")

    def _group_stats(self, node: Node) -> None:
        check(self.reduces, f"{node.op} has no place in a pointwise kernel")
        name = self._stored_as(node)
        out = self.region.parameter(node.values[0], "out")
        self.lines.append(f"tile.{self._store_moments(node)}({out}, {name});")

    @staticmethod
    def _store_moments(node: Node) -> str:
        """The member function: the two of boxes lie in planes of their own."""
        plane = node.outputs[0].numel // 2
        return "store_moments" if node.op == "group_stats" else f"template store_moments<{plane}>"

    def _merge_moments(self, node: Node) -> None:
        check(self.reduces, f"{node.op} has no place in a pointwise kernel")
        means, m2s = (self._whole(node, position)[0] for position in (0, 1))
        out = self.region.parameter(node.values[0], "out")
        self._names[node.values[0]] = ""
        self.lines.append(f"tile.merge_moments({out}, {means}, {m2s}, {node.attrs['count']}.0f);")

    def _stored_as(self, node: Node) -> str:
        """The tile that `node` has the statistics of, as it is stored; those of `node` are stored
        by themselves."""
        made = self._inner(node.inputs[0]) is not None
        name, dtype = self._whole(node)
        (value,) = node.values
        check(value in self.graph.outputs, f"%{node.name} is not stored as it is")
        self._names[value] = ""
        if made:
            return f"map<N>([&](int i) {{ return round_to<{c_type(dtype)}>({name}[i]); }})"
        return name

    def _normalize_groups(self, node: Node) -> None:
        """The block merges the statistics of its images first, in shared memory."""
        check(not self.reduces, f"{node.op} has no place in a kernel of rows")
        check(not self.moments, "two normalize_groups have the same shared memory")
        x, stats, *affine = node.inputs
        sizes, result = node.outputs[0].sizes, node.outputs[0].dtype
        check(compute_type(result) == "float", f"{node.op} of {result} has no kernel")
        images, chunks, groups, _ = self.graph.specs[stats].sizes
        pixels, depth = math.prod(sizes[1:-1]), sizes[-1] // groups
        name = self._input(x, node, tile=True, like=sizes)
        check(self._inner(stats) is None, f"%{node.name} reads statistics made here")
        try:
            base, layout = resolve(self.graph, stats)
            check(layout.is_contiguous, f"%{node.name} reads its statistics through a view")
            of_point = Layout((((images, groups),), ((pixels, 0),), ((groups, 1), (depth, 0))))
            where = self.space.lay(of_point)
        except NotAView as error:
            raise Illegal(f"%{node.name} has no groups in the tile's order: {error}") from None
        self.moments = (images, pixels * sizes[-1], groups, chunks)
        label = self._labels[node.values[0]]
        count = pixels * depth // chunks
        self.lines.append(
            f"const GroupMoments<Config, {images}, {chunks}, {groups}, {count}> {label}_groups("
            f"{self.region.parameter(base, 'in')}, {literal(float(node.attrs['eps']))});"
        )
        one = f"active ? {label}_groups.at({{at}}) : RowMoments{{{{}}}}"
        if self._steady(where, self.vector):
            text = f"const RowMoments m = {one.format(at=index(where, ('row', 'col')))}; "
            text += "return map<V>([&](int) { return m; });"
        else:
            at = index(where, ("row", "(col + i)"))
            text = f"return map<V>([&](int i) {{ return {one.format(at=at)}; }});"
        self.lines.append(f"const auto {label}_of = tile.vectors({AT} {{ {text} }});")
        unit = f"({name}[i] - {label}_of[i].mean) * {label}_of[i].rstd"
        self._scaled(node, f"map<N>([&](int i) {{ return {unit}; }})", affine)

    def shared_bytes(self, points: int) -> int:
        """Dynamic shared memory of a block of so many points, by `GroupMoments` of the library."""
        if self.moments is None:
            return 0
        images, of_image, groups, _ = self.moments
        return 8 * groups * min(images, (points + of_image - 2) // of_image + 1)

    def merged_bytes(self, points: int) -> int:
        """What such a block reads of statistics."""
        return self.shared_bytes(points) * (self.moments[-1] if self.moments else 0)

    def _merge(self, node: Node) -> None:
        spec = self.graph.specs[node.inputs[0]]
        chunks = spec.sizes[-2]
        check(self._inner(node.inputs[0]) is None, f"%{node.name} merges what is made here")
        try:
            base, layout = resolve(self.graph, node.inputs[0])
            layout = layout.reshape((self.space.rows, 2 * chunks))
        except NotAView as error:
            raise Illegal(f"%{node.name} cannot read its statistics: {error}") from None
        check(layout.contiguous_run() == 2 * chunks, f"%{node.name} reads scattered statistics")
        check(layout.vector(2) == 2, f"%{node.name} reads statistics that are not aligned")
        at = index(Layout((layout.dims[0], ()), layout.offset), ("row", "0"))
        label = self._labels[node.values[0]].removesuffix("_0")
        parameter = self.region.parameter(base, "in")
        merged = (
            f"merge_row_stats<{node.attrs['columns']}>({parameter} + {at}, "
            f"{literal(float(node.attrs['eps']))})"
        )
        self.lines.append(
            f"const auto {label} = tile.vectors({AT} {{ return map<V>([&](int) "
            f"{{ return active ? {merged} : RowMoments{{}}; }}); }});"
        )
        for value, member in zip(node.values, ("mean", "rstd"), strict=True):
            name = self._labels[value]
            text = f"map<N>([&](int i) {{ return {label}[i].{member}; }})"
            self.lines.append(f"const auto {name} = {text};")
            self._names[value] = name
            self._tiles.add(name)

    # -- stores ---------------------------------------------------------------------------------

    def _store(self, output: str) -> None:
        value = output
        while (node := self.graph.producers.get(value)) is not None and node.definition.is_view:
            value = node.inputs[0]
        check(value in self._names, f"%{output} is not made by this kernel")
        name = self._names[value]
        if not name:
            return
        dtype = self.graph.specs[output].dtype
        out = self.region.parameter(output, "out")
        try:
            layout = store_layout(self.graph, value, output)
            layout = (self.space.lay if name in self._tiles else self.space.lay_row)(layout)
        except NotAView as error:
            raise Illegal(f"%{output} cannot be stored in the tile's order: {error}") from None
        if name not in self._tiles:
            at = index(layout, ("row", "0"))
            one = f"map<1>([&](int) {{ return {name}; }})"
            self.lines.append(f"store<1>({out} + {at}, {one}, tile.leads());")
            return
        head = f"tile.store({name}, [&](int row, int col, bool active, const auto& x)"
        if layout.even is not None:
            self._store_even(out, layout, layout.even, head)
            return
        check(all(PAIR not in axis for axis in layout.dims), f"%{output} has pairs along rows")
        self._fit(layout, dtype, stored=True)
        if self.space.columns % self.vector == 0 and layout.vector(self.vector) >= self.vector:
            at = index(layout, ("row", "col"))
            self.lines.append(f"{head} {{ store<V>({out} + {at}, x, active); }});")
            return
        self._store_each(out, layout, head, self._guard())

    def _store_each(self, out: str, layout: Layout, head: str, guard: str) -> None:
        """Store element by element where `guard` holds; `head` is how a store begins."""
        at = index(layout, ("row", "(col + i)"))
        one = "map<1>([&](int) { return x[i]; })"
        self.lines.append(
            f"{head} {{ for (int i = 0; i < V; ++i) store<1>({out} + {at}, {one}, {guard}); }});"
        )

    def _store_even(self, out: str, layout: Layout, even: Layout, head: str) -> None:
        """Store the even columns at `out`; `even` is their part of `layout`, `head` how a store
        begins."""
        self.neighbours += 1
        self.widest = min(self.widest, 2 * even.vector(4))
        vector = self.vector
        whole = vector % 2 == 0 and self.space.columns % vector == 0
        if whole and even.vector(vector // 2) == vector // 2:
            at = index(layout, ("row", "col"))
            kept = "map<V / 2>([&](int i) { return x[2 * i]; })"
            self.lines.append(f"{head} {{ store<V / 2>({out} + {at}, {kept}, active); }});")
            return
        self._store_each(out, layout, head, f"{self._guard()} && (col + i) % 2 == 0")

    # -- text -----------------------------------------------------------------------------------

    def source(self, header: str, config: str, threads: int) -> str:
        """The whole file; `header` is the template's name and that of its file."""
        fields = "\n".join(f"  {text};" for text, _ in self.region.parameters.values())
        lines = list(self.lines)
        if self.reduces:
            lines[:0] = ["const int row = tile.row();", "const bool active = tile.active();"]
        body = "".join(f"    {line}\n" for line in lines)
        declarations = ", ".join(text for text, _ in self.region.parameters.values())
        names = ", ".join(self.region.parameters)
        return f"""#include "{header}.cuh"
using namespace gtco;

struct Config {{
  static constexpr int ROWS = {self.space.rows}, COLUMNS = {self.space.columns};
  static constexpr int V = {self.vector};
  {config}
}};

struct Body {{
{fields}
  template <class Tile>
  __device__ __forceinline__ void operator()(Tile& tile) const {{
    constexpr int V = Tile::V, N = Tile::N;
{body}  }}
}};

extern "C" __global__ void __launch_bounds__({threads}) ENTRY_POINT({declarations}) {{
  {header}<Config>(Body{{{names}}});
}}
"""
