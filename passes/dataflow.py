"""Who reads what: compute nodes, the views between them and the values that are stored.

Views are free, so fusion works on compute nodes alone. `Flow` is a graph seen that way: each
operand of a compute node is a base value (an input, a constant or a compute node's value) and a
chain of views, and each base value has one stored form. The stored form of a value whose readers
all go through one chain of reshapes and permutes is the end of that chain: its producer stores
through the permuted layout, and the reader finds contiguous memory.

    %a = attention(%q, %k, %v)   %p = permute(%a)   %r = reshape(%p)   %y = linear(%r, %w)
    the group of %a stores %r

So does that of a value of pairs which everybody reads through the slice of the even columns:

    %h = mul(%y, swap_pairs(%y))   %z = slice(%h, dim=2, start=0, end=2560, step=2)
    the group of %h stores %z
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from gtco.ir.graph import Graph, Group, Node, subgraph
from gtco.ir.spec import TensorSpec
from gtco.ir.views import (
    Layout,
    NotAView,
    apply_view,
    store_layout,
    takes_even,
    through_views,
)
from gtco.passes.frames import has_windows


@dataclass(frozen=True)
class Read:
    """One operand of a compute node: `value` is `base` seen through `views`, in that order."""

    value: str
    base: str
    views: tuple[Node, ...]


def trace(graph: Graph, value: str) -> Read:
    """Follow `value` through views to the input, constant or compute value behind it."""
    return Read(value, *through_views(graph.producers.get, value))


def stored_form(graph: Graph, value: str) -> str:
    """The view of compute value `value` that its group stores: usually `value` itself.

    The longest chain of reshapes, permutes and slices that keep one of a pair which every reader
    goes through, if it holds more than reshapes and a kernel can store through it. What the graph
    returns is stored as it was made: the runtime returns views of it; and so is what a copy reads,
    which lays it out another way itself.
    """
    returned = set(graph.outputs)
    best = current = value
    moved = False
    while current not in returned and len(graph.users[current]) == 1:
        (view,) = graph.users[current]
        reorders = view.op in ("reshape", "permute")
        if not (reorders or keeps_one(graph.producers.get, view)) or view.name in returned:
            break
        current = view.name
        moved = moved or view.op != "reshape"
        if moved:
            try:
                store_layout(graph, value, current)
            except NotAView:
                continue
            best = current
    copied = all(user.op == "copy" for user in graph.users[current]) and current not in returned
    return value if copied else best


def stored_layout(graph: Graph, value: str) -> Layout:
    """Where the elements of `value` lie in the stored form of what it is a view of.

    Raises:
        NotAView: strides cannot express it.
    """
    base, chain = through_views(graph.producers.get, value)
    stored = stored_form(graph, base) if base in graph.producers else base
    names = [base, *(view.name for view in chain)]
    start = names.index(stored) if stored in names else 0
    layout = Layout.contiguous(graph.specs[names[start]].sizes)
    for view in chain[start:]:
        layout = apply_view(layout, view)
    return layout


def keeps_one(producer: Callable[[str], Node | None], view: Node) -> bool:
    """Whether `view` keeps the even columns of what was computed of pairs of columns.

    Args:
        producer: the node that makes a value, or None.
        view: any view.
    """
    source = producer(view.inputs[0])
    if source is None or len(source.outputs) != 1 or not takes_even(view, source.outputs[0].sizes):
        return False
    pending, seen = [source], {source.name}
    while pending:
        node = pending.pop()
        if node.definition.of_pairs:
            return True
        if node.definition.is_pointwise:
            made_by = (producer(name) for name in node.inputs)
            found = {node.name: node for node in made_by if node and node.name not in seen}
            seen.update(found)
            pending.extend(found.values())
    return False


class Flow:
    """A graph as compute nodes and their operands."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.compute = tuple(node for node in graph.nodes if not node.definition.is_view)
        self.index = {node.name: position for position, node in enumerate(self.compute)}
        self.reads: Mapping[str, tuple[Read, ...]] = {
            node.name: tuple(trace(graph, name) for name in node.inputs) for node in self.compute
        }
        self.returned = frozenset(trace(graph, name).base for name in graph.outputs)
        self.stored = {
            value: stored_form(graph, value) for node in self.compute for value in node.values
        }

    def producer(self, read: Read) -> Node | None:
        """The compute node that makes the value behind `read`; inputs and constants have none."""
        return self.graph.producers.get(read.base)

    @cached_property
    def readers(self) -> Mapping[str, tuple[Node, ...]]:
        """Base value to the compute nodes that read it, through views or not."""
        table: dict[str, dict[str, Node]] = {}
        for node in self.compute:
            for read in self.reads[node.name]:
                table.setdefault(read.base, {})[node.name] = node
        return MappingProxyType({base: tuple(nodes.values()) for base, nodes in table.items()})

    @cached_property
    def predecessors(self) -> tuple[int, ...]:
        """Bit set of the compute nodes that each compute node reads."""
        masks = []
        for node in self.compute:
            mask = 0
            for read in self.reads[node.name]:
                if (made_by := self.producer(read)) is not None:
                    mask |= 1 << self.index[made_by.name]
            masks.append(mask)
        return tuple(masks)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Bit set of the compute nodes that each compute node depends on."""
        masks: list[int] = []
        for mask in self.predecessors:
            total = mask
            for position in bits(mask):
                total |= masks[position]
            masks.append(total)
        return tuple(masks)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """Bit set of the compute nodes that depend on each compute node."""
        masks = [0] * len(self.compute)
        for position in reversed(range(len(masks))):
            behind = masks[position] | 1 << position
            for read in bits(self.predecessors[position]):
                masks[read] |= behind
        return tuple(masks)

    def connected(self, within: int, start: int, *, siblings: bool = False) -> int:
        """The compute nodes of the bit set `within` that values connect with those of `start`.

        With `siblings` images that several read connect these as well.
        """
        reached = frontier = start
        while frontier:
            grown = 0
            for position in bits(within & ~reached):
                if self.predecessors[position] & frontier:
                    grown |= 1 << position
            for position in bits(frontier):
                grown |= self.predecessors[position]
                grown |= self.siblings[position] if siblings else 0
            frontier = grown & within & ~reached
            reached |= frontier
        return reached

    @cached_property
    def siblings(self) -> tuple[int, ...]:
        """Bit set of the others that read the windows of one image, of each compute node that does.

        One kernel may hold them although no value passes between them.
        """
        alike: dict[str, int] = {}
        images = [
            self.reads[node.name][0].value if has_windows(node) else "" for node in self.compute
        ]
        for position, image in enumerate(images):
            alike[image] = alike.get(image, 0) | 1 << position
        return tuple(
            alike[image] & ~(1 << position) if image else 0 for position, image in enumerate(images)
        )

    def layout(self, read: Read) -> Layout:
        """Where the operand's elements lie in the stored form of its base.

        Raises:
            NotAView: strides cannot express it.
        """
        stored = self.stored.get(read.base, read.base)
        layout = Layout.contiguous(self.graph.specs[stored].sizes)
        for view in self.outer_views(read):
            layout = apply_view(layout, view)
        return layout

    def outer_views(self, read: Read) -> tuple[Node, ...]:
        """The views between the stored form of the base and the operand."""
        stored = self.stored.get(read.base, read.base)
        names = [view.name for view in read.views]
        return read.views[names.index(stored) + 1 :] if stored != read.base else read.views

    def escapes(self, value: str, inside: frozenset[str] | set[str]) -> bool:
        """Whether somebody outside the nodes named `inside` reads the compute value `value`."""
        return value in self.returned or any(
            node.name not in inside for node in self.readers.get(value, ())
        )


def bits(mask: int) -> Iterable[int]:
    """The positions of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def make_group(flow: Flow, members: Iterable[Node], name: str = "group") -> Group:
    """The group of compute nodes `members`, with the views it reads and stores through."""
    members = tuple(members)
    inside = {node.name for node in members}
    chosen: dict[str, Node] = {}
    outputs: list[str] = []
    for node in members:
        chosen[node.name] = node
        for read in flow.reads[node.name]:
            made_by = flow.producer(read)
            internal = made_by is not None and made_by.name in inside
            for view in read.views if internal else flow.outer_views(read):
                chosen[view.name] = view
        for value in node.values:
            if flow.escapes(value, inside):
                stored = flow.stored[value]
                outputs.append(stored)
                for view in trace(flow.graph, stored).views:
                    chosen[view.name] = view
    return Group(name, subgraph(flow.graph, chosen.values(), outputs))


