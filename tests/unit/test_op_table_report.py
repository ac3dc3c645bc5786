"""The report and the plot of GEMM and attention alone: of rows as they were measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments import op_table
from experiments.op_table import report

DEVICE = "imaginary"


def row_of(operator: str, batch: int, run_us: Mapping[str, float], **others: Any) -> dict[str, Any]:
    own = [name for name in run_us if name.startswith("gemm")]
    return {
        "model": "m",
        "operator": operator,
        "kind": "gemm",
        "batch": batch,
        "sizes": (197, 768, 768),
        "floor_us": 1.0,
        "generated": min(own, key=run_us.__getitem__, default=None),
        "run_us": run_us,
        "tflops": {name: 1000.0 / us for name, us in run_us.items()},
        "lines": {name: {"python": 300, "device": 700} for name in own},
        "notes": {},
        **others,
    }


ROWS = [
    row_of(
        "QKV", 1, {"gemm_wgmma": 4.0, "gemm_wgmma, record": 2.0, "gemm_mma": 8.0, "cuBLAS": 3.0}
    ),
    row_of("FC1", 32, {"gemm_wgmma": 10.0, "cuBLAS": 8.9, "Triton": 12.0}),
    row_of("FC2", 32, {"gemm_wgmma": 10.0, "cuBLAS": 9.1}, notes={"Triton": "ValueError: no"}),
]


def test_the_report_has_rates_shares_and_ratios() -> None:
    lines = report({"rows": ROWS, "left_out": {"detr": "RuntimeError: no"}}).splitlines()
    first = "| m | QKV | 197 x 768 x 768 | gemm_wgmma, record | 2.00, 500 (51%) | 1.00 (50%) | "
    assert lines[2] == first + "3.00, 333 (34%), 1.50x |  |"
    assert lines[3].endswith("|  | 8.90, 112 (11%), 0.89x | 12.00, 83 (8%), 1.20x |")
    assert "| gemm_mma | 125 | m QKV | 300 | 700 | 0.125 |" in lines
    assert "| gemm_wgmma | 500 | m QKV | 300 | 700 | 0.500 |" in lines
    assert "Generated products below 90% of the library's speed: m FC1 (89%)." in lines
    assert "Not timed (1): Triton: ValueError: no" in lines
    assert "Not timed (1): detr: RuntimeError: no" in lines
    assert "speed: none." in report({"rows": ROWS[:1], "left_out": {}})


def test_what_is_known_is_kept_after_each_operator(tmp_path: Path) -> None:
    result = {"rows": ROWS[:1], "left_out": {}}
    op_table.save(result, tmp_path / "o.json")
    assert json.loads((tmp_path / "o.json").read_text())["rows"][0]["operator"] == "QKV"
    assert (tmp_path / "o.md").read_text() == report(result)


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    nothing = row_of("V", 1, {"cuBLAS": 3.0})
    op_table.plot({"device": DEVICE, "rows": [*ROWS, nothing]}, tmp_path / "o.png")
    assert (tmp_path / "o.png").exists()
