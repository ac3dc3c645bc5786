"""Whole models of skips and branches: no launch stores a concat that one product alone reads."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch

import gtco
from gtco.check import judge
from tests.groups import BF16, F16, F32
from tests.joined_models import ENLARGED, JOINED, STORED, Model, made


def concats(case: Model, dtype: torch.dtype) -> list[set[str]]:
    """The ops of each launch that has a concat; the host build is as near to fp64 as eager."""
    model, x = made(case, dtype)
    compiled = gtco.compile(model, (x,), target="host", fallback="error")
    exact = copy.deepcopy(model).double()(x.double())
    verdict = judge(compiled(x), model(x), exact, dtype)
    assert verdict.ok, verdict
    return [set(each.ops) for each in compiled.launches if "concat" in each.ops]


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "dtype"),
    list(zip(JOINED, itertools.cycle((F16, BF16, F32)), strict=False)),
)
def test_no_launch_stores_what_one_product_reads(name: str, dtype: torch.dtype) -> None:
    (ops,) = concats(JOINED[name], dtype)
    assert ops & {"linear", "conv"}


@pytest.mark.compiler
def test_an_enlarged_image_may_be_stored_in_the_concat() -> None:
    """Either kernel may have it: nobody copies both pieces."""
    (ops,) = concats(ENLARGED, torch.float16)
    assert ops & {"resize", "conv"}


@pytest.mark.compiler
@pytest.mark.parametrize("name", STORED)
def test_what_others_read_is_stored(name: str) -> None:
    found = concats(STORED[name], torch.float16)
    assert found and not any(ops & {"linear", "conv"} for ops in found)


@pytest.mark.parametrize(
    ("name", "arch"),
    list(zip((*JOINED, *STORED), itertools.cycle(("sm_90a", "sm_90a", "sm_80")), strict=False)),
)
def test_compiled_for_a_gpu_and_kept(name: str, arch: str, tmp_path: Path) -> None:
    """A file comes back only if each map of a piece lies within a value that its launch reads."""
    model, x = made((JOINED | STORED)[name], torch.float16)
    compiled = gtco.compile(model, (x,), target=arch, fallback="error")
    assert all(each.kernel != "aten" for each in compiled.launches)
    path = tmp_path / "joined.gtco"
    compiled.save(path)
    assert gtco.load(path).launches == compiled.launches
