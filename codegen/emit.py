"""Text of the per-element part of a kernel: one named temporary per node.

The iteration space of every kernel is (row, col): `col` runs over the last dimension of the
anchor's output (or of the group's largest value), `row` over all the others in row-major order. A
value of a group is a *tile* value (one per element) or a *row* value (one per row); what a node
reads from outside is loaded through its layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gtco.codegen.program import Pointer
from gtco.codegen.scalars import c_type, compute_type, literal, scalar
from gtco.codegen.sketch import Illegal, check
from gtco.ir.graph import Graph, Group, Node
from gtco.ir.views import Axis, Layout, NotAView, piece_layout, resolve, store_layout
from gtco.passes.frames import is_statistic


def axis_index(axis: Axis, variable: str) -> str:
    """Elements to skip for index `variable` along one dimension."""
    terms: list[str] = []
    inner = 1
    for position, (extent, stride) in enumerate(reversed(axis)):
        outermost = position == len(axis) - 1
        part = variable if inner == 1 else f"({variable} / {inner})"
        if not outermost:
            part = f"({part} % {extent})"
        if stride:
            terms.append(part if stride == 1 else f"{part} * {stride}")
        inner *= extent
    return " + ".join(reversed(terms)) or "0"


def index(layout: Layout, variables: Sequence[str]) -> str:
    """The element's position in its buffer, as a C++ expression."""
    terms = [axis_index(axis, name) for axis, name in zip(layout.dims, variables, strict=True)]
    terms.append(str(layout.offset))
    return " + ".join(term for term in terms if term != "0") or "0"


@dataclass(frozen=True)
class Operand:
    """A stored value that the group reads, as seen from the iteration space."""

    parameter: str
    dtype: torch.dtype
    layout: Layout


def declared(parameters: Mapping[str, tuple[str, Pointer]]) -> str:
    """Kernel parameters as an entry point declares them, from their names to (C++, argument)."""
    return ", ".join(text for text, _ in parameters.values())


