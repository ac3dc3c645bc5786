"""Channels that no copy of 16 bytes divides are padded with zeros between products.

%y: f16[1,56,56,45] = conv(%x, %w: f16[45,3,3,64])      %p: f16[1,56,56,48] = conv(%x, %w')
                                                        %y: f16[1,56,56,48] = where(%real, %p, 0)
%r: f16[1,56,56,45] = relu(%y)                      ->  %r: f16[1,56,56,48] = relu(%y)
%z: f16[1,56,56,64] = conv(%r, %v: f16[64,3,3,45])      %z: f16[1,56,56,64] = conv(%r, %v')

The weights that make a value get zero rows, and those that read it zero columns, so no result is
rounded differently; %real keeps infinities of %x out of padding that a product reads. In between,
each channel must stay by itself, and its padding finite. What is joined, reduced along its channels
or read by anything else keeps its width, and with it all that is computed from it or towards it
channel by channel. What is returned, itself or permuted, is a view of the padded value, which takes
no kernel:

%z: f16[1,112,112,45] = resize(%y)                      %z: f16[1,112,112,48] = resize(%y)
return permute(%z)                                  ->  %s: f16[1,112,112,45] = slice(%z)
                                                        return permute(%s)

But only where a windowed op or another product gains as well, or where an image is permuted on its
way out and its channels are whole 32s then, which products store by 16 bytes: an H100 takes 20 us
for 36864 pixels of 150 channels, 17 of 152 and 9 of 160. Rows that the caller gets as they are stay
as plainly laid out as eager's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import networkx as nx
import torch
import torch.nn.functional as F

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import FLOATS, TensorSpec
from gtco.passes.rewrite import Editor, Log, Refusal

RULE = "products of channels that no copy divides -> products of padded channels"
CHANNELS = 8
"""What channels are padded to a multiple of: 16 bytes of the narrowest type."""
STORED = 32
"""Columns that four lanes of a product's epilogue store by 16 bytes each, if all of them exist."""
LITTLE = Fraction(9, 8)
"""How far channels may grow for that."""
COPY_BYTES = 16
"""What vectors of memory and the copy engine take pixels in multiples of."""
MOST = Fraction(4, 3)
"""How far what lies between two products, or is returned, may grow."""
ROWS = 16
"""Pixels that a tile of a product has at least; of fewer, as gates have, copies do not bind."""


