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
from dataclasses import dataclass

import torch

from gtco.codegen.emit import (
    Region,
    axis_index,
    c_type,
    compute_type,
    convert,
    index,
    literal,
    names_of,
)
from gtco.codegen.sketch import Illegal, check
from gtco.ir.graph import Graph, Group, Node
from gtco.ir.views import Axis, Layout, NotAView, resolve, store_layout

MAX_ELEMENTS = 2**31 - 1
"""Most elements of one buffer: kernels index with 32 bits."""

_AT = "[&](int row, int col, bool active)"


@dataclass(frozen=True)
class Space:
    """The iteration space: (row, column) over points of shape `full`.

    Args:
        full: the shape of a value with one element per point.
        across: the dimensions of `full` that run along the columns, in order.
    """

    full: tuple[int, ...]
    across: tuple[int, ...]

    @property
    def columns(self) -> int:
        return math.prod(self.full[dim] for dim in self.across)

    @property
    def rows(self) -> int:
        return math.prod(self.full) // self.columns

    def lay(self, layout: Layout) -> Layout:
        """The (row, column) layout of a tensor with one element per point, in row-major order.

        Raises:
            NotAView: strides cannot express it.
        """
        kept = [dim for dim in range(len(self.full)) if dim not in self.across]
        points = layout.reshape(self.full).permute([*kept, *self.across])
        return points.reshape((self.rows, self.columns))

    def lay_row(self, layout: Layout) -> Layout:
        """The same for a tensor with one element per row."""
        return Layout((layout.reshape((self.rows,)).dims[0], ()), layout.offset)


def is_uniform(axis: Axis) -> bool:
    """Whether the elements along a dimension are one element."""
    return all(stride == 0 for _, stride in axis)


def coordinate(shape: Sequence[int], dim: int) -> Layout:
    """The layout whose element positions are the coordinates along `dim`."""
    axes = [((size, int(at == dim)),) if size > 1 else () for at, size in enumerate(shape)]
    return Layout(tuple(axes))


