"""`experiments.sanitize` runs every sketch and every kind of cluster, and a wrong answer shows."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from experiments import sanitize
from gtco.codegen.program import KernelProgram
from gtco.codegen.rules import SKETCHES, derive
from gtco.ir.graph import Group
from gtco.ir.interpreter import interpret
from gtco.target import TARGETS

H100 = TARGETS["sm_90a"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_it_runs_every_sketch_in_few_small_programs(arch: str) -> None:
    found = [
        program
        for case in sanitize.CASES.values()
        for program in sanitize.programs(case, case.make(), TARGETS[arch])
    ]
    hopper = {
        "gemm_wgmma", "gemm_persistent", "gemm_back_to_back", "conv_wgmma", "attention_projection",
        "attention_wgmma",
    }  # fmt: skip
    expected = {kind.name for kind in SKETCHES} - (hopper if arch == "sm_80" else set())
    assert {program.sketch for program in found} == expected
    assert len(found) <= 170
    assert all(program.grid[0] * program.grid[1] * program.grid[2] <= 128 for program in found)
    if arch == "sm_90a":
        schedules = [program.schedule for program in found if program.sketch == "gemm_wgmma"]
        copies = [each.schedule["tma"] for each in found if each.sketch == "attention"]
        assert set(copies) == {0, 1}
        shared = [each.schedule for each in found if each.sketch == "attention_wgmma"]
        assert {1, 2, 4} <= {each["split"] for each in shared}
        assert {0, 16} == {each["rest"] for each in shared}
        for knob in ("split", "multicast"):
            assert {1, 2, 4} <= {schedule[knob] for schedule in schedules}
            assert {0, 1} <= {schedule["swap"] for schedule in schedules if schedule[knob] > 1}
        assert {1, 2, 3} <= {schedule["cluster_q"] for schedule in schedules}
        few = [program.schedule for program in found if program.sketch == "gemm_skinny"]
        assert {1, 2, 4} <= {schedule["split"] for schedule in few}
        stay = [program for program in found if program.sketch == "gemm_persistent"]
        assert {0, 1} == {program.schedule["cooperative"] for program in stay}
        assert {384, 512} == {program.block for program in stay}, "two consumers, and three"
        assert max(program.grid[0] for program in stay) == sanitize.MULTIPROCESSORS
        both = [program for program in found if program.sketch == "gemm_back_to_back"]
        assert {program.grid[0] for program in both} == {sanitize.MULTIPROCESSORS}
        assert {2, 4} == {program.schedule["stages"] for program in both}


def test_a_wish_that_nothing_fulfils_is_an_error() -> None:
    (sketch,) = derive(sanitize.CASES["gelu"].make(), "elementwise", H100).sketches
    with pytest.raises(ValueError, match="has no legal schedule with"):
        sanitize.wished(sketch, {"vectors": 1000}, seed=0)


@pytest.mark.parametrize("factor", [1.0, 0.0])
def test_a_wrong_answer_is_reported(
    factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(
        program: KernelProgram, group: Group, values: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        outputs = interpret(group.graph, [values[name] for name in group.graph.inputs])
        return {
            name: output * torch.tensor(factor, dtype=output.dtype)
            for name, output in zip(group.graph.outputs, outputs, strict=True)
        }

    monkeypatch.setattr(sanitize, "run_from_cpu", run)
    assert sanitize.run_kernels(H100) == (factor == 1.0)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("right") for line in lines) == (len(lines) if factor else 0)
