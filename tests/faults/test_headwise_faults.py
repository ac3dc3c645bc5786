"""Planted faults in what gives the columns of normed heads another order."""

from __future__ import annotations

import sys
from functools import partial

import pytest

from gtco.passes.headwise import headwise
from gtco.passes.rotary import fuse_rotary
from tests.faults.test_pass_faults import judged, planted
from tests.unit.test_passes_rotary import (
    X,
    halves,
    of_clamped_linears,
    of_normed_parts,
    of_scaled_heads,
    prepared,
)

FAULTS = {
    "weights in the order that they had": ("columns[:, order].flatten()", "columns.flatten()"),
    "scales in the order that they had": ("[order.to(constant.device)]", ""),
    "a mean over heads": ('{"dims": (3,)}', '{"dims": (1,)}'),
    "a clamp that is forgotten": ("for node in self.ahead:", "for node in ():"),
    "scales of one head for all": (
        "kept.shape[-1] == kept.numel() == columns", "kept.shape[-1] == columns"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_planted_fault_is_caught(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault is not None:
        wrong = planted(sys.modules[headwise.__module__], *FAULTS[fault])
        monkeypatch.setattr(sys.modules[fuse_rotary.__module__], "headwise", wrong.headwise)
    layers = partial(of_clamped_linears, halves), partial(of_normed_parts, halves), of_scaled_heads
    right, found = judged(fuse_rotary, (prepared(layer, X.float()) for layer in layers))
    for result in right:
        assert sum(node.op == "rotate" for node in result.nodes) == 2, "it declined"
    assert bool(found) == (fault is not None)
