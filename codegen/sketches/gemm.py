"""What every GEMM sketch shares: the group's operands and its epilogue.

D[rows, columns] = A[rows, K] B[columns, K]^T per batch; `rows` are the tokens or, of a convolution,
the pixels of the result, `columns` the output channels. The epilogue sees (row, col) with `row`
counted over all batches. The groups of a convolution are a batch whose results lie side by side:
`col` is counted over all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from gtco.codegen.emit import PointwiseEmitter, Region
from gtco.codegen.program import TensorMapArgument
from gtco.codegen.sketch import Illegal, check
from gtco.codegen.sketches.operands import (
    GemmOperand,
    JoinedOperand,
    Operand,
    Piece,
    pieces_of,
)
from gtco.codegen.sketches.windows import (
    AXES,
    WindowOperand,
    of_whole_rows,
    single_stride,
    windows_of,
)
from gtco.ir.graph import Graph, Group, Node
from gtco.ir.spec import BYTES, HALVES
from gtco.ir.views import NotAView, resolve
from gtco.passes.box_means import RUN
from gtco.passes.joined import joined_by
from gtco.passes.scaled import Scale, scale_of
from gtco.target import Target

FP8 = torch.float8_e4m3fn
PROMOTED_ATOMS = 4
"""Of 128 bytes of K, whose sums of e4m3 are left to the tensor cores (promotion.cuh)."""


def is_promoted(dtype: torch.dtype, steps: int, atoms: int) -> bool:
    """Whether a thread has two sets of sums, since there are more steps of so many atoms than the
    tensor cores add up."""
    return dtype == FP8 and steps > max(1, PROMOTED_ATOMS // atoms)


@dataclass(frozen=True)
class ScaleOperand:
    """What A is multiplied by ahead of the products.

    Args:
        product: the node.
        operand: (1, groups, K): a row of factors for each group of rows of A.
        rows: of a group.
    """

    product: Node
    operand: GemmOperand
    rows: int

    def most(self, rows: int) -> int:
        """Groups that a tile of so many rows meets at most."""
        groups = self.operand.layout.shape[1]
        return min(groups, (rows + self.rows - 2) // self.rows + 1)


@dataclass(frozen=True)
class GemmProblem:
    """A GEMM group, analysed.

    Args:
        anchor: the linear, matmul or convolution.
        batch, rows, columns, k: the sizes of one product and how many there are.
        dtype: of both operands.
        a, b: the operands; A may be windows of an image, and may lie in several pieces.
        scale: what A is multiplied by, if by anything.
    """

    group: Group
    anchor: Node
    batch: int
    rows: int
    columns: int
    k: int
    dtype: torch.dtype
    a: Operand
    b: GemmOperand
    scale: ScaleOperand | None = None

    def matmul_tflops(self, target: Target) -> float:
        """The dense rate of its products on `target`, TFLOP/s."""
        return target.products_tflops(self.dtype, self.anchor.attrs.get("products"))

    @property
    def plain_a(self) -> GemmOperand:
        """A, where a sketch reads whole rows alone.

        Raises:
            Illegal: it is windows of an image, or lies in pieces.
        """
        if isinstance(self.a, GemmOperand):
            return self.a
        kind = "windows of an image" if isinstance(self.a, WindowOperand) else "pieces of a concat"
        raise Illegal(f"this sketch reads no {kind}")

    @property
    def windows(self) -> tuple[str, str]:
        """What copies windows of an image or pieces as A: a struct, and how a template is told of
        it; both are empty where A is rows."""
        if isinstance(self.a, GemmOperand):
            return "", ""
        return f"struct Windows {{\n{self.a.fields}\n}};\n\n", ", Windows"

    @property
    def atoms_are_apart(self) -> bool:
        """Whether a piece of K ends where a tap or a piece of A does, so that no step may run
        beyond the last."""
        return not isinstance(self.a, GemmOperand)

    def atoms(self, elements: int) -> int:
        """How many pieces of `elements` each K comes in."""
        if isinstance(self.a, GemmOperand):
            return -(-self.k // elements)
        return self.a.atoms(elements)

    def cut_atoms(self, elements: int) -> int:
        """Of these, those of windows that a piece's channels do not fill."""
        pieces = [each for each in pieces_of(self.a) if isinstance(each, WindowOperand)]
        return sum(each.taps for each in pieces if each.channels % elements)

    @property
    def taps(self) -> int:
        """Of the windows that A's rows are; 1 of rows as they lie."""
        first = pieces_of(self.a)[0]
        return first.taps if isinstance(first, WindowOperand) else 1

    @property
    def grouped(self) -> bool:
        """Whether the batch is the groups of a convolution."""
        return bool(self.anchor.attrs.get("groups", 1) > 1)

    @property
    def shares_a(self) -> bool:
        """Whether all products of the batch have one A, whose layout is that of one product."""
        return isinstance(self.a, GemmOperand) and self.a.layout.shape[0] < self.batch

    def region(self, vector: int = 8) -> Region:
        """The epilogue's iteration space, at most `vector` columns a call."""
        if self.grouped:  # no call reaches into the next group
            shape = (self.rows, self.batch * self.columns)
            return Region(self.group, shape, math.gcd(vector, self.columns))
        return Region(self.group, (self.batch * self.rows, self.columns), vector)

    def epilogue(self, region: Region) -> PointwiseEmitter:
        """The epilogue's emitter; the template hands in `acc`."""
        ahead = joined_by(self.group.graph, self.anchor)
        if self.scale is not None:
            ahead = self.scale.product
        nodes = [node for node in self.group.nodes if node is not ahead]
        return PointwiseEmitter(region, {self.anchor.values[0]: "acc"}, nodes)

    @cached_property
    def row_stats(self) -> int:
        """Of how many values the group makes row statistics."""
        return sum(node.op == "row_stats" for node in self.group.nodes)

    @cached_property
    def of_pairs(self) -> bool:
        """Whether the epilogue reads a column's neighbour."""
        return any(node.definition.of_pairs for node in self.group.nodes)

    def width(self, vector: int) -> int:
        """Columns side by side that `by_width` leaves a thread, of an epilogue of `vector` a call:
        eight where 32 of them are whole, four where 16 are, else two, as wgmma has them."""
        width = math.gcd(self.columns, 32) // 4
        return width if self.batch == 1 and self.b.k_major and 2 < width <= vector else 2

    def check_stats(self, columns: int, part: str) -> None:
        """Refuse epilogues of `columns` at a time, a `part`, that cut what row statistics are of.

        Raises:
            Illegal: they do.
        """
        check(
            not self.row_stats or columns % 64 == 0,
            f"{columns} columns a {part} cut the chunks of the row statistics",
        )
        check(
            not (self.row_stats and self.grouped and self.columns % 64),
            f"{self.columns} columns a group cut the chunks of the row statistics",
        )

    def tensor_maps(self, size: int, box: int) -> list[TensorMapArgument]:
        """Those of the pieces of A, of tiles of `box` rows, of `size` there are."""
        return [self.tensor_map(piece, size, box) for piece in pieces_of(self.a)]

    def tensor_map(self, operand: Piece, size: int, box: int) -> TensorMapArgument:
        """The map of tiles of `box` rows or columns, of `size` there are, and 128 bytes of K; of
        128 bytes of either where K is not what lies side by side."""
        # A copy of f32 rounds it to tf32, of which no part is left over.
        dtype = torch.int32 if is_exact(self.anchor, self.dtype) else self.dtype
        if isinstance(operand, WindowOperand):
            return operand.tensor_map(dtype, min(box, 256))
        batch_stride, row_stride, k_stride = (
            single_stride(axis) or 0 for axis in operand.layout.dims
        )
        k, of_k = operand.layout.shape[-1], 128 // self.dtype.itemsize
        sizes, stride, tile = (k, size), row_stride or pad_to(k, 16), (of_k, min(box, 256))
        if not operand.k_major:
            sizes, stride, tile = (size, k), k_stride, (of_k, of_k)
        return TensorMapArgument(
            operand.base,
            operand.layout.offset,
            dtype,
            (*sizes, operand.layout.shape[0]),
            (stride, batch_stride or stride * sizes[1]),
            (*tile, 1),
        )


