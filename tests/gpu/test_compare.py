"""Comparing, tracing and dumping on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import gtco
from gtco.benchmarking.compare import compare, compare_artifact
from gtco.cli.demo import VisionTransformer, randomize
from gtco.locate import Located
from gtco.options import Options
from gtco.runtime.plan import Launch

pytestmark = pytest.mark.gpu


@pytest.fixture
def model() -> Located:
    module = VisionTransformer(patch=8, width=128, depth=2, heads=4, image=64, classes=10)
    randomize(module, seed=0)
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    return Located("vit", module.eval().half().cuda(), (image.half().cuda(),), {})


def test_every_output_and_group_is_right(model: Located, tmp_path: Path) -> None:
    result = compare(model, Options(), layers=True)
    assert not result.wrong
    gtco.compile(model.module, model.args).save(tmp_path / "vit.gtco")
    assert not compare_artifact(tmp_path / "vit.gtco", layers=True).wrong


def test_a_wrong_weight_is_found_in_its_group(
    model: Located, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gtco.runtime import executable

    right = executable._upload

    def wrong(plan: object, device: object) -> dict[str, torch.Tensor]:
        values = right(plan, device)  # type: ignore[arg-type]
        name = next(reversed(values))
        return {**values, name: values[name] + 1}

    monkeypatch.setattr(executable, "_upload", wrong)
    result = compare(model, Options(), (), layers=True)
    assert result.first_wrong_group is not None
    compiled = gtco.compile(model.module, model.args)
    last = next(reversed(right(compiled._plan, torch.device("cuda", 0))))
    readers = [group.name for group in compiled.graph if last in group.graph.constants]
    assert result.first_wrong_group.group in readers


def test_a_walk_computes_what_a_call_does(model: Located) -> None:
    compiled = gtco.compile(model.module, model.args)
    seen: list[str] = []

    def visit(launch: Launch, values: object, run: object) -> None:
        seen.append(launch.group.name)
        run()  # type: ignore[operator]

    expected = compiled(*model.args)
    assert torch.equal(compiled.walk(visit, *model.args), expected)
    assert seen == [launch.name for launch in compiled.launches]
    assert torch.equal(compiled(*model.args), expected)


def test_a_trace_names_each_launch_and_its_kernel(model: Located, tmp_path: Path) -> None:
    compiled = gtco.compile(model.module, model.args)
    compiled.trace(tmp_path / "trace.json", *model.args)
    content = json.loads((tmp_path / "trace.json").read_text())
    names = [event.get("name", "") for event in content["traceEvents"]]
    for launch in content["gtco"]["launches"]:
        assert launch["range"] in names
        assert launch["kernel"] == "aten" or launch["kernel"] in names
    assert "CUDA graph" in content["gtco"]["times"]