def pad_channels(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    found = _Channels(graph)
    if log is not None:
        log.refusals += [Refusal(RULE, name, reason) for name, reason in found.reasons.items()]
    if not found.padded:
        return graph
    if log is not None:
        log.applied[RULE] += sum(_is_product(graph, node) for node in found.padded.values())
    edit = Editor(graph)
    renamed: dict[str, str] = {}  # to what is padded
    replaced: dict[str, str] = {}  # by what is as wide as it was
    for node in graph.nodes:
        grows = node.name in found.padded
        if node.name in found.handed or (not grows and renamed.keys().isdisjoint(node.inputs)):
            continue
        edit.root(node)
        inputs = [renamed.get(value, replaced.get(value, value)) for value in node.inputs]
        if not _is_product(graph, node):
            renamed[node.name] = _by_channel(edit, node, inputs)
        elif grows:
            product = _product(edit, node, inputs, True)
            multiplied = node.name in found.multiplied
            renamed[node.name] = _made(edit, node, product) if multiplied else product
        else:
            replaced[node.name] = _product(edit, node, inputs, False)
            edit.replace(node.name, replaced[node.name])
        if grows and found.is_handed(node.name):
            edit.replace(node.name, _narrow(edit, node, renamed[node.name]))
    edit.remove_dead()
    return edit.finish()


def _width(channels: int) -> int:
    stored = -(-channels // STORED) * STORED
    return stored if stored <= LITTLE * channels else -(-channels // CHANNELS) * CHANNELS


def _product(edit: Editor, node: Node, inputs: Iterable[str], grows: bool) -> str:
    """Product `node` of the padded operand, and of more rows of weights if it `grows`."""
    x, w, *bias = inputs
    weight = edit.constants[w]
    rows = _width(len(weight)) - len(weight) if grows else 0
    columns = edit.shape(x)[-1] - weight.shape[-1]
    beside = (0, columns, *(0, 0) * (weight.dim() - 2), 0, rows)
    w = edit.add_constant(f"{w}_padded", F.pad(weight, beside))
    bias = [edit.add_constant(f"{b}_padded", F.pad(edit.constants[b], (0, rows))) for b in bias]
    return edit.add(node.op, x, w, *bias, **node.attrs)


def _made(edit: Editor, node: Node, product: str) -> str:
    """The padded `product` with zeros beside its real channels, whatever its operand held."""
    (spec,) = node.outputs
    channels, width = spec.sizes[-1], _width(spec.sizes[-1])
    real = torch.arange(width) < channels
    zero = torch.zeros((), dtype=spec.dtype)
    mask = edit.add_constant(f"{node.name}_real", real)
    return edit.add("where", mask, product, edit.add_constant(f"{node.name}_zero", zero))


def _narrow(edit: Editor, node: Node, padded: str) -> str:
    """The real channels of `padded`, which stands for `node`: a view."""
    (spec,) = node.outputs
    return edit.add("slice", padded, dim=spec.rank - 1, start=0, end=spec.sizes[-1])


def _by_channel(edit: Editor, node: Node, inputs: Iterable[str]) -> str:
    """`node` of padded operands; its constants of a row of channels get zeros beside them."""
    channels = node.outputs[0].sizes[-1]
    operands = []
    for value in inputs:
        tensor = edit.constant(value)
        if tensor is not None and tensor.dim() and tensor.shape[-1] == channels:
            wide = F.pad(tensor, (0, _width(channels) - channels))
            value = edit.add_constant(f"{value}_padded", wide)
        operands.append(value)
    attrs = dict(node.attrs)
    if "shape" in attrs:
        attrs["shape"] = (*attrs["shape"][:-1], _width(channels))
    return edit.add(node.op, *operands, **attrs)


# -- what may be padded ----------------------------------------------------------------------------


class _Channels:
    """Whose channels are padded: the largest set of values that is closed under what is asked.

    Attributes:
        padded: those nodes by name.
        handed: permutes that only the caller reads. They are none of them.
        multiplied: those whose padding a product multiplies with its zero columns.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.handed: set[str] = set()
        for node in reversed(graph.nodes):
            users = graph.users[node.name] if node.op == "permute" else None
            if users is not None and all(user.name in self.handed for user in users):
                self.handed.add(node.name)
        wanted = (node for node in graph.nodes if _is_wanted(node))
        self.padded = {node.name: node for node in wanted if node.name not in self.handed}
        self.reasons: dict[str, str] = {}
        self._beside: dict[str, float] = {}
        order, before = list(self.padded.values()), -1
        while len(self.padded) != before:
            before = len(self.padded)
            for node in (*order, *reversed(order)):
                if node.name in self.padded and (reason := self._why_not(node)):
                    del self.padded[node.name]
                    if _is_product(graph, node):
                        self.reasons[node.name] = reason
        for linked in self._linked():
            if reason := self._why_not_worth(linked):
                for name in sorted(linked):
                    node = self.padded.pop(name)
                    if _is_product(graph, node):
                        self.reasons[name] = reason
        self.multiplied: set[str] = set()
        for name in reversed(self.padded):
            users = graph.users[name]
            if any(_is_product(graph, user) or user.name in self.multiplied for user in users):
                self.multiplied.add(name)

    def is_handed(self, name: str) -> bool:
        """Whether the caller gets this value, as it is or permuted."""
        return name in self._graph.outputs or any(
            user.name in self.handed for user in self._graph.users[name]
        )

    def _linked(self) -> list[set[str]]:
        """What is computed channel by channel of one another."""
        linked = nx.Graph()
        linked.add_nodes_from(self.padded)
        for node in self.padded.values():
            if not _is_product(self._graph, node):
                linked.add_edges_from((v, node.name) for v in node.inputs if v in self.padded)
        return list(nx.connected_components(linked))

    def _why_not_worth(self, linked: set[str]) -> str | None:
        if all(map(self._has_few, linked)):
            return "all that is computed of it has few pixels"
        if not any(map(self.is_handed, linked)):
            return None
        gains = any(self.padded[name].definition.family == "stencil" for name in linked)
        users = [user for name in linked for user in self._graph.users[name]]
        if gains or any(_is_product(self._graph, user) for user in users):
            return None
        width = _width(self.padded[min(linked)].outputs[0].sizes[-1])
        if width % STORED == 0 and linked.isdisjoint(self._graph.outputs):
            return None  # permuted, so that its rows are none of eager's in any case
        return "it is returned, and no windowed op and no other product reads it"

    def _has_few(self, name: str) -> bool:
        (spec,) = self.padded[name].outputs
        return spec.numel < ROWS * spec.sizes[-1]

    def _why_not(self, node: Node) -> str | None:
        return self._why_not_made(node) or self._why_not_read(node)

    def _why_not_made(self, node: Node) -> str | None:
        if _is_product(self._graph, node):
            self._beside[node.name] = 0.0
            return None
        if not _keeps_channels(self._graph, node):
            return f"{node.op} makes %{node.name} of several channels"
        for value in node.inputs:
            wide = self.padded.get(value)
            if wide is None and not self._is_row(value, node):
                return f"%{node.name} reads %{value}, whose channels stay as they are"
            if wide is not None and wide.outputs[0].sizes[-1] != node.outputs[0].sizes[-1]:
                return f"%{node.name} has other channels than %{value}"
        beside = self._padding(node)
        if beside is None or not math.isfinite(beside):
            return f"{node.op} of zeros is not finite"
        self._beside[node.name] = beside
        return None

    def _is_row(self, value: str, node: Node) -> bool:
        """Whether `value` is a constant that is padded with zeros, or one number."""
        tensor = self._graph.constants.get(value)
        if tensor is None:
            return False
        return tensor.numel() == 1 or tensor.shape[-1] == node.outputs[0].sizes[-1]

    def _padding(self, node: Node) -> float | None:
        """What stands in the padding of `node`; None where it is not one number."""
        if not node.definition.is_pointwise:
            made = [self._beside[value] for value in node.inputs if value in self._beside]
            zero = not any(made) or node.op == "depthwise_conv"
            return 0.0 if zero else made[0] if node.definition.is_view else None
        operands = []
        for value in node.inputs:
            tensor = self._graph.constants.get(value)
            if tensor is None:
                dtype = self._graph.specs[value].dtype
                operands.append(torch.tensor(self._beside[value], dtype=dtype))
            elif tensor.numel() == 1 and node.outputs[0].sizes[-1] != 1:
                operands.append(tensor.cpu().reshape(()))
            else:
                operands.append(torch.zeros((), dtype=tensor.dtype))
        return float(node.definition.reference(*operands, **node.attrs))

    def _why_not_read(self, node: Node) -> str | None:
        for user in self._graph.users[node.name]:
            if user.name in self.handed:
                continue
            if _is_product(self._graph, user):
                if node.name in user.inputs[1:]:
                    return f"%{user.name} reads it as weights"
            elif user.name not in self.padded:
                return f"%{user.name} reads it as wide as it is"
        return None


def _is_wanted(node: Node) -> bool:
    if len(node.outputs) != 1 or node.outputs[0].rank < 2:
        return False
    (spec,) = node.outputs
    channels = spec.sizes[-1]
    return spec.dtype in FLOATS and not _is_copied(spec) and _width(channels) <= MOST * channels


def _is_copied(spec: TensorSpec) -> bool:
    return spec.sizes[-1] * spec.dtype.itemsize % COPY_BYTES == 0


def fills_copies(narrow: TensorSpec, wide: TensorSpec) -> bool:
    """Whether `wide` is `narrow` with a few more channels, so that copies divide its rows."""
    few = narrow.sizes[-1] < wide.sizes[-1] <= MOST * narrow.sizes[-1]
    return few and _is_copied(wide) and not _is_copied(narrow)


def _is_product(graph: Graph, node: Node) -> bool:
    """Whether `node` multiplies all channels of each pixel with constant weights."""
    if not (node.definition.is_linear or node.op == "conv"):
        return False
    shapes = [graph.constants[v].shape for v in node.inputs[1:] if v in graph.constants]
    rows = node.outputs[0].sizes[-1:]
    known = len(shapes) == len(node.inputs) - 1 and len(shapes[0]) > 1
    return known and all(shape == rows for shape in shapes[1:])


def _keeps_channels(graph: Graph, node: Node) -> bool:
    """Whether each channel of what `node` makes is made of the same channel of what it reads."""
    definition, attrs = node.definition, node.attrs
    last = node.outputs[0].rank - 1
    if definition.is_pointwise:
        return not definition.of_pairs
    if definition.family == "stencil":
        return not definition.samples
    if node.op in ("reshape", "expand"):
        return True  # of operands as wide as it is, which is asked for besides
    if node.op == "permute":
        return bool(attrs["dims"][-1] == last)
    if node.op in ("slice", "concat"):
        return bool(attrs["dim"] % (last + 1) != last)
    if node.op == "pad":
        return bool(attrs["before"][-1] == attrs["after"][-1] == 0)
    row = definition.row
    if row is None or row.whole or row.counts or definition.axes != "dims":
        return False
    rank = graph.specs[node.inputs[0]].rank
    return all(dim % rank != rank - 1 for dim in attrs["dims"])
