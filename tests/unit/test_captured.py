"""Calls without copies: what is read and stored in place, and how kernels get new addresses."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver
from torch import Tensor, nn

from gtco.codegen.program import KernelProgram, Pointer, TensorMapArgument
from gtco.frontend.torch_export import capture
from gtco.options import Options
from gtco.passes import run_pipeline
from gtco.passes.channels import MOST
from gtco.runtime.captured import CapturedGraph
from gtco.runtime.driver import BoundLaunch, DriverError
from gtco.runtime.executable import Executable
from gtco.runtime.in_place import LEAST_KEPT, MOST_LAUNCHES, copied_inputs, copied_outputs
from gtco.runtime.inputs import input_checks
from gtco.runtime.plan import Plan
from tests.cuda_stand_in import SUCCESS, CpuGraphs, Kernel, Notes, Stream, on_cpu, take_notes
from tests.models import FunctionOfTwo
from tests.plans import make_plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for CUDA")

SIZE = (8, 8)


def plan_of(function: Callable[..., Any], **options: Any) -> Plan:
    """Negations are generated kernels, all else is ATen's."""
    captured = capture(FunctionOfTwo(function).eval(), (torch.zeros(SIZE), torch.zeros(SIZE)))
    return make_plan(captured, generated="neg", options=Options(**options))


def thrice(x: Tensor, y: Tensor) -> Any:
    """Three launches, the last two of which x's slot in the arena may serve."""
    return {"x": torch.neg(torch.neg(torch.neg(x))), "y": torch.neg(y)}


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    return take_notes(monkeypatch)


@pytest.fixture
def graphs(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> CpuGraphs:
    return CpuGraphs(monkeypatch, torch.Size(SIZE).numel())


def inputs(*seeds: int) -> list[Tensor]:
    return [torch.randn(SIZE, generator=torch.Generator().manual_seed(each)) for each in seeds]


# -- what is in place ------------------------------------------------------------------------------


def reasons(function: Callable[..., Any]) -> tuple[dict[str, str], dict[str, str]]:
    plan = plan_of(function)
    values = {base: torch.zeros(SIZE) for base, _ in plan.outputs.values()}
    return copied_inputs(plan), copied_outputs(plan, values)


def test_what_only_kernels_use_needs_no_copy() -> None:
    assert reasons(thrice) == ({}, {})
    assert reasons(lambda x, y: torch.neg(x).t().view(2, 4, 8)) == ({}, {})  # y is not read at all


def test_an_input_that_is_given_back_is_copied() -> None:
    ins, outs = reasons(lambda x, y: (torch.neg(x), y.t()))
    assert ins == {"y": "the caller gets it back"}
    assert list(outs.values()) == ["no launch stores it"]


def test_what_aten_reads_or_stores_is_copied() -> None:
    ins, outs = reasons(lambda x, y: (torch.neg(x), torch.sigmoid(y)))
    assert ins == {"y": "g1 calls ATen with it"}
    assert list(outs.values()) == ["g1 calls ATen with it"]
    ins, outs = reasons(lambda x, y: (a := torch.neg(x), torch.sigmoid(a)))
    assert ins == {} and len(outs) == 2  # the first is stored by a kernel and read by ATen


def test_outputs_that_share_memory_or_select_from_it_are_copied() -> None:
    _, outs = reasons(lambda x, y: (a := torch.neg(x), a.t()))
    assert set(outs.values()) == {"another output shares its memory"}
    for select in (
        lambda x: x[3:],
        lambda x: x[:, :5],
        lambda x: x[:4].expand(2, 4, 8)[:, :, 0],
        lambda x: x[:1].expand(8, 8),
        lambda x: x.t().reshape(64),
        lambda x: x[:, 1:].unfold(1, 6, 1),
    ):
        _, outs = reasons(lambda x, y, select=select: select(torch.neg(x)))
        (reason,) = outs.values()
        assert reason.startswith("it is another selection or order of the elements of %")


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[1:-1],
    "columns": lambda x: x[:, :6],
    "the last columns": lambda x: x[:, 2:].t(),
    "rows and columns": lambda x: x[1:, :7],
    "three dimensions": lambda x: x[:, 1:].view(2, 4, 7).permute(2, 0, 1),
}
"""Three quarters and more of an image."""


