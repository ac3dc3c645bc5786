"""Calls without copies on a GPU: kernels read and store where the caller has the tensors."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.codegen.program import TensorMapArgument
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.frontend.torch_export import capture
from gtco.options import Options
from gtco.runtime.captured import CapturedGraph
from gtco.runtime.executable import Executable
from gtco.runtime.module import CompiledModule
from gtco.target import Target, target_of_capability
from tests.models import FunctionOfTwo
from tests.plans import make_plan

pytestmark = pytest.mark.gpu

SIZE = (256, 1024)
CLUSTERS = [(1, 1, 1), (4, 1, 1), (1, 2, 1), (2, 1, 2)]
"""Blocks that split K, blocks that bring each other tiles, and neighbours that do neither."""


def negations(x: Tensor, y: Tensor) -> Any:
    return {"x": torch.neg(torch.neg(torch.neg(x))), "y": torch.neg(y)}


@pytest.fixture
def target() -> Target:
    return target_of_capability(*torch.cuda.get_device_capability())


def compiled_of(function: Callable[..., Any], target: Target, **options: Any) -> CompiledModule:
    """Negations are generated kernels, all else is ATen's."""
    like = (torch.zeros(SIZE, device="cuda"), torch.zeros(SIZE, device="cuda"))
    captured = capture(FunctionOfTwo(function).eval(), like)
    plan = make_plan(captured, generated="neg", target=target, options=Options(**options))
    return CompiledModule(plan, captured)


def two_linears(model: nn.Module, rows: int, target: Target, clusters: tuple[int, int, int]) -> Any:
    """`model`, two linear layers in wgmma kernels whose clusters are so large; and its plan."""
    weight = next(model.parameters())
    like = torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    captured = capture(model, (like,))
    plan = make_plan(captured, target=target)
    launches = []
    for launch in plan.launches:
        sketch = GemmWgmma(launch.group, target)
        program = next(
            sketch.emit(schedule)
            for schedule in sketch.defaults()
            if (schedule["split"], schedule["multicast"], schedule["cluster_q"]) == clusters
        )
        launches.append(dataclasses.replace(launch, program=program))
    return captured, dataclasses.replace(plan, launches=tuple(launches))


def ready(compiled: CompiledModule) -> Executable:
    executable = compiled.prepare()
    assert isinstance(executable, Executable)
    return executable


def random(*seeds: int) -> list[Tensor]:
    generators = [torch.Generator("cuda").manual_seed(each) for each in seeds]
    return [torch.randn(SIZE, device="cuda", generator=each) for each in generators]


def are_right_at_new_addresses(
    compiled: CompiledModule, expected: Callable[..., Tensor], make: Callable[[int], list[Tensor]]
) -> bool:
    """Calls with inputs in new memory give right and fresh answers, whatever the buffers hold."""
    kept = []
    for seed in range(6):
        for buffer in ready(compiled).inputs:
            buffer.fill_(float("nan"))
        given = make(seed)
        answer = compiled(*given)
        kept.append((answer if isinstance(answer, dict) else {"x": answer}, given))
    torch.cuda.synchronize()
    addresses = {result.data_ptr() for results, _ in kept for result in results.values()}
    if len(addresses) != sum(len(results) for results, _ in kept):
        return False
    return all(
        torch.allclose(result, expected(each), rtol=1e-2, atol=1e-2)
        for results, given in kept
        for result, each in zip(results.values(), given, strict=True)
    )


# -- kernels ---------------------------------------------------------------------------------------


def test_calls_read_inputs_and_store_outputs_where_the_caller_has_them(target: Target) -> None:
    compiled = compiled_of(negations, target)
    assert ready(compiled).copied_inputs == ready(compiled).copied_outputs == ()
    assert are_right_at_new_addresses(compiled, torch.neg, lambda seed: random(seed, seed + 10))


def test_kernels_left_at_old_addresses_are_noticed(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compiled_of(negations, target)
    monkeypatch.setattr(CapturedGraph, "_bind", lambda self, addresses: None)

    # Other numbers than the test above has: its answers may still lie where new ones belong.
    def make(seed: int) -> list[Tensor]:
        return random(seed + 100, seed + 110)

    assert not are_right_at_new_addresses(compiled, torch.neg, make)


@pytest.mark.parametrize("clusters", CLUSTERS)
def test_tensor_maps_clusters_and_dependent_launches_move_too(
    target: Target, clusters: tuple[int, int, int]
) -> None:
    if not target.has_wgmma:
        pytest.skip("wgmma and tensor maps need sm_90a")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(768, 768), nn.Linear(768, 512)).eval().cuda().half()
    captured, plan = two_linears(model, 128, target, clusters)
    first, second = (launch.program for launch in plan.launches)
    (name,) = plan.graph.inputs
    maps = [each for each in first.arguments if isinstance(each, TensorMapArgument)]
    assert name in [each.value for each in maps] and plan.is_dependent(1)
    assert first.cluster == second.cluster == (math.prod(clusters), 1, 1)
    compiled = CompiledModule(plan, captured)
    assert ready(compiled).copied_inputs == ready(compiled).copied_outputs == ()

    def make(seed: int) -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        return [torch.randn(128, 768, device="cuda", generator=generator).half()]

    with torch.no_grad():
        assert are_right_at_new_addresses(compiled, model, make)
        given = [*make(1), *make(2)]
        expected = [model(each) for each in given]
        for turn in range(20):  # back and forth: encoded maps are used again
            answer = compiled(given[turn % 2])
            torch.testing.assert_close(answer, expected[turn % 2], rtol=1e-2, atol=1e-2)


