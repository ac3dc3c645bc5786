"""The benchmark's judgement and bookkeeping, without a GPU: who runs when, and what is refused."""

from __future__ import annotations

import gc
import io
import itertools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from gtco.benchmarking.answers import (
    Call,
    Inputs,
    fresh_inputs,
    in_precision,
    parse_peers,
    references,
)
from gtco.benchmarking.bench import (
    BenchResult,
    WrongAnswer,
    bench,
    check_answers,
    compare,
    kernel_times,
)
from gtco.benchmarking.contestants import (
    EAGER_CALLS,
    MAKERS,
    PEERS,
    TENSORRT,
    TORCHSCRIPT,
    UNTUNED,
    Cost,
    NoGpu,
    Setting,
    costs,
)
from gtco.benchmarking.onnx_peer import BoundOnnxRuntime, export_onnx
from gtco.benchmarking.rounds import SETTLING_US, Timing, percentiles, time_rounds
from gtco.benchmarking.tensorrt_peer import TensorRTPlace
from gtco.check import Verdict
from gtco.cli import show
from gtco.locate import Located, UsageError
from gtco.options import Options


class ScriptedClock:
    """Gives each contestant times of its own and keeps what was timed: a call, and how many of it
    back to back, or one that was waited for."""

    def __init__(self, times: dict[Call, float]) -> None:
        self.times = times
        self.timed: list[tuple[Call, int | str]] = []

    def single(self, call: Call, inputs: Inputs) -> tuple[float, float]:
        self.timed.append((call, "single"))
        return self.times[call] + 5, 4.0

    def back_to_back(self, call: Call, inputs: Sequence[Inputs], calls: int) -> float:
        self.timed.append((call, calls))
        return self.times[call]


def located(module: nn.Module, *args: torch.Tensor) -> Located:
    return Located("a_module:a_function", module.eval(), args, {})


def test_contestants_take_turns_and_each_round_starts_with_another() -> None:
    def ours(x: object) -> None: ...
    def theirs(x: object) -> None: ...

    clock = ScriptedClock({ours: 100.0, theirs: 200.0})
    inputs: list[Inputs] = [((1,), {})]
    timings = time_rounds({"gtco": ours, "eager": theirs}, inputs, clock, rounds=2, calls=10)
    turns = [call for call, _ in itertools.groupby(call for call, _ in clock.timed)]
    assert turns == [ours, theirs, ours]  # the second round starts where the first ended
    assert timings["gtco"].single_us == {"p50": 105.0, "p90": 105.0, "p99": 105.0}
    assert timings["eager"].rounds_us == (200.0, 200.0)
    assert timings["eager"].host_us == 4.0


def test_calls_that_count_follow_others_back_to_back_for_as_long_as_clocks_take_to_settle() -> None:
    def ours(x: object) -> None: ...

    clock = ScriptedClock({ours: 150.0})
    time_rounds({"gtco": ours}, [((1,), {})], clock, rounds=1, calls=10)
    timed = [what for _, what in clock.timed]
    assert timed.index(10) < timed.index("single")  # the GPU is idle in between single calls
    ahead = timed[: timed.index(10)]
    assert sum(each for each in ahead if isinstance(each, int)) * 150.0 >= SETTLING_US


def test_percentiles() -> None:
    assert percentiles(range(101)) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def timing(*rounds: float) -> Timing:
    return Timing({"p50": rounds[0], "p90": rounds[0], "p99": rounds[0]}, 1, rounds[0], rounds)


class Caching(nn.Module):
    """Keeps a tensor of its first call, as LeViT keeps its biases."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.kept.setdefault("bias", x.new_ones(1) * 2)


def test_what_a_module_keeps_of_inductors_calls_is_not_eagers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It lies in a CUDA graph's memory, which the next replay writes."""
    monkeypatch.setattr(Setting, "need_gpu", lambda self: None)
    monkeypatch.setattr(torch, "compile", lambda module, mode: module)
    module, x = Caching(), torch.ones(3)
    with ExitStack() as stack:
        setting = Setting(Located("m", module, (x,), {}), module, Options(), tmp_path, stack)
        call = MAKERS["inductor reduce-overhead"](setting)
        assert torch.equal(call(x), torch.full((3,), 3.0))
    assert not module.kept


