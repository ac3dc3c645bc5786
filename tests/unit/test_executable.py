"""How calls on several streams are ordered, seen on a CUDA that only takes notes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gtco.frontend.torch_export import capture
from gtco.options import Options
from gtco.runtime.executable import Executable
from tests.cuda_stand_in import Notes, Stream, take_notes
from tests.plans import Block, make_plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for CUDA")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    return take_notes(monkeypatch)


@pytest.fixture
def executable(notes: Notes) -> Executable:
    torch.manual_seed(0)
    captured = capture(Block().eval(), (torch.randn(4, 16), torch.randn(4, 16)))
    plan = make_plan(captured, options=Options(cuda_graph=False))
    made = Executable(plan, torch.device("cpu", 0), {})
    notes.take()
    return made


def test_calls_on_one_stream_ask_nothing_of_cuda_to_be_in_order(
    executable: Executable, notes: Notes
) -> None:
    x, y = torch.randn(4, 16), torch.randn(4, 16)
    for _ in range(3):
        executable([x, y], static_outputs=False)
    assert notes.take() == []


def test_a_call_waits_for_the_last_one_on_another_stream(
    executable: Executable, notes: Notes
) -> None:
    default, first, second = notes.current, Stream(notes, 1), Stream(notes, 2)
    inputs = [torch.randn(4, 16), torch.randn(4, 16)]
    seen = []
    for stream in (first, first, second, default, default):
        notes.current = stream
        executable(inputs, static_outputs=False)
        seen.append(notes.take())
    assert seen == [
        ["1 waits for stream 0", "event on 1"],
        ["event on 1"],
        ["2 waits for the event", "event on 2"],
        ["0 waits for the event"],
        [],
    ]


def test_a_failed_call_leaves_its_mark_too(executable: Executable, notes: Notes) -> None:
    notes.current = Stream(notes, 1)
    with pytest.raises(RuntimeError):
        executable([torch.randn(4, 16), torch.randn(3, 3)], static_outputs=False)
    assert notes.take()[-1] == "event on 1"


def test_answers_are_fresh_and_need_no_grad_even_where_it_is_on(executable: Executable) -> None:
    x, y = torch.randn(4, 16), torch.randn(4, 16)
    with torch.enable_grad():
        first = executable([x, y], static_outputs=False)
        second = executable([x, y], static_outputs=False)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()
        assert not one.requires_grad


def test_parameters_that_need_grad_are_taken_as_they_are(notes: Notes) -> None:
    linear = nn.Linear(16, 16).eval()
    captured = capture(linear, (torch.randn(4, 16),))
    made = Executable(
        make_plan(captured, options=Options(cuda_graph=False)), torch.device("cpu", 0), {}
    )
    x = torch.randn(4, 16)
    (answer,) = made([x], static_outputs=True)
    assert not answer.requires_grad
    torch.testing.assert_close(answer, linear(x).detach())
