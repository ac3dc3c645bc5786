"""Subgraphs, operators and SE-ResNet9: rehearsed through the same code, and drawn."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from experiments import ablations, e2e, engines, ops, resnet, subgraphs
from experiments.models import operators
from experiments.suites import run
from experiments.suites.child import Asked
from gtco.benchmarking.contestants import PEERS
from gtco.locate import locate

TABLES = (e2e, subgraphs, ops, resnet, ablations)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("module", "row"), [(subgraphs, "detr_attention"), (ops, "matmul_gelu")], ids=str
)
def test_a_rehearsal(
    module: ModuleType, row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    out = tmp_path / "out.jsonl"
    run.main(module.SUITE, [str(out), "--quick", "--rows", row])
    (found,) = map(json.loads, out.read_text().splitlines())
    assert found["rehearsal"] and found["attempts"] == 1
    points = list(found["points"].values()) if "points" in found else [found]
    assert all({"gtco", "onnxruntime (CPU)"} <= point["timings"].keys() for point in points)
    text = (tmp_path / "out.md").read_text()
    assert "no speed is claimed" in text and "| ran |" in text
    assert not (tmp_path / "out.png").exists(), "there are no times to draw"


@pytest.mark.parametrize(
    "module", [e2e, subgraphs, ops, resnet, ablations], ids=lambda each: each.__name__
)
def test_every_table_has_rows_that_can_be_made(module: ModuleType) -> None:
    suite = module.SUITE
    assert suite.module == module.__name__ and len({row.name for row in suite.rows}) == len(
        suite.rows
    )
    for row in suite.rows:
        assert set(row.peers(False)) <= PEERS.keys()
        assert row.cases(False).keys() and row.cases(True).keys()
    smallest = next(iter(suite.rows[-1].cases(True).values()))()
    with torch.no_grad():
        smallest.module(*smallest.args)


def test_sizes_are_those_of_the_sources() -> None:
    sizes = {row.name: tuple(map(int, row.cases(False))) for row in ops.ROWS}
    assert max(sizes["matmul_gelu"]) == 4736 and max(sizes["softmax"]) == 12672
    assert sizes["vit"] == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert all(size % 128 == 0 for name in ("add", "softmax") for size in sizes[name])
    rounds = resnet.SUITE.rounds * resnet.SUITE.calls
    assert rounds == 10_000


def test_the_state_dicts_weights_are_those_that_compute() -> None:
    from transformers import ViTConfig, ViTModel

    state = operators.random_state_dict(**operators.SMALL)
    module, (images,) = operators.vit_of(state, 2, **operators.SMALL)
    own = ViTModel(ViTConfig(**operators.SMALL)).eval()
    own.load_state_dict(state)
    own.to(images.device, images.dtype)
    with torch.no_grad():
        hidden, pooled = module(images)
        expected = own(images)
    assert torch.equal(hidden, expected.last_hidden_state) and hidden.shape == (2, 17, 64)
    assert torch.equal(pooled, expected.pooler_output)
    gone = next(name for name in state if "attention" in name)
    with pytest.raises(ValueError, match=gone):
        operators.vit_of({k: v for k, v in state.items() if k != gone}, 1, **operators.SMALL)
    published = {name: state[today] for name, today in zip(PUBLISHED_NAMES, TODAY, strict=True)}
    others = {name: each for name, each in state.items() if name not in TODAY}
    again, _ = operators.vit_of(published | others, 2, **operators.SMALL)
    with torch.no_grad():
        assert torch.equal(again(images)[0], hidden)


TODAY = ("layers.0.attention.q_proj.weight", "layers.0.mlp.fc1.bias")
PUBLISHED_NAMES = (
    "encoder.layer.0.attention.attention.query.weight",
    "encoder.layer.0.intermediate.dense.bias",
)


def test_engines_are_built_ahead_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another process exports the same bytes, so the table finds what was built ahead."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "stand_ins"))
    words = [str(tmp_path), "--tensorrt-python", sys.executable, "--rows", "detr_attention"]
    engines.main([*words, "--quick"])
    assert len(list(tmp_path.glob("*.engine"))) == 1
    assert capsys.readouterr().out.startswith("detr_attention: built in")
    found = engines.build("detr_attention", tmp_path, Path(sys.executable), 60.0, True)
    assert found.startswith("was there")
    monkeypatch.setenv("STAND_IN_REFUSES", "Erf")
    assert "no importer" in engines.build("vit_h14", tmp_path, Path(sys.executable), 60.0, True)
    assert len(list(tmp_path.glob("*.refused"))) == 1


# -- with times ------------------------------------------------------------------------------------


def benchmark(*names: str) -> dict[str, Any]:
    """What `bench` says of contestants that take 100 us, 200 and so on."""
    times = {name: 100.0 * place for place, name in enumerate(names, 1)}
    return {
        "timings": {
            name: {
                "back_to_back_us": spent,
                "rounds_us": [spent, spent + 10],
                "single_us": dict.fromkeys(("p50", "p90", "p99"), spent),
            }
            for name, spent in times.items()
        },
        "verdicts": {
            name: {"normal": {"ok": True, "rmse": 1e-3, "eager_rmse": 1e-3}} for name in names
        },
        "costs": {name: {"seconds": 1.0, "memory_bytes": 1_000_000} for name in names},
        "failures": {"inductor max-autotune": "no"},
        "launches": 3,
        "generated_share": 1.0,
        "floor_us": 50.0,
        "weight_bytes": 1,
        "facts": {"version": "10.0", "build_s": 9.0, "memory_bytes": 1},
    }


def measured(result: dict[str, Any]) -> Callable[..., tuple[dict[str, Any], None]]:
    """In place of a child: `result`, on some card."""
    card = {"card": {}, "environment": {"gpus": [{"name": "NVIDIA H200"}]}}

    def ask(asked: Asked, *_: object) -> tuple[dict[str, Any], None]:
        counts = {"rounds": asked.rounds, "calls": asked.calls, "failures": {}}
        return {**counts, **result, **card}, None

    return ask


@pytest.mark.parametrize("module", [subgraphs, resnet], ids=lambda each: each.__name__)
def test_models_are_tabled_and_drawn(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(run, "ask_child", measured(benchmark("gtco", "eager", "TensorRT")))
    run.main(module.SUITE, [str(tmp_path / "out.jsonl")])
    text = (tmp_path / "out.md").read_text()
    assert "On NVIDIA H200." in text and "| 200 |" in text and "300 (10.0)" in text
    assert (tmp_path / "out.png").stat().st_size > 10_000
    if module is subgraphs:
        assert "| decoder layer | 4.19 | 1.17 | 11.67 | 3.00 |" in text


def test_operators_are_tabled_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    points = {
        "64": benchmark("gtco", "eager"),
        "128": benchmark("gtco", "eager"),
        "256": {"error": "OutOfMemoryError: no"},
    }
    monkeypatch.setattr(run, "ask_child", measured({"points": points}))
    run.main(ops.SUITE, [str(tmp_path / "out.jsonl"), "--rows", "add,vit"])
    text = (tmp_path / "out.md").read_text()
    assert "| 128 | 100.0 | 200.0, 2.00x | 3 |" in text
    assert "- size 256: OutOfMemoryError: no (every model)" in text
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.compiler
def test_an_ablations_rehearsal_is_tabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    asked = Asked("experiments.ablations", "vit_b16", True, 1, 2)
    found = ablations.measure(locate("tests.pools:tiny"), asked, told.append)
    assert set(ablations.ARMS) == found["arms"].keys() and not found["failures"]
    assert "3 tasks, 1 programs each" in told
    monkeypatch.setattr(run, "ask_child", measured(found | {"rehearsal": True}))
    run.main(ablations.SUITE, [str(tmp_path / "out.jsonl"), "--quick", "--rows", "vit_b16"])
    assert "| ViT-B/16 | ran (2) |" in (tmp_path / "out.md").read_text()


def test_ablations_are_compared_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    arms = {
        name: {"median_us": 100.0 * place, "launches": place}
        for place, name in enumerate(reversed(ablations.ARMS), 2)
    }
    monkeypatch.setattr(run, "ask_child", measured({"arms": arms, "rehearsal": False}))
    run.main(ablations.SUITE, [str(tmp_path / "out.jsonl")])
    text = (tmp_path / "out.md").read_text()
    assert text.count("| 800 (8) |") == text.count("| 4.00 | 3.50 |") == 9
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_no_matplotlib_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(run, "ask_child", measured(benchmark("gtco", "eager")))
    run.main(resnet.SUITE, [str(tmp_path / "out.jsonl")])
    assert "pip install 'gtco[experiments]'" in capsys.readouterr().err