def test_the_better_mode_stands_for_inductor_and_a_failed_one_does_not() -> None:
    slow, fast = "inductor reduce-overhead", "inductor max-autotune"
    result = BenchResult(
        verdicts={name: {"normal": Verdict("")} for name in ("gtco", slow, fast)},
        timings={"gtco": timing(100, 50), slow: timing(300, 300), fast: timing(200, 50)},
    )
    compare(result, ["eager", "inductor"])
    assert result.best == {"inductor": fast}
    assert result.ratios["inductor"]["back_to_back"] == 1.5  # the median of 200/100 and 50/50
    assert result.ratios["inductor"]["back_to_back_low"] == 1.0
    del result.timings[fast]
    compare(result, ["inductor"])
    assert result.best == {"inductor": slow}


def test_whose_answer_is_wrong_stands_for_no_peer() -> None:
    slow, fast = "inductor reduce-overhead", "inductor max-autotune"
    result = BenchResult(
        verdicts={name: {"normal": Verdict("")} for name in ("gtco", slow)}
        | {fast: {"normal": Verdict(""), "outliers": Verdict("NaN")}},
        timings={"gtco": timing(100, 100), slow: timing(300, 300), fast: timing(200, 200)},
    )
    compare(result, ["inductor"])
    assert result.best == {"inductor": slow}


def test_the_table_names_everyone_and_what_failed() -> None:
    result = BenchResult(
        verdicts={
            "gtco": {"normal": Verdict("")},
            "eager": {"normal": Verdict("")},
            "inductor reduce-overhead": {"normal": Verdict("NaN")},
        },
        timings={
            "gtco": timing(100, 100),
            "eager": timing(150, 170),
            "inductor reduce-overhead": timing(90, 90),
        },
        failures={"inductor max-autotune": "RuntimeError: no compiler"},
        launches=63,
        floor_us=40.0,
        kernels=kernel_times([("gtco_gemm_1", 6.0), ("Memcpy DtoD", 2.0)], calls=1),
    )
    compare(result, ["eager", "inductor"])
    out = io.StringIO()
    show.bench(Console(file=out, width=120), located(nn.Identity()).name, result)
    text = out.getvalue()
    assert "eager takes 1.60 times as long as gtco back to back (1.50 to 1.70" in text
    assert "gtco takes 2.50 times the floor back to back, 40.0 us" in text
    assert "inductor max-autotune failed: RuntimeError: no compiler" in text
    assert text.count("WRONG") == 1
    assert "63 launches; 75.0% of gtco's GPU time" in text
    assert "Memcpy DtoD" in text
    assert "ran on the CPU" not in text


def test_onnx_runtime_is_named_as_what_runs_on_the_cpu() -> None:
    result = BenchResult(
        verdicts={"gtco": {"normal": Verdict("")}, "onnxruntime (CPU)": {"normal": Verdict("")}},
        timings={"gtco": timing(100, 100), "onnxruntime (CPU)": timing(1000, 1000)},
    )
    compare(result, ["onnxruntime"])
    out = io.StringIO()
    show.bench(Console(file=out, width=120), "model.onnx", result)
    assert "onnxruntime (CPU) takes 10.00 times as long as gtco" in out.getvalue()
    assert "onnxruntime (CPU) ran on the CPU" in out.getvalue()