def is_exact(anchor: Node, dtype: torch.dtype) -> bool:
    """Whether the products of `anchor`, whose operands are `dtype`, are fp32: three of tf32."""
    return dtype == torch.float32 and anchor.attrs.get("products") != "tf32"


EXACT = "  static constexpr bool EXACT = true;  // three products of tf32 each\n"
"""Of a kernel's configuration, where `is_exact`."""

ROWS_OF_K = 64
"""Rows or columns of 16 bits side by side in a row of K, as `wgmma` takes them."""
BY_ROWS = "  static constexpr bool BY_ROWS = true;  // Q lies in rows of K\n"
"""Of a kernel's configuration, where its N side is no `k_major` operand."""
P_BY_ROWS = "  static constexpr bool P_BY_ROWS = true;  // P lies in rows of K\n"
"""Likewise of its M side."""
SHARED = "  static constexpr bool SHARED = true;  // all products have one A\n"
"""Likewise, of a problem that `shares_a`."""

GROUPED = "  static constexpr bool GROUPED = true;  // the batch lies side by side\n"
"""Likewise, of a problem that is `grouped`."""


def check_products(
    anchor: Node, dtype: torch.dtype, target: Target, *, exact: bool = False
) -> None:
    """Refuse operands of `anchor` that a kernel does not multiply.

    Args:
        anchor: the contraction.
        dtype: of its operands.
        target: the architecture.
        exact: whether the kernel can take three products of tf32 for one of fp32.

    Raises:
        Illegal: naming their dtype.
    """
    check(dtype in (*HALVES, *BYTES, torch.float32), f"no tensor core multiplies {dtype}")
    check(dtype != FP8 or target.has_fp8, f"gtco multiplies no fp8 on {target.arch}")
    check(exact or not is_exact(anchor, dtype), "this sketch multiplies fp32 as tf32 alone")