@pytest.mark.parametrize("part", PARTS.values(), ids=list(PARTS))
def test_outputs_that_are_most_of_what_is_stored_are_not_copied(
    graphs: CpuGraphs, part: Callable[[Tensor], Tensor]
) -> None:
    def two(x: Tensor, y: Tensor) -> Any:  # the part comes first, and the whole has another size
        return {"part": part(torch.neg(x)), "whole": torch.neg(y), "more": part(torch.neg(y + 1))}

    executable = on_cpu(plan_of(two))
    assert executable.copied_outputs == ()
    kept = []
    for seed in range(4):
        for buffer in (*executable.inputs, *executable.outputs):
            buffer.fill_(float("nan"))
        x, y = inputs(seed, seed + 10)
        kept.append((executable([x, y], static_outputs=False), x, y))
    for answers, x, y in kept:
        for answer, right in zip(answers, (part(-x), -y, part(-(y + 1))), strict=True):
            assert torch.equal(answer, right) and answer.stride() == right.stride()
            assert answer._base is None and answer.untyped_storage().nbytes() == 4 * 64
    assert len({answer.untyped_storage().data_ptr() for each, *_ in kept for answer in each}) == 12
    static = executable([x, y], static_outputs=True)
    assert torch.equal(static[0], part(-x)) and torch.equal(static[1], -y)
    assert static[0].data_ptr() == executable.outputs[0].data_ptr()


def test_what_padding_adds_is_no_more_than_an_output_may_hold() -> None:
    assert LEAST_KEPT * MOST <= 1


def test_an_input_of_many_launches_is_copied() -> None:
    def many(count: int) -> Callable[..., Any]:
        return lambda x, y: tuple(torch.neg(x) for _ in range(count))

    assert reasons(many(MOST_LAUNCHES)) == ({}, {})
    assert reasons(many(MOST_LAUNCHES + 1))[0] == {"x": f"{MOST_LAUNCHES + 1} launches use it"}


# -- calls -----------------------------------------------------------------------------------------


def are_right_at_new_addresses(executable: Executable) -> bool:
    """Calls with inputs in new memory give right and fresh answers, whatever the buffers hold."""
    kept = []
    for seed in range(4):
        for buffer in executable.inputs:
            buffer.fill_(float("nan"))
        x, y = inputs(seed, seed + 10)
        kept.append((executable([x, y], static_outputs=False), x, y))
    return all(
        torch.equal(result, -given)
        for results, *both in kept
        for result, given in zip(results, both, strict=True)
    )


def test_calls_read_inputs_and_store_outputs_where_the_caller_has_them(graphs: CpuGraphs) -> None:
    executable = on_cpu(plan_of(thrice))
    assert executable.copied_inputs == executable.copied_outputs == ()
    assert are_right_at_new_addresses(executable)


def test_libraries_take_workspaces_of_the_graphs_own(graphs: CpuGraphs, notes: Notes) -> None:
    on_cpu(plan_of(thrice))
    assert notes.lines.count("workspaces dropped") == 2  # ahead of the capture and after it


