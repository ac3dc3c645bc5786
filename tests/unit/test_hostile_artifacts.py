"""Artifacts with right checksums that are not sane: each is refused by name, or is harmless."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.runtime import artifact
from gtco.runtime.artifact import ArtifactError
from gtco.runtime.executable import compile_programs
from gtco.runtime.plan import Plan, PlanKnobs
from tests.artifact_files import read_content, rewrite
from tests.hostile_artifacts import Edit, consistent_edits, edits
from tests.models import setr, vit, vit_spelled_out


class Mixed(nn.Module):
    """Generated kernels around a call of ATen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.special.erfcx(self.up(self.norm(x)).float()).half()) + x


MODELS = {
    "sm_90a": (lambda: vit().half(), (1, 3, 32, 32)),
    "sm_80": (lambda: Mixed().half().eval(), (48, 64)),
}


@pytest.fixture(scope="module", params=MODELS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    make, shape = MODELS[request.param]
    path = tmp_path_factory.mktemp("hostile") / "model.gtco"
    gtco.compile(make(), (torch.randn(shape).half(),), target=request.param).save(path)
    return path


def verdict(written: Path, edit: Edit, path: Path) -> str | Plan:
    """What is said of a copy with `edit`, or the plan of one that is taken."""
    path.write_bytes(written.read_bytes())
    rewrite(path, edit.change, dict(edit.metadata), None, edit.blobs, edit.text)
    try:
        return artifact.read(path).plan
    except ArtifactError as error:
        return str(error)


def same_launches(plan: Plan, other: Plan) -> bool:
    """Whether both do the same work: the same launches, each behind those that it reads from."""

    def described(plan: Plan) -> dict[str, object]:
        return {
            launch.group.name: (
                launch.program,
                str(launch.group.graph),
            )
            for launch in plan.launches
        }

    return len(plan.launches) == len(other.launches) and described(plan) == described(other)


def test_each_edit_is_refused_or_harmless(written: Path, tmp_path: Path) -> None:
    plan = artifact.read(written).plan
    path = tmp_path / "edited.gtco"
    accepted, refused = [], 0
    for edit in edits(read_content(written)):
        found = verdict(written, edit, path)
        if isinstance(found, str):
            assert str(path) in found, edit.name
            refused += 1
        elif not same_launches(found, plan):
            accepted.append(edit.name)
    assert not accepted
    assert refused >= 100


def test_what_a_launch_asks_for_is_held_against_the_code(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "edited.gtco"
    count = 0
    for edit, words in consistent_edits(read_content(written)):
        found = verdict(written, edit, path)
        assert isinstance(found, str), edit.name
        assert re.search(words, found), (edit.name, found)
        count += 1
    assert count >= 20


def test_a_name_that_follows_is_not_refused_for_itself(written: Path, tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    from tests.hostile_artifacts import _renamed, chosen

    content = read_content(written)
    path = tmp_path / "renamed.gtco"
    for index in chosen(content):
        edit = _renamed("more blocks", content, index, lambda p: p.update(grid=[60, 6, 1]))
        assert isinstance(verdict(written, edit, path), Plan)


SOUND = {
    "segmentation": (lambda: setr(), (1, 3, 32, 32)),
    "spelled out": (lambda: vit_spelled_out(), (1, 3, 32, 32)),
    "larger": (lambda: vit(64, 8, 128, 2, 2), (2, 3, 64, 64)),
    "convolutions": (lambda: convolutions(), (2, 16, 32, 32)),
}


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for stride, kernel, out, groups in ((1, 3, 64, 1), (2, 3, 128, 1), (1, 5, 128, 128)):
        given = 16 if not layers else 64 if out == 128 and groups == 1 else 128
        layers += [nn.Conv2d(given, out, kernel, stride, kernel // 2, groups=groups), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(128, 32, 1)).eval()


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("case", SOUND)
def test_what_gtco_makes_is_taken(case: str, target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = SOUND[case]
    compiled = gtco.compile(make().half(), (torch.randn(shape).half(),), target=target)
    path = tmp_path / "model.gtco"
    compiled.save(path)
    assert same_launches(gtco.load(path)._plan, compiled._plan)


def test_plans_with_all_their_knobs_are_taken(tmp_path: Path) -> None:
    image = torch.randn(1, 3, 64, 64).half()
    plain = gtco.compile(vit(64, 8, 256, 2, 4).half(), (image,), target="sm_90a")
    knobs = PlanKnobs(fetch_distance=2, late_trigger=1, spread=1)
    plan = replace(plain._plan, launches=knobs.apply(plain._plan.launches, plain._plan.target))
    assert any("fetch" in launch.program.accesses for launch in plan.launches if launch.program)
    path = tmp_path / "model.gtco"
    artifact.save(path, plan, plain._captured, compile_programs(plan))
    assert same_launches(gtco.load(path)._plan, plan)
