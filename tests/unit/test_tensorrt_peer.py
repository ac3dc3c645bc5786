"""The runner of TensorRT against a stand-in for it and for CUDA, in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gtco.benchmarking.onnx_peer import export_onnx
from gtco.benchmarking.tensorrt_peer import (
    TensorRT,
    TensorRTError,
    TensorRTPlace,
    TensorRTRunner,
    read_trtexec,
)

pytest.importorskip("onnxruntime")
STAND_INS = Path(__file__).parents[1] / "stand_ins"
PYTHON = Path(sys.executable)


class Two(nn.Module):
    """Two inputs, and two outputs of different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.layer(x - 2 * y)
        return z.softmax(-1), z[:, :2].sum(-1)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS))
    return monkeypatch


def exported(folder: Path) -> Path:
    file = folder / "model.onnx"
    export_onnx(Two().eval(), (torch.zeros(3, 8), torch.zeros(3, 8)), file)
    return file


@pytest.mark.parametrize("version", ["8.5.3.1", "10.3.0", "11.0.0"])
def test_answers_times_and_facts(
    version: str, tmp_path: Path, stand_in: pytest.MonkeyPatch
) -> None:
    stand_in.setenv("STAND_IN_TENSORRT", version)
    torch.manual_seed(0)
    model = Two().half().eval()
    args = torch.randn(3, 8).half(), torch.randn(3, 8).half()
    place = TensorRTPlace(PYTHON, tmp_path / "engines")
    peer = TensorRT(place, model, args, tmp_path)
    try:
        for _ in range(2):  # other inputs reach the captured graph
            with torch.no_grad():
                expected = model(*args)
            found = peer(*args)
            assert isinstance(found, tuple) and [each.dtype for each in found] == [torch.half] * 2
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
            args = args[1], args[0]
        given = [((torch.ones(3, 8).half(),) * 2, {})]
        assert peer.back_to_back(peer, given, 4) > 0
        total, host = peer.single(peer, given[0])
        assert total >= host > 0
        assert peer.facts["version"] == version and peer.facts["cuda_graph"]
        assert peer.facts["memory_bytes"] > 0 and peer.facts["build_s"] > 0
    finally:
        peer.close()
    (engine,) = (tmp_path / "engines").glob(f"{version}-*.engine")
    how = engine.read_bytes().split(b"\0")[1].decode()
    assert (
        how
        == {
            "8.5.3.1": "level none, FP16,no TF32,tactics 3",
            "10.3.0": "level 5, no TF32",
            "11.0.0": "level 5, ",
        }[version]
    )


def test_fp32_stays_and_tf32_is_as_torch_has_it(
    tmp_path: Path, stand_in: pytest.MonkeyPatch
) -> None:
    file, engines = exported(tmp_path), tmp_path / "engines"
    with TensorRTRunner(PYTHON) as runner:
        runner.build(file, engines)
    stand_in.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    with TensorRTRunner(PYTHON) as runner:
        assert runner.build(file, engines)["build_s"] > 0, "another engine"
    asked = [path.read_bytes().split(b"\0")[1].decode() for path in engines.glob("*.engine")]
    assert sorted(asked) == ["level none, no TF32,tactics 3", "level none, tactics 3"]


def test_engines_and_what_was_timed_are_kept(tmp_path: Path, stand_in: pytest.MonkeyPatch) -> None:
    file, engines = exported(tmp_path), tmp_path / "engines"
    for times in (1, 2):
        with TensorRTRunner(PYTHON) as runner:
            facts = runner.build(file, engines)
        assert (facts["build_s"] > 0) == (times == 1), "the second time it is read"
    (cache,) = engines.glob("*.cache")
    assert cache.read_bytes() == b"timed "
    (engine,) = engines.glob("*.engine")
    engine.write_bytes(b"of another version")
    for _ in range(2):  # the second time by what is kept
        with TensorRTRunner(PYTHON) as runner, pytest.raises(TensorRTError, match="cannot be read"):
            runner.build(file, engines)
    (refusal,) = engines.glob("*.refused")
    assert "cannot be read" in refusal.read_text()


def test_building_is_given_up(tmp_path: Path, stand_in: pytest.MonkeyPatch) -> None:
    stand_in.setenv("STAND_IN_SECONDS", "30")
    was_at = "no engine after 0 s, it was at: timing the tactics of conv_0"
    with TensorRTRunner(PYTHON) as runner, pytest.raises(TensorRTError, match=was_at):
        runner.build(exported(tmp_path), tmp_path, patience=0.3)
    assert [each.read_text() for each in tmp_path.glob("*.refused")] == [was_at]


def test_what_cannot_be_captured_runs_without_a_graph(
    tmp_path: Path, stand_in: pytest.MonkeyPatch
) -> None:
    stand_in.setenv("STAND_IN_NO_CAPTURE", "1")
    with TensorRTRunner(PYTHON) as runner:
        assert runner.build(exported(tmp_path), None)["cuda_graph"] is False
        assert runner.ask("back_to_back", calls=3)["us"] > 0


def test_refusals_say_why(tmp_path: Path, stand_in: pytest.MonkeyPatch) -> None:
    file = exported(tmp_path)
    stand_in.setenv("STAND_IN_REFUSES", "Softmax")
    with TensorRTRunner(PYTHON) as runner, pytest.raises(TensorRTError, match="for Softmax"):
        runner.build(file, None)
    stand_in.delenv("STAND_IN_REFUSES")
    stand_in.setenv("STAND_IN_BUILDS_NOTHING", "1")
    with TensorRTRunner(PYTHON) as runner:
        with pytest.raises(TensorRTError, match="any implementation for node Foreign"):
            runner.build(file, None)
        with pytest.raises(TensorRTError, match="KeyError"):  # and it is still there
            runner.ask("nonsense")


def test_an_interpreter_without_tensorrt_and_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(TensorRTError, match="No module named 'tensorrt'"):
        TensorRTRunner(PYTHON)
    with pytest.raises(TensorRTError, match="does not start"):
        TensorRTRunner(tmp_path / "python")
    dead = tmp_path / "dead"
    dead.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    dead.chmod(0o755)
    with pytest.raises(TensorRTError, match=r"ended with 3: out of luck"):
        TensorRTRunner(dead)


def test_times_of_trtexec(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    each = {"startComputeMs": 1.0, "endComputeMs": 1.25, "computeMs": 0.25, "latencyMs": 0.5}
    file.write_text(json.dumps([each, {**each, "computeMs": 0.75}]))
    assert read_trtexec(file) == [250.0, 750.0]
    file.write_text('{"count": 3}')
    with pytest.raises(TensorRTError, match="not what trtexec"):
        read_trtexec(file)