@pytest.mark.parametrize("fault", ["bind", "inputs", "outputs", "update"])
def test_kernels_left_at_old_addresses_are_noticed(
    graphs: CpuGraphs, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = on_cpu(plan_of(thrice))
    graph: Any = executable._graph
    if fault == "bind":
        monkeypatch.setattr(CapturedGraph, "_bind", lambda self, addresses: None)
    elif fault == "update":
        graphs.cuGraphExecKernelNodeSetParams = lambda *args: (SUCCESS,)  # type: ignore[method-assign]
        monkeypatch.setattr(
            driver, "cuGraphExecKernelNodeSetParams", graphs.cuGraphExecKernelNodeSetParams
        )
    else:
        part = slice(0, 2) if fault == "inputs" else slice(2, 4)
        graph._uses[part] = [[], []]
    assert not are_right_at_new_addresses(executable)


def test_only_kernels_of_what_moved_get_new_arguments(graphs: CpuGraphs) -> None:
    executable = on_cpu(plan_of(thrice))
    x, y, other = inputs(1, 2, 3)
    executable([x, y], static_outputs=True)
    assert graphs.updates == [(1, 1), (1, 4)]
    graphs.updates.clear()
    executable([x, y], static_outputs=True)
    assert graphs.updates == []
    executable([x, other], static_outputs=True)
    assert graphs.updates == [(1, 4)]
    graphs.updates.clear()
    executable([x, other], static_outputs=False)
    assert graphs.updates == [(1, 3), (1, 4)]


def test_a_kernel_that_reads_and_stores_in_place_is_updated_once(graphs: CpuGraphs) -> None:
    executable = on_cpu(plan_of(lambda x, y: torch.neg(x)))
    x, y = inputs(1, 2)
    (answer,) = executable([x, y], static_outputs=False)
    assert torch.equal(answer, -x) and graphs.updates == [(1, 1)]


def test_an_empty_input_moves_nobody_else(graphs: CpuGraphs) -> None:
    captured = capture(FunctionOfTwo(lambda x, y: torch.neg(y)), (torch.zeros(4, 0), inputs(0)[0]))
    executable = on_cpu(make_plan(captured, generated="neg"))
    for seed in range(3):
        (given,) = inputs(seed)
        for buffer in (*executable.inputs, *executable.outputs):
            buffer.fill_(float("nan"))
        (answer,) = executable([torch.zeros(4, 0), given], static_outputs=False)
        assert torch.equal(answer, -given)
        assert torch.equal(executable.outputs[0].isnan(), torch.ones(SIZE, dtype=torch.bool))


def awkward(kind: str, values: Tensor) -> Tensor:
    """`values` as no kernel can read them in place, or as one that is no plain tensor."""
    if kind == "misaligned":
        return torch.zeros(values.numel() + 1)[1:].view(values.shape).copy_(values)
    if kind == "transposed":
        return values.t().contiguous().t()
    if kind == "negated":
        return torch._neg_view(-values)
    return nn.Parameter(values, requires_grad=False)


@pytest.mark.parametrize("kind", ["misaligned", "transposed", "negated", "subclass"])
def test_inputs_that_no_kernel_can_read_are_copied(graphs: CpuGraphs, kind: str) -> None:
    executable = on_cpu(plan_of(thrice))
    for seed in range(3):
        x, y = inputs(seed, seed + 10)
        answers = executable([awkward(kind, x), y], static_outputs=False)
        assert torch.equal(answers[0], -x) and torch.equal(answers[1], -y)
        graph = executable._graph
        assert graph is not None and graph._bound[0] == executable.inputs[0].data_ptr()
        plain = executable([x, y], static_outputs=False)
        assert torch.equal(plain[0], -x)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "gtco.runtime"]