# -- calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["misaligned", "transposed", "subclass"])
def test_inputs_that_no_kernel_can_read_are_copied(target: Target, kind: str) -> None:
    compiled = compiled_of(negations, target)
    for seed in range(3):
        x, y = random(seed, seed + 10)
        given = x
        if kind == "misaligned":
            given = torch.zeros(x.numel() + 1, device="cuda")[1:].view(SIZE).copy_(x)
            assert given.data_ptr() % 16 and given.is_contiguous()
        elif kind == "transposed":
            given = x.t().contiguous().t()
        else:
            given = nn.Parameter(x, requires_grad=False)
        answers = compiled(given, y)
        assert torch.equal(answers["x"], -x) and torch.equal(answers["y"], -y)
        assert torch.equal(compiled(x, y)["x"], -x)


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_images_are_read_as_the_example_lay(last: bool, caplog: pytest.LogCaptureFixture) -> None:
    """In the other order a call copies them, and says so once."""
    model = nn.Sequential(nn.Conv2d(64, 40, 3, padding=1), nn.ReLU(), nn.Conv2d(40, 64, 4, 4))
    model = model.eval().cuda().half()
    images = [torch.randn(2, 64, 20, 28, device="cuda").half() for _ in range(3)]
    orders = (torch.channels_last, torch.contiguous_format)
    like, unlike = orders if last else orders[::-1]
    compiled = gtco.compile(model, images[0].contiguous(memory_format=like))
    assert ready(compiled).copied_inputs == ()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "gtco.runtime"):
        for order, told in ((like, 0), (unlike, 1), (like, 1)):
            for each in images:
                for buffer in ready(compiled).inputs:
                    buffer.fill_(float("nan"))
                given = each.contiguous(memory_format=order)
                torch.testing.assert_close(compiled(given), model(given), rtol=1e-2, atol=1e-2)
            found = [each for each in caplog.records if each.name == "gtco.runtime"]
            assert len(found) == told


def test_one_tensor_may_stand_for_two_arguments(target: Target) -> None:
    compiled = compiled_of(negations, target)
    (x,) = random(1)
    answers = compiled(x, x)
    assert torch.equal(answers["x"], -x) and torch.equal(answers["y"], -x)


@pytest.mark.parametrize("static_outputs", [False, True])
def test_empty_inputs_move_nobody_else(target: Target, static_outputs: bool) -> None:
    class Model(nn.Module):
        def forward(self, nothing: Tensor, x: Tensor, unused: Tensor) -> Tensor:
            return torch.neg(x)

    x, unused = random(1, 2)
    nothing = torch.zeros(4, 0, device="cuda")
    captured = capture(Model().eval(), (nothing, x, unused))
    options = Options(static_outputs=static_outputs)
    plan = make_plan(captured, generated="neg", target=target, options=options)
    compiled = CompiledModule(plan, captured)
    for seed in range(3, 7):
        given, unused = random(seed, seed + 10)
        for buffer in ready(compiled).inputs:
            buffer.fill_(float("nan"))
        poison = torch.full(SIZE, float("nan"), device="cuda")
        del poison  # a fresh output takes its memory
        assert torch.equal(compiled(nothing, given, unused), -given)


def test_static_outputs_stay_and_can_be_the_next_input(target: Target) -> None:
    compiled = compiled_of(negations, target, static_outputs=True)
    x, y, other = random(1, 2, 3)
    first = compiled(x, y)["x"]
    again = compiled(other, first)  # stored anew before y is read
    assert again["x"].data_ptr() == first.data_ptr()
    assert torch.equal(again["x"], -other) and torch.equal(again["y"], x)


def test_what_is_copied_and_what_is_not_can_be_in_one_call(target: Target) -> None:
    def mixed(x: Tensor, y: Tensor) -> Any:
        made = torch.neg(x)
        return {"made": made, "after": torch.neg(torch.sigmoid(made)), "same": y}

    compiled = compiled_of(mixed, target)
    assert ready(compiled).copied_inputs == (1,)
    assert ready(compiled).copied_outputs == (0, 2)
    kept = []
    for seed in range(4):
        x, y = random(seed, seed + 10)
        kept.append((compiled(x, y), x, y))
    for answers, x, y in kept:
        assert torch.equal(answers["made"], -x) and torch.equal(answers["same"], y)
        torch.testing.assert_close(answers["after"], -torch.sigmoid(-x))


