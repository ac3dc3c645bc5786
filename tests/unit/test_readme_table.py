"""The README shows what was measured: its table is made from the result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments import readme_table


def benchmark(name: str, us: float) -> dict[str, Any]:
    """What `gtco bench --json` prints, as far as the table reads it."""
    times = {"gtco": us, "eager": 2 * us, "inductor max-autotune": 1.5 * us}
    return {
        "model": f"experiments.models.vit:{name}",
        "options": {"precision": None},
        "timings": {
            each: {"single_us": {"p50": spent + 20}, "back_to_back_us": spent}
            for each, spent in times.items()
        },
        "best": {"eager": "eager", "inductor": "inductor max-autotune"},
        "ratios": {"eager": {"back_to_back": 2.0}, "inductor": {"back_to_back": 1.5}},
        "launches": 63,
        "floor_us": 100.0,
        "generated_share": 0.987,
        "environment": {"gpus": [{"name": "NVIDIA H100"}]},
    }


def test_the_readme_shows_the_results_that_are_there() -> None:
    section = readme_table.table(readme_table.results(readme_table.RESULTS))
    readme = readme_table.README.read_text()
    assert readme_table.updated(readme, section) == readme, (
        "run python -m experiments.readme_table --write"
    )


def test_the_last_result_of_a_case_counts_and_failures_are_shown(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(json.dumps(benchmark("vit_b16", 500), indent=2))
    failed = {"model": "a:b", "error": "no", "environment": {"gpus": [{"name": "NVIDIA H100"}]}}
    lines = [benchmark("vit_b16", 400), failed, {"floor_us": 1}]
    (tmp_path / "2.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    text = readme_table.table(readme_table.results(tmp_path))
    header, _, first, second = text.splitlines()
    assert header.count("|") == first.count("|") == second.count("|")
    assert "| 400 | 4.0 | 420 | 800, 2.00x | 600, 1.50x (max-autotune) | 63 | 98.7% |" in first
    assert "| failed: no |" in second


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    assert "No results" in readme_table.table(readme_table.results(tmp_path))
