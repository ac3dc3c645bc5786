"""The measuring worker on a real device: it times, judges, and survives bad kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gtco
from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate, Sampler
from gtco.cost_model.measure import Subject
from gtco.cost_model.record import TuningRecord
from gtco.cost_model.trials import Trials
from gtco.passes.legality import family
from gtco.passes.tasks import workload_key
from gtco.target import Target, target_of_capability
from tests import groups, models

pytestmark = pytest.mark.gpu

FAULTS = {
    "while (true) __nanosleep(1000);": "it hangs",
    "*(volatile int*)8 = 1;": "illegal memory access",
    "return;": "wrong answer",
    "nothing;": "does not compile",
}


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials() as runner:
        yield runner


@pytest.fixture(scope="module")
def subject() -> Subject:
    group = groups.residual_linear(197, 768, 768, torch.float16)
    return Subject(workload_key(group, _target()), group)


def _target() -> Target:
    return target_of_capability(*torch.cuda.get_device_capability())


def candidate(subject: Subject) -> Candidate:
    sketches = derive(subject.group, family(subject.group), _target()).sketches
    return Sampler(sketches, 0).defaults(1)[0]


def run(
    trials: Trials, subject: Subject, tried: Candidate | None, final: bool = False
) -> TuningRecord:
    return trials.run(subject, tried, final=final).result(timeout=300)


@pytest.mark.parametrize("final", [False, True])
def test_a_kernel_and_the_library_are_timed(trials: Trials, subject: Subject, final: bool) -> None:
    for tried in (candidate(subject), None):
        record = run(trials, subject, tried, final)
        assert record.run_us is not None and 0.5 < record.run_us < 1000, record.error


@pytest.mark.parametrize("statement", FAULTS)
def test_a_bad_kernel_costs_no_other(trials: Trials, subject: Subject, statement: str) -> None:
    good = candidate(subject)
    head, brace, body = good.program.source.rpartition(") {\n")
    source = f"{head}{brace}  {statement}\n{body}"
    bad = Candidate(good.sketch, dataclasses.replace(good.program, source=source))
    record = run(trials, subject, bad)
    assert record.run_us is None and FAULTS[statement] in record.error
    assert run(trials, subject, good).run_us is not None


def test_a_small_vit_is_tuned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models.vit(depth=2).half().cuda()
    image = torch.randn(1, 3, 32, 32, device="cuda", dtype=torch.float16)
    result = gtco.tune(model, (image,), seconds=30, database=tmp_path / "t.sqlite")
    assert result.trials > 0 and all(row.best_us is not None for row in result.rows if row.weight)
    with torch.no_grad():
        torch.testing.assert_close(result.compiled(image), model(image), atol=2e-2, rtol=2e-2)