def test_an_answer_is_laid_out_as_a_clone_and_is_no_view(target: Target) -> None:
    compiled = compiled_of(lambda x, y: torch.neg(x).t(), target)
    x, y = random(1, 2)
    answer = compiled(x, y)
    assert ready(compiled).copied_outputs == ()
    assert torch.equal(answer, -x.t()) and answer.stride() == (1, SIZE[1])
    assert answer._base is None


class Segments(nn.Module):
    """Scores of 21 classes, enlarged, and all of the image that they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(64, 64, 3, padding=1)
        self.scores = nn.Conv2d(64, 21, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.relu(self.body(x))
        scores = nn.functional.interpolate(self.scores(y), scale_factor=2, mode="bilinear")
        return scores, nn.functional.max_pool2d(y, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("cuda_graph", [True, False])
def test_outputs_that_are_most_of_what_is_stored_are_not_copied(
    dtype: torch.dtype, cuda_graph: bool
) -> None:
    torch.manual_seed(0)
    model = Segments().eval().to("cuda", dtype)
    exact = copy.deepcopy(model).double()
    shape = (2, 64, 24, 32)

    nbytes = shape[0] * 48 * 64 * 24 * dtype.itemsize
    strides = (24 * 48 * 64, 1, 24 * 64, 24)
    x = torch.zeros(shape, device="cuda", dtype=dtype)
    kept = []
    with torch.no_grad():
        compiled = gtco.compile(model, (x,), fallback="error", cuda_graph=cuda_graph)
        assert ready(compiled).copied_outputs == (() if cuda_graph else (0, 1))
        assert ready(compiled).outputs[0].stride() == strides
        for _ in range(6):
            for buffer in (*ready(compiled).inputs, *ready(compiled).outputs):
                buffer.fill_(float("nan"))
            poison = torch.full((nbytes // 4,), float("nan"), device="cuda")
            del poison  # a fresh output takes its memory
            x = torch.randn(shape, device="cuda", dtype=dtype)
            kept.append((compiled(x), exact(x.double())))
    torch.cuda.synchronize()
    answers = [answer for found, _ in kept for answer in found]
    assert len({answer.untyped_storage().data_ptr() for answer in answers}) == 12
    for found, right in kept:
        for one, other in zip(found, right, strict=True):
            assert (one.double() - other).norm() <= 2e-3 * other.norm()
        if cuda_graph:
            assert found[0].stride() == strides and found[0]._base is None
            assert found[0].untyped_storage().nbytes() == nbytes


def test_enqueue_runs_between_the_buffers_whatever_a_call_used(target: Target) -> None:
    compiled = compiled_of(negations, target)
    executable = ready(compiled)
    x, y, other = random(1, 2, 3)
    answers = compiled(x, y)
    for buffer in executable.inputs:
        buffer.copy_(other)
    executable.enqueue()
    assert all(torch.equal(output, -other) for output in executable.outputs)
    assert torch.equal(answers["x"], -x)
    assert torch.equal(compiled(x, y)["x"], -x)


def test_an_update_leaves_replays_under_way_alone(target: Target) -> None:
    """Many calls are enqueued ahead of the GPU, each with other addresses."""
    compiled = compiled_of(negations, target)
    given = [random(seed, seed + 100) for seed in range(16)]
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # tens of milliseconds: all calls are enqueued meanwhile
    answers = [compiled(x, y) for x, y in given]
    for (x, y), answer in zip(given, answers, strict=True):
        assert torch.equal(answer["x"], -x) and torch.equal(answer["y"], -y)


def test_two_streams_in_turn_get_their_own_answers(target: Target) -> None:
    compiled = compiled_of(negations, target)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    given = [random(seed, seed + 100) for seed in range(12)]
    torch.cuda.synchronize()
    answers = []
    for turn, (x, y) in enumerate(given):
        with torch.cuda.stream(streams[turn % 2]):
            answers.append(compiled(x, y))
    torch.cuda.synchronize()
    for (x, y), answer in zip(given, answers, strict=True):
        assert torch.equal(answer["x"], -x) and torch.equal(answer["y"], -y)


def test_a_thread_that_never_used_cuda_may_call(target: Target) -> None:
    compiled = compiled_of(negations, target)
    x, y = random(1, 2)
    compiled(x, y)
    answers: list[Any] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: answers.append(compiled(x, y)))
        thread.start()
        thread.join()
    assert len(answers) == 2
    assert all(torch.equal(answer["x"], -x) for answer in answers)


def test_a_call_in_a_capture_of_the_callers_is_right_if_cuda_takes_it(target: Target) -> None:
    compiled = compiled_of(negations, target)
    x, y = random(1, 2)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    outer: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        compiled(x, y)
        side.synchronize()
        try:
            with torch.cuda.graph(outer, stream=side):
                answer = compiled(x, y)
        except RuntimeError:
            outer = None
        for seed in range(3):
            other, another = random(seed + 3, seed + 13)
            assert torch.equal(compiled(other, y)["x"], -other)
            if outer is not None:
                x.copy_(another)
                outer.replay()
                assert torch.equal(answer["x"], -another)
        side.synchronize()