def analyse(
    group: Group,
    *,
    scales: bool = False,
    joins: bool = False,
    boxes: bool = False,
) -> GemmProblem:
    """The GEMM in `group`.

    Args:
        group: the group.
        scales: whether the kernel can multiply A by a factor of each channel.
        joins: whether it can read A in pieces.
        boxes: whether it can leave means and moments of runs of rows.

    Raises:
        Illegal: there is not exactly one, an operand is not a strided view, or A is to be scaled
            or read in pieces, or means are to be left, and cannot be.
    """
    for node in group.nodes:
        if node.op in ("box_means", "box_moments"):
            leaves = boxes and node.attrs["box"] == (RUN,)
            check(leaves, f"this sketch leaves no means of boxes of {list(node.attrs['box'])}")
    anchors = [node for node in group.nodes if node.definition.family == "gemm"]
    check(len(anchors) == 1, f"a GEMM kernel has one contraction, not {len(anchors)}")
    (anchor,) = anchors
    graph = group.graph
    out = anchor.outputs[0].sizes
    concat = joined_by(graph, anchor)
    check(joins or concat is None, "this sketch reads its operand from one place")
    if concat is not None:
        return _analyse_joined(group, anchor, concat)
    if anchor.definition.convolves:
        return _analyse_conv(group, anchor)
    found = scale_of(graph, anchor)
    check(scales or found is None, "this sketch copies its operands unchanged: none is scaled")
    try:
        scale = None if found is None else _scale_operand(graph, found)
        a_base, a = resolve(graph, anchor.inputs[0] if found is None else found.value)
        b_base, b = resolve(graph, anchor.inputs[1])
        for base in (a_base, b_base, *(() if scale is None else (scale.operand.base,))):
            stored = base in graph.inputs or base in graph.constants
            check(stored, f"operand %{base} is made in the same kernel")
        k = a.shape[-1]
        if anchor.definition.is_linear:
            batch, columns = 1, out[-1]
            rows = math.prod(out[:-1])
            a = a.reshape((1, rows, k))
            b = b.reshape((1, columns, k))
        else:
            check(len(a.shape) >= 2 and len(b.shape) >= 2, "a matmul of vectors is no GEMM")
            rows, columns = out[-2:]
            batch = math.prod(out[:-2])
            a = a.expand((*out[:-2], rows, k)).reshape((batch, rows, k))
            b = b.expand((*out[:-2], k, columns)).permute(
                [*range(len(out) - 2), len(out) - 1, len(out) - 2]
            )
            b = b.reshape((batch, columns, k))
    except NotAView as error:
        raise Illegal(f"%{anchor.name} reads an operand that is no strided view: {error}") from None
    dtypes = {graph.specs[a_base].dtype, graph.specs[b_base].dtype}
    check(len(dtypes) == 1, f"%{anchor.name} has operands of two dtypes")
    return GemmProblem(
        group,
        anchor,
        batch,
        rows,
        columns,
        k,
        dtypes.pop(),
        GemmOperand(a_base, a, a_base in graph.constants),
        GemmOperand(b_base, b, b_base in graph.constants),
        scale,
    )


