"""The host's part of a call, on a GPU of these tests' own."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch

from experiments.studies import host_cost


class Event:
    """Between any two lie 3 ms."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 3.0


def test_calls_with_the_same_inputs_and_with_others_by_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ran: list[str] = []
    monkeypatch.setattr(host_cost, "settle", lambda clock, call, inputs: ran.append("|"))
    call, other, replay, part = (partial(ran.append, name) for name in "cors")
    found = host_cost.cost(host_cost.Contestant(call, other, replay, {"part": part}), samples=2)
    assert found.gpu_us == found.same_inputs_us == found.other_inputs_us == 30.0
    assert set(found.idle_us) == set(found.busy_us) == {"part", "rest", "call"}
    runs = 5 * host_cost.RUNS
    assert Counter(ran)["o"] == runs // 2
    assert "|" + "co" * (runs // 2) in "".join(ran)
    host_cost.show({"gtco": found}, 1.0)
    assert "back to back 30.0, with other inputs 30.0" in capsys.readouterr().out
