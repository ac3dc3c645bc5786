"""The intermediate representation: an immutable graph of a closed set of operators.

A `Graph` is a list of nodes in topological order. Every value has a name and a `TensorSpec`; a
node with one output names its value after itself (`h`), a node with several numbers them (`h.0`,
`h.1`). Graphs never change: a pass is a function from `Graph` to `Graph`, and `GraphBuilder` is
how a new one is made.

    %h: f16[1,197,3072] = gelu(%x)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from gtco.ir.aten import without_data
from gtco.ir.fold import OUTSIDE, Item, Repeat, Source, find_repeats, first_reads
from gtco.ir.ops import OPS, Op, Pattern
from gtco.ir.spec import DTYPE_NAMES, GraphError, TensorSpec


@dataclass(frozen=True)
class Node:
    """One operator applied to named values.

    Args:
        name: unique within the graph.
        op: a key of `gtco.ir.ops.OPS`.
        inputs: value names, in the order of the op's reference function.
        attrs: keyword arguments of the reference function.
        outputs: one spec per output.
        source: the user's module that this node came from, for reports.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    attrs: Mapping[str, Any]
    outputs: tuple[TensorSpec, ...]
    source: str = ""

    @property
    def values(self) -> tuple[str, ...]:
        """The names of the values this node makes."""
        if len(self.outputs) == 1:
            return (self.name,)
        return tuple(f"{self.name}.{index}" for index in range(len(self.outputs)))

    @property
    def definition(self) -> Op:
        return OPS[self.op]

    @property
    def pattern(self) -> Pattern:
        return self.definition.pattern

    def __str__(self) -> str:
        outs = ", ".join(f"%{v}: {s}" for v, s in zip(self.values, self.outputs, strict=True))
        args = [f"%{name}" for name in self.inputs]
        args += [f"{key}={_show(self.attrs[key])}" for key in sorted(self.attrs)]
        return f"{outs} = {self.op}({', '.join(args)})"


