"""`gtco.compile` without a GPU: what it selects, what it refuses and which records it uses."""

from __future__ import annotations

import gc
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco import compiler
from gtco.check import judge
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.compiler import FallbackError
from gtco.cost_model.knowledge import Knowledge
from gtco.cost_model.record import LIBRARY, TuningRecord
from gtco.ir.graph import Group
from gtco.options import OptionError
from gtco.passes.tasks import Task, workload_key
from gtco.runtime.module import CompiledModule
from gtco.selection import launches_of
from gtco.target import TARGETS, TargetError
from tests import groups, models

H100 = TARGETS["sm_90a"]
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
Records = Callable[..., None]


def image(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(dtype)


def tiny_vit(dtype: torch.dtype = torch.float32, depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return models.vit(depth=depth).to(dtype)


def compile_vit(dtype: torch.dtype, depth: int = 2, **options: Any) -> CompiledModule:
    return gtco.compile(tiny_vit(dtype, depth), (image(dtype),), **{"target": "sm_90a", **options})


class Mixed(nn.Module):
    """A linear, and a running product, which gtco generates no kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.fc(torch.logcumsumexp(x.mean((2, 3)), 1))
        return pooled


MIXED = (torch.randn(1, 8, 6, 6).half(),)


def linear() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return nn.Linear(64, 128).half().eval(), (torch.randn(32, 64).half(),)


# -- selection -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", TARGETS)
def test_a_vit_is_five_launches_a_layer_and_none_in_aten(arch: str) -> None:
    two, three = (
        compile_vit(torch.float16, depth, target=arch, fallback="error").launches
        for depth in (2, 3)
    )
    assert len(three) - len(two) == 5
    assert len(two) <= 2 * 5 + 8
    assert {launch.source for launch in two} <= {"record", "default"}
    assert all(launch.kernel.startswith(f"gtco_{launch.family}_") for launch in two)
    layer = [each for each in three if any("blocks.1" in module for module in each.modules)]
    families = Counter(each.family for each in layer)
    assert families["attention"] == 1 and set(families) == {"gemm", "attention"}


def test_equal_layers_share_their_kernels_and_all_compile() -> None:
    compiled = compile_vit(torch.float16, depth=4)
    shared = [kernel for kernel in compiled.kernels if kernel.launches > 1]
    assert len(shared) == 5
    assert all(kernel.launches >= 3 for kernel in shared)  # the last layer has one token to do
    assert sum(kernel.launches for kernel in compiled.kernels) == len(compiled.launches)
    for kernel in compiled.kernels:
        assert kernel.registers > 0 and kernel.cubin_bytes > 0
        assert kernel.spill_bytes == 0, kernel


@NO_GPU
def test_a_call_without_the_gpu_names_the_target() -> None:
    with pytest.raises(TargetError, match="compiled for sm_90a, and no CUDA GPU is here"):
        compile_vit(torch.float16)(image(torch.float16))


# -- refusals --------------------------------------------------------------------------------------


def test_a_fallback_is_an_error_where_asked_for() -> None:
    model = Mixed().half().eval()
    with pytest.raises(
        FallbackError, match=r"1 x aten\.logcumsumexp\.default: gtco has no kernel"
    ) as caught:
        gtco.compile(model, MIXED, target="sm_90a", fallback="error")
    assert 'pass fallback="warn"' in str(caught.value)
    assert "1 groups" in str(caught.value)


def test_a_fallback_is_named_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gtco"):
        compiled = gtco.compile(Mixed().half().eval(), MIXED, target="sm_90a")
    (without,) = (each for each in compiled.launches if each.source == "fallback")
    assert without.kernel == "aten" and without.ops == ("aten",)
    assert without.reason == "library: no sketch takes aten.logcumsumexp.default"
    assert (
        "1 x aten.logcumsumexp.default: gtco has no kernel that computes this; leave" in caplog.text
    )
    assert len(compiled.launches) > 1


class Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


def test_more_products_than_a_grid_has_blocks_along_z_have_a_kernel() -> None:
    a = torch.ones(70000, 8, 8)  # in 16 bits they are gemm_persistent's, whose blocks stay
    compiled = gtco.compile(Product(), (a, a), target="sm_90a", fallback="error")
    (launch,) = compiled.launches
    assert launch.source == "default"


@pytest.mark.parametrize(
    ("rows", "columns", "sketch"),
    [(1, 1000, "gemm_skinny"), (1, 3072, "gemm_wgmma"), (6304, 3072, "gemm_persistent")],
)
def test_an_untuned_group_takes_the_sketch_that_the_draft_prefers(
    rows: int, columns: int, sketch: str
) -> None:
    group = groups.norm_linear(rows, 768, columns, torch.float16)
    task = Task(workload_key(group, H100), group, (group,))
    (launch,) = launches_of(task, H100, Knowledge("none"))
    assert launch.program is not None
    assert (launch.program.sketch, launch.source) == (sketch, "default")


def test_an_unknown_option_suggests_the_known_one() -> None:
    model, args = linear()
    with pytest.raises(OptionError, match="unknown option 'precison'; did you mean 'precision'"):
        gtco.compile(model, args, target="sm_90a", precison="fp16")
    with pytest.raises(OptionError, match=r"'fp61' is not one of .* did you mean 'fp16'"):
        gtco.compile(model, args, target="sm_90a", precision="fp61")


@NO_GPU
def test_no_gpu_and_no_target_says_what_to_pass() -> None:
    model, args = linear()
    with pytest.raises(TargetError, match=r'no CUDA GPU is here .* pass target="sm_90a"'):
        gtco.compile(model, args)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("sm_75", "'sm_75' is older than sm_80, which gtco needs"),
        ("sm_90", "unknown target 'sm_90'; did you mean 'sm_90a'"),
        ("h100", "unknown target 'h100'.* gtco knows sm_80, sm_86, sm_87, sm_89, sm_90a, sm_100"),
    ],
)
def test_targets_that_gtco_does_not_have(target: str, reason: str) -> None:
    model, args = linear()
    with pytest.raises(TargetError, match=reason):
        gtco.compile(model, args, target=target)


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_a_lowered_model_keeps_its_dtypes(precision: str, dtype: torch.dtype) -> None:
    compiled = compile_vit(torch.float32, precision=precision, fallback="error")
    assert {launch.source for launch in compiled.launches} <= {"record", "default"}
    (out,) = gtco.interpret(compiled.graph, (image(),))
    assert out.dtype == torch.float32 and out.shape == (1, 10)
    with torch.no_grad():
        exact = tiny_vit(torch.float64)(image(torch.float64))
        eager = tiny_vit(dtype)(image(dtype)).float()
    verdict = judge(out, eager, exact, dtype)
    assert verdict.ok, verdict


@pytest.mark.parametrize(("precision", "hints"), [(None, 1), ("fp32", 0), ("tf32", 0)])
def test_fp32_that_nobody_asked_for_is_hinted_at(
    precision: str | None, hints: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, args = nn.Linear(64, 64).eval(), (torch.zeros(8, 64),)
    gtco.compile(model, args, target="sm_90a", precision=precision)
    assert sum('precision="tf32"' in line for line in caplog.messages) == hints


def test_a_model_in_tf32_is_generated_whole() -> None:
    compiled = compile_vit(torch.float32, precision="tf32", fallback="error")
    assert all(launch.kernel != "aten" for launch in compiled.launches)
    (out,) = gtco.interpret(compiled.graph, (image(),))
    with torch.no_grad():
        torch.testing.assert_close(out, tiny_vit()(image()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", [None, "fp32"])
def test_a_model_in_fp32_is_generated_whole(precision: str | None) -> None:
    compiled = compile_vit(torch.float32, precision=precision, fallback="error")
    assert all(launch.kernel != "aten" for launch in compiled.launches)
    assert bool(compiled.report().precision_hint) == (precision is None)
    (out,) = gtco.interpret(compiled.graph, (image(),))
    with torch.no_grad():
        torch.testing.assert_close(out, tiny_vit()(image()), rtol=1e-4, atol=1e-5)


def test_fp32_products_are_the_librarys_where_parts_of_tf32_are_slower() -> None:
    """FFMA has half of tf32's rate on sm_86, where three products would take half as long again."""
    compiled = compile_vit(torch.float32, target="sm_86")
    reasons = {launch.family: launch.reason for launch in compiled.launches}
    faster = "fp32 is predicted faster in the library than as tf32 on sm_86"
    assert reasons["gemm"] == reasons["attention"] == faster and not reasons["rowwise"]
    assert not compiled.report().fallbacks
    in_tf32 = compile_vit(torch.float32, target="sm_86", precision="tf32")
    assert all(launch.kernel != "aten" for launch in in_tf32.launches)


# -- records ---------------------------------------------------------------------------------------


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    """`records(*each)` makes them all there is for any card."""

    def install(*found: TuningRecord) -> None:
        monkeypatch.setattr(compiler, "known_on", lambda *_: Knowledge("H100", found))

    install()
    return install


def linear_group() -> Group:
    model, args = linear()
    (group,) = gtco.fuse(gtco.capture(model, args), target=H100)
    return group


def record(run_us: float = 2.0) -> TuningRecord:
    """A record with a schedule that is no default and a sketch that is not preferred."""
    group = linear_group()
    sketch = GemmMma(group, H100)
    defaults = list(sketch.defaults())
    schedule = next(schedule for schedule, _ in sketch.legal() if schedule not in defaults)
    key = workload_key(group, H100)
    return TuningRecord(key, "H100", sketch.name, sketch.version, schedule, run_us)


def chosen(records: Records, *found: TuningRecord) -> tuple[str, dict[str, int], str]:
    """(source, schedule, kernel) of a linear compiled with these records."""
    records(*found)
    model, args = linear()
    (launch,) = gtco.compile(model, args, target="sm_90a").launches
    return launch.source, dict(launch.schedule), launch.kernel


def test_the_fastest_record_is_used(records: Records) -> None:
    best = record()
    slower = replace(best, schedule={**best.schedule, "stages": 4}, run_us=3.0)
    source, schedule, kernel = chosen(records, slower, best)
    assert (source, schedule) == ("record", dict(best.schedule))
    assert kernel == GemmMma(linear_group(), H100).emit(best.schedule).name


def test_a_record_that_does_not_fit_is_not_used(
    records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    good = record()
    default = chosen(records)
    assert default[0] == "default" and default[1] != dict(good.schedule)
    for other in (
        replace(good, version=good.version - 1),
        replace(good, sketch="gemm_gone"),
        replace(good, workload=good.workload.replace("sm_90a", "sm_80")),
        replace(good, run_us=None, error="wrong answer"),
    ):
        assert chosen(records, other) == default
    assert not [each for each in caplog.records if each.name == "gtco"]
    illegal = replace(good, schedule={**good.schedule, "block_m": 8})
    assert chosen(records, illegal) == default
    assert "no longer legal" in caplog.text
    assert chosen(records, replace(good, version=0, run_us=1.0), good)[0] == "record"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stages": None}, r"the schedule lacks the knob stages \(of 2, 3, 4\)"),
        ({"stages": 0}, r"0 is no value of the knob stages \(of 2, 3, 4\)"),
        ({"block_m": -64}, r"-64 is no value of the knob block_m"),
        ({"split": 1}, "the sketch has no knob 'split'"),
    ],
)
def test_a_record_of_other_knobs_or_values_is_not_used(
    changes: dict[str, int | None],
    reason: str,
    records: Records,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = record()
    changed = {**good.schedule, **changes}
    schedule = {name: value for name, value in changed.items() if value is not None}
    assert chosen(records, replace(good, schedule=schedule)) == chosen(records)
    assert re.search(f"no longer legal: {reason}", caplog.text)


def test_a_library_that_was_measured_faster_runs(records: Records) -> None:
    good = record()
    library = replace(good, sketch=LIBRARY, version=1, schedule={}, run_us=1.0)
    records(good, library)
    model, args = linear()
    compiled = gtco.compile(model, args, target="sm_90a", fallback="error")
    (launch,) = compiled.launches
    assert (launch.kernel, launch.source) == ("aten", "record")
    assert launch.reason == "the library was measured faster"
    report = compiled.report()
    assert not report.fallbacks and [each.reason for each in report.library] == [launch.reason]
    assert chosen(records, library) == chosen(records), "no kernel was tried beside it"
    assert chosen(records, library, replace(good, version=0)) == chosen(records)
    assert chosen(records, library, replace(good, run_us=None, error="it hangs"))[2] == "aten"
    assert chosen(records, good, replace(library, run_us=3.0))[0] == "record"
    assert chosen(records, good, replace(library, run_us=3.0))[2] != "aten"


@pytest.mark.parametrize("on", (True, False))
def test_the_garbage_collector_is_left_as_it_was(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def capture(*_: object) -> None:
        seen.append(gc.isenabled())
        raise RuntimeError("planted")

    monkeypatch.setattr(compiler, "capture_for", capture)
    try:
        (gc.enable if on else gc.disable)()
        with pytest.raises(RuntimeError, match="planted"):
            gtco.compile(nn.Identity(), (torch.zeros(1),), target="sm_90a")
        assert (seen, gc.isenabled()) == ([False], on)
    finally:
        gc.enable()
