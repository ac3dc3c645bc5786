"""The table of whole models: rehearsed for real, and what it does when children end badly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.e2e import ROWS, SUITE
from experiments.models import autogtco, convolutional, small, vit
from experiments.suites import card, run
from experiments.suites.child import Asked
from experiments.suites.run import main
from experiments.suites.table import COLUMNS, best_ratio, report
from gtco.benchmarking.contestants import MAKERS, PEERS

STAND_INS = Path(__file__).parents[1] / "stand_ins"


def test_each_row_has_its_model_and_a_small_relative() -> None:
    modules = {"autogtco": autogtco, "convolutional": convolutional, "vit": vit}
    for row in ROWS:
        assert callable(getattr(modules[row.module], row.name)), row.name
        assert callable(getattr(small, row.name)), row.name
        for quick in (False, True):
            names = {name for peer in row.peers(quick) for name in PEERS[peer]}
            columns = {name for column in COLUMNS.values() for name in column}
            assert names <= columns, "nobody runs in vain"
            assert set(row.left_out) <= names
    assert set(MAKERS) <= {name for names in PEERS.values() for name in names}


@pytest.mark.compiler
def test_a_rehearsal_through_the_same_code_claims_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS))
    out = tmp_path / "e2e.jsonl"
    words = [str(out), "--quick", "--rows", "vit_b16", "--tensorrt-python", sys.executable]
    main(SUITE, words)
    (result,) = map(json.loads, out.read_text().splitlines())
    assert result["rehearsal"] and result["row"] == "vit_b16" and result["attempts"] == 1
    assert {"gtco", "TensorRT", "TorchScript", "onnxruntime (CPU)"} <= result["timings"].keys()
    assert result["failures"]["eager"] == "NoGpu: it runs on a CUDA GPU alone"
    text = (tmp_path / "e2e.md").read_text()
    assert "no speed is claimed" in text and "ran (8.5.3.1)" in text
    assert "- eager: NoGpu: it runs on a CUDA GPU alone (ViT-B/16)" in text
    row = next(line for line in text.splitlines() if line.startswith("| ViT-B/16 | ran"))
    assert not any(digit in row.replace("8.5.3.1", "").replace("B/16", "") for digit in "123456789")
    capsys.readouterr()
    monkeypatch.setattr(run, "ask_child", None)  # all is there: nothing runs again
    main(SUITE, words)
    assert capsys.readouterr().out == text
    with pytest.raises(SystemExit):
        main(SUITE, [str(out), "--rows", "vit_b16"])
    assert "holds rehearsals" in capsys.readouterr().err


# -- children that end badly -----------------------------------------------------------------------

ASKED = Asked("experiments.e2e", "vit_b16", True, 1, 2)


def scripted(
    monkeypatch: pytest.MonkeyPatch, folder: Path, script: str
) -> Callable[[], tuple[dict[str, Any], str | None]]:
    """`ask_child` with a shell script in place of the child."""
    child = folder / "child"
    child.write_text(f"#!/bin/sh\n{script}\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    return lambda: run.ask_child(ASKED, {}, 1.0, lambda message: None)


@pytest.mark.parametrize(
    ("script", "error", "blamed"),
    [
        (
            'echo \'{"tell": "preparing TorchScript"}\'; echo out of luck >&2; exit 3',
            "the process ended with 3: out of luck",
            "TorchScript",
        ),
        (
            'echo \'{"tell": "round 2 of 5: eager, channels last"}\'; exec sleep 30',
            "no word of eager, channels last for 1 s",
            "eager, channels last",
        ),
        (
            'echo \'{"tell": "checking gtco"}\'; '
            'echo \'{"error": "Unusable: eager left", "blamed": "eager"}\'',
            "Unusable: eager left",
            "eager",
        ),
    ],
)
def test_whoever_the_child_was_at_is_blamed(
    script: str, error: str, blamed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scripted(monkeypatch, tmp_path, script)() == ({"error": error}, blamed)


def outcome(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[tuple[dict[str, Any], str | None]]
) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    left_out: list[tuple[str, ...]] = []

    def ask(asked: Asked, *_: object) -> tuple[dict[str, Any], str | None]:
        left_out.append(asked.left_out)
        return outcomes.pop(0)

    monkeypatch.setattr(run, "ask_child", ask)
    return run.run_row(SUITE.row("vit_b16"), ASKED, 1.0, lambda message: None), left_out


def test_the_row_runs_again_without_who_ended_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found, left_out = outcome(
        monkeypatch, [({"error": "it died"}, "eager"), ({"failures": {}, "timings": {}}, None)]
    )
    assert left_out == [(), ("eager",)]
    assert found["failures"] == {"eager": "ended the process: it died"}
    assert found["attempts"] == 2


def test_a_row_ends_with_its_error_where_gtco_or_nobody_is_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for blamed in ("gtco", None):
        found, left_out = outcome(monkeypatch, [({"error": "it died"}, blamed)])
        assert found["error"] == "it died" and found["row"] == "vit_b16" and len(left_out) == 1


def test_failed_rows_are_shown_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "e2e.jsonl"
    errors = ["it died", "it died again"]
    monkeypatch.setattr(run, "ask_child", lambda *_: ({"error": errors.pop(0)}, None))
    for _ in range(2):
        main(SUITE, [str(out), "--rows", "unet"])
    assert not errors and len(out.read_text().splitlines()) == 2
    main(SUITE, [str(out), "--report"])  # runs nothing
    assert "- the whole row: it died again (U-Net, 256 x 256)" in capsys.readouterr().out


# -- what people read ------------------------------------------------------------------------------


def result(**times: float) -> dict[str, Any]:
    """A row of ViT-B/16 whose contestants take so long; those in capitals answer wrongly."""
    names = {"torchscript": "TorchScript", "tensorrt": "TensorRT", "EAGER": "eager"}
    timings, verdicts, costs = {}, {}, {}
    for key, spent in times.items():
        name = names.get(key, key)
        single = {"p50": spent + 10, "p90": spent + 20, "p99": spent + 30}
        timings[name] = {"back_to_back_us": spent, "rounds_us": [spent] * 2, "single_us": single}
        verdict = {"ok": key.islower(), "rmse": 1e-3, "eager_rmse": 2e-3}
        verdicts[name] = {"normal": verdict}
        costs[name] = {"seconds": 9.0, "memory_bytes": 5_000_000}
    return {
        "row": "vit_b16",
        **SUITE.row("vit_b16").facts(False),
        "title": "ViT-B/16",
        "timings": timings,
        "verdicts": verdicts,
        "costs": costs,
        "failures": {},
        "launches": 63,
        "generated_share": 1.0,
        "floor_us": 50.0,
        "weight_bytes": 173_000_000,
        "facts": {"version": "8.5.3.1", "build_s": 0.0, "memory_bytes": 400_000_000},
        "card": {"driver_version": "580", "power.draw": {"least": 90, "median": 600, "most": 700}},
        "environment": {"gpus": [{"name": "NVIDIA H200"}]},
    }


def test_the_tables_say_who_is_best_wrong_and_missing() -> None:
    found = result(gtco=200.0, torchscript=900.0, tensorrt=800.0, EAGER=100.0)
    found["failures"] = {"inductor max-autotune": "OutOfMemoryError: no"}
    assert best_ratio(found) == 4.0, "a wrong answer is no peer"
    text = report([found])
    assert "On NVIDIA H200." in text
    for cell in (
        "100 (wrong)",
        "800 (8.5.3.1)",
        "| 4.00 | 4.00 |",
        "210, 220, 230",
        "built before",
    ):
        assert cell in text, cell
    assert "| 1.0e-03 (2.0e-03) |" in text and "100.0%" in text and "90, 600, 700" in text
    assert "| 178 | 400 |" not in text and "| 5 | 178 |" in text, "weights are shared with torch"
    assert "| ViT-B/16 | 0.70 | 4.00 | 1.02 | 2.96 | 4.50 |" in text
    assert "- inductor max-autotune: OutOfMemoryError: no (ViT-B/16)" in text
    found["costs"]["eager"]["memory_bytes"] = -8_000_000_000
    assert "| 5 | – | – | 400 |" in report([found]), "somebody else's memory was let go"  # noqa: RUF001


def test_trtexec_fills_the_column_where_nobody_else_does(tmp_path: Path) -> None:
    file = tmp_path / "vit_b16.json"
    file.write_text(json.dumps([{"computeMs": 0.5}, {"computeMs": 0.7}, {"computeMs": 0.6}]))
    found = result(gtco=200.0) | run.of_trtexec(file)
    assert "600 (trtexec, not judged)" in report([found])
    assert run.of_trtexec(tmp_path / "unet.json") == {}


def test_what_the_card_did() -> None:
    lines = card.parse("1980, 2619, 700.1, 60\n1200, 2619, 100.5, 50\n1980, 26")
    assert card.summary(lines)["clocks.sm"] == {"least": 1200, "median": 1590, "most": 1980}
    assert card.summary(card.parse("[N/A], 2619, 1, 1"))["clocks.mem"]["most"] == 2619
    assert card.summary([]) == {}


def test_who_is_left_out_by_name_is_named_besides_who_always_is() -> None:
    words = ["out.jsonl", "--without", "TorchScript", "--without", "inductor max-autotune"]
    row = SUITE.row("setr_pup")
    asked = run.asked_of(run.arguments(SUITE, words), SUITE, row)
    assert set(asked.left_out) == {*row.left_out, "TorchScript", "inductor max-autotune"}
    assert len(asked.left_out) == len(set(asked.left_out))
