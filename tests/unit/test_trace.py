"""A Chrome trace of one call on the host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import gtco
from gtco.ir.interpreter import ArgumentError
from gtco.runtime.module import CompiledModule

pytestmark = pytest.mark.compiler

X = torch.randn(24, 64).half()


@pytest.fixture(scope="module")
def compiled() -> CompiledModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 32))
    return gtco.compile(model.eval().half(), (X,), target="host")


def test_each_launch_has_a_range_that_names_group_and_modules(
    compiled: CompiledModule, tmp_path: Path
) -> None:
    compiled.trace(tmp_path / "trace.json", X)
    content = json.loads((tmp_path / "trace.json").read_text())
    ranges = [each for each in content["traceEvents"] if each.get("cat") == "user_annotation"]
    ranges.sort(key=lambda each: each["ts"])
    named = [each["name"] for each in ranges if each["name"].split(":")[0] in names(compiled)]
    assert named == [
        f"{launch.name}: {', '.join(launch.modules) or 'no module'}" for launch in compiled.launches
    ]
    assert len(named) > 1 and any(name.endswith(": 0") or ": 0, " in name for name in named)
    about = content["gtco"]
    assert "nothing of a GPU" in about["times"] and about["target"] == "host"
    assert [each["range"] for each in about["launches"]] == named
    assert [each["kernel"] for each in about["launches"]] == [
        launch.kernel for launch in compiled.launches
    ]


def names(compiled: CompiledModule) -> set[str]:
    return {launch.name for launch in compiled.launches}


def test_a_walk_computes_what_a_call_does(compiled: CompiledModule) -> None:
    seen: list[str] = []

    def visit(launch: object, values: object, run: object) -> None:
        seen.append(launch.group.name)  # type: ignore[attr-defined]
        run()  # type: ignore[operator]

    assert torch.equal(compiled.walk(visit, X), compiled(X))
    assert seen == [launch.name for launch in compiled.launches]


def test_what_does_not_fit_or_cannot_be_written_is_refused(
    compiled: CompiledModule, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=r"expected f16\[24,64\]"):
        compiled.trace(tmp_path / "trace.json", X.int())
    assert not (tmp_path / "trace.json").exists()
    with pytest.raises(FileNotFoundError):
        compiled.trace(tmp_path / "missing" / "trace.json", X)
