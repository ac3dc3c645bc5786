"""Plans and compiled modules, as far as they go without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gtco.frontend.torch_export import Captured, capture
from gtco.ir.graph import Group
from gtco.ir.interpreter import ArgumentError, interpret
from gtco.ir.spec import GraphError
from gtco.runtime.arena import plan_arena
from gtco.runtime.inputs import InputCheck
from gtco.runtime.library import bind_library, library_precision
from gtco.runtime.module import CompiledModule, RecompileError, runs_on
from gtco.runtime.plan import Plan, PlanError
from gtco.target import TARGETS, TargetError
from tests.plans import Block, make_plan

CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return capture(Block().eval(), (torch.randn(4, 16), torch.randn(4, 16)))


@pytest.fixture(scope="module")
def negations() -> Captured:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.neg(torch.sigmoid(torch.neg(torch.neg(x))))

    return capture(Twice().eval(), (torch.randn(8),))


# -- the plan --------------------------------------------------------------------------------------


def test_library_launches_in_an_arena_equal_the_interpreter(captured: Captured) -> None:
    plan = make_plan(captured, (("linear", "gelu"),))
    graph = captured.graph
    arena = plan_arena(plan.lifetimes())
    memory = torch.full((arena.nbytes,), 0xFF, dtype=torch.uint8)
    tensors: dict[str, Tensor] = {name: graph.constants[name] for name in plan.constants}
    for name, offset in arena.offsets.items():
        spec = graph.specs[name]
        flat = memory[offset : offset + spec.nbytes]
        tensors[name] = flat.view(spec.dtype).view(spec.sizes)
    args = [torch.randn(4, 16), torch.randn(4, 16)]
    for name, value in zip(graph.inputs, args, strict=True):
        tensors[name].copy_(value)
    for launch in plan.launches:
        bind_library(launch.group, tensors)(0)
    for name, expected in zip(graph.outputs, interpret(graph, args), strict=True):
        base, chain = plan.outputs[name]
        result = tensors[base]
        for node in chain:
            result = node.definition.reference(result, **node.attrs)
        torch.testing.assert_close(result, expected)


def test_a_product_over_nothing_is_its_bias() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, torch.zeros(3, 0), torch.arange(3.0))

    captured = capture(Model(), (torch.zeros(2, 4, 0),))
    (node,) = (each for each in captured.graph.nodes if each.op == "linear")
    group = Group("g", captured.graph)
    out = torch.full((2, 4, 3), float("nan"))
    constants = captured.graph.constants
    bind_library(group, {"x": torch.zeros(2, 4, 0), **constants, node.name: out})(0)
    assert torch.equal(out, torch.arange(3.0).expand(2, 4, 3))


def test_a_shape_that_torch_misstates_is_said() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.logcumsumexp(x, 0)

    graph = capture(Model(), (torch.zeros(4),)).graph
    (name,) = graph.outputs
    tensors = {"x": torch.zeros(4), name: torch.zeros(2, 4)}
    with pytest.raises(GraphError, match=f"%{name} .aten.logcumsumexp.* has the shape .4., where"):
        bind_library(Group("g", graph), tensors)(0)


def test_lifetimes_span_first_store_to_last_read(captured: Captured) -> None:
    plan = make_plan(captured)
    spans = {each.name: (each.first, each.last) for each in plan.lifetimes()}
    x, y = captured.graph.inputs
    made = [launch.group.graph.outputs[0] for launch in plan.launches]
    assert spans[x] == (-1, 0)
    assert spans[y] == (-1, len(made))  # the caller gets it back
    assert spans[made[0]] == (0, 1)
    assert spans[made[-1]] == (len(made) - 1, len(made))
    assert not set(spans) & set(captured.graph.constants)


def test_a_plan_out_of_order_is_refused(captured: Captured) -> None:
    plan = make_plan(captured)
    backwards = Plan(plan.fused, plan.launches[::-1], plan.target, plan.options)
    with pytest.raises(PlanError, match="before a launch stores it"):
        backwards.lifetimes()
    short = Plan(plan.fused, plan.launches[:-1], plan.target, plan.options)
    with pytest.raises(PlanError, match="which no launch stores"):
        short.lifetimes()


def test_a_plan_of_another_signature_is_refused(captured: Captured, negations: Captured) -> None:
    with pytest.raises(PlanError, match="changed the model's inputs"):
        CompiledModule(make_plan(captured), negations)


def test_only_generated_neighbours_launch_early(negations: Captured) -> None:
    plan = make_plan(negations, generated="neg")
    assert [plan.is_dependent(i) for i in range(4)] == [False, True, False, False]
    late = Plan(plan.fused, plan.launches, plan.target, plan.options, dependent_launch=False)
    assert not any(late.is_dependent(i) for i in range(4))
    old = Plan(plan.fused, plan.launches, TARGETS["sm_80"], plan.options)
    assert not any(old.is_dependent(i) for i in range(4))


def test_library_precision_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    with library_precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
    with library_precision("fp32"):
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == before


# -- the module ------------------------------------------------------------------------------------


def test_launches_kernels_and_report(negations: Captured) -> None:
    compiled = CompiledModule(make_plan(negations, generated="neg"), negations)
    assert [launch.kernel == "aten" for launch in compiled.launches] == [False, False, True, False]
    assert compiled.launches[0].ops == ("neg",)
    assert compiled.launches[0].schedule == {"cluster": 1}
    (kernel,) = compiled.kernels
    assert (kernel.launches, kernel.smem_bytes, kernel.spill_bytes) == (3, 64, 0)
    assert kernel.registers > 0 and kernel.cubin_bytes > 0
    report = compiled.report()
    assert (report.launches, report.generated, report.legal_plans) == (4, 3, 42)
    assert [each.reason for each in report.fallbacks] == ["no sketch"]
    assert report.predicted_us == 12.0
    assert report.predicted_generated == 0.5
    assert report.to_dict()["fallbacks"][0]["ops"] == "sigmoid"
    text = str(report)
    assert "the reduction axis crosses the tile" in text
    assert "4, 3 of them generated" in text


def test_bytes_saved_counts_what_is_neither_stored_nor_read_again(captured: Captured) -> None:
    apart = CompiledModule(make_plan(captured), captured).report()
    fused = CompiledModule(make_plan(captured, (("linear", "gelu"),)), captured).report()
    hidden = 4 * 32 * 4
    assert apart.bytes_saved == 0
    assert fused.bytes_saved == 2 * hidden
    assert fused.bytes_moved + fused.bytes_saved == apart.bytes_moved


@NO_GPU
def test_a_call_without_the_gpu_says_so(captured: Captured) -> None:
    compiled = CompiledModule(make_plan(captured), captured)
    with pytest.raises(TargetError, match="compiled for sm_90a, and no CUDA GPU is here"):
        compiled(torch.randn(4, 16), torch.randn(4, 16))


def test_arguments_that_do_not_fit_the_signature(captured: Captured) -> None:
    compiled = CompiledModule(make_plan(captured), captured)
    with pytest.raises(ArgumentError, match="argument y is missing"):
        compiled(torch.randn(4, 16))


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.to("cpu"),
        lambda module: module.cuda(),
        lambda module: module.half(),
        lambda module: module.float(),
        lambda module: module.train(),
        lambda module: module.load_state_dict({}),
    ],
)
def test_what_would_change_it_says_to_recompile(captured: Captured, change: Any) -> None:
    compiled = CompiledModule(make_plan(captured), captured)
    with pytest.raises(RecompileError, match=r"compile it again"):
        change(compiled)
    assert compiled.eval() is compiled
    assert not compiled.training
    assert not list(compiled.parameters()) and not compiled.state_dict()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(4, 8), r"argument x: expected f32\[4,16\], got f32\[4,8\]"),
        (torch.zeros(4, 16, dtype=torch.int32), r"expected f32\[4,16\], got i32\[4,16\]"),
        (torch.zeros(4, 16, dtype=torch.complex64), r"got torch.complex64\[4,16\]"),
        (torch.zeros(4, 16, device="meta"), r"a tensor on cpu, got one on meta; move it"),
        (torch.zeros(4, 16, requires_grad=True), r"argument x requires grad"),
        ([1.0], r"argument x: expected a tensor, got a list"),
    ],
)
def test_input_errors_name_the_argument(captured: Captured, given: Any, message: str) -> None:
    check = InputCheck("x", captured.graph.specs[next(iter(captured.graph.inputs))])
    with pytest.raises(ArgumentError, match=message):
        check(given, CPU, True)


def test_any_strides_are_taken_and_grad_where_it_is_off(captured: Captured) -> None:
    check = InputCheck("x", captured.graph.specs[next(iter(captured.graph.inputs))])
    check(torch.zeros(16, 4).t(), CPU, True)
    check(torch.zeros(4, 16, requires_grad=True), CPU, False)


def test_code_runs_on_newer_minors_but_not_sm_90a() -> None:
    assert runs_on(TARGETS["sm_80"], (8, 9))
    assert not runs_on(TARGETS["sm_89"], (8, 6))
    assert not runs_on(TARGETS["sm_80"], (9, 0))
    assert runs_on(TARGETS["sm_90a"], (9, 0))
    assert not runs_on(TARGETS["sm_90a"], (10, 0))


def test_a_positional_call_takes_the_short_way(captured: Captured, negations: Captured) -> None:
    assert CompiledModule(make_plan(captured), captured)._positional
    assert CompiledModule(make_plan(negations), negations)._single == 0
    assert CompiledModule(make_plan(captured), captured)._single is None
    block = Block().eval()
    keyword = capture(block, (torch.randn(4, 16),), {"y": torch.randn(4, 16)})
    assert not CompiledModule(make_plan(keyword), keyword)._positional
