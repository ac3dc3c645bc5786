"""Planted faults in what joins windows, turns what windows are cut out of, and knows literals."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

import gtco
from gtco.frontend.literals import fold_literals
from gtco.ir.interpreter import interpret
from gtco.passes.attention import fuse_attention
from gtco.passes.canonicalize import canonicalize
from gtco.passes.rotary import fuse_rotary
from gtco.passes.windows import join_windows
from tests.faults.test_pass_faults import judged, planted
from tests.pass_checks import captured, random
from tests.unit.test_frontend_literals import (
    PATCHES,
    Written,
    changing,
    of_images,
    of_positions,
    of_windows,
)
from tests.unit.test_passes_rotary import (
    X,
    halves,
    of_a_window_and_all,
    of_crossed_windows,
    of_cut_windows,
    of_items,
    of_three_linears,
    of_turned_values,
    of_windows_that_others_read,
    prepared,
)
from tests.unit.test_passes_windows import (
    CHANNELS,
    attended,
    in_another_order,
    of_other_keys,
    of_other_scales,
    rows_around_others,
)

WINDOWS = {
    "windows in any order": ("self.end == other.start", "True"),
    "keys of other windows": ("len({(start, end) for _, start, end in found}) > 1", "False"),
    "scales of the first": ("and dict(self.node.attrs) == dict(other.node.attrs)", ""),
    "heads among the windows": (
        'name = edit.add("permute", name, dims=(0, 2, 3, 1, 4, 5))', "pass"
    ),
    "rows with others between": ("not windows[-1].is_ahead_of(window)", "False"),
    "the first windows of a row for all": ("at = run[0].start - first.start", "at = 0"),
    "rows one run after the other": (
        "        for i in range(row.count)\n        for y in made\n",
        "        for y in made\n        for i in range(row.count)\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", [None, *WINDOWS])
def test_a_fault_in_joined_windows_is_caught(fault: str | None) -> None:
    module = sys.modules[join_windows.__module__]
    wrong = module if fault is None else planted(module, *WINDOWS[fault])
    cases = []
    for function, tokens in (
        (lambda _, x: attended(x, (4, 4, 2, 4, 4)), 18),
        (lambda _, x: attended(x, (4, 4, 2, 4, 4, 2, 3)), 23),
        (rows_around_others, 8),
        (of_other_keys, 8),
        (in_another_order, 8),
        (of_other_scales, 8),
    ):
        graph, args = captured(function, random(2, tokens, 3 * CHANNELS, dtype=torch.float32))
        cases.append((fuse_attention(canonicalize(graph)), args))
    _, found = judged(wrong.join_windows, cases)
    assert bool(found) == (fault is not None)


TURNED = {
    "whoever reads keys": ("nodes[0] != nodes[1]", "False"),
    "whatever else they read": (
        "any(_ahead_of_slices(edit, each) != whole for each in nodes[0])", "False"
    ),
    "queries that turn alone": (
        "match.whole[:count], made[:count]", "match.whole[:1], made[:1]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", [None, *TURNED])
def test_a_fault_in_windows_that_turn_is_caught(fault: str | None) -> None:
    module = sys.modules[fuse_rotary.__module__]
    wrong = module if fault is None else planted(module, *TURNED[fault])
    layers = (
        partial(of_cut_windows, halves),
        of_crossed_windows,
        of_a_window_and_all,
        of_turned_values,
        of_windows_that_others_read,
        of_three_linears(of_items),
    )
    _, found = judged(wrong.fuse_rotary, (prepared(layer, X.float()) for layer in layers))
    assert bool(found) == (fault is not None)


LITERALS = {
    "a literal before it changed": ("return {}\n            continue", "continue"),
    "another constant": ("constants[target] = value", "constants[target] = value + 1"),
}  # fmt: skip


@pytest.mark.parametrize("fault", [None, *LITERALS])
def test_a_fault_in_literals_is_caught(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault is not None:
        wrong = planted(sys.modules[fold_literals.__module__], *LITERALS[fault])
        monkeypatch.setattr(
            sys.modules["gtco.frontend.torch_export"], "fold_literals", wrong.fold_literals
        )
    found = []
    for function in (of_positions, of_images, of_windows, changing):
        model = Written(function).eval()
        x = random(PATCHES, 8, dtype=torch.float32)
        try:
            graph = gtco.capture(model, (x,))
            torch.testing.assert_close(interpret(graph, (x,))[0], model(x))
        except (AssertionError, RuntimeError, gtco.CaptureError) as error:
            found.append(str(error))
    assert bool(found) == (fault is not None)
