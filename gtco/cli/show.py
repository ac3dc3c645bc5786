"""What the commands print: tables for people, plain values for `--json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gtco.benchmarking.bench import BenchResult, KernelTime
from gtco.benchmarking.compare import Comparison, GroupCheck
from gtco.benchmarking.onnx_peer import OnnxRuntime
from gtco.check import Verdict
from gtco.cli.demo import NAME, TARGET, Rehearsal
from gtco.cost_model.plans import FLOOR
from gtco.frontend.torch_export import Captured
from gtco.reporting.report import make_report, telling_refusals
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.infos import KernelInfo, LaunchInfo, kernel_infos, launch_infos
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import Plan
from gtco.target import TARGETS


def _table(title: str, *columns: str, texts: int = 1) -> Table:
    """A table whose first `texts` columns are text and whose other columns are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < texts else "right")
    return table


# -- env -----------------------------------------------------------------------------------------


def environment(console: Console, facts: dict[str, Any], known: Sequence[dict[str, Any]]) -> None:
    table = Table.grid(padding=(0, 2))
    for name, version in facts["packages"].items():
        table.add_row(name, version or "not installed")
    table.add_row("python", facts["python"])
    table.add_row("platform", facts["platform"])
    table.add_row("NVRTC", facts["nvrtc"] or "not found")
    table.add_row("CUDA (torch)", facts["cuda"] or "none: a CPU build")
    table.add_row("CUDA (driver)", facts["driver"] or "none")
    for gpu in facts["gpus"]:
        target = gpu["target"] or "no target for it"
        size = gpu["memory_bytes"] / 2**30
        table.add_row("GPU", f"{gpu['name']}, {target}, {size:.0f} GiB")
    if not facts["gpus"]:
        table.add_row("GPU", "none")
    for each in known:
        kin = f"{each['kin']} of other cards of its architecture"
        if each["kin_devices"]:
            kin += f" ({', '.join(each['kin_devices'])}: schedules without times)"
        times = f"{each['library_times']} times of ATen"
        counts = f"{each['own']} own, {kin}, {each['stale']} stale, {times}"
        table.add_row("records", f"{each['gpu']}: {counts}")
    table.add_row("targets", ", ".join(TARGETS))
    cache = facts["cache"]
    state = "" if cache["used"] and cache["writable"] else " (not usable)"
    table.add_row("cache", cache["folder"] + state)
    console.print(table, highlight=False)


# -- bench ---------------------------------------------------------------------------------------


def bench(console: Console, model: str, result: BenchResult) -> None:
    table = _table(
        f"{model}, microseconds a call",
        "",
        "synchronised p50",
        "p90",
        "p99",
        "host",
        "back to back",
        "x gtco's",
        "answer",
    )
    if result.rehearsal:
        console.print("rehearsed on the CPU: these times say nothing about a GPU")
    ours = result.timings["gtco"].back_to_back_us
    for name, timing in result.timings.items():
        verdicts = result.verdicts[name].values()
        table.add_row(
            name,
            *(f"{timing.single_us[key]:.1f}" for key in ("p50", "p90", "p99")),
            f"{timing.host_us:.1f}",
            f"{timing.back_to_back_us:.1f}",
            f"{timing.back_to_back_us / ours:.2f}",
            "right" if all(verdict.ok for verdict in verdicts) else "WRONG",
        )
    console.print(table)
    for peer, ratio in result.ratios.items():
        spread = f"{ratio['back_to_back_low']:.2f} to {ratio['back_to_back_high']:.2f}"
        name = result.best[peer]
        console.print(
            f"{name} takes {ratio['back_to_back']:.2f} times as long as gtco back to back "
            f"({spread} over the rounds), {ratio['single_p50']:.2f} times synchronised",
            highlight=False,
        )
    if result.floor_us:
        console.print(
            f"gtco takes {ours / result.floor_us:.2f} times the floor back to back, "
            f"{result.floor_us:.1f} us: {FLOOR}",
            highlight=False,
        )
    if OnnxRuntime.name in result.timings:
        line = (
            f"{OnnxRuntime.name} ran on the CPU, copies from and to the GPU included: no GPU peer"
        )
        console.print(line, highlight=False)
    for name, reason in result.failures.items():
        console.print(f"{name} failed: {reason}", markup=False, highlight=False)
    for kind, verdict in result.verdicts["gtco"].items():
        console.print(f"answer for {kind} inputs is {verdict}", highlight=False)
    share = result.generated_share
    known = "an unknown share" if share is None else f"{share:.1%}"
    console.print(_profile_table(result.kernels))
    console.print(
        f"{result.launches} launches; {known} of gtco's GPU time runs in generated kernels",
        highlight=False,
    )


