"""What a compilation did: for the eye through rich, for programs through `to_dict`."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from gtco.ir.graph import Graph, Node
from gtco.passes.dataflow import Flow
from gtco.reporting.fallbacks import FallbackKind, fallback_kinds, group_ops, precision_hint
from gtco.runtime.plan import Plan

_WIDTH = 110


@dataclass(frozen=True)
class Fallback:
    """A launch without a generated kernel: its name, its operators and why."""

    name: str
    ops: str
    reason: str


@dataclass(frozen=True)
class Refusal:
    """An edge that was not fused, and why."""

    producer: str
    consumer: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The result of one compilation.

    Args:
        target: the architecture.
        operators: nodes of the captured graph that compute something.
        launches: kernels and ATen calls of one run.
        generated: how many of them are generated kernels.
        families: launches by family.
        sources: launches by where their schedule comes from.
        fallbacks: launches that have no generated kernel.
        fallback_kinds: the same by reason, with what the user can do.
        precision_hint: what a user who did not say `precision` can do about products in fp32.
        library: launches of ATen because it was measured faster.
        uncaptured: launches that no CUDA graph could hold.
        refusals: edges that were not fused.
        bytes_moved: what the launches of one run read and write.
        bytes_saved: what one kernel per captured operator would read and write, less
            `bytes_moved`.
        legal_plans: partitions that the search chose from.
        predicted_us: of one run, if every launch has a prediction.
        predicted_generated: share of that time in generated kernels.
    """

    target: str
    operators: int
    launches: int
    generated: int
    families: dict[str, int]
    sources: dict[str, int]
    fallbacks: tuple[Fallback, ...]
    fallback_kinds: tuple[FallbackKind, ...]
    precision_hint: str
    library: tuple[Fallback, ...]
    uncaptured: tuple[str, ...]
    refusals: tuple[Refusal, ...]
    bytes_moved: int
    bytes_saved: int
    legal_plans: int
    predicted_us: float | None
    predicted_generated: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def traffic(self) -> str:
        """What fusion saves of the bytes read and written, in words."""
        moved, saved = self.bytes_moved / 1e6, self.bytes_saved / 1e6
        return (
            f"{saved:.1f} MB: the launches read and write {moved:.1f} MB, "
            f"one kernel per operator {moved + saved:.1f} MB"
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._summary()
        if self.fallbacks:
            kinds = self.fallback_kinds
            rows = [(len(kind.launches), kind.ops, kind.explanation) for kind in kinds]
            yield _table("runs with ATen for want of a kernel", rows)
        if self.library:
            counts = Counter((each.ops, each.reason) for each in self.library)
            rows = [(count, *key) for key, count in counts.most_common()]
            yield _table("runs with ATen because it is faster", rows)
        if self.precision_hint:
            yield self.precision_hint
        for line in self.uncaptured:
            yield f"not in the CUDA graph: {line}"
        if self.refusals:
            yield self._refusal_table()

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=_WIDTH, color_system=None).print(self)
        return out.getvalue().rstrip()

    def _summary(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, value in self.facts():
            table.add_row(name, value)
        return table

    def facts(self) -> Iterator[tuple[str, str]]:
        """Name and text of each fact, for people."""
        yield "target", self.target
        yield "operators", str(self.operators)
        yield "launches", f"{self.launches}, {self.generated} of them generated"
        yield "families", _counts(self.families)
        yield "schedules", _counts(self.sources)
        yield "bytes saved", self.traffic()
        yield "legal plans", f"{self.legal_plans:.3g}" if self.legal_plans else "not counted"
        if self.predicted_us is not None and self.predicted_generated is not None:
            share = f"{self.predicted_generated:.0%} in generated kernels"
            yield "predicted", f"{self.predicted_us:.0f} us, {share}"

    def _refusal_table(self) -> Table:
        table = Table(title="edges not fused", title_justify="left")
        for column in ("edges", "for example", "reason"):
            table.add_column(column)
        kinds = refusal_kinds(self.refusals)
        for edges in sorted(kinds, key=len, reverse=True):
            first = edges[0]
            table.add_row(str(len(edges)), f"%{first.producer} -> %{first.consumer}", first.reason)
        return table


def refusal_kinds(refusals: Iterable[Refusal]) -> list[list[Refusal]]:
    """`refusals` by kind, in order: reasons that differ in names and numbers alone are of one."""
    kinds: dict[str, list[Refusal]] = {}
    for each in refusals:
        kinds.setdefault(re.sub(r"%\w+|\d[\d.]*", "_", each.reason), []).append(each)
    return list(kinds.values())


def telling_refusals(refusals: Sequence[Refusal], count: int = 3) -> tuple[Refusal, ...]:
    """The first `count` refusals of different kinds, then others until there are `count`."""
    kinds = refusal_kinds(refusals)
    first = [edges[0] for edges in kinds]
    others = [each for edges in kinds for each in edges[1:]]
    return tuple([*first, *others][:count])


def make_report(plan: Plan, captured: Graph, uncaptured: tuple[str, ...] = ()) -> Report:
    """The report of `plan`.

    Args:
        plan: what runs.
        captured: the graph that it was made from, before any rewrite.
        uncaptured: launches that no CUDA graph could hold.
    """
    launches = plan.launches
    operators = [(node,) for node in captured.nodes if not node.definition.is_view]
    moved = bytes_moved(plan.graph, [launch.group.compute for launch in launches])
    without = [launch for launch in launches if launch.program is None]
    named = {
        missing: tuple(
            Fallback(each.group.name, group_ops(each.group), each.reason)
            for each in without
            if (each.source == "fallback") == missing
        )
        for missing in (True, False)
    }
    times = [(each.program is not None, each.predicted_us) for each in launches]
    known = [(generated, us) for generated, us in times if us is not None]
    total = sum(us for _, us in known) if known and len(known) == len(launches) else None
    ours = sum(us for generated, us in known if generated)
    return Report(
        target=plan.target.arch,
        operators=len(operators),
        launches=len(launches),
        generated=len(launches) - len(without),
        families=dict(Counter(launch.family for launch in launches)),
        sources=dict(Counter(launch.source for launch in launches)),
        fallbacks=named[True],
        fallback_kinds=fallback_kinds(launches),
        precision_hint=precision_hint(plan),
        library=named[False],
        uncaptured=uncaptured,
        refusals=tuple(Refusal(*each) for each in plan.fused.refusals),
        bytes_moved=moved,
        bytes_saved=bytes_moved(captured, operators) - moved,
        legal_plans=plan.fused.legal_plans,
        predicted_us=total,
        predicted_generated=ours / total if total else None,
    )


def bytes_moved(graph: Graph, parts: Iterable[Iterable[Node]]) -> int:
    """Bytes that the parts of `graph` read and write if each part is one kernel.

    A value that several members read counts once, and no more of it than they read.
    """
    flow = Flow(graph)
    total = 0
    for part in parts:
        nodes = tuple(part)
        inside = {node.name for node in nodes}
        reads: dict[str, int] = {}
        for read in {read.value: read for node in nodes for read in flow.reads[node.name]}.values():
            producer = flow.producer(read)
            if producer is None or producer.name not in inside:
                seen = reads.get(read.base, 0) + graph.specs[read.value].nbytes
                reads[read.base] = min(seen, graph.specs[read.base].nbytes)
        values = [value for node in nodes for value in node.values]
        writes = [graph.specs[value].nbytes for value in values if flow.escapes(value, inside)]
        total += sum(reads.values()) + sum(writes)
    return total


def _counts(table: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(table.items()))


def _table(title: str, rows: Iterable[tuple[int, str, str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("launches", "operators", "reason"):
        table.add_column(column)
    for launches, ops, reason in rows:
        table.add_row(str(launches), ops, reason)
    return table
