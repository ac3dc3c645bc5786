"""Concats of channels that a product reads in pieces, in whole models on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

import gtco
from gtco.check import judge
from tests.joined_models import ENLARGED, JOINED, STORED, made

pytestmark = pytest.mark.gpu

CASES = {**JOINED, **STORED, "enlarged": ENLARGED}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_models_of_skips_and_branches(name: str, dtype: torch.dtype, graph: bool) -> None:
    """Again with other values and with what is no number, of which nothing stays behind."""
    model, x = made(CASES[name], dtype)
    model, x = model.cuda(), x.cuda()
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        compiled = gtco.compile(model, (x,), fallback="error", cuda_graph=graph)
        for each in (x, torch.randn_like(x), torch.full_like(x, torch.nan), x.clone()):
            verdict = judge(compiled(each), model(each), exact(each.double()), dtype)
            assert verdict.ok, verdict


@pytest.mark.parametrize("name", JOINED)
def test_no_launch_stores_what_one_product_reads(name: str) -> None:
    model, x = made(JOINED[name], torch.float16)
    with torch.no_grad():
        compiled = gtco.compile(model.cuda(), (x.cuda(),), fallback="error")
    (ops,) = (set(each.ops) for each in compiled.launches if "concat" in each.ops)
    assert ops & {"linear", "conv"}
