"""`gtco tune` as a user runs it, on the host build."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gtco.cli import main as cli
from gtco.cli import tune as cli_tune
from gtco.cost_model.database import Database
from gtco.tuning.result import TaskRow, TuneResult, TuneStatus

MODELS = """
import torch

class Gelu(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x + 1)

def gelu():
    return Gelu().eval(), (torch.ones(4, 64).half(),)
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    (tmp_path / "models_to_tune.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gtco", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        seen = capsys.readouterr()
        return int(stopped.value.code or 0), seen.out, seen.err

    return call


@pytest.mark.compiler
def test_tuning_reports_and_compile_knows(run: Run, tmp_path: Path) -> None:
    words = ("models_to_tune:gelu", "--db", "t.sqlite", "--target", "host")
    code, out, err = run("tune", *words, "--trials", "2", "--json")
    assert code == 0, err
    data = json.loads(out)
    (row,) = [each for each in data["rows"] if each["weight"]]
    assert (data["trials"], data["stopped"]) == (2, "trials")
    assert row["trials"] > 0 and row["library_us"] > 0
    assert data["after_us"] == row["best_us"] > 0
    assert {"task", "load", "check", "time"} <= set(data["phases"])
    assert "searching" in err
    with Database(tmp_path / "t.sqlite") as opened:
        assert len(list(opened.records())) >= 3
    code, out, err = run("compile", *words, "--json")
    assert code == 0, err
    assert [each["source"] for each in json.loads(out)["launches"]] == ["tuned here"]
    assert not (tmp_path / "data").exists()


USAGE = {
    "no limit": ([], "--seconds 480"),
    "no trials": (["--trials", "0"], "--trials"),
    "unknown flag": (["--minutes", "8"], "--minutes"),
}


@pytest.mark.parametrize("case", USAGE)
def test_bad_usage_is_explained_and_exits_with_2(run: Run, case: str) -> None:
    arguments, expected = USAGE[case]
    code, out, err = run("tune", "models_to_tune:gelu", "--target", "host", *arguments)
    assert code == 2 and expected in err and not out


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("target", [(), ("--target", "sm_90a")])
def test_a_missing_gpu_is_named(run: Run, target: tuple[str, ...]) -> None:
    code, _, err = run("tune", "models_to_tune:gelu", "--trials", "1", *target)
    assert code == 2 and 'no CUDA GPU is here; target="host"' in err


def test_a_database_that_cannot_be_opened_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run(
        "tune", "models_to_tune:gelu", "--trials", "1", "--target", "host", "--db", "file/t.sqlite"
    )
    assert code == 1 and "file/t.sqlite" in err and "unexpected" not in err


ROWS = (
    TaskRow("gemm_0", "linear -> gelu", 10_000_000, 12, 4.5, "gemm_wgmma", 6.25, 0.31, 40, 2),
    TaskRow("norm_3", "layer_norm", 5_000, 0),
)


def test_the_summary_names_all_that_was_found() -> None:
    out = Console(record=True, width=160)
    result = TuneResult(
        None,  # type: ignore[arg-type]
        ROWS,
        before_us=500.0,
        after_us=250.5,
        replayed_us=None,
        plans_us=(251.0, 249.5),
        trials=40,
        failures=2,
        seconds=61.0,
        finish_seconds=9.0,
        phases={"load": 1.5},
        stopped="seconds",
    )
    cli_tune.show(out, "a model", result)
    text = out.export_text()
    assert "predicted latency: 500.0 us before, 250.5 us now" in text
    cli_tune.show(out, "a model", replace(result, replayed_us=(510.0, 249.0)))
    assert "the whole graph: 510.0 us before, 249.0 us now" in out.export_text()
    cli_tune.show(out, "a model", result, host=True)
    host = out.export_text()
    assert "says nothing about a GPU" in host and "us before" not in host
    for fact in ("a model", "10.0", "12", "4.50", "gemm_wgmma", "6.25", "31%", "other plan",
                 "40 programs measured in 61 s, 2 of them failed", "the time was up", "load 1.5 s",
                 "then 9 s to time the best programs again",
                 "251.0, 249.5"):  # fmt: skip
        assert fact in text


def test_progress_shows_on_a_terminal_and_as_lines() -> None:
    status = TuneStatus("searching", 12.0, 30, ROWS)
    for terminal in (True, False):
        err = Console(record=True, width=160, force_terminal=terminal)
        with cli_tune._watching(err) as watch:
            watch(status)
        assert "searching: 12 s, 30 programs, 1 of 2 tasks measured" in err.export_text()