def test_an_input_in_another_order_than_the_example_is_told_once(
    graphs: CpuGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    executable = on_cpu(plan_of(thrice))
    x, y = inputs(1, 2)
    with caplog.at_level(logging.WARNING, "gtco.runtime"):
        for kind in ("misaligned", "subclass"):
            executable([awkward(kind, x), y], static_outputs=False)
        assert not told(caplog)
        for _ in range(2):
            executable([awkward("transposed", x), y], static_outputs=False)
    (message,) = told(caplog)
    assert message.startswith("argument x lies in memory otherwise than the example")


def test_an_input_that_lies_like_a_transposed_example_is_read_there(graphs: CpuGraphs) -> None:
    like = torch.zeros(SIZE), torch.zeros(4, 2, 8).permute(1, 2, 0)
    model = FunctionOfTwo(lambda x, y: torch.neg(y.permute(2, 0, 1))).eval()
    captured = capture(model, like)
    captured = dataclasses.replace(captured, graph=run_pipeline(captured.graph))
    executable = on_cpu(make_plan(captured, generated="neg"))
    _, check = input_checks(captured.graph)
    for seed in range(3):
        x, y = inputs(seed, seed + 10)
        for buffer in executable.inputs:
            buffer.fill_(float("nan"))
        y = y.view(4, 2, 8)
        given = check(y.permute(1, 2, 0), y.device, True)
        (answer,) = executable([x, given], static_outputs=False)
        assert torch.equal(answer, -y)
        graph = executable._graph
        assert graph is not None and y.data_ptr() in graph._bound


def test_one_tensor_may_stand_for_two_arguments(graphs: CpuGraphs) -> None:
    executable = on_cpu(plan_of(thrice))
    (x,) = inputs(1)
    answers = executable([x, x], static_outputs=False)
    assert torch.equal(answers[0], -x) and torch.equal(answers[1], -x)
    assert answers[0].data_ptr() != answers[1].data_ptr()


def test_static_outputs_stay_and_can_be_the_next_input(graphs: CpuGraphs) -> None:
    executable = on_cpu(plan_of(thrice))
    x, y, other = inputs(1, 2, 3)
    first = executable([x, y], static_outputs=True)
    again = executable([other, first[0]], static_outputs=True)  # stored anew before y is read
    assert first[0].data_ptr() == again[0].data_ptr() == executable.outputs[0].data_ptr()
    assert torch.equal(again[0], -other) and torch.equal(again[1], x)
    fresh = executable([x, y], static_outputs=False)
    assert fresh[0].data_ptr() != again[0].data_ptr() and torch.equal(fresh[0], -x)


def test_what_is_copied_and_what_is_not_can_be_in_one_call(graphs: CpuGraphs) -> None:
    def mixed(x: Tensor, y: Tensor) -> Any:
        made = torch.neg(x)
        return {"made": made, "after": torch.neg(torch.sigmoid(made)), "same": y}

    executable = on_cpu(plan_of(mixed))
    assert (executable.copied_inputs, executable.copied_outputs) == ((1,), (0, 2))
    kept = []
    for seed in range(3):
        x, y = inputs(seed, seed + 10)
        kept.append((executable([x, y], static_outputs=False), x, y))
    for (made, after, same), x, y in kept:
        assert torch.equal(made, -x) and torch.equal(same, y)
        torch.testing.assert_close(after, -torch.sigmoid(-x))


def test_an_answer_is_laid_out_as_a_clone_and_is_no_view(graphs: CpuGraphs) -> None:
    executable = on_cpu(plan_of(lambda x, y: torch.neg(x).t()))
    x, y = inputs(1, 2)
    (answer,) = executable([x, y], static_outputs=False)
    clone = executable.outputs[0].clone()
    assert torch.equal(answer, -x.t()) and answer.stride() == clone.stride() == (1, 8)
    assert answer._base is None and answer.untyped_storage().nbytes() == 4 * answer.numel()


def test_enqueue_runs_between_the_buffers_whatever_a_call_used(graphs: CpuGraphs) -> None:
    executable = on_cpu(plan_of(thrice))
    x, y, other = inputs(1, 2, 3)
    answers = executable([x, y], static_outputs=False)
    for buffer in executable.inputs:
        buffer.copy_(other)
    executable.enqueue()
    assert all(torch.equal(output, -other) for output in executable.outputs)
    assert torch.equal(answers[0], -x)


def test_a_failed_update_is_made_good_by_the_next_call(graphs: CpuGraphs) -> None:
    executable = on_cpu(plan_of(thrice))
    x, y = inputs(1, 2)
    graphs.failures = 1
    with pytest.raises(DriverError, match=r"new arguments for the launch of gtco_\w+: CUDA_ERROR"):
        executable([x, y], static_outputs=True)
    answers = executable([x, y], static_outputs=True)
    assert torch.equal(answers[0], -x) and torch.equal(answers[1], -y)


def test_a_graph_that_the_caller_captures_goes_from_buffer_to_buffer(
    graphs: CpuGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = on_cpu(plan_of(thrice))
    x, y = inputs(1, 2)
    executable([x, y], static_outputs=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    answers = executable([x, y], static_outputs=False)
    graph = executable._graph
    assert torch.equal(answers[0], -x) and graph is not None and graph._bound == graph.home


def test_without_one_graph_everything_goes_through_the_buffers(
    graphs: CpuGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    def cut(x: Tensor, y: Tensor) -> Any:
        return torch.neg(torch.sigmoid(torch.neg(x)))

    graphs.refuse = True
    with caplog.at_level(logging.WARNING, "gtco.runtime"):
        segmented = on_cpu(plan_of(cut))
    assert "does not fit one CUDA graph" in caplog.text and len(segmented.uncaptured) == 1
    plain = on_cpu(plan_of(cut, cuda_graph=False))
    for executable in (segmented, plain):
        assert executable.copied_inputs == (0, 1) and executable.copied_outputs == (0,)
        for seed in range(3):
            x, y = inputs(seed, seed + 10)
            (answer,) = executable([x, y], static_outputs=False)
            torch.testing.assert_close(answer, -torch.sigmoid(-x))
    assert graphs.updates == []


def test_a_walk_goes_through_the_buffers_after_a_call(graphs: CpuGraphs) -> None:
    executable = on_cpu(plan_of(thrice))
    x, y, other = inputs(1, 2, 3)
    executable([x, y], static_outputs=False)
    answers = executable.walk([other, y], lambda launch, values, run: run())
    assert torch.equal(answers[0], -other) and torch.equal(answers[1], -y)


def test_a_tensor_map_is_encoded_once_for_each_address(
    graphs: CpuGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    kept: list[Any] = []

    def encode(dtype: Any, rank: int, address: int, *rest: Any) -> Any:
        encoded.append(address)
        storage = ctypes.create_string_buffer(address.to_bytes(8, "little"), 128)
        kept.append(storage)
        return SUCCESS, SimpleNamespace(getPtr=lambda: ctypes.addressof(storage))

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    x, other, out = torch.zeros(64), torch.ones(64), torch.zeros(64)
    whole = TensorMapArgument("x", 0, torch.float32, (8, 8, 1), (8, 64), (8, 8, 1), 0)
    rest = dataclasses.replace(whole, offset=16)
    program = KernelProgram(
        "gemm", "", {}, "", "sm_90a", (1, 1, 1), 32, 0, (whole, Pointer("out"), rest)
    )
    kernel: Any = Kernel(None, 0)
    launch = BoundLaunch(kernel, program, {"x": x, "out": out}, dependent=True)
    graph = CapturedGraph([launch], Stream(Notes(), 7), {"x": x.data_ptr()})  # type: ignore[arg-type]
    base = x.data_ptr()
    assert encoded == [base, base + 64]
    encoded.clear()
    for address in (other.data_ptr(), base, other.data_ptr(), base):
        graph._bind([address])
        assert graphs.graphs[0].nodes == [[address, out.data_ptr()]]
    assert encoded == [other.data_ptr(), other.data_ptr() + 64, base, base + 64]
    (node,) = {node for node, _ in graph._uses[0]}
    third = ctypes.c_void_p.from_address(node._parameters.address + 16).value
    assert third and ctypes.c_uint64.from_address(third).value == base + 64
