"""The experiment that fits the draft model's constants to records."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import refit_constants
from experiments.refit_constants import Sample, error, refit, samples_of
from gtco.cost_model.model import draft_us
from gtco.cost_model.pool import SUFFIX, write_pool
from gtco.cost_model.record import shipped_records
from gtco.target import CARDS, TARGETS
from tests.pools import DEVICE, synthetic_pool

H100 = TARGETS["sm_90a"]


def made_by(**constants: float) -> list[Sample]:
    """Programs of the shipped records, with times that these constants would give."""
    target = replace(H100, constants=replace(H100.constants, **constants))
    samples = samples_of(shipped_records(), CARDS["sm_90a"].name, "sm_90a")[::3]
    return [replace(each, run_us=draft_us(each.work, target)) for each in samples]


def test_constants_that_are_right_stay() -> None:
    samples = made_by()
    assert len(samples) > 100 and error(samples, H100) == 0
    assert refit(samples, H100, 1) is H100.constants


def test_constants_that_are_wrong_are_found() -> None:
    samples = made_by(epilogue_us=0.5, start_boundaries=1.5)
    found = refit(samples, H100, 10)
    assert found.epilogue_us == pytest.approx(0.5, rel=0.15)
    assert found.start_boundaries == pytest.approx(1.5, rel=0.1)
    assert error(samples, replace(H100, constants=found)) < error(samples, H100) / 5


def test_the_table_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--rounds", "0"])
    refit_constants.main()
    said = capsys.readouterr().out
    assert f"version={H100.constants.version + 1}," in said and "held out: " in said
    monkeypatch.setattr(sys, "argv", ["x", "--device", "another"])
    with pytest.raises(SystemExit):
        refit_constants.main()
    assert "no record of another" in capsys.readouterr().err


def test_a_measured_pool_is_fitted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = synthetic_pool()[0]
    ran = sum(entry.run_us is not None for entry in task.entries)
    assert 0 < ran < len(task.entries), "some failed"
    file = tmp_path / f"{task.name}{SUFFIX}"
    write_pool(file, task)
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path), "--device", DEVICE, "--rounds", "0"])
    refit_constants.main()
    assert f": {ran} programs" in capsys.readouterr().out
    file.write_bytes(b"no pool")
    with pytest.raises(SystemExit):
        refit_constants.main()
    assert f"{file} is no measured pool" in capsys.readouterr().err