def _scale_operand(graph: Graph, scale: Scale) -> ScaleOperand:
    base, layout = resolve(graph, scale.factor)
    layout = layout.reshape((1, scale.groups, layout.shape[-1]))
    return ScaleOperand(
        scale.product, GemmOperand(base, layout, base in graph.constants), scale.rows
    )


def _analyse_conv(group: Group, anchor: Node) -> GemmProblem:
    graph = group.graph
    *pixels, out = anchor.outputs[0].sizes
    groups = anchor.attrs.get("groups", 1)
    columns = out // groups
    k = math.prod(graph.specs[anchor.inputs[1]].sizes[1:])
    try:
        a = of_whole_rows(windows_of(graph, anchor))
        b_base, b = resolve(graph, anchor.inputs[1])
        b = b.reshape((groups, columns, k))
    except NotAView as error:
        raise Illegal(f"%{anchor.name} reads an operand that is no strided view: {error}") from None
    for base in (a.base, b_base):
        stored = base in graph.inputs or base in graph.constants
        check(stored, f"operand %{base} is made in the same kernel")
    dtypes = {graph.specs[a.base].dtype, graph.specs[b_base].dtype}
    check(len(dtypes) == 1, f"%{anchor.name} has operands of two dtypes")
    b_operand = GemmOperand(b_base, b, b_base in graph.constants)
    rows = math.prod(pixels)
    return GemmProblem(group, anchor, groups, rows, columns, k, dtypes.pop(), a, b_operand)


def _analyse_joined(group: Group, anchor: Node, concat: Node) -> GemmProblem:
    graph = group.graph
    *rows, columns = anchor.outputs[0].sizes
    try:
        pieces = tuple(_piece(graph, anchor, name, math.prod(rows)) for name in concat.inputs)
        b_base, b = resolve(graph, anchor.inputs[1])
        k = math.prod(b.shape) // columns
        b = b.reshape((1, columns, k))
    except NotAView as error:
        raise Illegal(f"%{anchor.name} reads an operand that is no strided view: {error}") from None
    dtypes = set()
    for base in (*(piece.base for piece in pieces), b_base):
        stored = base in graph.inputs or base in graph.constants
        check(stored, f"operand %{base} is made in the same kernel")
        dtypes.add(graph.specs[base].dtype)
    check(len(dtypes) == 1, f"%{anchor.name} has operands of two dtypes")
    b_operand = GemmOperand(b_base, b, b_base in graph.constants)
    a = JoinedOperand(pieces)
    return GemmProblem(group, anchor, 1, math.prod(rows), columns, k, dtypes.pop(), a, b_operand)


def _piece(graph: Graph, anchor: Node, name: str, rows: int) -> Piece:
    if anchor.definition.convolves:
        return windows_of(graph, anchor, name)
    base, layout = resolve(graph, name)
    layout = layout.reshape((1, rows, layout.shape[-1]))
    return GemmOperand(base, layout, base in graph.constants)


