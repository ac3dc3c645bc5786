"""Strided views of stored tensors, with hierarchical dimensions.

A `Layout` says where each element of a tensor lies in a buffer. A dimension is a tuple of
(extent, stride) pairs, outermost first, so that the reshape of a permuted tensor (the patches of
an image, the heads of an attention output) is a layout too and costs no copy:

    x: [3, 224, 224] -> patches [196, 768]
    rows ((14, 3584), (14, 16))   columns ((3, 50176), (16, 224), (16, 1))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gtco.ir.graph import Graph, Node

Axis = tuple[tuple[int, int], ...]
"""(extent, stride in elements) pairs of one dimension, outermost first."""

PAIR = (2, 0)
"""Ends a dimension of which only the even elements are stored: the odd ones have no place."""


class NotAView(ValueError):
    """The view cannot be expressed by strides: the elements must be moved."""


def _compact(pairs: Sequence[tuple[int, int]]) -> Axis:
    """Drop extents of one and join neighbours that continue each other."""
    result: list[tuple[int, int]] = []
    for extent, stride in pairs:
        if extent == 1:
            continue
        if result and result[-1][1] == extent * stride:
            result[-1] = (result[-1][0] * extent, stride)
        else:
            result.append((extent, stride))
    return tuple(result)


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor lie in its buffer, in elements."""

    dims: tuple[Axis, ...]
    offset: int = 0

    @staticmethod
    def contiguous(shape: Sequence[int]) -> Layout:
        dims: list[Axis] = []
        stride = 1
        for size in reversed(shape):
            dims.append(_compact([(size, stride)]))
            stride *= size
        return Layout(tuple(reversed(dims)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(extent for extent, _ in axis) for axis in self.dims)

    @property
    def is_contiguous(self) -> bool:
        return self.offset == 0 and self.dims == Layout.contiguous(self.shape).dims

    def strides(self) -> tuple[int, ...] | None:
        """One stride per dimension (0 for extents of one), or None if a dimension is nested."""
        if any(len(axis) > 1 for axis in self.dims):
            return None
        return tuple(axis[0][1] if axis else 0 for axis in self.dims)

    def permute(self, dims: Sequence[int]) -> Layout:
        return Layout(tuple(self.dims[dim] for dim in dims), self.offset)

    def expand(self, shape: Sequence[int]) -> Layout:
        """Broadcast to `shape`: new leading dimensions and dimensions of one get stride 0."""
        missing = len(shape) - len(self.dims)
        old = ((),) * missing + self.dims
        sizes = (1,) * missing + self.shape
        new: list[Axis] = []
        for axis, size, target in zip(old, sizes, shape, strict=True):
            if target in (size, -1):
                new.append(axis)
            elif size == 1:
                new.append(((target, 0),))
            else:
                raise NotAView(f"{self.shape} does not broadcast to {tuple(shape)}")
        return Layout(tuple(new), self.offset)

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> Layout:
        size = self.shape[dim]
        start, end, step = slice(start, end, step).indices(size)
        count = max(0, -(-(end - start) // step))
        axis = self.dims[dim]
        if start == 0 and count == size:
            return self
        if count == 0:
            return Layout.contiguous((*self.shape[:dim], 0, *self.shape[dim + 1 :]))
        inner = math.prod(extent for extent, _ in axis[1:])
        outer_stride = axis[0][1]
        if len(axis) == 1:
            new: Axis = ((count, outer_stride * step),)
            offset = start * outer_stride
        elif step == 1 and start % inner == 0 and count % inner == 0:
            new = ((count // inner, outer_stride), *axis[1:])
            offset = start // inner * outer_stride
        elif count == 1:
            new, offset, rest = (), 0, start
            for extent, stride in reversed(axis):
                rest, index = divmod(rest, extent)
                offset += index * stride
        else:
            raise NotAView(f"a slice [{start}:{end}:{step}] that cuts the nested dimension {dim}")
        dims = (*self.dims[:dim], _compact(new), *self.dims[dim + 1 :])
        return Layout(dims, self.offset + offset)

    def unfold(self, dim: int, size: int, step: int) -> Layout:
        """Windows of `size` neighbours along `dim`, one from each `step`th on."""
        axis, extent = self.dims[dim], self.shape[dim]
        if len(axis) > 1:
            raise NotAView(f"windows of the nested dimension {dim}")
        stride = axis[0][1] if axis else 0
        count = (extent - size) // step + 1
        dims = (*self.dims[:dim], _compact([(count, stride * step)]), *self.dims[dim + 1 :])
        return Layout((*dims, _compact([(size, stride)])), self.offset)

    def reshape(self, shape: Sequence[int]) -> Layout:
        """The same elements in row-major order under another shape.

        Raises:
            NotAView: an extent would have to be cut where it does not divide.
        """
        if -1 in shape:
            known = -math.prod(shape)
            shape = [math.prod(self.shape) // known if size == -1 else size for size in shape]
        if 0 in self.shape:  # any layout is right for no elements
            return Layout.contiguous(shape)
        flat = list(_compact([pair for axis in self.dims for pair in axis]))
        dims: list[Axis] = []
        for size in reversed(shape):
            pairs: list[tuple[int, int]] = []
            need = size
            while need > 1:
                if not flat:
                    raise NotAView(f"{self.shape} has fewer elements than {tuple(shape)}")
                extent, stride = flat.pop()
                if need % extent == 0:
                    pairs.insert(0, (extent, stride))
                    need //= extent
                elif extent % need == 0:
                    pairs.insert(0, (need, stride))
                    flat.append((extent // need, stride * need))
                    need = 1
                else:
                    raise NotAView(
                        f"reshape {self.shape} to {tuple(shape)} cuts {extent} by {need}"
                    )
            dims.insert(0, _compact(pairs))
        return Layout(tuple(dims), self.offset)

    def contiguous_run(self, dim: int = -1) -> int:
        """How many neighbours along `dim` are neighbours in memory."""
        axis = self.dims[dim]
        if not axis:
            return 1
        extent, stride = axis[-1]
        return extent if stride == 1 else 1

    def vector(self, limit: int, dim: int = -1) -> int:
        """The widest power of two up to `limit` elements with which `dim` can be accessed.

        Each access starts at a multiple of the width along `dim`, and lies at a multiple of the
        width in memory whatever the other indices are. The buffer itself is aligned to `limit`.
        """
        width = limit
        dim %= len(self.dims)
        while width > 1:
            fits = self.offset % width == 0 and self.contiguous_run(dim) % width == 0
            for position, axis in enumerate(self.dims):
                own = axis[:-1] if position == dim else axis
                fits = fits and all(stride % width == 0 for _, stride in own)
            if fits:
                break
            width //= 2
        return width

    @property
    def even(self) -> Layout | None:
        """Where the even elements of the last dimension go, if two neighbours have one place each:
        see `store_layout`. None of any other layout."""
        if not self.dims or self.dims[-1][-1:] != (PAIR,):
            return None
        return Layout((*self.dims[:-1], self.dims[-1][:-1]), self.offset)

    def __str__(self) -> str:
        dims = ", ".join("x".join(f"{e}:{s}" for e, s in axis) or "1:0" for axis in self.dims)
        return f"({dims})" + (f"+{self.offset}" if self.offset else "")


def apply_view(layout: Layout, node: Node) -> Layout:
    """The layout of view `node`'s result, given its input's.

    Raises:
        NotAView: strides cannot express it.
    """
    attrs = node.attrs
    if node.op == "reshape":
        return layout.reshape(node.outputs[0].sizes)
    if node.op == "permute":
        return layout.permute([dim % len(layout.dims) for dim in attrs["dims"]])
    if node.op == "expand":
        return layout.expand(node.outputs[0].sizes)
    if node.op == "slice":
        dim = attrs["dim"] % len(layout.dims)
        return layout.slice(dim, attrs["start"], attrs["end"], attrs.get("step", 1))
    if node.op == "unfold":
        return layout.unfold(attrs["dim"], attrs["size"], attrs["step"])
    raise NotAView(f"{node.op} is not a view")


def through_views(
    producer: Callable[[str], Node | None], value: str
) -> tuple[str, tuple[Node, ...]]:
    """The input, constant or compute value behind `value`, and the views between, in their order.

    Args:
        producer: the node that makes a value, or None.
        value: any.
    """
    chain: list[Node] = []
    while (node := producer(value)) is not None and node.definition.is_view:
        chain.append(node)
        value = node.inputs[0]
    return value, tuple(reversed(chain))


def in_order(views: Iterable[Node], sizes: tuple[int, ...]) -> bool:
    """Whether `views` of a contiguous value of these sizes leave its elements in their order."""
    layout = Layout.contiguous(sizes)
    try:
        for view in views:
            layout = apply_view(layout, view)
    except NotAView:
        return False
    return layout.is_contiguous


def resolve(graph: Graph, value: str) -> tuple[str, Layout]:
    """The stored value that `value` is a view of, and its layout there.

    Walks view nodes up to an input, a constant or a compute node. `value` itself is returned with
    a contiguous layout if it is no view.

    Raises:
        NotAView: strides cannot express the chain.
    """
    base, chain = through_views(graph.producers.get, value)
    layout = Layout.contiguous(graph.specs[base].sizes)
    for node in chain:
        layout = apply_view(layout, node)
    return base, layout


def takes_even(view: Node, sizes: tuple[int, ...]) -> bool:
    """Whether `view` of a value of these sizes is its columns 0, 2, 4, ..., of an even number."""
    if view.op != "slice" or not sizes or sizes[-1] % 2 or view.attrs.get("step", 1) != 2:
        return False
    taken = range(*slice(view.attrs["start"], view.attrs["end"], 2).indices(sizes[-1]))
    return view.attrs["dim"] % len(sizes) == len(sizes) - 1 and taken == range(0, sizes[-1], 2)


def store_layout(graph: Graph, value: str, stored: str) -> Layout:
    """Where elements of `value` go in the contiguous buffer of `stored`, a view of it.

    `stored` is reached from `value` through reshapes and permutes, and at most one slice that
    `takes_even`: each column and its neighbour have one place then, which is the even one's
    (`Layout.even`).

    Raises:
        NotAView: another view lies between, or strides cannot express it.
    """
    chain: list[Node] = []
    current = stored
    while current != value:
        node = graph.producers.get(current)
        if node is None or not node.definition.is_view:
            raise NotAView(f"%{stored} is no view of %{value}")
        chain.append(node)
        current = node.inputs[0]
    layout, paired = Layout.contiguous(graph.specs[stored].sizes), False
    for node in chain:
        if node.op == "reshape":
            layout = layout.reshape(graph.specs[node.inputs[0]].sizes)
        elif node.op == "permute":
            dims = [dim % len(layout.dims) for dim in node.attrs["dims"]]
            layout = layout.permute([dims.index(position) for position in range(len(dims))])
        elif takes_even(node, graph.specs[node.inputs[0]].sizes) and not paired:
            paired = True
            layout = Layout((*layout.dims[:-1], (*layout.dims[-1], PAIR)), layout.offset)
        else:
            raise NotAView(f"{node.op} drops or repeats elements")
    return layout


def piece_layout(graph: Graph, concat: Node, position: int, stored: str) -> Layout:
    """Where elements of input `position` of `concat` go in the contiguous buffer of `stored`.

    `stored` is `concat`'s value or reached from it as for `store_layout`.

    Raises:
        NotAView: likewise.
    """
    dim = concat.attrs["dim"] % concat.outputs[0].rank
    sizes = [graph.specs[name].sizes[dim] for name in concat.inputs]
    start = sum(sizes[:position])
    layout = store_layout(graph, concat.values[0], stored)
    return layout.slice(dim, start, start + sizes[position])
