"""Comparing on the CPU: planted faults are found in the output and in the group they come from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.benchmarking.answers import fresh_inputs, references
from gtco.benchmarking.compare import (
    check_groups,
    compare,
    compare_artifact,
    judge_outputs,
    max_abs_error,
)
from gtco.benchmarking.onnx_peer import OnnxRuntime
from gtco.codegen.program import KernelProgram
from gtco.frontend.torch_export import Captured
from gtco.locate import Located, UsageError, locate
from gtco.options import Options
from gtco.runtime.host import HostKernel
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import Plan
from gtco.target import TargetError

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")

HOST = Options(target="host")


class Branches(nn.Module):
    """Two results, from two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.linear = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.norm(x)
        return {"small": self.linear(x), "same": x.exp()}


@pytest.fixture
def model() -> Located:
    torch.manual_seed(0)
    return Located("branches", Branches().eval().half(), (torch.randn(24, 64).half(),), {})


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU()).eval()
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (torch.randn(8, 64),), str(path), dynamo=False)
    return path


def plant(monkeypatch: pytest.MonkeyPatch, kernel: str, error: float) -> None:
    """Let the kernel whose name starts with `kernel` be off by `error` in one element."""
    right = HostKernel.__call__

    def wrong(
        self: HostKernel, program: KernelProgram, tensors: Mapping[str, Tensor], **how: Any
    ) -> None:
        right(self, program, tensors, **how)
        if program.name.startswith(kernel):
            tensors[program.arguments[-1].value].view(-1)[3] += error

    monkeypatch.setattr(HostKernel, "__call__", wrong)


@pytest.mark.compiler
def test_right_answers_are_right_output_by_output(model: Located) -> None:
    result = compare(model, HOST, layers=True)
    assert not result.wrong and result.first_wrong_group is None
    assert {each.contestant for each in result.outputs} == {"gtco", "eager"}
    assert {each.output for each in result.outputs} == {"output ['small']", "output ['same']"}
    assert len(result.outputs) == 2 * 2 * 3
    assert all(each.max_abs is not None and each.max_abs > 0 for each in result.outputs)
    compiled = gtco.compile(model.module, model.args, target="host")
    assert [each.group for each in result.groups] == [each.name for each in compiled.launches]
    assert result.to_dict()["ok"] is True


@pytest.mark.compiler
def test_a_wrong_kernel_is_found_in_its_output_and_its_group(
    model: Located, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "gtco_gemm", 2.0)
    result = compare(model, HOST, (), layers=True)
    assert {each.output for each in result.outputs if not each.verdict.ok} == {"output ['small']"}
    first = result.first_wrong_group
    assert first is not None and first.kernel.startswith("gtco_gemm") and "linear" in first.ops
    assert first.max_abs is not None and first.max_abs > 1.9
    assert "output ['small'] for normal inputs is wrong" in result.wrong[0]
    assert result.to_dict()["first_wrong_group"] == first.group


@pytest.mark.compiler
def test_the_error_of_one_group_is_not_blamed_on_the_next(
    model: Located, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "gtco_rowwise", 3.0)
    compiled = gtco.compile(model.module, model.args, target="host")
    checks = check_groups(compiled, fresh_inputs((model.args, {}), "normal", 1))
    wrong = [check.kernel for check in checks if not check.verdict.ok]
    assert wrong and all(kernel.startswith("gtco_rowwise") for kernel in wrong)
    assert any(check.kernel.startswith("gtco_gemm") for check in checks)


def test_another_structure_and_lost_elements_are_wrong() -> None:
    x = torch.randn(4, 4)
    exact = x.double()
    ((place, verdict, error),) = judge_outputs([x], x, exact, torch.float32)
    assert place == "result" and "structured" in verdict.reason and error is None
    ((place, verdict, error),) = judge_outputs(x + 1, x, exact, torch.float32)
    assert place == "output" and not verdict.ok and error == pytest.approx(1.0)
    assert max_abs_error(torch.tensor([float("inf"), 1.0]), torch.tensor([1.0, 1.5])) == 0.5
    assert max_abs_error(torch.tensor([1]), torch.tensor([2])) is None


