"""`GTCO_LOGS`: what it asks for is told, and what it misspells is named."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import gtco
from gtco import logs
from gtco.options import OptionError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Put every level and handler back."""
    loggers = [logging.getLogger(name) for name in ("gtco", *(f"gtco.{a}" for a in logs.AREAS))]
    before = [(each, each.level, list(each.handlers)) for each in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def compile_one() -> None:
    gtco.compile(nn.Linear(64, 64).eval().half(), (torch.randn(8, 64).half(),), target="sm_80")


def test_a_list_is_areas_and_levels() -> None:
    levels = logs.parse("+fusion, codegen,")
    assert levels == {"fusion": logging.DEBUG, "codegen": logging.INFO}
    assert logs.parse("") == {}


def test_an_unknown_area_is_named_with_the_closest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GTCO_LOGS", "+fusoin")
    with pytest.raises(OptionError, match="no area 'fusoin'; did you mean 'fusion'"):
        compile_one()
    with pytest.raises(OptionError, match="known: frontend, fusion, codegen, runtime, tune"):
        logs.parse("all")


def told(caplog: pytest.LogCaptureFixture) -> set[tuple[str, str]]:
    records = (each for each in caplog.records if each.name.startswith("gtco"))
    return {(each.name, each.levelname) for each in records}


def test_only_what_was_asked_for_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_one()
    assert not told(caplog)
    monkeypatch.setenv("GTCO_LOGS", "+fusion,codegen")
    compile_one()
    assert told(caplog) == {
        ("gtco.fusion", "DEBUG"),
        ("gtco.fusion", "INFO"),
        ("gtco.codegen", "INFO"),
    }


def test_without_handlers_messages_go_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GTCO_LOGS", "frontend")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    compile_one()
    compile_one()
    seen = capsys.readouterr()
    lines = [line for line in seen.err.splitlines() if "gtco.frontend" in line]
    assert (
        lines
        == ["INFO gtco.frontend: captured Linear: 1 inputs, 2 constants of 0.0 MB, 1 nodes"] * 2
    )
    assert not seen.out


def test_every_logger_is_an_area() -> None:
    found = set()
    for folder in ("gtco", "passes", "codegen", "cost_model"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r'getLogger\("([^"]+)"\)', path.read_text()))
    assert found == {"gtco", *(f"gtco.{area}" for area in logs.AREAS)}
