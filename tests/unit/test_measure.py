"""What the tuner measures and what it throws away, without a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import Sketch
from gtco.cost_model import measure
from gtco.cost_model.measure import (
    Candidate,
    candidates,
    compile_candidates,
    random_values,
    wrong_outputs,
)
from gtco.graph import Group
from gtco.interpreter import interpret
from gtco.runtime.compile_pool import CompileJob, compile_many
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.nvrtc import CompileError, CubinCache
from gtco.runtime.poison import poisoned
from gtco.target import TARGETS
from tests import groups, tile_groups

H100, A100 = TARGETS["sm_90a"], TARGETS["sm_80"]
CPU = torch.device("cpu")
F16 = torch.float16


# -- the judgement ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Answers:
    """A group, what it is exactly and what torch makes of it."""

    group: Group
    exact: tuple[Tensor, ...]
    eager: tuple[Tensor, ...]

    def judge(self, *results: Tensor) -> str:
        """`wrong_outputs` of `results`, in the order of the group's outputs."""
        named = dict(zip(self.group.graph.outputs, results, strict=True))
        return wrong_outputs(self.group, named, self.exact, self.eager)


def answers(group: Group) -> Answers:
    values = random_values(group, CPU, seed=0)
    args = [values[name] for name in group.graph.inputs]
    exact = interpret(group.graph, args, dtype=torch.float64)
    return Answers(group, exact, interpret(group.graph, args))


@pytest.fixture(scope="module")
def residual() -> Answers:
    """Two outputs: the sum in fp16 and its statistics in fp32."""
    return answers(groups.residual_linear(33, 136, 104, F16))


def test_right_answers_pass(residual: Answers) -> None:
    assert residual.judge(*residual.eager) == ""
    assert residual.judge(*(each.float() for each in residual.exact)) == ""
    noise = (residual.eager[0].double() - residual.exact[0]) * 2
    assert residual.judge((residual.exact[0] + noise).half(), residual.eager[1]) == ""


def test_poisoned_outputs_never_pass(residual: Answers) -> None:
    specs = residual.group.graph.specs
    untouched = [poisoned(specs[name], CPU) for name in residual.group.graph.outputs]
    for slot, name in enumerate(residual.group.graph.outputs):
        results = list(residual.eager)
        results[slot] = untouched[slot]
        assert f"%{name} has an RMSE of nan" in residual.judge(*results)
    integers = answers(tile_groups.integers())
    for slot, name in enumerate(integers.group.graph.outputs):
        results = list(integers.eager)
        results[slot] = poisoned(integers.group.graph.specs[name], CPU)
        assert f"%{name}" in integers.judge(*results)


@pytest.mark.parametrize("at", [0, 1])
def test_one_nan_or_infinity_never_passes(residual: Answers, at: int) -> None:
    for value in (float("nan"), float("inf")):
        results = [each.clone() for each in residual.eager]
        results[at].view(-1)[-1] = value
        assert "wrong answer" in residual.judge(*results)


def test_planted_wrong_answers_are_rejected(residual: Answers) -> None:
    for slot, right in enumerate(residual.eager):
        for wrong in (
            torch.zeros_like(right),
            -right,
            right * 1.01,
            right.roll(1, dims=1),
            torch.cat((right[:, :-1], right[:, :1]), dim=1),
            torch.randn_like(right),
        ):
            results = list(residual.eager)
            results[slot] = wrong
            assert "wrong answer" in residual.judge(*results)


def test_the_first_wrong_output_is_named(residual: Answers) -> None:
    first, second = residual.group.graph.outputs
    y, stats = residual.eager
    assert f"%{first}" in residual.judge(-y, -stats)
    assert f"%{second}" in residual.judge(y, -stats)


# -- the inputs ------------------------------------------------------------------------------------


def test_random_values_are_what_the_group_reads() -> None:
    group = groups.norm_linear(7, 200, 40, F16)
    values = random_values(group, CPU, seed=3)
    graph = group.graph
    assert set(values) == {*graph.inputs, *graph.constants}
    for name in graph.inputs:
        assert (tuple(values[name].shape), values[name].dtype) == (
            graph.specs[name].sizes,
            graph.specs[name].dtype,
        )
    assert (values["stats"][..., 1] >= 0).all()
    again = random_values(group, CPU, seed=3)
    assert all(torch.equal(values[name], again[name]) for name in values)
    assert not torch.equal(values["x"], random_values(group, CPU, seed=4)["x"])


# -- the candidates --------------------------------------------------------------------------------


def names(found: list[Candidate]) -> list[str]:
    return [each.program.name for each in found]


def defaults(sketch: Sketch, count: int) -> list[KernelProgram]:
    schedules = list(sketch.defaults())[:count]
    return [sketch.emit(schedule) for schedule in schedules]


def test_candidates_are_the_best_defaults_and_random_others() -> None:
    group = groups.residual_linear(197, 768, 768, F16)
    found = candidates(group, H100, best=12, rest=6, seed=0)
    by_sketch: dict[str, list[Candidate]] = {}
    for each in found:
        by_sketch.setdefault(each.sketch.name, []).append(each)
    assert {name: len(each) for name, each in by_sketch.items()} == {
        "gemm_wgmma": 18,
        "gemm_mma": 3,
    }
    preferred = by_sketch["gemm_wgmma"]
    assert names(preferred)[:12] == [p.name for p in defaults(preferred[0].sketch, 12)]
    assert len(set(names(found))) == len(found)
    assert names(found) == names(candidates(group, H100, best=12, rest=6, seed=0))
    assert names(found) != names(candidates(group, H100, best=12, rest=6, seed=1))


def test_candidates_stop_where_a_sketch_has_no_more() -> None:
    found = candidates(tile_groups.gelu_bias(4, 8), A100, best=20, rest=40, seed=0)
    assert 3 < len(set(names(found))) == len(found) <= 9
    assert not candidates(
        groups.plain_linear(4, 64, 64, torch.float32), H100, best=9, rest=9, seed=0
    )


def test_a_candidate_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def uncached(jobs: list[CompileJob]) -> list[CompiledKernel | CompileError]:
        return compile_many(jobs, 1, CubinCache(None))

    monkeypatch.setattr(measure, "compile_many", uncached)
    good, other = candidates(tile_groups.gelu_bias(4, 8), A100, best=2, rest=0, seed=0)
    broken = dataclasses.replace(other.program, source=f"{other.program.source} nothing;")
    errors = compile_candidates([good, Candidate(other.sketch, broken)])
    assert list(errors) == [broken.name]
    assert "does not compile for sm_80" in errors[broken.name]