@pytest.mark.compiler
def test_an_artifact_is_judged_by_its_own_graph(
    model: Located, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels for sm_90a run on the CPU here, from what the file says."""

    def on_the_host(plan: Plan, captured: Captured, kernels: object) -> CompiledModule:
        return CompiledModule(replace(plan, options=HOST), captured)

    gtco.compile(model.module, model.args, target="sm_90a").save(tmp_path / "a.gtco")
    monkeypatch.setattr("gtco.benchmarking.compare.CompiledModule", on_the_host)
    result = compare_artifact(tmp_path / "a.gtco", layers=True)
    assert not result.wrong and len(result.groups) > 1
    assert {each.contestant for each in result.outputs} == {"gtco", "its graph in torch"}
    plant(monkeypatch, "gtco_gemm", 2.0)
    wrong = compare_artifact(tmp_path / "a.gtco")
    assert "gtco's output ['small'] for normal inputs is wrong" in wrong.wrong[0]


@NO_GPU
def test_without_the_gpu_it_says_so(model: Located, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="compiled for sm_90a, and no CUDA GPU is here"):
        compare(model, Options(target="sm_90a"))
    gtco.compile(model.module, model.args, target="sm_90a").save(tmp_path / "a.gtco")
    with pytest.raises(TargetError, match="compiled for sm_90a, and no CUDA GPU is here"):
        compare_artifact(tmp_path / "a.gtco")


# -- ONNX Runtime --------------------------------------------------------------------------------


@pytest.mark.compiler
@pytest.mark.parametrize("precision", [None, "fp16"])
def test_onnx_runtime_is_an_oracle(onnx_file: Path, precision: str | None) -> None:
    pytest.importorskip("onnxruntime")
    options = Options(target="host", precision=precision)
    result = compare(locate(str(onnx_file)), options, ("eager", "onnxruntime"))
    assert not result.wrong
    named = {each.contestant for each in result.outputs}
    assert named == {"gtco", "eager", "onnxruntime (CPU)"}


@pytest.mark.compiler
def test_another_reading_of_the_file_than_onnx_runtimes_is_wrong(
    onnx_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    right = OnnxRuntime.__call__
    monkeypatch.setattr(OnnxRuntime, "__call__", lambda self, *args: right(self, *args) + 0.01)
    result = compare(locate(str(onnx_file)), HOST, ("onnxruntime",))
    assert all("onnxruntime (CPU)'s output" in line for line in result.wrong)
    assert len(result.wrong) == 3


def test_onnx_runtime_wants_a_file_and_its_package(
    model: Located, onnx_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="branches is none"):
        OnnxRuntime(model)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match="pip install onnxruntime"):
        OnnxRuntime(locate(str(onnx_file)))


def test_a_file_moves_to_a_device_and_a_functions_model_stays(
    model: Located, onnx_file: Path
) -> None:
    moved = locate(str(onnx_file)).file_on("meta")
    assert {each.device.type for each in (*moved.args, *moved.module.buffers())} == {"meta"}
    assert model.file_on("meta") is model


def test_the_references_of_a_file_compute_in_the_precision_that_was_asked_for(
    onnx_file: Path,
) -> None:
    model = locate(str(onnx_file))
    plain, low = references(model, None), references(model, "fp16")
    exact = plain.exact((model.args, {}))
    assert exact.dtype == torch.float64
    assert torch.equal(exact, low.exact((model.args, {})))
    wide, narrow = plain.eager(*model.args), low.eager(*model.args)
    assert wide.dtype == narrow.dtype == torch.float32
    assert max_abs_error(narrow, exact) > 10 * max_abs_error(wide, exact)  # type: ignore[operator]


def test_the_reference_in_tf32_rounds_what_it_multiplies() -> None:
    """Whatever kernels torch's libraries choose, here on a CPU those of fp32."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    model = Located("a model", module, (torch.randn(1, 8, 9, 9),), {})
    truth = references(model, "tf32")
    exact = truth.exact((model.args, {}))
    plain, rounded = (
        float((y.detach() - exact).norm() / exact.norm())
        for y in (truth.eager(*model.args), truth.judged((model.args, {})))
    )
    assert truth.eager is module  # peers run the model itself
    assert plain < 1e-6
    assert 1e-4 < rounded < 1e-3