class TileEmitter:
    """Writes the body of a register-tile kernel.

    Args:
        group: the group.
        space: its iteration space.
        vector: columns of one access.
        reduces: whether a thread's points lie in one row, so that row values are scalars.

    Attributes:
        widest: the widest vector that every access of neighbours allows.
        loads: how many tile values are loaded.
        strided: whether the largest operand or result has neighbours along rows, not columns.
    """

    def __init__(self, group: Group, space: Space, vector: int, *, reduces: bool) -> None:
        self.region = Region(group, (space.rows, space.columns), vector)
        self.space = space
        self.reduces = reduces
        self.vector = vector
        self.widest = 8
        self.loads = 0
        self.strided = False
        self.lines: list[str] = []
        self._names: dict[str, str] = {}
        self._tiles: set[str] = set()
        self._loaded: dict[tuple[str, Layout], str] = {}
        nodes = [node for node in group.nodes if not node.definition.is_view]
        self._labels = names_of(nodes)
        graph = group.graph
        for name in (*graph.inputs, *graph.constants, *graph.outputs):
            check(0 < graph.specs[name].numel <= MAX_ELEMENTS, f"%{name} is empty or too large")
        for node in nodes:
            self._write(node)
        for output in graph.outputs:
            self._store(output)
        while space.columns % self.widest:
            self.widest //= 2

    @property
    def graph(self) -> Graph:
        return self.region.graph

    # -- operands -------------------------------------------------------------------------------

    def _inner(self, value: str) -> str | None:
        """The member that `value` is, through reshapes; None if it comes from outside."""
        current, views = value, []
        while (node := self.graph.producers.get(current)) is not None and node.definition.is_view:
            views.append(node.op)
            current = node.inputs[0]
        if current not in self._names:
            check(current not in self.graph.producers, f"%{current} is not made by this kernel")
            return None
        check(all(op == "reshape" for op in views), f"%{value} rearranges a value of this kernel")
        return current

    def _external(self, value: str, like: Sequence[int]) -> tuple[str, torch.dtype, Layout]:
        """(stored value, dtype, layout broadcast to `like`)."""
        base, layout = resolve(self.graph, value)
        return base, self.graph.specs[base].dtype, layout.expand(like)

    def _vector(self, parameter: str, layout: Layout) -> str:
        """A `Vec<T, V>` of neighbouring columns, in terms of row, col and active."""
        if is_uniform(layout.dims[1]):
            at = index(layout, ("row", "col"))
            return f"map<V>([&](int) {{ return load<1>({parameter} + {at}, active)[0]; }})"
        if self.space.columns % self.vector == 0 and layout.vector(self.vector) >= self.vector:
            return f"load<V>({parameter} + {index(layout, ('row', 'col'))}, active)"
        at = index(layout, ("row", "(col + i)"))
        return f"map<V>([&](int i) {{ return load<1>({parameter} + {at}, {self._guard()})[0]; }})"

    def _guard(self) -> str:
        columns = self.space.columns
        return "active" if columns % self.vector == 0 else f"active && col + i < {columns}"

    def _fit(self, layout: Layout, dtype: torch.dtype) -> None:
        """Note that neighbours of `layout` are accessed: a vector is at most 16 bytes."""
        rows, columns = layout.dims
        if columns and columns[-1][1] == 1:
            self.widest = min(self.widest, layout.vector(8), max(1, 16 // dtype.itemsize))
        elif rows and rows[-1][1] == 1 and not is_uniform(columns):
            self.strided = True

    def _row_load(self, value: str, like: Sequence[int]) -> str:
        base, _, layout = self._external(value, like)
        return self._load(base, self.space.lay_row(layout), scalar=True)

    def _load(self, base: str, layout: Layout, *, scalar: bool) -> str:
        parameter = self.region.parameter(base, "in")
        if (name := self._loaded.get((parameter, layout))) is not None:
            return name
        name = self._loaded[parameter, layout] = f"x{len(self._loaded)}"
        if scalar:
            at = index(layout, ("row", "0"))
            self.lines.append(f"const auto {name} = load<1>({parameter} + {at}, active)[0];")
        else:
            self._tiles.add(name)
            self.loads += 1
            text = self._vector(parameter, layout)
            self.lines.append(f"const auto {name} = tile.vectors({_AT} {{ return {text}; }});")
        return name

    def _tile_load(self, value: str, like: Sequence[int]) -> str:
        base, dtype, layout = self._external(value, like)
        layout = self.space.lay(layout)
        scalar = self.reduces and is_uniform(layout.dims[1])
        if self.graph.specs[value].numel == math.prod(like):
            self._fit(layout, dtype)
        return self._load(base, layout, scalar=scalar)

    def _input(self, value: str, node: Node, *, tile: bool, like: Sequence[int]) -> str:
        """The C++ name of an input of `node`, whose result is a tile value or a row value."""
        inner = self._inner(value)
        try:
            if inner is None:
                return (self._tile_load if tile else self._row_load)(value, like)
            name = self._names[inner]
            if tile and name not in self._tiles:
                sizes = self.graph.specs[value].sizes
                seen = self.space.lay(Layout.contiguous(sizes).expand(like))
                own = Layout.contiguous((self.space.rows,))
                check(
                    seen.dims[0] == own.dims[0] and is_uniform(seen.dims[1]),
                    f"%{value} is no row value to %{node.name}",
                )
        except NotAView as error:
            raise Illegal(f"%{node.name} cannot read %{value} in its order: {error}") from None
        check(tile or name not in self._tiles, f"%{node.name} reads all of a row: %{value}")
        return name

    def _is_tile(self, node: Node) -> bool:
        """Whether `node` makes one element per point (else one per row)."""
        numel = node.outputs[0].numel
        points, rows = math.prod(self.space.full), self.space.rows
        check(
            numel in (points, rows) if self.reduces else numel == points,
            f"%{node.name} has {numel} elements, the kernel {points} points in {rows} rows",
        )
        if points > rows or not self.reduces:
            return numel == points
        made = [inner for name in node.inputs if (inner := self._inner(name)) is not None]
        return not made or any(self._names[inner] in self._tiles for inner in made)

    # -- nodes ----------------------------------------------------------------------------------

    def _write(self, node: Node) -> None:
        if node.op == "concat":
            self._define(node, self._concat(node), tile=True)
        elif node.op == "pad":
            self._define(node, self._pad(node), tile=True)
        elif node.op == "space_to_depth":
            self._define(node, self._space_to_depth(node), tile=True)
        elif node.op == "merge_stats":
            self._merge(node)
        elif node.op == "row_stats":
            self._row_stats(node)
        elif node.op in ("sum", "mean", "amax", "softmax", "layer_norm"):
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
        scalars = [f"{name}[i]" if name in self._tiles else name for name in names]
        text = self.region.scalar(node, scalars)
        self._define(node, f"map<N>([&](int i) {{ return {text}; }})" if tile else text, tile=tile)

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
        name, dtype = self._whole(node)
        result = node.outputs[0].dtype
        if compute_type(dtype) != compute_type(result):
            name = f"vec_cast<{compute_type(result)}>({name})"
        if node.op in ("sum", "mean", "amax"):
            self._define(node, f"tile.{node.op}({name})", tile=False)
            return
        if node.op == "softmax":
            self._define(node, f"tile.softmax({name})", tile=True)
            return
        eps = literal(node.attrs["eps"], result)
        like = node.outputs[0].sizes
        scaled = [self._input(value, node, tile=True, like=like) for value in node.inputs[1:]]
        text = f"tile.normalize({name}, {eps})"
        if not scaled:
            self._define(node, text, tile=True)
            return
        label = self._labels[node.values[0]]
        self.lines.append(f"const auto {label}_unit = {text};")
        terms = [f"{name}[i]" if name in self._tiles else name for name in scaled]
        specs = [self.graph.specs[value].dtype for value in node.inputs[1:]]
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
            f"const auto {label} = tile.vectors({_AT} {{ return map<V>([&](int) "
            f"{{ return active ? {merged} : RowMoments{{}}; }}); }});"
        )
        for value, member in zip(node.values, ("mean", "rstd"), strict=True):
            name = self._labels[value]
            text = f"map<N>([&](int i) {{ return {label}[i].{member}; }})"
            self.lines.append(f"const auto {name} = {text};")
            self._names[value] = name
            self._tiles.add(name)

    def _concat(self, node: Node) -> str:
        """Each piece is loaded only where the coordinate lies in it."""
        shape = node.outputs[0].sizes
        dim = node.attrs["dim"] % len(shape)
        check(math.prod(shape) == math.prod(self.space.full), f"%{node.name} is no tile value")
        try:
            where = self.space.lay(coordinate(shape, dim))
            texts: list[str] = []
            ends: list[int] = []
            start = 0
            for value in node.inputs:
                spec = self.graph.specs[value]
                if spec.numel == 0:
                    continue
                texts.append(self._piece(node, value, dim, start))
                start += spec.sizes[dim]
                ends.append(start)
        except NotAView as error:
            raise Illegal(f"%{node.name} cannot be read in the tile's order: {error}") from None
        self._keep_pieces_whole(where, ends)
        choice = texts[-1]
        for text, end in zip(reversed(texts[:-1]), reversed(ends[:-1]), strict=True):
            choice = f"at < {end} ? {text} : {choice}"
        at = index(where, ("row", "col"))
        return f"tile.vectors({_AT} {{ const int at = {at}; return {choice}; }})"

    def _piece(self, node: Node, value: str, dim: int, start: int) -> str:
        check(self._inner(value) is None, f"%{node.name} reads %{value}, which is made here")
        base, layout = resolve(self.graph, value)
        shape = node.outputs[0].sizes
        axis = layout.dims[dim]
        check(len(axis) <= 1, f"%{value}, a piece of %{node.name}, has a nested dimension {dim}")
        stride = axis[0][1] if axis else 0
        dims = list(layout.dims)  # as if the piece ran over the whole dimension, shifted
        dims[dim] = ((shape[dim], stride),)
        whole = self.space.lay(Layout(tuple(dims), layout.offset - start * stride))
        dtype = self.graph.specs[base].dtype
        self._fit(whole, dtype)
        self.loads += 1
        text = self._vector(self.region.parameter(base, "in"), whole)
        if compute_type(dtype) != compute_type(node.outputs[0].dtype):
            text = f"vec_cast<{compute_type(node.outputs[0].dtype)}>({text})"
        return text

    def _keep_pieces_whole(self, where: Layout, ends: Sequence[int]) -> None:
        """Narrow the vector so that none holds elements of two pieces."""
        inner = 1
        for extent, stride in reversed(where.dims[1]):
            if stride != 0:
                while any(end * inner % self.widest for end in ends):
                    self.widest //= 2
                return
            inner *= extent

    def _pad(self, node: Node) -> str:
        """The input is loaded where every coordinate lies in it; what is not loaded is zero."""
        (value,) = node.inputs
        shape, before, after = node.outputs[0].sizes, node.attrs["before"], node.attrs["after"]
        check(math.prod(shape) == math.prod(self.space.full), f"%{node.name} is no tile value")
        check(self._inner(value) is None, f"%{node.name} reads %{value}, which is made here")
        sizes = self.graph.specs[value].sizes
        padded = [dim for dim in range(len(shape)) if before[dim] or after[dim]]
        check(bool(padded), f"%{node.name} pads nothing")
        last = self.space.across[-1]
        try:
            base, layout = resolve(self.graph, value)
            # as if the input ran on along the padded dimensions, which are indexed by themselves
            dims = [((shape[d], 0),) if d in padded else axis for d, axis in enumerate(layout.dims)]
            rest = self.space.lay(Layout(tuple(dims), layout.offset))
            where = {dim: self.space.lay(coordinate(shape, dim)) for dim in padded}
        except NotAView as error:
            raise Illegal(f"%{node.name} cannot be read in the tile's order: {error}") from None
        limit = min(8, max(1, 16 // self.graph.specs[base].dtype.itemsize))
        width = layout.vector(limit, last)
        while any(edge % width for edge in (shape[last], before[last])):
            width //= 2
        self.widest = min(self.widest, width)
        self.loads += 1
        whole = self.vector <= width
        variables = ("row", "col" if whole else "(col + i)")
        at = index(rest, variables)
        inside = "active" if whole else self._guard()
        names = []
        for dim in padded:
            start = f" - {before[dim]}" if before[dim] else ""
            names.append(f"at{dim} = {index(where[dim], variables)}{start}")
            at += f" + {axis_index(layout.dims[dim], f'at{dim}')}"
            inside += f" && at{dim} >= 0" if before[dim] else ""
            inside += f" && at{dim} < {sizes[dim]}" if after[dim] else ""
        head = f"const int {', '.join(names)};"
        source = f"{self.region.parameter(base, 'in')} + {at}"
        if whole:
            return f"tile.vectors({_AT} {{ {head} return load<V>({source}, {inside}); }})"
        one = f"map<V>([&](int i) {{ {head} return load<1>({source}, {inside})[0]; }})"
        return f"tile.vectors({_AT} {{ return {one}; }})"

    def _space_to_depth(self, node: Node) -> str:
        """Each element is looked up by itself: neighbours come from several rows of the image."""
        (value,) = node.inputs
        shape, attrs = node.outputs[0].sizes, node.attrs
        check(math.prod(shape) == math.prod(self.space.full), f"%{node.name} is no tile value")
        check(self._inner(value) is None, f"%{node.name} reads %{value}, which is made here")
        _, height, width, channels = self.graph.specs[value].sizes
        try:
            base, layout = resolve(self.graph, value)
            where = [self.space.lay(coordinate(shape, dim)) for dim in range(4)]
        except NotAView as error:
            raise Illegal(f"%{node.name} cannot be read in the tile's order: {error}") from None
        self.loads += 1
        rows, columns = attrs["block"]
        top, left = attrs["before"]
        n, i, j, depth = (index(each, ("row", "(col + i)")) for each in where)
        lines = (
            f"const int depth = {depth}, piece = depth / {channels};",
            f"const int y = ({i}) * {rows} + piece / {columns} - {top};",
            f"const int x = ({j}) * {columns} + piece % {columns} - {left};",
        )
        inside = f"{self._guard()} && piece < {rows * columns}"
        inside += f" && y >= 0 && y < {height} && x >= 0 && x < {width}"
        names = (f"({n})", "y", "x", f"(depth % {channels})")
        at = index(layout, names)
        source = f"{self.region.parameter(base, 'in')} + {at}"
        one = f"{' '.join(lines)} return load<1>({source}, {inside})[0];"
        return f"tile.vectors({_AT} {{ return map<V>([&](int i) {{ {one} }}); }})"

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
        self._fit(layout, dtype)
        head = f"tile.store({name}, [&](int row, int col, bool active, const auto& x)"
        if self.space.columns % self.vector == 0 and layout.vector(self.vector) >= self.vector:
            at = index(layout, ("row", "col"))
            self.lines.append(f"{head} {{ store<V>({out} + {at}, x, active); }});")
            return
        at = index(layout, ("row", "(col + i)"))
        one = "map<1>([&](int) { return x[i]; })"
        self.lines.append(
            f"{head} {{ for (int i = 0; i < V; ++i) "
            f"store<1>({out} + {at}, {one}, {self._guard()}); }});"
        )

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
