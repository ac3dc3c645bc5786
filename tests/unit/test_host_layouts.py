"""The host library's register and shared-memory layouts against those recorded on an H200."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from experiments.record_layouts import (
    SWIZZLE,
    Table,
    copies,
    kernel,
    record,
    record_ldmatrix,
    record_mma,
    run_on_host,
    tensor_map,
)
from gtco.codegen.program import KernelProgram
from gtco.ir.interpreter import round_to_tf32
from gtco.runtime.nvrtc import compile_uncached
from tests.conftest import GOLDEN

RECORDED = GOLDEN / "hopper_layouts.json"


def differences(ours: object, recorded: object, path: str = "") -> list[str]:
    """The names of the tables that differ."""
    if isinstance(ours, dict) and isinstance(recorded, dict) and ours.keys() == recorded.keys():
        return [
            line for key in ours for line in differences(ours[key], recorded[key], f"{path}/{key}")
        ]
    return [] if ours == recorded else [path]


@pytest.mark.compiler
@pytest.mark.skipif(
    not RECORDED.exists(), reason="run python -m experiments.record_layouts on a Hopper card"
)
def test_the_host_library_has_the_recorded_layouts() -> None:
    recorded: Table = json.loads(RECORDED.read_text())
    assert "H200" in recorded.pop("device")
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
            tensors["y"].copy_(torch.arange(2048) << 13)

    record(only_compile)
    assert len(compiled) == 38  # the swizzle takes both types in one


@pytest.mark.compiler
def test_tf32_products_have_the_layouts_of_the_manual() -> None:
    table = record_mma(run_on_host, torch.float32)
    for lane in range(32):
        row, k = lane // 4, lane % 4
        places = [(row, k), (row + 8, k), (row, k + 4), (row + 8, k + 4)]
        assert table["a"][lane] == [m * 8 + depth for m, depth in places]
        columns = [(row, k), (row, k + 4), (row + 8, k), (row + 8, k + 4)]
        assert table["b"][lane] == [n * 8 + depth for n, depth in columns]
        assert table["rows"][lane] == [row + 1, row + 1, row + 9, row + 9] * 2


@pytest.mark.compiler
def test_the_copy_engine_rounds_to_tf32_as_an_h200_does() -> None:
    recorded = {  # bits before and after, ties to even
        0x3F800FFF: 0x3F800000, 0x3F801000: 0x3F800000, 0x3F801001: 0x3F802000,
        0x3F803000: 0x3F804000, 0x3FFFFFFF: 0x40000000, 0x7F800000: 0x7F800000,
        0x7F800001: 0x7FFFE000, 0x7F7FFFFF: 0x7F800000, 0x00001001: 0x00002000,
    }  # fmt: skip
    body, smem_bytes = copies(SWIZZLE, {"x": (0, 64)})
    parameters = {"x": tensor_map("x", 64, torch.float32), "y": "u32*"}
    program = kernel(body, parameters, 128, smem_bytes)
    x, y = (torch.zeros(2048, dtype=torch.int32) for _ in range(2))
    x[: len(recorded)] = torch.tensor(list(recorded), dtype=torch.int32)
    run_on_host(program, {"x": x.view(torch.float32).view(64, 32), "y": y})
    assert y[: len(recorded)].tolist() == list(recorded.values())
    finite = x.view(torch.float32)[: len(recorded)]
    kept = ~finite.isnan()
    rounded = round_to_tf32(finite).view(torch.int32)
    assert torch.equal(rounded[kept], y[: len(recorded)][kept])