def _show(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_show(item) for item in value)}]"
    return repr(value)


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, eq=False)
class Graph:
    """Inputs, constants, nodes in topological order, outputs.

    Args:
        inputs: name to spec, in the order of the call.
        constants: name to tensor: weights, buffers and folded values.
        nodes: in topological order.
        outputs: value names; a name may stand more than once.
        orders: of inputs that callers have with their dimensions in another order than they lie
            in memory (`torch.channels_last`), the permutation that makes the caller's tensor what
            `inputs` says.
    """

    inputs: Mapping[str, TensorSpec]
    constants: Mapping[str, torch.Tensor]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))

    @cached_property
    def given(self) -> Mapping[str, TensorSpec]:
        """The inputs as callers have them."""
        table = dict(self.inputs)
        for name in self.orders:
            table[name] = TensorSpec.of(self.as_given(name, table[name].meta()))
        return MappingProxyType(table)

    def as_given(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor for the input `name`, of the shape in `inputs`, as a caller has it."""
        order = self.orders.get(name)
        if order is None:
            return tensor
        return tensor.permute([order.index(dim) for dim in range(len(order))])

    def as_stored(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A caller's tensor for the input `name`, of the shape in `inputs`."""
        order = self.orders.get(name)
        return tensor if order is None else tensor.permute(order)

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The spec of every value."""
        table = dict(self.inputs)
        table.update({name: TensorSpec.of(tensor) for name, tensor in self.constants.items()})
        for node in self.nodes:
            table.update(zip(node.values, node.outputs, strict=True))
        return MappingProxyType(table)

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """Value name to the node that makes it; inputs and constants have none."""
        return MappingProxyType({value: node for node in self.nodes for value in node.values})

    @cached_property
    def users(self) -> Mapping[str, tuple[Node, ...]]:
        """Value name to the nodes that read it, in topological order."""
        table: dict[str, list[Node]] = {name: [] for name in self.specs}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                table[name].append(node)
        return MappingProxyType({name: tuple(nodes) for name, nodes in table.items()})

    def verify(self) -> None:
        """Check names, order and specs.

        Raises:
            GraphError: naming the node and the rule it breaks.
        """
        seen = set(self.inputs)
        if clash := seen & set(self.constants):
            raise GraphError(f"%{min(clash)} is both an input and a constant")
        seen |= set(self.constants)
        for name, order in self.orders.items():
            if name not in self.inputs or sorted(order) != list(range(self.inputs[name].rank)):
                raise GraphError(f"{order} is no order of the dimensions of an input %{name}")
        for node in self.nodes:
            if node.op not in OPS:
                raise GraphError(f"%{node.name}: unknown op {node.op!r}")
            for name in node.inputs:
                if name not in seen:
                    raise GraphError(f"%{node.name} reads %{name} before it is made")
            for value in node.values:
                if value in seen:
                    raise GraphError(f"%{value} is made twice")
            seen.update(node.values)
            inferred = infer_outputs(
                node.op, [self.specs[name] for name in node.inputs], node.attrs
            )
            if inferred != node.outputs:
                raise GraphError(
                    f"%{node.name}: {node.op} gives {', '.join(map(str, inferred))}, but the node "
                    f"says {', '.join(map(str, node.outputs))}"
                )
        for name in self.outputs:
            if name not in seen:
                raise GraphError(f"output %{name} is never made")

    def __str__(self) -> str:
        orders = {name: f" of {_show(order)}" for name, order in self.orders.items()}
        head = (f"%{name}: {spec}{orders.get(name, '')}" for name, spec in self.inputs.items())
        lines = [f"graph({', '.join(head)}):"]
        lines += [f"  const %{n}: {TensorSpec.of(t)}" for n, t in self.constants.items()]
        lines += [f"  {node}" for node in self.nodes]
        lines.append(f"  return {', '.join(f'%{name}' for name in self.outputs)}")
        return "\n".join(lines)


def infer_outputs(
    op: str, inputs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> tuple[TensorSpec, ...]:
    """Output specs of `op`, from running its reference function on the meta device."""
    # A model's layers ask the same few questions; attributes print exactly, so text is a key.
    key = (op, tuple(inputs), repr(sorted(attrs.items())))
    known = _INFERRED.get(key)
    if known is None:
        reference, given = OPS[op].reference, without_data(op, attrs)
        result = reference(*(spec.meta() for spec in inputs), **given)
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        known = _INFERRED[key] = tuple(TensorSpec.of(tensor) for tensor in tensors)
    return known


_INFERRED: dict[tuple[str, tuple[TensorSpec, ...], str], tuple[TensorSpec, ...]] = {}


@dataclass
class GraphBuilder:
    """Builds a `Graph` node by node; names are made unique on the way."""

    inputs: dict[str, TensorSpec] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    orders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _taken: dict[str, int] = field(default_factory=dict)

    def fresh(self, hint: str) -> str:
        """A name that no value has yet, made from `hint`."""
        name = hint.replace(".", "_")
        while name in self._taken:
            self._taken[name] += 1
            candidate = f"{name}_{self._taken[name]}"
            name = candidate if candidate not in self._taken else name
        self._taken[name] = 0
        return name

    def input(self, hint: str, spec: TensorSpec, order: tuple[int, ...] | None = None) -> str:
        """Append an input and return its name; `order` as in `Graph.orders`."""
        name = self.fresh(hint)
        self.inputs[name] = self.specs[name] = spec
        if order is not None:
            self.orders[name] = order
        return name

    def constant(self, hint: str, tensor: torch.Tensor) -> str:
        name = self.fresh(hint)
        self.constants[name] = tensor.detach()
        self.specs[name] = TensorSpec.of(tensor)
        return name

    def node(
        self,
        op: str,
        inputs: Iterable[str],
        attrs: Mapping[str, Any] | None = None,
        *,
        hint: str | None = None,
        source: str = "",
    ) -> tuple[str, ...]:
        """Append a node and return the names of its values."""
        names = tuple(inputs)
        frozen = MappingProxyType({key: _freeze(item) for key, item in (attrs or {}).items()})
        outputs = infer_outputs(op, [self.specs[name] for name in names], frozen)
        node = Node(self.fresh(hint or op), op, names, frozen, outputs, source)
        self.nodes.append(node)
        self.specs.update(zip(node.values, outputs, strict=True))
        return node.values

    def add(
        self,
        op: str,
        *inputs: str,
        hint: str | None = None,
        source: str = "",
        **attrs: Any,
    ) -> str:
        """Append a node with one output and return its value's name."""
        (value,) = self.node(op, inputs, attrs, hint=hint, source=source)
        return value

    def build(self, outputs: Iterable[str]) -> Graph:
        """The graph; its constants lie on one device, which most of their bytes are on."""
        return Graph(
            MappingProxyType(dict(self.inputs)),
            MappingProxyType(_on_one_device(self.constants)),
            tuple(self.nodes),
            tuple(outputs),
            MappingProxyType(dict(self.orders)),
        )


def _on_one_device(constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    held: Counter[torch.device] = Counter()
    for tensor in constants.values():
        held[tensor.device] += tensor.nbytes
    home = max(held, key=held.__getitem__, default=None)
    return {name: tensor.to(home) for name, tensor in constants.items()}


@dataclass(frozen=True, eq=False)
class Group:
    """Nodes that become one kernel, as a graph of their own.

    `graph.inputs` and `graph.constants` are the values read from outside (a view that a member
    reads through is a member too, so an input is always a tensor that something stores);
    `graph.outputs` are the values that somebody outside reads.
    """

    name: str
    graph: Graph

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.graph.nodes

    @cached_property
    def compute(self) -> tuple[Node, ...]:
        """The members that are more than a view."""
        return tuple(node for node in self.nodes if not node.definition.is_view)

    def __str__(self) -> str:
        return f"{self.name}: {' -> '.join(node.op for node in self.compute)}"

    def lines(self) -> Iterator[str]:
        """The group as its name, what it reads and stores, and a line a node."""
        ins = ", ".join(f"%{n}" for n in (*self.graph.inputs, *self.graph.constants))
        outs = ", ".join(f"%{name}" for name in self.graph.outputs)
        yield f"{self.name}({ins}) -> {outs}:"
        yield from (f"  {node}" for node in self.nodes)

    @cached_property
    def form(self) -> str:
        """Its text without names: equal for groups whose nodes are alike, one by one.

        Where a slice begins does not count: each layer of a decoder may read its own part of one
        tensor.
        """
        graph = self.graph
        short = {name: f"x{index}" for index, name in enumerate(graph.inputs)}
        short |= {name: f"c{index}" for index, name in enumerate(graph.constants)}
        values = [value for node in graph.nodes for value in node.values]
        short |= {name: f"n{index}" for index, name in enumerate(values)}
        lines = [str(graph.specs[name]) for name in (*graph.inputs, *graph.constants)]
        for node in graph.nodes:
            inputs = tuple(short[name] for name in node.inputs)
            attrs = {"dim": node.attrs["dim"]} if node.op == "slice" else node.attrs
            lines.append(str(replace(node, name="", inputs=inputs, attrs=attrs)))
        return "\n".join([*lines, *(short[name] for name in graph.outputs)])

    @property
    def starts(self) -> tuple[int, ...]:
        """Where its slices begin."""
        return tuple(node.attrs["start"] for node in self.nodes if node.op == "slice")


@dataclass(frozen=True, eq=False)
class FusedGraph:
    """A rewritten graph and the groups it runs as, in launch order.

    Args:
        graph: the whole graph after every rewrite.
        groups: in an order that respects the edges; together they cover each compute node.
        refusals: (producer, consumer, reason) for each edge that was not fused.
        legal_plans: how many partitions into legal groups the search space held.
    """

    graph: Graph
    groups: tuple[Group, ...]
    refusals: tuple[tuple[str, str, str], ...] = ()
    legal_plans: int = 0

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, fold: bool = True) -> str:
        """Every group with its nodes; of repeated layers the first alone, if `fold`.

        x12, where each later one reads %add_3 of the one before in place of %embed:
          linear_2(%embed, %weight) -> %linear_2:
            %linear_2: f16[1,197,2304] = linear(%embed, %weight)
          ...
          read below: %add_47, which is %add_3 of the last
        """
        lines: list[str] = []
        at = 0
        for repeat in (*self.repeats, None) if fold else (None,):
            until = len(self.groups) if repeat is None else repeat.start
            lines += [line for group in self.groups[at:until] for line in group.lines()]
            if repeat is not None:
                lines += self._folded(repeat)
                at = repeat.end
        return "\n".join(lines)

    @cached_property
    def repeats(self) -> tuple[Repeat, ...]:
        """Runs of groups that are layers alike, by position; they hide the most groups."""
        return find_repeats(self._items)

    @cached_property
    def _items(self) -> tuple[Item, ...]:
        made: dict[str, Source] = {
            name: (position, output)
            for position, group in enumerate(self.groups)
            for output, name in enumerate(group.graph.outputs)
        }
        return tuple(
            Item(group.form, tuple(made.get(name, (OUTSIDE, name)) for name in group.graph.inputs))
            for group in self.groups
        )

    def _folded(self, repeat: Repeat) -> Iterator[str]:
        start, period, count = repeat.start, repeat.period, repeat.count
        body = self.groups[start : start + period]
        carried = first_reads(self._items, start, period) or {}
        swaps = [
            f"%{self._value(value)} of the one before in place of %{self._value(first)}"
            for value, first in carried.items()
        ]
        later = self.groups[start + period : repeat.end]
        moved = any(own.starts != body[i % period].starts for i, own in enumerate(later))
        facts = [f"each later one reads {' and '.join(swaps)}"] if swaps else []
        facts += ["slices begin elsewhere"] if moved else []
        yield f"x{count}, where {', and '.join(facts)}:" if facts else f"x{count}:"
        yield from (f"  {line}" for group in body for line in group.lines())
        read = {name for group in self.groups[repeat.end :] for name in group.graph.inputs}
        read |= self._returned
        for index, group in enumerate(later):
            turn, place = divmod(index, period)
            which = "the last" if turn == count - 2 else f"number {turn + 2}"
            for own, name in zip(group.graph.outputs, body[place].graph.outputs, strict=True):
                if own in read:
                    yield f"  read below: %{own}, which is %{name} of {which}"

    def _value(self, source: Source) -> str:
        position, which = source
        return which if isinstance(which, str) else self.groups[position].graph.outputs[which]

    @cached_property
    def _returned(self) -> frozenset[str]:
        """Stored values that the graph's outputs are, or are views of."""
        bases = []
        for name in self.graph.outputs:
            while (node := self.graph.producers.get(name)) and node.definition.is_view:
                name = node.inputs[0]
            bases.append(name)
        return frozenset(bases)


def subgraph(graph: Graph, nodes: Iterable[Node], outputs: Iterable[str]) -> Graph:
    """The graph of `nodes` alone: what they read from outside becomes inputs and constants."""
    chosen = {node.name for node in nodes}
    members = tuple(node for node in graph.nodes if node.name in chosen)
    made = {value for node in members for value in node.values}
    read = dict.fromkeys(name for node in members for name in node.inputs if name not in made)
    return Graph(
        MappingProxyType({n: graph.specs[n] for n in read if n not in graph.constants}),
        MappingProxyType({n: graph.constants[n] for n in read if n in graph.constants}),
        members,
        tuple(outputs),
    )