def materialize_views(graph: Graph) -> Graph:
    """Copy what strides cannot express, so that every remaining chain of views has a layout.

    %p = permute(%x)   %r = reshape(%p)   %h = relu(%r)
    %p = permute(%x)   %c = copy(%p)   %r = reshape(%c)   %h = relu(%r)
    """
    stored_through = {
        view.name
        for node in graph.nodes
        if not node.definition.is_view
        for value in node.values
        for view in trace(graph, stored_form(graph, value)).views
    }
    layouts = {name: Layout.contiguous(spec.sizes) for name, spec in graph.specs.items()}
    taken = set(graph.specs)
    copies: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.definition.is_view and node.name not in stored_through:
            (source,) = node.inputs
            try:
                layouts[node.name] = apply_view(layouts[source], node)
            except NotAView:
                spec = graph.specs[source]
                if source not in copies:
                    nodes.append(copy_of(source, spec, taken))
                    copies[source] = nodes[-1].name
                node = replace(node, inputs=(copies[source],))
                layouts[node.name] = apply_view(Layout.contiguous(spec.sizes), node)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes)) if copies else graph


def copy_of(value: str, spec: TensorSpec, taken: set[str]) -> Node:
    """A node that copies `value`, of a name that is not `taken` and is then."""
    name = f"{value}_copy".replace(".", "_")
    while name in taken:
        name += "_"
    taken.add(name)
    return Node(name, "copy", (value,), MappingProxyType({}), (spec,))


def drop_dead(graph: Graph) -> Graph:
    """Drop the nodes that no output depends on."""
    live = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if live.intersection(node.values):
            kept.append(node)
            live.update(node.inputs)
    if len(kept) == len(graph.nodes):
        return graph
    return replace(graph, nodes=tuple(reversed(kept)))
