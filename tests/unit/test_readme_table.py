"""The README shows what was measured: its table is made from the result files."""

from __future__ import annotations

import json
import re
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
            each: {
                "single_us": {"p50": spent + 20},
                "back_to_back_us": spent,
                "rounds_us": [spent],
            }
            for each, spent in times.items()
        },
        "verdicts": {each: {"normal": {"ok": True}} for each in times},
        "best": {"eager": "eager", "inductor": "inductor max-autotune"},
        "ratios": {"eager": {"back_to_back": 2.0}, "inductor": {"back_to_back": 1.5}},
        "launches": 63,
        "floor_us": 100.0,
        "generated_share": 0.987,
        "environment": {"gpus": [{"name": "NVIDIA H100"}]},
    }


def test_the_pages_show_the_results_that_are_there() -> None:
    for path, text in readme_table.pages(readme_table.results(readme_table.RESULTS)).items():
        assert path.read_text() == text, (
            f"{path.name}: run python -m experiments.readme_table --write"
        )


def test_every_link_of_the_pages_leads_somewhere() -> None:
    for page in (readme_table.README, *sorted(readme_table.PAGE.parent.glob("*.md"))):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_who_answers_wrongly_is_marked_and_in_no_chart() -> None:
    result = benchmark("vit_b16", 100)
    result["verdicts"]["inductor max-autotune"]["normal"]["ok"] = False
    assert "150, 1.50x (max-autotune, answers wrong)" in readme_table.table([result])
    assert "<rect" not in readme_table.chart([result])
    assert readme_table.summary([result]) == readme_table.NOTHING
    assert "1.50x</text>" in readme_table.chart([benchmark("vit_b16", 100)])
    assert "<rect" not in readme_table.whole_chart([result])
    assert "| 100 us | 150 us | **1.50x** |" in readme_table.summary([benchmark("vit_b16", 100)])


def test_the_readmes_bars_are_the_newest_of_some_models_and_the_others_have_theirs() -> None:
    old, other = benchmark("vit_b16", 100), benchmark("vit_b16_unheard_of", 100)
    new = benchmark("vit_b16", 100) | {"environment": {"gpus": [{"name": "NVIDIA H200"}]}}
    text = readme_table.chart([old, other, new])
    assert text.count("<rect") == 1 and ">ViT-B/16 (H200)</text>" in text
    text = readme_table.whole_chart([old, other, new])
    assert text.count("<rect") == 3 and ">vit:vit_b16_unheard_of (H100)</text>" in text


def test_the_better_layout_stands_for_a_peer() -> None:
    result = benchmark("vit_b16", 100)
    name, key = "inductor reduce-overhead, channels last", "inductor-channels-last"
    timing = {"single_us": {"p50": 140}, "back_to_back_us": 120, "rounds_us": [120]}
    result["timings"][name], result["best"][key] = timing, name
    result["verdicts"][name] = {"normal": {"ok": True}}
    result["ratios"][key] = {"back_to_back": 1.2}
    assert "120, 1.20x (reduce-overhead, channels last)" in readme_table.table([result])
    assert "| 100 us | 120 us | **1.20x** |" in readme_table.summary([result])
    result["verdicts"][name]["normal"]["ok"] = False
    assert "| 100 us | 150 us | **1.50x** |" in readme_table.summary([result])


def test_the_last_result_of_a_case_counts_and_failures_are_shown(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(json.dumps(benchmark("vit_b16", 500), indent=2))
    failed = {"model": "a:b", "error": "no", "environment": {"gpus": [{"name": "NVIDIA H100"}]}}
    rehearsed = benchmark("vit_b16", 5) | {"rehearsal": True}
    lines = [benchmark("vit_b16", 400), failed, {"floor_us": 1}, rehearsed]
    (tmp_path / "2.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    text = readme_table.table(readme_table.results(tmp_path))
    header, _, first, second = text.splitlines()
    assert header.count("|") == first.count("|") == second.count("|")
    assert "| 400 | 4.0 | 420 | 800, 2.00x | 600, 1.50x (max-autotune) | 63 | 98.7% |" in first
    assert "| failed: no |" in second


def test_the_newest_day_counts_whatever_its_file_is_called(tmp_path: Path) -> None:
    newest = benchmark("vit_b16", 300)
    newest["environment"] = {**newest["environment"], "date": "2026-11-25"}
    (tmp_path / "a.json").write_text(json.dumps(newest))
    (tmp_path / "b.json").write_text(json.dumps(benchmark("vit_b16", 500)))
    (found,) = readme_table.results(tmp_path)
    assert found["timings"]["gtco"]["back_to_back_us"] == 300


def test_tensorrt_stands_beside_what_was_published_and_its_faults_are_named() -> None:
    found = benchmark("vit_b16", 100) | {"title": "ViT-B/16", "failures": {}, "card": {}}
    found["published"] = {"jit": 4.0, "tensorrt": 6.0, "ansor": 2.0, "autogtco": 4.0}
    found["timings"]["TensorRT"] = found["timings"]["eager"]
    found["verdicts"]["TensorRT"] = {"normal": {"ok": True}, "large mean": {"ok": True}}
    found["facts"] = {"version": "10.9"}
    text = readme_table.beside_tensorrt([found])
    assert "| 100 | 200 (10.9) | 2.00 | 1.50 |" in text and "dashes" not in text
    found["verdicts"]["TensorRT"]["large mean"]["ok"] = False
    text = readme_table.beside_tensorrt([found])
    assert "| 200 (10.9, wrong) | – | 1.50 |" in text  # noqa: RUF001
    assert "- ViT-B/16: answers wrong for inputs of: large mean\n" in text
    del found["timings"]["TensorRT"], found["verdicts"]["TensorRT"]
    found["failures"] = {"TensorRT": "TensorRTError: no"}
    found["published"] = None
    text = readme_table.beside_tensorrt([found])
    assert "| 100 | – | – | – |" in text and "- ViT-B/16: TensorRTError: no\n" in text  # noqa: RUF001


def test_a_run_without_torch_compile_replaces_none_that_has_it(tmp_path: Path) -> None:
    runs = [benchmark("vit_b16", us) for us in (100, 90, 80)]
    del runs[2]["timings"]["inductor max-autotune"]
    (tmp_path / "runs.jsonl").write_text("\n".join(map(json.dumps, runs)))
    (kept,) = readme_table.results(tmp_path)
    assert kept["timings"]["gtco"]["back_to_back_us"] == 90


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    assert "No results" in readme_table.table(readme_table.results(tmp_path))