def _profile_table(kernels: tuple[KernelTime, ...]) -> Table:
    table = _table("gtco's call in the profiler", "kernel", "launches", "mean us", "share")
    for kernel in kernels:
        launches, share = f"{kernel.launches:g}", f"{kernel.share:.1%}"
        table.add_row(kernel.name, launches, f"{kernel.mean_us:.2f}", share)
    return table


# -- compare -------------------------------------------------------------------------------------


def comparison(console: Console, model: str, result: Comparison) -> None:
    table = _table(
        f"{model}, errors against the model in fp64",
        "",
        "inputs",
        "output",
        "RMSE",
        "limit",
        "max abs",
        "answer",
        texts=3,
    )
    for each in result.outputs:
        errors = _errors(each.verdict, each.max_abs)
        table.add_row(each.contestant, each.kind, escape(each.output), *errors)
    console.print(table, highlight=False)
    if not result.groups:
        return
    table = _table(
        "each group, given the interpreter's values, against the interpreter in fp64",
        "group",
        "operators",
        "RMSE",
        "limit",
        "max abs",
        "answer",
        texts=2,
    )
    for check in result.groups:
        errors = _errors(check.verdict, check.max_abs)
        table.add_row(check.group, " -> ".join(check.ops), *errors)
    console.print(table, highlight=False)
    first = result.first_wrong_group
    line = "every group agrees with the interpreter" if first is None else _first_wrong(first)
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _errors(verdict: Verdict, max_abs: float | None) -> tuple[str, ...]:
    largest = "" if max_abs is None else f"{max_abs:.2e}"
    answer = "right" if verdict.ok else "WRONG"
    return f"{verdict.rmse:.2e}", f"{verdict.limit:.2e}", largest, answer


def _first_wrong(check: GroupCheck) -> str:
    modules = ", ".join(check.modules) or "no module"
    return f"the first wrong group is {check}\n  kernel {check.kernel}, from {modules}"


# -- compile and demo ----------------------------------------------------------------------------


def compiled(console: Console, module: CompiledModule, kernels: tuple[KernelInfo, ...]) -> None:
    console.print(module.report(), highlight=False)
    console.print(_launch_table(module.launches), highlight=False)
    console.print(_kernel_table("kernels", kernels), highlight=False)


def compiled_json(module: CompiledModule, kernels: tuple[KernelInfo, ...]) -> dict[str, Any]:
    return {
        "report": module.report().to_dict(),
        "kernels": [asdict(kernel) for kernel in kernels],
        "launches": [asdict(launch) for launch in module.launches],
    }


def _launch_table(launches: tuple[LaunchInfo, ...]) -> Table:
    """One row for launches that are alike, in order of the first, and a row of totals."""
    kinds: dict[tuple[Any, ...], list[LaunchInfo]] = {}
    for launch in launches:
        kinds.setdefault((launch.ops, launch.kernel, launch.source), []).append(launch)
    title = "launches (times are predicted, of one launch; the total of all)"
    table = _table(title, "operators", "launches", "us", "schedule", "kernel")
    for alike in kinds.values():
        first = alike[0]
        table.add_row(
            " -> ".join(first.ops),
            str(len(alike)),
            _predicted([first]),
            first.source,
            first.kernel,
        )
    table.add_section()
    sources = Counter(launch.source for launch in launches)
    counts = ", ".join(f"{count} {source}" for source, count in sources.items())
    table.add_row("total", str(len(launches)), _predicted(launches), counts, "")
    return table


def _predicted(launches: Sequence[LaunchInfo]) -> str:
    times = [launch.predicted_us for launch in launches if launch.predicted_us is not None]
    return f"{sum(times):.1f}" if len(times) == len(launches) else ""