@dataclass
class Region:
    """The part of a group that runs per element: analysis and text.

    Args:
        group: the group.
        shape: of the iteration space; the last dimension is the columns.
        vector: columns that one call handles at most; narrowed to a divisor of the columns, and to
            what every access of 16 bytes allows.
        parameters: kernel parameters so far, as (C++ declaration, argument).
    """

    group: Group
    shape: tuple[int, ...]
    vector: int = 8
    parameters: dict[str, tuple[str, Pointer]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        while self.columns % self.vector:  # no call reaches beyond a row's last column
            self.vector //= 2

    @property
    def graph(self) -> Graph:
        return self.group.graph

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def declarations(self) -> str:
        """The parameters as the entry point declares them."""
        return declared(self.parameters)

    def is_row(self, value: str) -> bool:
        """Whether `value` has one element per row."""
        spec = self.graph.specs[value]
        return self.columns > 1 and spec.numel == self.rows and spec.sizes[-1:] == (1,)

    def is_tile(self, value: str) -> bool:
        """Whether `value` has one element per point of the iteration space."""
        return self.graph.specs[value].numel == self.rows * self.columns

    def parameter(self, value: str, kind: str) -> str:
        """Name of the kernel parameter that points at `value`; `kind` is "in" or "out"."""
        for name, (_, argument) in self.parameters.items():
            if argument.value == value and name.startswith(kind):
                return name
        name = f"{kind}{sum(key.startswith(kind) for key in self.parameters)}"
        dtype = c_type(self.graph.specs[value].dtype)
        if kind == "out":
            text = f"{dtype}* __restrict__ {name}"
        elif value in self.graph.constants:
            text = f"const {dtype}* __restrict__ {name}"
        else:  # without restrict: an invariant load could be moved above the dependent-launch wait
            text = f"const {dtype}* {name}"
        self.parameters[name] = (text, Pointer(value))
        return name

    def operand(self, value: str, like: Sequence[int]) -> Operand:
        """`value`, read from outside and broadcast to `like`, laid over the iteration space.

        `like` has the elements of the iteration space, or one per row with a last dimension of 1.

        Raises:
            Illegal: the access is no strided one.
        """
        try:
            base, layout = resolve(self.graph, value)
            layout = layout.expand(like)
            per_row = math.prod(like) == self.rows and self.columns > 1
            layout = layout.reshape((self.rows, 1 if per_row else self.columns))
        except NotAView as error:
            raise Illegal(f"%{value} cannot be read in the order of the tile: {error}") from None
        return Operand(self.parameter(base, "in"), self.graph.specs[base].dtype, layout)

    def fit_store(self, layout: Layout) -> None:
        """Narrow the vector so that 16-byte stores to `layout`, as of `store_layout`, stay aligned:
        of a value that is loaded, a layout of pairs means something else."""
        if (even := layout.even) is not None:
            self.vector = min(self.vector, 2 * even.vector(max(1, self.vector // 2)))
            return
        if not layout.dims[-1] or all(stride == 0 for _, stride in layout.dims[-1]):
            return
        self.vector = min(self.vector, layout.vector(self.vector))

    # -- text -----------------------------------------------------------------------------------

    def load(self, operand: Operand, row: str = "row", col: str = "col") -> str:
        """Expression for `operand` at (row, col...): a vector, or a scalar where it is uniform."""
        at = index(operand.layout, (row, col))
        if not operand.layout.dims[-1] or all(stride == 0 for _, stride in operand.layout.dims[-1]):
            return f"load<1>({operand.parameter} + {at}, active)[0]"
        if operand.layout.vector(self.vector) >= self.vector:
            return f"load<V>({operand.parameter} + {at}, active)"
        element = index(operand.layout, (row, f"({col} + i)"))
        return (
            f"map<V>([&](int i) {{ return load<1>({operand.parameter} + {element}, active)[0]; }})"
        )


def names_of(nodes: Iterable[Node]) -> dict[str, str]:
    """A short C++ name for each value: the op's name, numbered; the same for equal groups."""
    taken: dict[str, int] = {}
    result: dict[str, str] = {}
    for node in nodes:
        count = taken.get(node.op, 0)
        taken[node.op] = count + 1
        stem = f"v_{node.op}" if count == 0 else f"v_{node.op}{count}"
        for position, value in enumerate(node.values):
            result[value] = stem if len(node.values) == 1 else f"{stem}_{position}"
    return result


class PointwiseEmitter:
    """Writes the functor of a group: row values, tile values, stores and row statistics.

    Args:
        region: the iteration space.
        given: values that the template hands in, as C++ names of `Vec<float, V>`.
        nodes: members to write, in topological order (views and given values are skipped).
    """

    def __init__(self, region: Region, given: dict[str, str], nodes: Sequence[Node]) -> None:
        self.region = region
        self.names = dict(given)
        self.row_lines: list[str] = []
        self.row_fields: list[str] = []
        self._row_types: dict[str, str] = {}
        self.tile_lines: list[str] = []
        self.fetched: dict[str, tuple[str, str]] = {}
        self.images: dict[str, Operand] = {}
        self._fetched_by_row: set[str] = set()
        self._loaded: dict[tuple[str, Layout], str] = {}
        self._scalars: set[str] = set()
        self._labels = names_of(nodes)
        self._outputs: dict[str, Layout] = {}
        graph = region.graph
        made = {value for node in nodes for value in node.values} | set(given)
        self._made, self._given = made, frozenset(given)
        self.stats = [node for node in nodes if is_statistic(node)]
        stored = [
            (value, output)
            for output in graph.outputs
            if (value := self._member(output)) in made and not is_statistic(graph.producers[value])
        ]
        for value, output in stored:
            self._outputs[output] = self._plan_store(value, output)
        for node in nodes:
            if node.definition.is_view or is_statistic(node):
                continue
            if node.op == "concat":
                self.names[node.values[0]] = self.names[self._piece(node)[1]]
                continue
            if node.values[0] in given:
                self._write_bias(node)
            else:
                self._write(node)
        for value, output in stored:
            self._store(value, output)
        for node in self.stats:
            self._write_stats(node)

    # -- analysis -------------------------------------------------------------------------------

    def _member(self, value: str) -> str:
        """The value a chain of reshapes and permutes starts from, if a member made it."""
        graph = self.region.graph
        while (node := graph.producers.get(value)) is not None and node.definition.is_view:
            value = node.inputs[0]
        return value

    def _inner(self, value: str) -> str | None:
        """The member that `value` is, through reshapes; None if it comes from outside."""
        graph = self.region.graph
        current = value
        while current not in self._given:  # which may be a view
            node = graph.producers.get(current)
            if node is None or not node.definition.is_view:
                break
            if node.op != "reshape" and self._member(value) in self._made:
                raise Illegal(f"%{value} is a {node.op} of a value made in this kernel")
            current = node.inputs[0]
        return current if current in self._made else None

    def _input(self, value: str, like: Sequence[int], lines: list[str]) -> tuple[str, bool]:
        """(C++ name, is a vector) of an input of a node whose shape is `like`."""
        inner = self._inner(value)
        if inner is not None:
            name = self.names[inner]
            if inner in self._scalars:
                in_row = lines is self.row_lines
                return (name if in_row else f"r.{name}"), False
            return name, True
        operand = self.region.operand(value, like)
        key = (operand.parameter, operand.layout)
        place = f"{'row' if lines is self.row_lines else 'tile'}"
        if (known := self._loaded.get((place + key[0], key[1]))) is not None:
            return known, known not in self._scalars
        name = f"x{len(self._loaded)}"
        text = self.region.load(operand)
        uniform = text.endswith("[0]")
        self._loaded[(place + key[0], key[1])] = name
        if uniform:
            self._scalars.add(name)
        if lines is self.tile_lines and text.startswith("load<"):
            width = "1" if uniform else "V"
            kind = f"Packed<{c_type(operand.dtype)}, {width}>"
            self.fetched[name] = (kind, text.replace("load<", "load_packed<").removesuffix("[0]"))
            if any(stride for _, stride in operand.layout.dims[0]):
                self._fetched_by_row.add(name)
                if not uniform and self._is_image(operand):
                    self.images[name] = operand
            text = f"unpack(in.{name}){'[0]' if uniform else ''}"
        lines.append(f"const auto {name} = {text};")
        return name, not uniform

    def _is_image(self, operand: Operand) -> bool:
        """Whether a tensor map describes `operand`, an element for each row and column."""
        rows, columns = operand.layout.dims
        of_copies = operand.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8)
        if not of_copies or len(rows) != 1 or columns != ((self.region.columns, 1),):
            return False
        places = (operand.layout.offset, rows[0][1])  # of the first element, and between rows
        return all(place * operand.dtype.itemsize % 16 == 0 for place in places)

    def _write(self, node: Node) -> None:
        region = self.region
        if node.op == "merge_stats":
            self._write_merge(node)
            return
        check(node.definition.is_pointwise, f"%{node.name}: {node.op} is not pointwise")
        (value,) = node.values
        row = region.is_row(value)
        check(
            row or region.is_tile(value), f"%{node.name} has neither the tile's shape nor a row's"
        )
        lines = self.row_lines if row else self.tile_lines
        like = node.outputs[0].sizes
        inputs = [self._input(name, like, lines) for name in node.inputs]
        label = self._labels[value]
        at = "i"
        if node.definition.of_pairs:
            check(region.vector % 2 == 0, f"%{node.name} needs columns in vectors of at least two")
            at = "i ^ 1"
            lines.append("static_assert(V % 2 == 0);")
        scalars = [f"{name}[{at}]" if vector else name for name, vector in inputs]
        expression = scalar(region.graph, node, scalars)
        if row:
            kind = compute_type(node.outputs[0].dtype)
            check(kind not in ("double", "i64"), f"%{node.name}: a row value of 8 bytes")
            self._scalars.add(value)
            self.row_fields.append(label)
            self._row_types[label] = kind
            lines.append(f"const {kind} {label} = {expression};")
        else:
            lines.append(f"const auto {label} = map<V>([&](int i) {{ return {expression}; }});")
        self.names[value] = label

    def _write_bias(self, node: Node) -> None:
        """The third input of a linear is added to what the template hands in."""
        if not node.definition.is_linear or len(node.inputs) < 3:
            return
        (value,) = node.values
        bias, vector = self._input(node.inputs[2], node.outputs[0].sizes, self.tile_lines)
        term = f"{bias}[i]" if vector else bias
        label = self._labels[value]
        total = f"{self.names[value]}[i] + {term}"
        self.tile_lines.append(f"const auto {label} = map<V>([&](int i) {{ return {total}; }});")
        self.names[value] = label

    def _write_merge(self, node: Node) -> None:
        region = self.region
        spec = region.graph.specs[node.inputs[0]]
        rows = math.prod(spec.sizes[:-2])
        check(rows == region.rows, f"%{node.name} has {rows} rows, the tile {region.rows}")
        try:
            base, layout = resolve(region.graph, node.inputs[0])
            layout = layout.reshape((rows, math.prod(spec.sizes[-2:])))
        except NotAView as error:
            raise Illegal(f"%{node.name} cannot read its statistics: {error}") from None
        check(
            layout.contiguous_run() == layout.shape[1], f"%{node.name} reads scattered statistics"
        )
        parameter = region.parameter(base, "in")
        label = self._labels[node.values[0]].removesuffix("_0")
        at = index(Layout((layout.dims[0], ()), layout.offset), ("row", "0"))
        self.row_lines.append(
            f"const RowMoments {label} = merge_row_stats<{node.attrs['columns']}, AT_ONCE>"
            f"({parameter} + {at}, {literal(float(node.attrs['eps']))});"
        )
        for value, member in zip(node.values, ("mean", "rstd"), strict=True):
            name = self._labels[value]
            self.row_lines.append(f"const float {name} = {label}.{member};")
            self.row_fields.append(name)
            self.names[value] = name
            self._scalars.add(value)

    def _plan_store(self, value: str, output: str) -> Layout:
        region, node = self.region, self.region.graph.producers[value]
        own = self._piece(node)[1] if node.op == "concat" else value
        check(region.is_tile(own), f"%{own} has not the tile's shape, so no tile stores it")
        try:
            if node.op == "concat":
                layout = piece_layout(region.graph, node, self._piece(node)[0], output)
            else:
                layout = store_layout(region.graph, value, output)
            layout = layout.reshape((region.rows, region.columns))
        except NotAView as error:
            raise Illegal(f"%{output} cannot be stored in the order of the tile: {error}") from None
        region.fit_store(layout)
        return layout

    @property
    def stored_apart(self) -> int:
        """Elements of all outputs whose neighbours along columns are stored elsewhere."""
        layouts = (layout.dims for layout in self._outputs.values())
        apart = sum(bool(columns) and columns[-1][1] != 1 for _, columns in layouts)
        return apart * self.region.rows * self.region.columns

    def _piece(self, concat: Node) -> tuple[int, str]:
        """Position and value of the one input of `concat` that is made here."""
        found = [(at, self._inner(name)) for at, name in enumerate(concat.inputs)]
        made = [(at, value) for at, value in found if value is not None]
        check(len(made) == 1, f"%{concat.name} joins {len(made)} values that are made here")
        return made[0]

    def _store(self, value: str, output: str) -> None:
        region = self.region
        layout = self._outputs[output]
        parameter = region.parameter(output, "out")
        name = self.names[value]
        if layout.even is not None:
            check(region.vector >= 2, f"%{output} needs columns in vectors of at least two")
            at = index(layout, ("row", "col"))
            even = f"map<V / 2>([&](int i) {{ return {name}[2 * i]; }})"
            self.tile_lines.append("static_assert(V % 2 == 0);")
            self.tile_lines.append(f"store<V / 2>({parameter} + {at}, {even}, active);")
        elif layout.vector(region.vector) >= region.vector:
            at = index(layout, ("row", "col"))
            self.tile_lines.append(f"store<V>({parameter} + {at}, {name}, active);")
        else:
            at = index(layout, ("row", "(col + i)"))
            self.tile_lines.append("#pragma unroll")
            self.tile_lines.append(
                f"for (int i = 0; i < V; ++i) store<1>({parameter} + {at}, "
                f"Vec<decltype({name}[0] + 0), 1>{{{{{name}[i]}}}}, active);"
            )

    def _write_stats(self, node: Node) -> None:
        region = self.region
        source = self._inner(node.inputs[0])
        check(source is not None, f"%{node.name} reads a value from outside")
        assert source is not None
        shape = region.graph.specs[node.inputs[0]].sizes
        check(shape[-1] == region.columns, f"%{node.name} has {shape[-1]} columns")
        check(region.vector >= 2, f"%{node.name} needs columns in vectors of at least two")
        parameter = region.parameter(node.values[0], "out")
        element = c_type(region.graph.specs[source].dtype)
        self.tile_lines.append(
            f"const auto stored_{parameter} = map<V>([&](int i) "
            f"{{ return round_to<{element}>({self.names[source]}[i]); }});"
        )
        if node.op in ("box_means", "box_moments"):
            self.tile_lines.append(f"stats.add({parameter}, stored_{parameter}, active);")
            return
        self.tile_lines.append(
            f"stats.template store<{region.columns}>"
            f"({parameter}, row, col, stored_{parameter}, active);"
        )

    # -- text -----------------------------------------------------------------------------------

    def functor(self, name: str, given: str, returned: str = "", copied: str = "") -> str:
        """The functor's source; `given` is the parameter that the template hands in.

        `returned` is a value that it hands back; without one it stores what is stored. `copied` is
        one of `images` that the template has in shared memory.
        """
        fields = "\n".join(f"  {text};" for text, _ in self.region.parameters.values())
        row_struct = " ".join(
            f"{self._row_types.get(field, 'float')} {field};" for field in self.row_fields
        )
        row_body = "".join(f"    {line}\n" for line in self.row_lines)
        row_result = ", ".join(self.row_fields)
        fetched = {name: load for name, load in self.fetched.items() if name != copied}
        inputs = "".join(f" {kind} {name};" for name, (kind, _) in fetched.items())
        loads = ", ".join(text for _, text in fetched.values())
        by_row = bool(self._fetched_by_row & fetched.keys())
        rows = any(node.op == "row_stats" for node in self.stats)
        of_boxes = "".join(map(_of_boxes, self.stats))
        lines = (
            [*self.tile_lines, f"return {self.names[returned]};"] if returned else self.tile_lines
        )
        more, parameter = "class Stats = StatsOfLanes", "Stats stats = {}"
        if copied:
            more, parameter = "class Stats, class Copied", "Stats stats, const Copied& copied"
            loaded = "unpack(copied.template load<V>(row, col))"
            lines = [line.replace(f"unpack(in.{copied})", loaded) for line in lines]
        tile_body = "".join(f"    {line}\n" for line in lines)
        result = "auto" if returned else "void"
        return f"""struct {name} {{
{fields}
  static constexpr int VECTOR = {self.region.vector};
  static constexpr int ROW_VALUES = {len(self.row_fields)};
  static constexpr bool ROW_STATS = {str(rows).lower()};
{of_boxes}  struct Row {{ {row_struct} }};
  template <int AT_ONCE = 0>
  __device__ __forceinline__ Row row_values(int row, bool active) const {{
{row_body}    return Row{{{row_result}}};
  }}
  static constexpr bool INPUTS_BY_ROW = {str(by_row).lower()};
  template <int V>
  struct Inputs {{{inputs} }};
  template <int V>
  __device__ __forceinline__ Inputs<V> inputs(int row, int col, bool active) const {{
    return {{{loads}}};
  }}
  template <int V, {more}>
  __device__ __forceinline__ {result} operator()(int row, int col, const Row& r, bool active,
                                             const Inputs<V>& in,
                                             const Vec<float, V>& {given},
                                             {parameter}) const {{
{tile_body}  }}
}};
"""


def _of_boxes(statistic: Node) -> str:
    """What a functor says of the boxes that `statistic` is of."""
    if statistic.op == "box_means":
        return "  static constexpr bool BOX_MEANS = true;\n"
    if statistic.op == "box_moments":
        boxes = statistic.outputs[0].numel // 2
        columns = statistic.attrs["columns"]
        return f"  static constexpr int BOX_COLUMNS = {columns}, BOXES = {boxes};\n"
    return ""
