"""What a compilation did: for the eye through rich, for programs through `to_dict`."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from gtco.graph import Graph, Group
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
        operators: nodes of the rewritten graph that compute something.
        launches: kernels and ATen calls of one run.
        generated: how many of them are generated kernels.
        families: launches by family.
        sources: launches by where their schedule comes from.
        fallbacks: launches that have no generated kernel.
        library: launches of ATen because it was measured faster.
        uncaptured: launches that no CUDA graph could hold.
        refusals: edges that were not fused.
        bytes_saved: of intermediate results that are never stored.
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
    library: tuple[Fallback, ...]
    uncaptured: tuple[str, ...]
    refusals: tuple[Refusal, ...]
    bytes_saved: int
    legal_plans: int
    predicted_us: float | None
    predicted_generated: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._summary()
        if self.fallbacks:
            yield _table("runs with ATen for want of a kernel", self.fallbacks)
        if self.library:
            yield _table("runs with ATen because it is faster", self.library)
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
        for name, value in self._facts():
            table.add_row(name, value)
        return table

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "target", self.target
        yield "operators", str(self.operators)
        yield "launches", f"{self.launches}, {self.generated} of them generated"
        yield "families", _counts(self.families)
        yield "schedules", _counts(self.sources)
        yield "never stored", f"{self.bytes_saved / 1e6:.2f} MB of intermediate results"
        yield "legal plans", f"{self.legal_plans:.3g}" if self.legal_plans else "not counted"
        if self.predicted_us is not None and self.predicted_generated is not None:
            share = f"{self.predicted_generated:.0%} in generated kernels"
            yield "predicted", f"{self.predicted_us:.0f} us, {share}"

    def _refusal_table(self) -> Table:
        reasons = Counter(each.reason for each in self.refusals)
        example = {each.reason: each for each in reversed(self.refusals)}
        table = Table(title="edges not fused", title_justify="left")
        for column in ("edges", "reason", "for example"):
            table.add_column(column)
        for reason, count in reasons.most_common():
            first = example[reason]
            table.add_row(str(count), reason, f"%{first.producer} -> %{first.consumer}")
        return table


def make_report(plan: Plan, uncaptured: tuple[str, ...] = ()) -> Report:
    """The report of `plan`."""
    launches = plan.launches
    without = [launch for launch in launches if launch.program is None]
    named = {
        missing: tuple(
            Fallback(each.group.name, _ops(each.group), each.reason)
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
        operators=sum(not node.definition.is_view for node in plan.graph.nodes),
        launches=len(launches),
        generated=len(launches) - len(without),
        families=dict(Counter(launch.family for launch in launches)),
        sources=dict(Counter(launch.source for launch in launches)),
        fallbacks=named[True],
        library=named[False],
        uncaptured=uncaptured,
        refusals=tuple(Refusal(*each) for each in plan.fused.refusals),
        bytes_saved=bytes_saved(plan),
        legal_plans=plan.fused.legal_plans,
        predicted_us=total,
        predicted_generated=ours / total if total else None,
    )


def bytes_saved(plan: Plan) -> int:
    """Bytes of computed values that live in a kernel only: unfused, each would be stored."""
    saved = 0
    for launch in plan.launches:
        graph = launch.group.graph
        stored = {_computed(graph, name) for name in graph.outputs}
        for node in launch.group.compute:
            for value, spec in zip(node.values, node.outputs, strict=True):
                saved += 0 if value in stored else spec.nbytes
    return saved


def _computed(graph: Graph, value: str) -> str:
    """The value that `value` is a view of."""
    while (node := graph.producers.get(value)) is not None and node.definition.is_view:
        value = node.inputs[0]
    return value


def _ops(group: Group) -> str:
    names = []
    for node in group.compute:
        target = node.attrs.get("target")
        names.append(node.op if target is None else str(target))
    return " -> ".join(names)


def _counts(table: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(table.items()))


def _table(title: str, rows: tuple[Fallback, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("launch", "operators", "reason"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.name, row.ops, row.reason)
    return table