def test_kernels_are_added_up_by_name() -> None:
    spans = [("gtco_gemm_1", 2.0), ("gtco_gemm_1", 4.0), ("ampere_sgemm", 10.0), ("Memcpy", 4.0)]
    result = BenchResult(kernels=kernel_times(spans, calls=2))
    assert [kernel.name for kernel in result.kernels] == ["ampere_sgemm", "gtco_gemm_1", "Memcpy"]
    gemm = result.kernels[1]
    assert (gemm.launches, gemm.mean_us, gemm.share) == (1.0, 3.0, 0.3)
    assert result.generated_share == 0.3
    assert result.to_dict()["kernels"][1]["mean_us"] == 3.0
    assert BenchResult(kernels=kernel_times([], calls=2)).generated_share is None


def test_peers_are_parsed() -> None:
    assert parse_peers("eager, inductor,eager", PEERS) == ("eager", "inductor")
    assert parse_peers("", PEERS) == ()
    assert parse_peers("onnxruntime", PEERS) == ("onnxruntime",)
    with pytest.raises(UsageError, match="tvm"):
        parse_peers("eager,tvm", PEERS)


def test_fresh_inputs_are_new_and_fit() -> None:
    mask = torch.tensor([True, False])
    like: Inputs = ((torch.zeros(64, 64).half(), torch.tensor([3, 9]), "mode"), {"mask": mask})
    (image, labels, mode), kwargs = fresh_inputs(like, "normal", 0)
    assert image.dtype == torch.float16 and image.std() > 0.9
    assert labels.dtype == torch.int64 and labels.min() >= 3 and labels.max() <= 9
    assert mode == "mode"
    assert torch.equal(kwargs["mask"], mask)
    other = fresh_inputs(like, "normal", 1)[0][0]
    assert not torch.equal(image, other)
    assert fresh_inputs(like, "large mean", 0)[0][0].mean() > 7
    assert fresh_inputs(like, "outliers", 0)[0][0].abs().max() > 10


def test_peers_compute_in_the_precision_that_was_asked_for() -> None:
    model = nn.Linear(8, 8)
    assert in_precision(model, None) is model
    assert in_precision(model, "tf32") is model
    assert in_precision(model, "fp32") is model
    low = in_precision(model, "bf16")
    x = torch.randn(2, 8)
    answer = low(x)
    assert answer.dtype == torch.float32
    assert torch.equal(answer, answer.bfloat16().float())
    assert model.weight.dtype == torch.float32  # the user's model is left as it is


class Forgetful(nn.Module):
    """Right once; afterwards it gives back the tensor that it gave before."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.answer: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.answer is None:
            self.answer = self.model(x)
        return self.answer


class Cancelling(nn.Module):
    """Layer norm with the variance as a difference of squares, which a large mean destroys."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / (variance + 1e-6).sqrt()


@torch.no_grad()
def test_answers_are_checked_on_fresh_poisoned_and_hard_inputs() -> None:
    model = located(nn.LayerNorm(256, eps=1e-6).half(), torch.randn(4, 256).half())
    result = BenchResult()
    check_answers(result, {"gtco": model.module}, model, references(model, None), None)
    assert len(result.verdicts["gtco"]) == 3
    for wrong in (Forgetful(model.module), Cancelling(), nn.Identity()):
        with pytest.raises(WrongAnswer, match="gtco's answer for"):
            check_answers(BenchResult(), {"gtco": wrong}, model, references(model, None), None)


@torch.no_grad()
def test_a_peers_wrong_answer_is_on_record_and_stops_nothing() -> None:
    model = located(nn.Linear(64, 64).half(), torch.randn(4, 64).half())
    result = BenchResult()
    contestants = {"gtco": model.module, "eager": nn.Identity()}
    check_answers(result, contestants, model, references(model, None), None)
    assert not result.verdicts["eager"]["normal"].ok
    assert result.to_dict()["verdicts"]["eager"]["normal"]["ok"] is False
    assert result.verdicts["gtco"]["normal"].ok


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_is_timed() -> None:
    with pytest.raises(NoGpu, match="no CUDA GPU"):
        bench(located(nn.Linear(4, 4), torch.randn(2, 4)), Options())


