"""Planted faults in what gives the columns of normed heads another order."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.passes.headwise import headwise
from gtco.passes.rotary import fuse_rotary
from tests.faults.test_pass_faults import planted
from tests.pass_checks import check
from tests.unit.test_passes_rotary import (
    WIDTH,
    X,
    halves,
    of_clamped_linears,
    of_normed_parts,
    prepared,
    split,
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


def by_head(c: nn.Module, x: Tensor) -> Tensor:
    """Each head has scales of its own."""
    q, k, v = (split(F.linear(x, w)) for w in (c.q, c.k, c.v))
    scales = torch.stack([c.n, c.n + 1])[:, None]
    q, k = (F.layer_norm(y, (WIDTH,)) * scales for y in (q, k))
    q, k = (F.layer_norm(y, (WIDTH,)) for y in (q, k))
    return F.scaled_dot_product_attention(halves(q, c.cos, c.sin), halves(k, c.cos, c.sin), v)


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_planted_fault_is_caught(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault is not None:
        wrong = planted(sys.modules[headwise.__module__], *FAULTS[fault])
        monkeypatch.setattr(sys.modules[fuse_rotary.__module__], "headwise", wrong.headwise)
    found = []
    for layer in (partial(of_clamped_linears, halves), partial(of_normed_parts, halves), by_head):
        graph, args = prepared(layer, X.float())
        try:
            result = check(fuse_rotary, graph, args)
        except AssertionError as error:
            found.append(str(error))
        else:
            assert sum(node.op == "rotate" for node in result.nodes) == 2, "it declined"
    assert bool(found) == (fault is not None)