def pad_to(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


def analyse_wgmma(
    group: Group,
    target: Target,
    *,
    exact: bool = False,
    boxes: bool = False,
    shares: bool = False,
) -> GemmProblem:
    """The GEMM in `group`, whose operands TMA can bring to `wgmma`; `exact` as of
    `check_products`, `boxes` as of `analyse`, and `shares` whether the kernel can multiply all
    of the batch by one A.

    Raises:
        Illegal: as of `analyse`; or the target, the dtype or an operand's layout has no such way.
    """
    check(target.has_wgmma, f"{target.arch} has no wgmma")
    problem = _as_images(analyse(group, joins=True, boxes=boxes))
    stats = problem.row_stats
    check(stats <= 1, f"{stats} values with row statistics, of one at most")
    check_products(problem.anchor, problem.dtype, target, exact=exact)
    a = problem.a
    if shares and isinstance(a, GemmOperand) and single_stride(a.layout.dims[0]) == 0:
        problem = replace(problem, a=replace(a, layout=a.layout.slice(0, 0, 1)))
    rounds = not is_exact(problem.anchor, problem.dtype)
    for piece in pieces_of(problem.a):
        if isinstance(piece, WindowOperand):
            piece.check_map(problem.dtype)
        else:
            check_tensor_map("A", piece, problem.dtype, rounds)
    check_tensor_map("B", problem.b, problem.dtype, rounds)
    return problem


def _as_images(problem: GemmProblem) -> GemmProblem:
    """The same where rows lie in images that were cut: windows of one pixel have a tensor map, and
    rows without a single stride have none.

    Every stride of the rows is a dimension of the images: windows of 8 x 8 pixels, cut out of one
    image, are volumes of (rows of windows, windows, 8, 8).
    """
    pieces = [piece for piece in pieces_of(problem.a) if isinstance(piece, GemmOperand)]
    rows = max((piece.layout.dims[1] for piece in pieces), key=len, default=())
    by_k = all(single_stride(piece.layout.dims[2]) in (0, 1) for piece in pieces)
    if len(rows) < 2 or not by_k or not problem.anchor.definition.is_linear:
        return problem
    images = (*(1,) * (3 - len(rows)), *(size for size, _ in rows))
    if len(images) - 1 not in AXES:
        return problem
    ones, zeros = (1,) * (len(images) - 1), (0,) * (len(images) - 1)
    found = []
    for piece in pieces:
        try:
            layout = piece.layout.reshape((*images, piece.layout.shape[-1]))
        except NotAView:
            return problem
        found.append(
            WindowOperand(piece.base, layout, piece.constant, images[1:], ones, ones, zeros, ones)
        )
    joined = isinstance(problem.a, JoinedOperand)
    return replace(problem, a=JoinedOperand(tuple(found)) if joined else found[0])


def check_tensor_map(
    label: str, operand: GemmOperand, dtype: torch.dtype, rounds: bool = True
) -> None:
    """Refuse an operand, called `label`, of which no tensor map describes tiles. `rounds` says
    whether floats are multiplied as tf32.

    Raises:
        Illegal: naming its layout.
    """
    layout = operand.layout
    if not operand.k_major and (dtype in HALVES or not rounds):  # rows of K, which lie apart
        layout = layout.permute((0, 2, 1))
    dims = layout.dims
    batch, rows, k = (single_stride(axis) for axis in dims)
    check(
        batch is not None and rows is not None and k in (0, 1),
        f"operand {label} {operand.layout} is no K-major tile that a tensor map describes",
    )
    # An axis of one element has no stride; a stride of 0 says that all read the same.
    once = all(stride != 0 or not axis for stride, axis in ((batch, dims[0]), (rows, dims[1])))
    check(once, f"operand {label} {operand.layout} is read again, which no tensor map describes")
    unit = 16 // dtype.itemsize
    aligned = all((stride or 0) % unit == 0 for stride in (batch, rows, operand.layout.offset))
    check(aligned, f"operand {label} has rows that are not 16-byte aligned")
