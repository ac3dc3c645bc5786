"""The host library's register and shared-memory layouts against those recorded on an H100."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from experiments.record_layouts import Table, record, record_ldmatrix, record_mma, run_on_host
from gtco.codegen.program import KernelProgram
from gtco.runtime.nvrtc import compile_uncached
from tests.conftest import GOLDEN

RECORDED = GOLDEN / "h100_layouts.json"


def differences(ours: object, recorded: object, path: str = "") -> list[str]:
    """The names of the tables that differ."""
    if isinstance(ours, dict) and isinstance(recorded, dict) and ours.keys() == recorded.keys():
        return [
            line for key in ours for line in differences(ours[key], recorded[key], f"{path}/{key}")
        ]
    return [] if ours == recorded else [path]


@pytest.mark.compiler
@pytest.mark.skipif(
    not RECORDED.exists(), reason="run python -m experiments.record_layouts on an H100"
)
def test_the_host_library_has_the_recorded_layouts() -> None:
    recorded: Table = json.loads(RECORDED.read_text())
    assert "H100" in recorded.pop("device")
    assert not differences(record(run_on_host), recorded)


@pytest.mark.compiler
def test_lanes_that_change_places_show() -> None:
    def swapped(program: KernelProgram, tensors: Mapping[str, Tensor]) -> None:
        run_on_host(program, tensors)
        y = tensors["y"]
        y[[4, 5]] = y[[5, 4]]

    right, wrong = (
        {**record_ldmatrix(run), "mma": record_mma(run, torch.float16)}
        for run in (run_on_host, swapped)
    )
    expected = ["/ldmatrix_x4", "/ldmatrix_x4_trans", "/mma/rows", "/mma/columns", "/mma/k"]
    assert set(differences(wrong, right)) <= set(expected)
    assert {"/ldmatrix_x4", "/mma/columns"} <= set(differences(wrong, right))


def test_every_probe_compiles_for_the_gpu() -> None:
    compiled = set()

    def only_compile(program: KernelProgram, tensors: Mapping[str, Tensor]) -> None:
        if program.source not in compiled:
            assert compile_uncached(program.code, program.name, program.arch).spill_bytes == 0
            compiled.add(program.source)
        if "y" in tensors and tensors["y"].shape == (2048,):  # what the swizzle's probe checks
            tensors["y"].copy_(torch.arange(2048))

    record(only_compile)
    assert len(compiled) == 17  # the swizzle takes both types in one
