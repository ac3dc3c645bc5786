"""Artifacts with right checksums that are not sane: each is refused by name, or is harmless."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.runtime import artifact
from gtco.runtime.artifact import ArtifactError
from gtco.runtime.plan import Plan
from gtco.runtime.soundness import check_soundness
from tests.artifact_files import read_content, rewrite
from tests.hostile_artifacts import Edit, consistent_edits, edits
from tests.models import vit


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
    begun = time.perf_counter()
    try:
        return artifact.read(path).plan
    except ArtifactError as error:
        return str(error)
    finally:
        assert time.perf_counter() - begun < 5, edit.name


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


def test_the_check_is_quick(written: Path) -> None:
    found = artifact.read(written)
    begun = time.perf_counter()
    check_soundness(found.plan, found.kernels)
    assert (time.perf_counter() - begun) / len(found.plan.launches) < 0.2 / 200
