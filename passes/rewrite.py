"""Rules as data, and the driver that applies them.

A rule's name is its equation. Its `match` finds the pattern below a root node, its `check` says in
a sentence why the rule must not apply there, and its `replace` builds the new values:

    Rule("permute(permute(x)) -> permute(x)", ("permute",), match, check, replace)

The driver applies a set of rules until none fits, removes what nobody reads any more, and writes
refusals into a `Log`. It visits only the neighbourhood of what changed, so that the work grows
with the number of rewrites and not with the square of the graph.

A rewrite happens as a whole or not at all: a rule that raises, or whose values are not of the specs
that they replace, declines, and the graph is as it was.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch

from gtco.ir.graph import Graph, Node, _freeze, infer_outputs
from gtco.ir.ops import OPS
from gtco.ir.spec import GraphError, TensorSpec

M = TypeVar("M")
V = TypeVar("V")

DECLINED = "its rewrite fails here"
"""How the reason of a refusal begins that no check gave: the rule raised, or changed a spec."""

VISITS_PER_NODE = 200
"""A rule set that visits more often than this on average does not terminate."""


@dataclass(frozen=True)
class Refusal:
    """A pattern that was found but not rewritten."""

    rule: str
    node: str
    reason: str

    def __str__(self) -> str:
        return f"%{self.node}: {self.rule}: {self.reason}"


@dataclass
class Log:
    """What the passes did and what they refused, for reports."""

    applied: Counter[str] = field(default_factory=Counter)
    refusals: list[Refusal] = field(default_factory=list)


class Editor:
    """A graph under change: indexed nodes that can be added, rewired and removed.

    New nodes take the position of `anchor`, the root that is being rewritten; `finish` puts
    everything in topological order, as near to the old order as it allows.
    """

    def __init__(self, graph: Graph) -> None:
        self.inputs, self.orders = graph.inputs, graph.orders
        self.constants: dict[str, torch.Tensor] = dict(graph.constants)
        self._device = next((each.device for each in self.constants.values()), None)
        self.specs: dict[str, TensorSpec] = dict(graph.specs)
        self.nodes: dict[str, Node] = {node.name: node for node in graph.nodes}
        self.outputs = list(graph.outputs)
        self.anchor = 0
        self.source = ""
        self.touched: list[str] = []
        self._rank = {node.name: (i, 0) for i, node in enumerate(graph.nodes)}
        self._producers: dict[str, str] = {v: n.name for n in graph.nodes for v in n.values}
        self._users: dict[str, dict[str, None]] = defaultdict(dict)
        for node in graph.nodes:
            for name in node.inputs:
                self._users[name][node.name] = None
        self._taken: Counter[str] = Counter([*self.specs, *self.nodes])
        self._created = 0
        found = (node.attrs.get("products") for node in graph.nodes)
        self._products: str | None = next(filter(None, found), None)
        self._undo: list[tuple[MutableMapping[str, Any], str, Any]] = []

    # -- questions ---------------------------------------------------------------------------

    def producer(self, value: str, *ops: str) -> Node | None:
        """The node that makes `value`, if it is one of `ops` (any, if none are named)."""
        name = self._producers.get(value)
        if name is None or (ops and self.nodes[name].op not in ops):
            return None
        return self.nodes[name]

    def users(self, value: str) -> list[Node]:
        """The nodes that read `value`, in order."""
        names = self._users.get(value, {})
        return [self.nodes[name] for name in sorted(names, key=self._rank.__getitem__)]

    def is_output(self, value: str) -> bool:
        return value in self.outputs

    def read_once(self, value: str) -> bool:
        """One node reads `value`, and the caller does not."""
        return len(self._users.get(value, ())) == 1 and not self.is_output(value)

    def shape(self, value: str) -> tuple[int, ...]:
        return self.specs[value].sizes

    def dtype(self, value: str) -> torch.dtype:
        return self.specs[value].dtype

    def constant(self, value: str) -> torch.Tensor | None:
        return self.constants.get(value)

    def is_zero(self, value: str) -> bool:
        """Whether `value` is a constant that is 0 everywhere."""
        constant = self.constant(value)
        return constant is not None and not constant.any()

    # -- changes -----------------------------------------------------------------------------

    def add(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Append a node with one output; return its value."""
        (value,) = self.add_node(op, inputs, attrs)
        return value

    def add_views(self, value: str, views: Iterable[Node]) -> str:
        """Append what `views`, each of the one before, make of `value`; return the last."""
        for view in views:
            value = self.add(view.op, value, **view.attrs)
        return value

    def add_node(self, op: str, inputs: Sequence[str], attrs: Mapping[str, Any]) -> tuple[str, ...]:
        """Append a node; return its values.

        What multiplies f32 does so as the others of the graph, whatever it is made from.
        """
        if self._products:
            attrs = {key: value for key, value in attrs.items() if key != "products"}
            if OPS[op].multiplies and self.specs[inputs[0]].dtype == torch.float32:
                attrs["products"] = self._products
        frozen = MappingProxyType({key: _freeze(item) for key, item in attrs.items()})
        outputs = infer_outputs(op, [self.specs[name] for name in inputs], frozen)
        node = Node(self._fresh(op), op, tuple(inputs), frozen, outputs, self.source)
        self._created += 1
        self._put(self._rank, node.name, (self.anchor, self._created))
        self._put(self.nodes, node.name, node)
        for value, spec in zip(node.values, outputs, strict=True):
            self._put(self.specs, value, spec)
            self._put(self._producers, value, node.name)
        for name in node.inputs:
            self._put(self._users[name], node.name, None)
        self.touched.append(node.name)
        return node.values

    def add_constant(self, hint: str, tensor: torch.Tensor) -> str:
        """A new constant, where the others are: rules may compute it anywhere."""
        name = self._fresh(hint.replace(".", "_"))
        self._put(self.constants, name, tensor.detach().to(self._device))
        self._put(self.specs, name, TensorSpec.of(tensor))
        return name

    def replace(self, old: str, new: str) -> None:
        """Let everybody who reads `old` read `new`.

        Raises:
            GraphError: their specs differ.
        """
        self.replace_all([(old, new)])

    def replace_all(self, pairs: Iterable[tuple[str, str]]) -> None:
        """`replace` of each (old, new): what nobody reads any more goes at the end.

        Raises:
            GraphError: the specs of a pair differ.
        """
        changed = [pair for pair in pairs if pair[0] != pair[1]]
        for old, new in changed:
            self._rewire(old, new)
        for old, _ in changed:
            if producer := self._producers.get(old):
                self._remove_if_dead(producer)

    def _rewire(self, old: str, new: str) -> None:
        if self.specs[old] != self.specs[new]:
            raise GraphError(f"%{old}: {self.specs[old]} cannot become %{new}: {self.specs[new]}")
        for name in self._drop(self._users, old) or ():
            node = self.nodes[name]
            inputs = tuple(new if value == old else value for value in node.inputs)
            moved = Node(name, node.op, inputs, node.attrs, node.outputs, node.source)
            self._put(self.nodes, name, moved)
            self._put(self._users[new], name, None)
            self.touched.append(name)
        self.outputs = [new if value == old else value for value in self.outputs]
        if producer := self._producers.get(new):
            self.touched.append(producer)

    def remove_dead(self) -> None:
        """Remove every node that no output depends on."""
        for name in reversed(list(self.nodes)):
            if name in self.nodes:
                self._remove_if_dead(name)

    def finish(self) -> Graph:
        """The graph as it now is, without constants that nobody reads."""
        order = self._topological()
        read = {name for node in order for name in node.inputs}.union(self.outputs)
        constants = {name: t for name, t in self.constants.items() if name in read}
        nodes, outputs = tuple(order), tuple(self.outputs)
        return Graph(self.inputs, MappingProxyType(constants), nodes, outputs, self.orders)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What is done within counts as a whole: where it raises, nothing of it was done."""
        kept = (list(self.outputs), len(self.touched), self._created)
        self._undo.clear()
        try:
            yield
        except BaseException:
            for table, key, old in reversed(self._undo):
                if old is _ABSENT:
                    del table[key]
                else:
                    table[key] = old
            self.outputs, touched, self._created = kept
            del self.touched[touched:]
            raise
        finally:
            self._undo.clear()

    def _put(self, table: MutableMapping[str, V], key: str, value: V) -> None:
        self._undo.append((table, key, table.get(key, _ABSENT)))
        table[key] = value

    def _drop(self, table: MutableMapping[str, V], key: str) -> V | None:
        if key not in table:
            return None
        self._undo.append((table, key, table[key]))
        return table.pop(key)

    def root(self, node: Node) -> None:
        """Build from now on at `node`'s place and in its module's name."""
        self.anchor = self._rank[node.name][0]
        self.source = node.source

    def _fresh(self, hint: str) -> str:
        name = hint
        while name in self._taken:
            self._put(self._taken, hint, self._taken[hint] + 1)
            name = f"{hint}_{self._taken[hint] - 1}"
        self._put(self._taken, name, self._taken[name] + 1)
        return name

    def _remove_if_dead(self, name: str) -> None:
        pending = [name]
        while pending:
            node = self.nodes.get(pending.pop())
            if node is None or any(self._users.get(v) or v in self.outputs for v in node.values):
                continue
            self._drop(self.nodes, node.name)
            for value in node.values:
                self._drop(self._producers, value)
                self._drop(self.specs, value)
                self._drop(self._users, value)
            for value in dict.fromkeys(node.inputs):
                self._drop(self._users[value], node.name)
                self.touched += self._users[value]
                if producer := self._producers.get(value):
                    self.touched.append(producer)
                    pending.append(producer)

    def _topological(self) -> list[Node]:
        waiting = {
            node.name: len({self._producers[v] for v in node.inputs if v in self._producers})
            for node in self.nodes.values()
        }
        ready = [(self._rank[name], name) for name, count in waiting.items() if count == 0]
        heapq.heapify(ready)
        order: list[Node] = []
        while ready:
            _, name = heapq.heappop(ready)
            node = self.nodes[name]
            order.append(node)
            for user in dict.fromkeys(u for v in node.values for u in self._users.get(v, ())):
                waiting[user] -= 1
                if waiting[user] == 0:
                    heapq.heappush(ready, (self._rank[user], user))
        if len(order) != len(self.nodes):
            raise GraphError("a rewrite made a cycle")
        return order


def never_refused(edit: Editor, match: Any) -> str | None:
    """The check of a rule that is right wherever its pattern is found."""
    return None


@dataclass(frozen=True)
class Rule(Generic[M]):
    """One rewrite.

    Args:
        name: the equation, `before -> after`.
        roots: the ops whose nodes it looks at; empty means all.
        match: what the pattern binds at a node, or None if it is not there.
        replace: builds the replacement; returns one value per output of the root.
        check: None, or a sentence that says why the rule must not apply.
    """

    name: str
    roots: tuple[str, ...]
    match: Callable[[Editor, Node], M | None]
    replace: Callable[[Editor, M], str | tuple[str, ...]]
    check: Callable[[Editor, M], str | None] = never_refused


def rewrite(graph: Graph, rules: Sequence[Rule[Any]], log: Log | None = None) -> Graph:
    """Apply `rules` until none fits, and drop dead nodes.

    Raises:
        GraphError: the rules do not come to an end.
    """
    edit = Editor(graph)
    edit.remove_dead()
    edit.touched.clear()
    by_op: dict[str, list[Rule[Any]]] = defaultdict(list)
    for rule in rules:
        for op in rule.roots or (_ANY,):
            by_op[op].append(rule)
    applied: Counter[str] = Counter()
    refused: dict[tuple[str, str], str] = {}
    queue = _Queue(edit.nodes)
    for _ in range(VISITS_PER_NODE * (len(graph.nodes) + 1)):
        name = queue.pop()
        if name is None:
            break
        node = edit.nodes.get(name)
        if node is not None:
            _visit(edit, node, by_op[node.op] + by_op[_ANY], applied, refused)
            queue.extend(edit.touched)
            edit.touched.clear()
    else:
        raise GraphError(f"the rules do not come to an end: {applied.most_common(3)}")
    if log is not None:
        log.applied += applied
        log.refusals += [
            Refusal(rule, node, reason)
            for (rule, node), reason in refused.items()
            if node in edit.nodes
        ]
    edit.remove_dead()
    return edit.finish()


_ANY = "*"
_ABSENT = object()


class _Queue:
    """Names in order of arrival, each at most once."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = deque(names)
        self._waiting = set(self._names)

    def pop(self) -> str | None:
        if not self._names:
            return None
        name = self._names.popleft()
        self._waiting.discard(name)
        return name

    def extend(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._waiting:
                self._waiting.add(name)
                self._names.append(name)


def _visit(
    edit: Editor,
    node: Node,
    rules: Iterable[Rule[Any]],
    applied: Counter[str],
    refused: dict[tuple[str, str], str],
) -> None:
    """Apply the first rule that fits `node`."""
    for rule in rules:
        refused.pop((rule.name, node.name), None)
        try:
            with edit.transaction():
                done = _apply(edit, node, rule)
        except Exception as error:  # whatever went wrong, the graph without the rewrite is right
            done = f"{DECLINED}: {type(error).__name__}: {_first_line(error)}"
        if done is True:
            applied[rule.name] += 1
            return
        if done:
            refused[rule.name, node.name] = done


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _apply(edit: Editor, node: Node, rule: Rule[Any]) -> bool | str:
    """Whether `rule` was applied to `node`, or why not although its pattern is there."""
    match = rule.match(edit, node)
    if match is None:
        return False
    if reason := rule.check(edit, match):
        return reason
    edit.root(node)
    result = rule.replace(edit, match)
    values = (result,) if isinstance(result, str) else result
    edit.replace_all(zip(node.values, values, strict=True))
    return True


def merge_duplicates(graph: Graph, log: Log | None = None) -> Graph:
    """Two nodes that compute the same from the same inputs become one.

    %a = row_stats(%x)
    %b = row_stats(%x)      ->      %a = row_stats(%x)
    """
    renamed: dict[str, str] = {}
    seen: dict[tuple[Any, ...], Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        inputs = tuple(renamed.get(name, name) for name in node.inputs)
        key = (node.op, inputs, repr(sorted(node.attrs.items())))
        twin = None if is_random(node) else seen.get(key)
        if twin is not None:
            renamed.update(zip(node.values, twin.values, strict=True))
            continue
        if inputs != node.inputs:
            node = Node(node.name, node.op, inputs, node.attrs, node.outputs, node.source)
        seen[key] = node
        nodes.append(node)
    if log is not None and renamed:
        log.applied["f(x), f(x) -> f(x)"] += len(renamed)
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def is_random(node: Node) -> bool:
    """Whether two runs of `node` may differ."""
    if node.op != "aten":
        return False
    overload: Any = torch.ops
    for part in node.attrs["target"].split("."):
        overload = getattr(overload, part)
    return torch.Tag.nondeterministic_seeded in overload.tags
