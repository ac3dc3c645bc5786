"""What register-tile kernels read: the iteration space, strided operands, gathered elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gtco.codegen.emit import Region, axis_index, index
from gtco.codegen.scalars import compute_type, kind_cast, literal
from gtco.codegen.sketch import Illegal, check
from gtco.ir.graph import Graph, Group, Node
from gtco.ir.views import Axis, Layout, NotAView, resolve

AT = "[&](int row, int col, bool active)"
SECTOR = 32
"""Bytes of memory that come together."""
FEW_READERS = 4
"""Points for each element of a load that is still most of what a kernel waits for."""


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


class TileLoads:
    """What a register-tile kernel reads: operands, and ops that move elements and change none.

    Args:
        group: the group.
        space: its iteration space.
        vector: columns of one access.
        reduces: whether a thread's points lie in one row, so that row values are scalars.

    Attributes:
        widest: the widest vector that every access of neighbours allows.
        loads: how many tile values are loaded; the pieces of a concat are one.
        neighbours: how many accesses have neighbouring columns next to each other in memory.
        strided: whether a load, or a store where no load is otherwise, has neighbours along rows,
            not columns, as many as come from memory together.
        few: whether a load has but a few columns in one place, and those of the next rows beside.
        reads: (layout, bytes of an element) of each load whose elements are read once.
    """

    def __init__(self, group: Group, space: Space, vector: int, *, reduces: bool) -> None:
        self.region = Region(group, (space.rows, space.columns), vector)
        self.space = space
        self.reduces = reduces
        self.vector = vector
        self.widest = 8
        self.loads = 0
        self.neighbours = 0
        self.strided = False
        self.few = False
        self.reads: list[tuple[Layout, int]] = []
        self.lines: list[str] = []
        self._names: dict[str, str] = {}
        self._tiles: set[str] = set()
        self._loaded: dict[tuple[str, Layout], str] = {}

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

    def _fit(self, layout: Layout, dtype: torch.dtype, *, stored: bool = False) -> None:
        """Note that neighbours of `layout` are accessed: a vector is at most 16 bytes.

        What a kernel waits for are its loads: where one of them has its neighbours along columns,
        no `stored` result decides that rows come first.
        """
        columns = layout.dims[1]
        if columns and columns[-1][1] == 1:
            self.neighbours += 1
            self.widest = min(self.widest, layout.vector(8), max(1, 16 // dtype.itemsize))
            self.few |= not stored and self._rows_go_on(layout, dtype.itemsize)
        else:
            waits = not stored or not self.neighbours
            self.strided |= waits and self._along_rows(layout, dtype)

    def _along_rows(self, layout: Layout, dtype: torch.dtype) -> bool:
        """Whether neighbours in memory are those of neighbouring rows, not columns."""
        rows, columns = layout.dims
        if not rows or rows[-1][1] != 1 or is_uniform(columns) or columns[-1][1] == 1:
            return False
        return rows[-1][0] * dtype.itemsize >= SECTOR

    def _rows_go_on(self, layout: Layout, itemsize: int) -> bool:
        """Whether the next row lies where few columns of this one end: those of one vector, fewer
        than come from memory together, of columns that lie in many places."""
        rows, columns = layout.dims
        run, _ = columns[-1]
        if len(columns) == 1 or run > self.widest or not rows or rows[-1][1] != run:
            return False
        return run * itemsize < SECTOR <= rows[-1][0] * run * itemsize

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
            if all(stride for axis in layout.dims for _, stride in axis):
                self.reads.append((layout, self.graph.specs[base].dtype.itemsize))
            text = self._vector(parameter, layout)
            self.lines.append(f"const auto {name} = tile.vectors({AT} {{ return {text}; }});")
        return name

    def _tile_load(self, value: str, like: Sequence[int]) -> str:
        base, dtype, layout = self._external(value, like)
        layout = self.space.lay(layout)
        scalar = self.reduces and is_uniform(layout.dims[1])
        readers = math.prod(like) // max(1, self.graph.specs[value].numel)
        if readers == 1:
            self._fit(layout, dtype)
        elif readers <= FEW_READERS:
            self.strided |= self._along_rows(layout, dtype)
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

    # -- gathers ---------------------------------------------------------------------------------

    def _gathered(self, node: Node) -> str:
        """The tile value of an op that moves elements."""
        return {
            "concat": self._concat,
            "extend": self._shifted,
            "gather": self._gather,
            "pad": self._shifted,
            "roll": self._shifted,
            "space_to_depth": self._space_to_depth,
        }[node.op](node)

    def _concat(self, node: Node) -> str:
        """Each piece is loaded only where the coordinate lies in it."""
        shape = node.outputs[0].sizes
        dim = node.attrs["dim"] % len(shape)
        check(math.prod(shape) == math.prod(self.space.full), f"%{node.name} is no tile value")
        others = self.loads
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
        self.loads = others + 1  # of each point one piece
        self._keep_pieces_whole(where, ends)
        choice = texts[-1]
        for text, end in zip(reversed(texts[:-1]), reversed(ends[:-1]), strict=True):
            choice = f"at < {end} ? {text} : {choice}"
        at = index(where, ("row", "col"))
        return f"tile.vectors({AT} {{ const int at = {at}; return {choice}; }})"

    def _piece(self, node: Node, value: str, dim: int, start: int) -> str:
        check(self._inner(value) is None, f"%{node.name} reads %{value}, which is made here")
        base, layout = resolve(self.graph, value)
        shape = node.outputs[0].sizes
        axis = layout.dims[dim]
        if len(axis) > 1:
            return self._nested_piece(node, value, dim, start)
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

    def _nested_piece(self, node: Node, value: str, dim: int, start: int) -> str:
        """The same, of a piece with several strides along `dim`, which is indexed by itself."""
        base, layout = resolve(self.graph, value)
        shape, axis, dtype = node.outputs[0].sizes, layout.dims[dim], self.graph.specs[base].dtype
        dims = list(layout.dims)
        dims[dim] = ((shape[dim], 0),)
        rest = self.space.lay(Layout(tuple(dims), layout.offset))
        where = self.space.lay(coordinate(shape, dim))
        width = min(8, max(1, 16 // dtype.itemsize))
        while width > 1 and not (
            self._steady(where, width)
            and rest.vector(width) >= width
            and all(stride % width == 0 for _, stride in axis)
        ):
            width //= 2
        self.widest = min(self.widest, width)
        self.loads += 1
        parameter, same = self.region.parameter(base, "in"), self.vector <= width
        variables = ("row", "col" if same else "(col + i)")
        at = f"({index(where, variables)} - {start})"
        place = f"{index(rest, variables)} + {axis_index(axis, at)}"
        text = f"load<V>({parameter} + {place}, active)"
        if not same:
            one = f"load<1>({parameter} + {place}, {self._guard()})[0]"
            text = f"map<V>([&](int i) {{ return {one}; }})"
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

    def _shifted(self, node: Node) -> str:
        """Coordinates move along some dimensions. Of a pad, the input is loaded where every one
        lies in it, and what is not loaded is zero; of a roll, they go around; what extends the
        input by its own elements turns or stops at its ends.
        """
        (value,) = node.inputs
        shape, rolls, mode = node.outputs[0].sizes, node.op == "roll", node.attrs.get("mode")
        before = node.attrs["shifts" if rolls else "before"]
        after = (0,) * len(shape) if rolls else node.attrs["after"]
        check(math.prod(shape) == math.prod(self.space.full), f"%{node.name} is no tile value")
        check(self._inner(value) is None, f"%{node.name} reads %{value}, which is made here")
        sizes = self.graph.specs[value].sizes
        padded = [dim for dim in range(len(shape)) if before[dim] or after[dim]]
        check(bool(padded), f"%{node.name} {'rolls' if rolls else 'pads'} nothing")
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
        width = 1 if mode and last in padded else width  # where it turns, the order does too
        if self.graph.specs[base].numel >= self.graph.specs[value].numel:
            self.widest = min(self.widest, width)  # else elements are read again and again
        self.loads += 1
        whole = self.vector <= width
        variables = ("row", "col" if whole else "(col + i)")
        at = index(rest, variables)
        inside = "active" if whole else self._guard()
        names = []
        for dim in padded:
            to, start = index(where[dim], variables), before[dim]
            text = f"{to} - {start}" if start else to
            most = sizes[dim] - 1
            if rolls:
                text = f"({to}) < {start} ? ({to}) + {sizes[dim] - start} : {text}"
            elif mode == "reflect":
                turned = f"max_of({text}, {start} - ({to}))"
                text = f"min_of({turned}, {2 * most} - {turned})"
            elif mode == "replicate":
                text = f"min_of(max_of({text}, 0), {most})"
            names.append(f"at{dim} = {text}")
            at += f" + {axis_index(layout.dims[dim], f'at{dim}')}"
            pads = not (rolls or mode)
            inside += f" && at{dim} >= 0" if before[dim] and pads else ""
            inside += f" && at{dim} < {sizes[dim]}" if after[dim] and pads else ""
        head = f"const int {', '.join(names)};"
        source = f"{self.region.parameter(base, 'in')} + {at}"
        if whole:
            return f"tile.vectors({AT} {{ {head} return load<V>({source}, {inside}); }})"
        one = f"map<V>([&](int i) {{ {head} return load<1>({source}, {inside})[0]; }})"
        return f"tile.vectors({AT} {{ return {one}; }})"

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
        return f"tile.vectors({AT} {{ return map<V>([&](int i) {{ {one} }}); }})"

    def _gather(self, node: Node) -> str:
        """Elements that an index names: neighbours at once where they have one index.

        An index that is not there gives NaN, or 0 of integers: nothing else is read.
        """
        value, indices = node.inputs
        shape, dim = node.outputs[0].sizes, node.attrs["dim"] % node.outputs[0].rank
        check(math.prod(shape) == math.prod(self.space.full), f"%{node.name} is no tile value")
        for name in node.inputs:
            check(self._inner(name) is None, f"%{node.name} reads %{name}, which is made here")
        size = self.graph.specs[value].sizes[dim]
        try:
            base, layout = resolve(self.graph, value)
            places, by = resolve(self.graph, indices)
            # as if the input ran on along the dimension, which is indexed by itself
            dims = [
                ((extent, 0),) if at == dim else layout.slice(at, 0, extent).dims[at]
                for at, extent in enumerate(shape)
            ]
            rest = self.space.lay(Layout(tuple(dims), layout.offset))
            where = self.space.lay(by)
        except NotAView as error:
            raise Illegal(f"%{node.name} cannot be read in the tile's order: {error}") from None
        dtype = self.graph.specs[base].dtype
        width = rest.vector(min(8, max(1, 16 // dtype.itemsize)))
        steps = [stride for _, stride in layout.dims[dim]]
        while width > 1 and not (
            self._steady(where, width) and not any(step % width for step in steps)
        ):
            width //= 2
        if rest.dims[1] and rest.dims[1][-1][1] == 1:
            self.widest = min(self.widest, width)
        self.loads += 1
        whole = 1 < self.vector <= width
        variables = ("row", "col" if whole else "(col + i)")
        inside = "active" if whole else self._guard()
        kind = compute_type(dtype)
        none = literal(math.nan if dtype.is_floating_point else 0, dtype)
        index_at = f"{self.region.parameter(places, 'in')} + {index(where, variables)}"
        head = (
            f"const i64 named = load<1>({index_at}, {inside})[0]; "
            f"const i64 place = named < 0 ? named + {size} : named; "
            f"const bool known = place >= 0 && place < {size}; "
            "const int at = known ? static_cast<int>(place) : 0;"
        )
        at = f"{index(rest, variables)} + {axis_index(layout.dims[dim], 'at')}"
        source = f"{self.region.parameter(base, 'in')} + {at}"
        if whole:
            found = f"const auto found = load<V>({source}, known && {inside});"
            one = f"return map<V>([&](int i) {{ return known ? found[i] : {none}; }});"
            return f"tile.vectors({AT} {{ {head} {found} {one} }})"
        one = f"return known ? load<1>({source}, {inside})[0] : {kind_cast(kind)}({none});"
        return f"tile.vectors({AT} {{ return map<V>([&](int i) {{ {head} {one} }}); }})"

    def _steady(self, layout: Layout, width: int) -> bool:
        """Whether `width` neighbouring columns have one element of `layout`."""
        columns = layout.dims[1]
        if self.space.columns % width:
            return False
        return is_uniform(columns) or (columns[-1][1] == 0 and columns[-1][0] % width == 0)
