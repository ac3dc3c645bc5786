"""What a dump holds, and that its script really runs the model again and finds what is wrong."""

from __future__ import annotations

import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.calibration import Calibration
from gtco.ir.interpreter import interpret
from gtco.passes import PIPELINE
from gtco.reporting import dump
from gtco.runtime.module import CompiledModule
from tests.processes import environment


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)

    def forward(self, x: Tensor, *, shift: Tensor, scale: float) -> dict[str, Tensor]:
        return {"y": nn.functional.gelu(self.linear(x)) * scale + shift}


X = torch.randn(24, 64, generator=torch.Generator().manual_seed(1)).half()
FUSED = f"{len(PIPELINE) + 1}-fused.txt"
KWARGS = {"shift": torch.ones(32).half(), "scale": 0.5}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `GTCO_DUMP` points, as in a process that has compiled nothing yet."""
    monkeypatch.setenv("GTCO_DUMP", str(tmp_path / "dump"))
    monkeypatch.setattr(dump, "_numbers", count(1))
    return tmp_path / "dump"


def compiled(target: str) -> CompiledModule:
    torch.manual_seed(0)
    return gtco.compile(Model().eval().half(), (X,), KWARGS, target=target)


def test_a_dump_holds_every_step(folder: Path) -> None:
    module = compiled("sm_80")
    names = sorted(path.name for path in folder.iterdir())
    passes = [name for name in names if name[:2].isdigit()]
    assert (
        passes[0] == "00-captured.txt" and passes[-1] == FUSED and len(passes) == len(PIPELINE) + 2
    )
    assert (folder / FUSED).read_text() == f"{module.graph}\n"
    (kernel,) = module.kernels
    assert kernel.name in (folder / f"{kernel.name}.cu").read_text()
    assert len((folder / f"{kernel.name}.cubin").read_bytes()) == kernel.cubin_bytes
    assert "registers" in (folder / f"{kernel.name}.log").read_text()
    table = (folder / "kernels.txt").read_text()
    for fact in (
        f"{kernel.name} (sm_80)",
        f"{kernel.registers} registers",
        f"{kernel.smem_bytes} bytes of shared memory",
        f"{kernel.spill_bytes} bytes spilled",
        module.launches[0].name,
    ):
        assert fact in table


def test_each_later_compilation_has_a_folder_of_its_own(folder: Path) -> None:
    compiled("sm_80")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    gtco.compile(nn.Linear(64, 8).eval().half(), (X,), target="sm_80")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert (folder / "2" / FUSED).exists()


def test_the_captured_model_comes_back(folder: Path) -> None:
    module = compiled("sm_80")
    captured = dump.read_captured(folder / dump.CAPTURED)
    assert str(captured.graph) == str(module._captured.graph)
    tensors = captured.flatten((X,), KWARGS)
    for ours, theirs in zip(
        interpret(captured.graph, tensors), interpret(module.graph, tensors), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)
    assert set(captured.unflatten(interpret(captured.graph, tensors))) == {"y"}


def test_a_folder_that_takes_no_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GTCO_DUMP", str(tmp_path / "file"))
    monkeypatch.setattr(dump, "_numbers", count(1))
    with pytest.raises(OSError, match="file"):
        compiled("sm_80")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, dump.REPRO, *arguments],
        cwd=folder,
        env=environment(GTCO_DUMP=""),
        capture_output=True,
        text=True,
    )


@pytest.mark.compiler
def test_the_script_runs_the_model_again(folder: Path) -> None:
    module = compiled("sm_80")
    outcome = run(folder, "host")
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.startswith(f"{module.launches[0].name} (linear")
    assert ": right: RMSE" in outcome.stdout
    unknown = run(folder, "host", "gemm_7")
    assert unknown.returncode == 1 and "no group 'gemm_7'" in unknown.stderr


@pytest.mark.compiler
def test_the_script_of_fp8_finds_its_calibration(folder: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 48).eval().half(), torch.randn(20, 64).half()
    known = gtco.calibrate(model, [x, 2 * x])
    options = {"precision": "fp8", "calibration": known, "error_budget": 0.5}
    gtco.compile(model, (x,), target="sm_90a", **options)
    assert Calibration.load(folder / dump.CALIBRATION) == known
    outcome = run(folder, "host")
    assert outcome.returncode == 0, outcome.stderr
    assert "quantize" in (folder / FUSED).read_text() and ": right: RMSE" in outcome.stdout
