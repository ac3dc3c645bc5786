"""The demo's model is the ViT it says it is, and a wrong fused graph does not pass."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import gtco
from experiments.models import vit
from gtco.check import Verdict
from gtco.cli import demo
from gtco.cli import main as cli
from gtco.locate import Located

PARAMETERS = {
    "vit_base_patch16_224": 86_567_656,
    "vit_large_patch16_224": 304_326_632,
    "vit_huge_patch14_224": 630_764_800,  # without a head
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_models_have_as_many_parameters_as_published(name: str) -> None:
    with torch.device("meta"):
        model = demo.VisionTransformer(**vit.SIZES[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def small() -> Located:
    model = demo.VisionTransformer(patch=8, width=64, depth=2, heads=2, image=32, classes=10)
    demo.randomize(model, seed=0)
    return Located("small", model.eval(), (torch.randn(1, 3, 32, 32),), {})


def test_no_parameter_keeps_a_value_that_hides_mistakes() -> None:
    for name, parameter in small().module.named_parameters():
        assert parameter.std() > 0, name


@torch.no_grad()
def test_the_fused_graph_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo.check_fused(small()).ok
    right = gtco.interpret
    monkeypatch.setattr(gtco, "interpret", lambda *args: (right(*args)[0] + 1e-3,))
    assert not demo.check_fused(small()).ok


WRONG, RIGHT = Verdict("NaN in 1 of 1000 elements"), Verdict("")


@pytest.mark.parametrize("wrong", [(WRONG, None), (RIGHT, WRONG)])
def test_a_wrong_answer_fails_the_demo(
    wrong: tuple[Verdict, Verdict | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = SimpleNamespace(verdict=wrong[0], on_host=wrong[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "rehearse", lambda tell: found)
    monkeypatch.setattr(cli.show, "rehearsal", lambda console, rehearsed: None)
    monkeypatch.setattr(sys, "argv", ["gtco", "demo"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    assert "wrong: NaN in 1 of 1000" in capsys.readouterr().err


@torch.no_grad()
def test_without_classes_the_class_tokens_features_come_out() -> None:
    model = demo.VisionTransformer(patch=8, width=64, depth=1, heads=2, image=32, classes=0)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 64)
    assert not any(name.startswith("head") for name, _ in model.named_parameters())
