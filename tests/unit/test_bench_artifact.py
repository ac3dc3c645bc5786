"""Benching a saved artifact: on the CPU, where `interpret` stands for its kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.benchmarking import bench_artifact
from gtco.benchmarking.bench import WrongAnswer
from gtco.runtime.module import CompiledModule


class Masked(nn.Module):
    """A float, a mask, a literal and a keyword in; a dictionary out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor, scale: float, *, index: Tensor) -> dict[str, Tensor]:
        y = self.linear(x).masked_fill(~mask, 0) * scale
        return {"all": y, "one": y[index]}


ARGS = (torch.randn(4, 16), torch.ones(4, 16, dtype=torch.bool), 0.5)
KWARGS = {"index": torch.tensor([1, 2])}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    compiled = gtco.compile(Masked().eval(), ARGS, KWARGS, target="sm_90a")
    compiled.save(tmp_path / "masked.gtco")
    return tmp_path / "masked.gtco"


class WallClock:
    def single(self, call: Callable[..., Any], inputs: Any) -> tuple[float, float]:
        call(*inputs[0], **inputs[1])
        return 2.0, 1.0

    def back_to_back(self, call: Callable[..., Any], inputs: Any, calls: int) -> float:
        return 1.5


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Give `bench_artifact` a GPU that is none; its answers are off by `error`."""

    def pretend(error: float) -> None:
        class Pretended(CompiledModule):
            device = torch.device("cpu")

            def prepare(self) -> Any:
                return self

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                tensors = self._captured.flatten(args, kwargs)
                outputs = gtco.interpret(self.graph, tensors)
                return self._captured.unflatten([each + error for each in outputs])

        monkeypatch.setattr(bench_artifact, "CompiledModule", Pretended)

    monkeypatch.setattr(bench_artifact, "CudaClock", WallClock)
    monkeypatch.setattr(bench_artifact, "one_after_another", lambda compiled: compiled)
    monkeypatch.setattr(bench_artifact, "profile_kernels", lambda call, inputs: ())
    return pretend


def bench(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (0, 0))
        return bench_artifact.bench_artifact(path, rounds=2, calls=3)


def test_an_artifact_is_checked_and_timed_alone(
    path: Path, on_the_cpu: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_cpu(0.0)
    result = bench(path, monkeypatch)
    assert set(result.timings) == {"gtco"}
    assert result.timings["gtco"].rounds_us == (1.5, 1.5)
    assert all(verdict.ok for verdict in result.verdicts["gtco"].values())
    assert len(result.verdicts["gtco"]) == 3


def test_a_wrong_artifact_is_not_timed(
    path: Path, on_the_cpu: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_cpu(0.01)
    with pytest.raises(WrongAnswer, match="the artifact's answer for normal inputs is wrong"):
        bench(path, monkeypatch)


def test_arguments_are_made_from_the_signature(path: Path) -> None:
    captured = gtco.load(path)._captured
    args, kwargs = bench_artifact.example_inputs(captured, torch.device("cpu"))
    assert args[0].shape == (4, 16) and bool(args[1].all()) and args[2] == 0.5
    assert list(kwargs) == ["index"] and kwargs["index"].dtype == torch.int64
    assert len(captured.flatten(args, kwargs)) == 3
