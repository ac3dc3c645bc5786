"""GEMM and attention alone: shapes, searching, judging, lines and the report, without a GPU."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import experiments
from experiments import op_convolutions, op_rivals, op_shapes, op_table
from experiments.op_rivals import alternated, fastest
from experiments.op_shapes import MODELS, PEAK_TFLOPS, Model, Operator, operators
from experiments.op_table import Search, measured, report
from gtco.codegen.program import KernelProgram
from gtco.codegen.rules import SKETCHES
from gtco.codegen.sampler import Candidate
from gtco.codegen.sketches.attention import Attention
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.cost_model.knowledge import Knowledge
from gtco.cost_model.measure import MeasureError, Subject
from gtco.cost_model.record import LIBRARY, TuningRecord, shipped_records
from gtco.cost_model.trials import Trials
from gtco.ir.interpreter import interpret
from gtco.passes.tasks import workload_key
from gtco.target import TARGETS
from tests import attention_groups, groups, stencil_groups

F16 = torch.float16
H100 = TARGETS["sm_90a"]
CPU = torch.device("cpu", 0)
DEVICE = "imaginary"
GEMM = Operator("tiny", "projection", 1, groups.residual_linear(70, 64, 64, torch.float16))
ATTENTION = Operator("tiny", "attention", 1, attention_groups.packed(50, 2, 16))
CONVOLUTIONS = (
    Operator("tiny", "uneven", 1, groups.convolution((1, 9, 8, 16), 24, (3, 2), F16, after=(1, 0))),
    Operator("tiny", "three", 1, stencil_groups.projections(1, (6, 6, 16))),
)


class Device:
    """In place of `Trials`: a program takes as long as its grid is large.

    Args:
        broken: sketches whose programs fail.
        hopeless: no operator can be measured.
    """

    def __init__(self, broken: tuple[str, ...] = (), hopeless: bool = False) -> None:
        self.broken, self.hopeless = broken, hopeless

    def run(self, subject: Subject, candidate: Candidate) -> Future[TuningRecord]:
        found: Future[TuningRecord] = Future()
        program = candidate.program
        fails = program.sketch in self.broken
        run_us = None if fails else float(math.prod(program.grid))
        error = "it hangs" if fails else ""
        known = (subject.key, DEVICE, program.sketch, candidate.sketch.version)
        if self.hopeless:
            found.set_exception(MeasureError("it cannot be made ready"))
        else:
            found.set_result(TuningRecord(*known, dict(program.schedule), run_us, error))
        return found


def search(
    operator: Operator, device: Device | None = None, known: Knowledge | None = None, count: int = 6
) -> Search:
    runner: Any = device or Device()
    return Search(operator, H100, runner, known or Knowledge(DEVICE), count)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """CUDA's part played on the CPU: kernels are interpreted, times are made up.

    `factor` multiplies what generated kernels store, `bias` what Triton's GEMM adds, `us` is what a
    launch takes; `bound` has the tensors of each generated launch and whether it is dependent,
    `weights` those of each of Triton's.
    """
    state = SimpleNamespace(factor=1.0, bias=1.0, us=4.0, bound=[], weights=[])

    class Bound:
        def __init__(
            self,
            kernel: KernelProgram,
            program: KernelProgram,
            tensors: dict[str, Tensor],
            *,
            dependent: bool,
        ) -> None:
            assert {argument.value for argument in program.arguments} <= set(tensors)
            state.bound.append((tensors, dependent))
            self.tensors = tensors

        def __call__(self, stream: int) -> None:
            (graph,) = [
                each.group.graph
                for each in (GEMM, ATTENTION, *CONVOLUTIONS)
                if set(each.group.graph.outputs) <= set(self.tensors)
            ]
            args = [self.tensors[name] for name in graph.inputs]
            for name, value in zip(graph.outputs, interpret(graph, args), strict=True):
                self.tensors[name].copy_(value * state.factor)

    class Chain:
        def __init__(self, launches: list[Callable[[int], None]]) -> None:
            for each in launches:
                each(0)

        def times_us(self, repeat: int, replays: int) -> list[float]:
            return [state.us] * repeat

    def linear(config: str, x: Tensor, w: Tensor, bias: Tensor, y: Tensor) -> None:
        if config == "too large":
            raise RuntimeError("out of resource: shared memory\nand more")
        state.weights.append(w)
        y.copy_(F.linear(x, w, bias * state.bias))

    def attention(config: str, q: Tensor, k: Tensor, v: Tensor, y: Tensor) -> None:
        y.copy_(F.scaled_dot_product_attention(q, k, v))

    triton: Any = ModuleType("triton_peers")
    triton.LINEAR, triton.linear = ("too large", "small"), linear
    triton.ATTENTION, triton.attention = ("small",), attention
    monkeypatch.setitem(sys.modules, "experiments.triton_peers", triton)
    monkeypatch.delattr(experiments, "triton_peers", raising=False)
    monkeypatch.setattr(op_rivals, "BoundLaunch", Bound)
    monkeypatch.setattr(op_rivals, "Chain", Chain)
    monkeypatch.setattr(op_rivals, "load_program", lambda program, device: program)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return state


# -- shapes ----------------------------------------------------------------------------------------


def test_the_operators_of_a_vit_are_those_that_the_shipped_records_know() -> None:
    found = operators("vit_b16", H100)
    assert [each.name for each in found] == ["QKV", "attention", "projection", "FC1", "FC2"]
    assert [each.sizes for each in found] == [
        (197, 2304, 768), (1, 12, 197, 64), (197, 768, 768), (197, 3072, 768), (197, 768, 3072)
    ]  # fmt: skip
    shipped = {record.workload for record in shipped_records()}
    assert all(workload_key(each.group, H100) in shipped for each in found)
    qkv, attention = found[:2]
    assert qkv.flops == 2 * 197 * 2304 * 768 and attention.flops == 4 * 12 * 197 * 197 * 64
    assert qkv.tflops(4.0) == pytest.approx(174.3, abs=0.1)
    ops = [node.op for node in found[4].group.compute]
    assert ops == ["linear", "add", "row_stats"], "the next layer's norm begins in it"


def test_the_operators_of_detr() -> None:
    found = operators("detr", H100)
    assert [(each.name, each.sizes) for each in found] == [
        ("Q and K", (1050, 512, 256)),
        ("V", (1050, 256, 256)),
        ("attention", (1, 8, 1050, 32)),
        ("projection", (1050, 256, 256)),
        ("FC1", (1050, 2048, 256)),
        ("FC2", (1050, 256, 2048)),
    ]
    residual = [each.name for each in found if any(n.op == "add" for n in each.group.compute)]
    assert residual == ["projection", "FC2"]


def test_the_convolutions_of_a_model() -> None:
    found = op_convolutions.operators("mobilenet_v2", H100, Knowledge(DEVICE))
    named = {(each.name, each.sizes): each.times for each in found}
    assert named["3x3 depthwise to 384", (1, 14, 14, 384)] == 4
    assert named["3x3/2 depthwise to 96", (1, 112, 112, 96)] == 1
    assert named["1x1", (196, 384, 64)] == 4, "1x1 convolutions count, which are linears"
    assert sum(named.values()) == 52, "and the head does not"
    assert op_table.model_names("unet") == ("unet",)


def test_convolutions_of_a_concat() -> None:
    """They are asked of cuDNN as of the whole concat."""
    found = op_convolutions.operators("unet", H100, Knowledge(DEVICE))
    joined = [each for each in found if each.group.compute[0].op == "concat"]
    assert [(each.name, each.sizes) for each in joined] == [
        ("3x3 to 256", (1, 64, 64, 768)),
        ("3x3 to 128", (1, 128, 128, 384)),
        ("3x3 to 64", (1, 256, 256, 192)),
    ]


@pytest.mark.parametrize("case", ["joined_3", "scaled_bf16"])
def test_sizes_of_linears_whose_operand_is_prepared(case: str) -> None:
    group = (groups.JOINED_CASES | groups.SCALED_CASES)[case]()
    operator = Operator("tiny", "1x1", 1, group)
    rows, columns, k = operator.sizes
    assert operator.flops == 2 * rows * columns * k


def test_every_model_that_was_asked_for_is_there() -> None:
    sizes = {name: (each.batch, each.tokens, each.width) for name, each in MODELS.items()}
    assert sizes == {
        "vit_b16": (1, 197, 768),
        "vit_b16_batch8": (8, 197, 768),
        "vit_b16_batch32": (32, 197, 768),
        "vit_l16": (1, 197, 1024),
        "vit_l16_batch8": (8, 197, 1024),
        "vit_h14": (1, 257, 1280),
        "vit_b16_384": (1, 577, 768),
        "detr": (1, 1050, 256),
    }
    assert op_table.model_names("detr, vit_b16") == ("detr", "vit_b16")
    with pytest.raises(argparse.ArgumentTypeError, match="it knows no 'vit_b17'"):
        op_table.model_names("vit_b16,vit_b17")


def test_a_layer_that_is_fused_otherwise_is_no_layer_of_these_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny = op_shapes.vit(1, 16, 64, 2)
    other = Model(1, 16, 64, tiny.layer, op_shapes.MODELS["detr"].operators)
    monkeypatch.setitem(MODELS, "tiny", other)
    with pytest.raises(RuntimeError, match="two layers of tiny are fused into"):
        operators("tiny", H100)
    runner: Any = Device()
    monkeypatch.setattr(op_rivals, "warm_triton", lambda widths, device: None)
    searches, left_out = op_table.searched(("tiny",), H100, CPU, runner, Knowledge(DEVICE), 4)
    assert searches == [] and list(left_out) == ["tiny"]


def test_a_floor_is_the_longer_of_bytes_and_flops() -> None:
    long = Operator("m", "FC1", 1, groups.plain_linear(4096, 4096, 4096, torch.float16))
    assert long.floor_us(H100) == pytest.approx(2 * 4096**3 / (PEAK_TFLOPS * 1e6))
    nbytes = 2 * (70 * 64 * 3 + 64 * 64 + 64) + 4 * 70 * 2
    assert GEMM.floor_us(H100) == pytest.approx(nbytes / 2840e3)


# -- searching -------------------------------------------------------------------------------------


def test_half_of_the_programs_are_defaults() -> None:
    sketch = GemmWgmma(GEMM.group, H100)
    keys = [dict(each.program.schedule) for each in op_table.drawn(sketch, 20)]
    assert len(keys) == 20
    assert keys[:10] == [dict(each) for each in sketch.defaults()][:10]


def test_the_best_of_each_sketch_is_found_and_failures_are_told() -> None:
    found = search(GEMM, Device(broken=("gemm_mma",)), count=20).found()
    takes = {kind.name for kind in SKETCHES if kind.family == "gemm"}
    assert {"gemm_wgmma", "gemm_mma"} <= set(found) <= takes
    wgmma, mma = found["gemm_wgmma"], found["gemm_mma"]
    assert wgmma.best is not None and wgmma.run_us == math.prod(wgmma.best.program.grid)
    assert (wgmma.drawn, wgmma.ran, wgmma.errors) == (20, 20, ())
    assert (mma.best, mma.ran, mma.errors) == (None, 0, ("it hangs",))
    for each in search(GEMM, Device(hopeless=True)).found().values():
        assert each.errors == ("MeasureError: it cannot be made ready",)


def test_what_the_records_know_is_timed_too() -> None:
    free = search(GEMM).found()
    best = free["gemm_wgmma"].best
    assert best is not None
    programs = op_table.drawn(GemmWgmma(GEMM.group, H100), 3)
    other = next(each for each in programs if each.key != best.key)

    def after(*programs: Candidate | None) -> Search:
        known = Knowledge(DEVICE)
        key = workload_key(GEMM.group, H100)
        for number, each in enumerate(programs):
            name, version = (LIBRARY, 1) if each is None else (each.sketch.name, GemmWgmma.version)
            schedule = {} if each is None else dict(each.program.schedule)
            known.add(TuningRecord(key, DEVICE, name, version, schedule, 3.0 + number))
        return search(GEMM, known=known)

    chosen = after(None, other)
    assert chosen.recorded == LIBRARY
    names = op_table.finalists(chosen.record, free)
    assert list(names)[-1] == "gemm_wgmma, record"
    assert names["gemm_wgmma, record"].key == other.key
    assert list(op_table.finalists(after(best).record, free)) == list(free), "it is the same one"
    assert search(GEMM).record is None and search(GEMM).recorded == ""


@pytest.mark.compiler
def test_a_search_runs_on_the_host() -> None:
    with Trials(host=True) as runner:
        found = Search(ATTENTION, H100, runner, Knowledge("host"), 2).found()
    assert all(each.ran == 2 and each.run_us for each in found.values()), found


# -- judging and timing ----------------------------------------------------------------------------


def test_a_row_has_the_generated_kernel_and_its_peers(cpu: SimpleNamespace) -> None:
    row = measured(GEMM, search(GEMM), H100, CPU)
    assert set(row["run_us"]) == {*row["search"], "cuBLAS", "Triton"}, row["notes"]
    assert row["generated"] in row["search"] and row["sizes"] == (70, 64, 64)
    assert all(times == [4.0] * op_rivals.ROUNDS for times in row["rounds_us"].values())
    assert row["tflops"]["cuBLAS"] == pytest.approx(2 * 70 * 64 * 64 / 4e6)
    assert row["configurations"]["Triton"] == "small"
    assert row["left_out"] == {
        "Triton": ("too large: RuntimeError: out of resource: shared memory",)
    }
    assert row["notes"] == {}
    json.dumps(row)
    row = measured(ATTENTION, search(ATTENTION), H100, CPU)
    assert set(row["run_us"]) == {*row["search"], "SDPA", "Triton"}, row["notes"]
    assert row["generated"] in row["search"]
    assert row["configurations"]["SDPA"] in op_rivals.BACKENDS


@pytest.mark.parametrize("operator", CONVOLUTIONS, ids=lambda each: each.name)
def test_the_peer_of_a_convolution_is_cudnn(cpu: SimpleNamespace, operator: Operator) -> None:
    row = measured(operator, search(operator), H100, CPU)
    assert row["kind"] == "convolution" and row["notes"] == {}
    assert set(row["run_us"]) == {*row["search"], "cuDNN"} and row["generated"] in row["search"]
    text = report({"rows": [row], "left_out": {}})
    assert f"| tiny | {operator.name} | {' x '.join(map(str, operator.sizes))} |" in text


def test_chains_have_weights_of_their_own(cpu: SimpleNamespace) -> None:
    programs = op_table.finalists(None, search(GEMM).found())
    (make,) = op_rivals.generated(programs["gemm_wgmma"].program, GEMM.group, CPU).values()
    assert make().time_us() == 4.0
    assert [dependent for _, dependent in cpu.bound] == [False] + [True] * 11
    tensors = [each for each, _ in cpu.bound]
    addresses = {name: {each[name].data_ptr() for each in tensors} for name in tensors[0]}
    constants = GEMM.group.graph.constants
    assert {len(addresses[name]) for name in constants} == {12}
    assert {len(each) for name, each in addresses.items() if name not in constants} == {1}
    fastest(op_rivals.triton_linear((8, 16, 32), CPU))
    assert len({each.data_ptr() for each in cpu.weights}) == 12


@pytest.mark.parametrize("factor", [0.0, 1.01, math.nan])
def test_a_wrong_kernel_is_not_timed(cpu: SimpleNamespace, factor: float) -> None:
    cpu.factor = factor
    row = measured(GEMM, search(GEMM), H100, CPU)
    assert set(row["run_us"]) == {"cuBLAS", "Triton"} and row["generated"] is None
    assert all("WrongAnswer" in row["notes"][name] for name in row["search"])


def test_a_wrong_peer_is_not_timed(cpu: SimpleNamespace) -> None:
    cpu.bias = 0.0
    row = measured(GEMM, search(GEMM), H100, CPU)
    assert "Triton" not in row["run_us"] and "cuBLAS" in row["run_us"]
    assert "out of resource" in row["notes"]["Triton"], "the first reason"


def test_a_kernel_that_stores_nothing_is_not_timed(
    cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy: Any = sys.modules["experiments.triton_peers"]
    monkeypatch.setattr(lazy, "linear", lambda *tensors: None)
    row = measured(GEMM, search(GEMM), H100, CPU)
    assert "NaN in 4480 of 4480" in row["notes"]["Triton"]


def test_without_triton_its_cells_are_empty(
    cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "experiments.triton_peers")
    monkeypatch.setitem(sys.modules, "triton", None)
    op_rivals.warm_triton({64}, CPU)
    rows = [measured(each, search(each), H100, CPU) for each in (GEMM, ATTENTION)]
    assert all("Triton" not in row["run_us"] and len(row["run_us"]) > 1 for row in rows)
    text = report({"rows": rows, "left_out": {}})
    assert "Not timed (2): Triton: ModuleNotFoundError" in text


def test_an_operator_without_any_program_keeps_its_peers(cpu: SimpleNamespace) -> None:
    row = measured(GEMM, search(GEMM, Device(hopeless=True)), H100, CPU)
    assert set(row["run_us"]) == {"cuBLAS", "Triton"} and row["generated"] is None
    assert "cannot be made ready" in row["notes"]["gemm_wgmma"]
    assert "| tiny | projection | 70 x 64 x 64 |  |  |  | 4.00, 0 (0%) |" in report(
        {"rows": [row], "left_out": {"detr": "RuntimeError: no"}}
    )


def test_clocks_take_turns_and_the_fastest_configuration_is_kept() -> None:
    order: list[str] = []

    def clock(name: str, us: float) -> Callable[[], float]:
        def read() -> float:
            order.append(name)
            return us

        return read

    times = alternated({"a": clock("a", 2.0), "b": clock("b", 1.0)})
    assert order == ["a", "b"] * op_rivals.ROUNDS and times["b"] == [1.0] * op_rivals.ROUNDS

    def maker(us: float) -> Any:
        return lambda: SimpleNamespace(time_us=lambda: us)

    def broken() -> Any:
        raise ValueError("no\nmore")

    choice = fastest({"slow": maker(3.0), "broken": broken, "fast": maker(2.0)})
    assert choice.name == "fast" and choice.left_out == ("broken: ValueError: no",)
    with pytest.raises(RuntimeError, match="broken: ValueError: no"):
        fastest({"broken": broken})


# -- lines of code ---------------------------------------------------------------------------------


def test_lines_are_those_with_code(tmp_path: Path) -> None:
    python, cuda = tmp_path / "a.py", tmp_path / "a.cuh"
    python.write_text('"""Doc."""\n\n# why\nx = 1  # so\n    # more\n')
    cuda.write_text("// why\n#pragma once\n\n  int x;  // so\n  // more\n")
    assert op_table.code_lines(python) == 2 and op_table.code_lines(cuda) == 2


def test_a_sketch_takes_the_code_that_it_reaches() -> None:
    def names(files: set[Path]) -> set[str]:
        return {path.name for path in files}

    assert names(op_table.sketch_files(GemmMma)) >= {"gemm_mma.py", "gemm.py"}
    assert "gemm_wgmma.py" not in names(op_table.sketch_files(GemmMma))
    best = op_table.finalists(None, search(ATTENTION).found())["attention"]
    headers = names(op_table.device_headers(best.program.source))
    assert {"attention.cuh", "epilogue.cuh", "ptx.cuh", "types.cuh"} <= headers
    assert not {"wgmma.cuh", "gemm_mma.cuh"} & headers
    lines = op_table.lines_of(best)
    assert lines["python"] >= op_table.code_lines(Path(inspect.getfile(Attention))) > 100
    assert 200 < lines["device"] < 2400


# -- the command ----------------------------------------------------------------------------------


def test_the_command_needs_a_gpu_and_known_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, reason in ((["--models", "vit_b17"], "it knows no"), ([], "needs a CUDA GPU")):
        monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "o.json"), *words])
        with pytest.raises(SystemExit):
            op_table.main()
        assert reason in capsys.readouterr().err