class OneOfATuple(nn.Module):
    """An output whose structure no ONNX file keeps."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.layers(x),)


@pytest.mark.compiler
def test_a_rehearsal_on_the_cpu_takes_every_peer_that_runs_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "stand_ins"))
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    model = located(OneOfATuple(layers).half(), torch.randn(32, 64).half())
    told: list[str] = []
    result = bench(
        model,
        Options(target="host"),
        tuple(PEERS),
        rounds=1,
        calls=2,
        tensorrt=TensorRTPlace(Path(sys.executable)),
        tell=told.append,
    )
    run = {"gtco", UNTUNED, EAGER_CALLS, TORCHSCRIPT, "onnxruntime (CPU)", TENSORRT}
    if not torch.cuda.is_available():
        assert result.timings.keys() == run
        assert "CUDA GPU" in result.failures["eager"]
        assert "CUDA GPU" in result.failures["onnxruntime (CUDA)"]
    assert result.rehearsal and not result.kernels
    assert all(each.ok for name in run for each in result.verdicts[name].values())
    assert result.costs.keys() == run and result.costs["gtco"].memory_bytes is None
    assert result.facts["version"] == "8.5.3.1"
    assert result.weight_bytes == 2 * (2 * 64 * 128 + 128 + 64)
    assert "round 1 of 1: TensorRT" in told
    console = Console(file=io.StringIO(), width=120)
    show.bench(console, model.name, result)


@torch.no_grad()
def test_a_peer_that_raises_is_noted_and_has_no_times() -> None:
    def ours(x: object) -> None: ...
    def late(x: object) -> None: ...

    class Tired(ScriptedClock):
        def single(self, call: Call, inputs: Inputs) -> tuple[float, float]:
            if call is late:
                raise RuntimeError("tired\nof it")
            return super().single(call, inputs)

    failures: dict[str, str] = {}
    clock = Tired({ours: 10.0, late: 20.0})
    contestants: dict[str, Call] = {"gtco": ours, "eager": late}
    timings = time_rounds(contestants, [((1,), {})], clock, 2, 3, failures=failures)
    assert timings.keys() == {"gtco"} and failures == {"eager": "RuntimeError: tired"}
    assert sum(call is late and what == 3 for call, what in clock.timed) == 2, "never again"

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    model = located(nn.Linear(64, 64).half(), torch.randn(4, 64).half())
    result = BenchResult()
    contestants = {"gtco": model.module, "eager": broken}
    check_answers(result, contestants, model, references(model, None), None)
    assert result.failures == {"eager": "ValueError: no"} and "eager" not in result.verdicts
    with pytest.raises(ValueError, match="no"):
        check_answers(BenchResult(), {"gtco": broken}, model, references(model, None), None)


def test_the_bound_runtime_reads_and_writes_tensors(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x = nn.Linear(8, 6).half().eval(), torch.randn(8, 3).half().t()
    export_onnx(model, (x,), tmp_path / "model.onnx")
    bound = BoundOnnxRuntime(tmp_path / "model.onnx", "CPU", torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(bound(x), model(x), rtol=1e-2, atol=1e-2)
    with pytest.raises(UsageError, match="has no CUDAExecutionProvider"):
        BoundOnnxRuntime(tmp_path / "model.onnx", "CUDA", torch.device("cpu"))


def test_what_an_earlier_contestant_left_in_cycles_is_not_counted_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Held:
        """A hundred bytes, until the last reference is gone."""

        alive = 0

        def __init__(self) -> None:
            Held.alive += 1
            self.me = self

        def __del__(self) -> None:
            Held.alive -= 1

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000 - 100 * Held.alive, 1000))
    found: dict[str, Cost] = {}
    gc.disable()
    try:
        Held()
        with costs(found, "keeps one"):
            kept = Held()
            gc.collect()
        with costs(found, "keeps nothing"):
            Held()
    finally:
        gc.enable()
    assert kept.me is kept
    assert [each.memory_bytes for each in found.values()] == [100, 0]