def _kernel_table(title: str, kernels: tuple[KernelInfo, ...]) -> Table:
    table = _table(title, "kernel", "launches", "registers", "shared memory", "spilled", "cubin")
    for kernel in kernels:
        table.add_row(
            kernel.name,
            str(kernel.launches),
            str(kernel.registers),
            f"{kernel.smem_bytes} B",
            f"{kernel.spill_bytes} B",
            f"{kernel.cubin_bytes} B",
        )
    return table


# -- inspect -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inspected:
    """A plan to look at.

    Args:
        plan: what would run.
        captured: the model's signature.
        compiled: the kernels by entry point, if they are compiled.
        gtco_version: of the gtco that wrote the artifact, if it is one.
    """

    plan: Plan
    captured: Captured
    compiled: Mapping[str, CompiledKernel] = field(default_factory=dict)
    gtco_version: str | None = None

    @property
    def kernels(self) -> tuple[KernelInfo, ...]:
        """What is known of the compiled kernels."""
        return kernel_infos(self.plan, self.compiled) if self.compiled else ()


def inspected(console: Console, found: Inspected) -> None:
    if found.gtco_version is not None:
        facts = Table.grid(padding=(0, 2))
        facts.add_row("made by", f"gtco {found.gtco_version}")
        facts.add_row("made for", found.plan.target.arch)
        for name, value in asdict(found.plan.options).items():
            facts.add_row(name, str(value))
        console.print(facts, highlight=False)
    for kind, table in (("input", "inputs"), ("output", "outputs")):
        for name in getattr(found.captured.graph, table):
            spec = found.captured.graph.specs[name]
            console.print(f"{kind} %{name}: {spec}", markup=False, highlight=False)
    report = make_report(found.plan, found.captured.graph)
    console.print(report, highlight=False)
    console.print(_launch_table(launch_infos(found.plan)), highlight=False)
    if found.kernels:
        console.print(_kernel_table("kernels", found.kernels), highlight=False)
    if report.refusals:
        console.print("each edge not fused", style="bold")
    for edge in report.refusals:
        line = f"  %{edge.producer} -> %{edge.consumer}: {edge.reason}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def inspected_json(found: Inspected) -> dict[str, Any]:
    graph = found.captured.graph
    return {
        "gtco_version": found.gtco_version,
        "options": asdict(found.plan.options),
        "inputs": {name: str(spec) for name, spec in graph.given.items()},
        "outputs": [str(graph.specs[name]) for name in graph.outputs],
        "report": make_report(found.plan, graph).to_dict(),
        "launches": [asdict(launch) for launch in launch_infos(found.plan)],
        "kernels": [asdict(kernel) for kernel in found.kernels],
    }


def rehearsal(console: Console, rehearsed: Rehearsal) -> None:
    report = rehearsed.compiled.report()
    console.print(f"{NAME}, fp16, batch 1, for {TARGET}", style="bold", highlight=False)
    facts = Table.grid(padding=(0, 2))
    facts.add_row("operators in", str(report.operators))
    facts.add_row("launches out", f"{report.launches}, {report.generated} of them generated")
    facts.add_row("bytes saved", report.traffic())
    facts.add_row("legal plans", f"{report.legal_plans:.3g}")
    if report.predicted_us is not None:
        facts.add_row("time", f"{report.predicted_us:.0f} us a call (predicted, not measured)")
    console.print(facts, highlight=False)
    console.print("\nnot fused, for example", style="bold")
    for edge in telling_refusals(report.refusals):
        line = f"  %{edge.producer} -> %{edge.consumer}: {edge.reason}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(_kernel_table(f"cubins for {TARGET}", rehearsed.kernels), highlight=False)
    host = "Without a C++ compiler no kernel was run on the CPU."
    if rehearsed.on_host is not None:
        host = f"The kernels of a ViT of two layers, run on the CPU in fp16: {rehearsed.on_host}."
    console.print(
        f"\nThe fused graph, run in fp32, is {rehearsed.verdict}.\n{host}\n{LAST_LINE}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


LAST_LINE = (
    "Checked on the CPU; nothing was timed here. Your own model: "
    f"gtco compile your_module:your_function --target {TARGET}"
)


def rehearsal_json(rehearsed: Rehearsal) -> dict[str, Any]:
    return {
        "timed": False,
        "verdict": rehearsed.verdict.to_dict(),
        "on_host": None if rehearsed.on_host is None else rehearsed.on_host.to_dict(),
        **compiled_json(rehearsed.compiled, rehearsed.kernels),
    }
