"""The runtime on a GPU: launches, tensor maps, graphs, streams, threads and errors."""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from gtco.benchmarking.bench import profile_kernels
from gtco.benchmarking.contestants import GraphedEager
from gtco.codegen.program import KernelProgram, Pointer, TensorMapArgument
from gtco.frontend.torch_export import Captured, capture
from gtco.ir.aten import Slot
from gtco.ir.graph import GraphBuilder
from gtco.ir.interpreter import ArgumentError
from gtco.ir.spec import TensorSpec
from gtco.options import Options
from gtco.runtime.driver import BoundLaunch, DriverError
from gtco.runtime.executable import GpuMemoryError
from gtco.runtime.module import CompiledModule
from gtco.runtime.run import Chain, load_program
from gtco.target import Target, target_of_capability
from tests.plans import Block, make_plan, negate_program

pytestmark = pytest.mark.gpu

COPY_TILE = """#include "ptx.cuh"
using namespace gtco;
extern "C" __global__ void ENTRY_POINT(const __grid_constant__ ptx::TensorMap map, u16* out) {
  __shared__ alignas(128) u16 tile[32 * 64];
  __shared__ alignas(8) unsigned char barrier[8];
  const u32 full = ptx::shared_address(barrier);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(full, sizeof(tile));
    ptx::cp_async_bulk_tensor(ptx::shared_address(tile), map, 0, blockIdx.x * 32, blockIdx.y, full);
  }
  ptx::mbarrier_wait(full, 0);
  for (int i = threadIdx.x; i < 32 * 64; i += blockDim.x)
    out[(blockIdx.y * gridDim.x + blockIdx.x) * 32 * 64 + i] = tile[i];
}
"""


class Negations(nn.Module):
    """An even number of negations and one sigmoid that ATen computes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = torch.neg(x)
        x = torch.sigmoid(x)
        for _ in range(self.count):
            x = torch.neg(x)
        return x


@pytest.fixture
def target() -> Target:
    return target_of_capability(*torch.cuda.get_device_capability())


@pytest.fixture
def block() -> Iterator[tuple[nn.Module, Captured]]:
    torch.manual_seed(0)
    model = Block().eval().cuda()
    yield model, capture(model, (torch.randn(4, 16).cuda(), torch.randn(4, 16).cuda()))


def negations(count: int, size: int = 1 << 20) -> Captured:
    return capture(Negations(count).eval(), (torch.zeros(size, device="cuda"),))


# -- launches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [1, 4])
def test_dependent_launches_with_clusters_stay_in_order(target: Target, cluster: int) -> None:
    if cluster > 1 and not target.has_dependent_launch:
        pytest.skip("clusters need sm_90")
    captured = negations(8)
    plan = make_plan(captured, generated="neg", target=target, cluster=cluster)
    assert plan.is_dependent(1) == target.has_dependent_launch
    compiled = CompiledModule(plan, captured)
    assert not compiled.report().uncaptured
    for seed in range(20):
        torch.manual_seed(seed)
        x = torch.randn(1 << 20, device="cuda")
        assert torch.equal(compiled(x), torch.sigmoid(x))


def test_kernels_say_their_registers(target: Target) -> None:
    captured = negations(2)
    compiled = CompiledModule(make_plan(captured, generated="neg", target=target), captured)
    (kernel,) = compiled.kernels
    assert kernel.registers > 0 and kernel.launches == 4


def test_a_tensor_map_reads_a_head_of_qkv_and_zero_outside(target: Target) -> None:
    if not target.has_wgmma:
        pytest.skip("the tensor memory accelerator needs sm_90")
    for dtype in (torch.float16, torch.bfloat16):
        qkv = torch.randn(197, 2304, device="cuda").to(dtype)
        out = torch.full((12, 224, 64), float("nan"), dtype=dtype, device="cuda")
        keys = TensorMapArgument("qkv", 768, dtype, (64, 197, 12), (2304, 64), (64, 32, 1), 0)
        program = KernelProgram(
            "copy", "copy", {}, COPY_TILE, target.arch, (7, 12, 1), 128, 0, (keys, Pointer("out"))
        )
        launch = BoundLaunch(
            load_program(program, 0), program, {"qkv": qkv, "out": out}, dependent=False
        )
        launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        expected = qkv[:, 768:1536].view(197, 12, 64).transpose(0, 1)
        assert torch.equal(out[:, :197], expected)
        assert torch.count_nonzero(out[:, 197:]) == 0


def test_a_misaligned_tensor_map_is_an_error_that_names_it(target: Target) -> None:
    if not target.has_wgmma:
        pytest.skip("the tensor memory accelerator needs sm_90")
    x = torch.zeros(64, 64, dtype=torch.float16, device="cuda")
    odd = TensorMapArgument("x", 1, x.dtype, (64, 64, 1), (64, 4096), (64, 32, 1), 0)
    program = KernelProgram(
        "copy", "copy", {}, COPY_TILE, target.arch, (1, 1, 1), 128, 0, (odd, Pointer("x"))
    )
    with pytest.raises(DriverError, match=r"TensorMapArgument\(value='x', offset=1"):
        BoundLaunch(load_program(program, 0), program, {"x": x}, dependent=False)


def test_too_much_shared_memory_is_an_error_that_leaves_the_context_well(target: Target) -> None:
    captured = negations(2, 256)
    group = make_plan(captured, target=target).launches[0].group
    program = dataclasses.replace(negate_program(group, target), smem_bytes=1 << 20)
    x = torch.randn(256, device="cuda")
    values = {program.arguments[0].value: x, program.arguments[1].value: torch.empty_like(x)}
    with pytest.raises(DriverError, match=rf"kernel {program.name}, max_dynamic_shared"):
        BoundLaunch(load_program(program, 0), program, values, dependent=False)
    assert torch.equal(torch.neg(torch.neg(x)), x)


def test_a_chain_gives_plausible_times(target: Target) -> None:
    group = make_plan(negations(2), target=target).launches[0].group
    program = negate_program(group, target)
    x = torch.randn(1 << 20, device="cuda")
    values = {program.arguments[0].value: x, program.arguments[1].value: torch.empty_like(x)}
    kernel = load_program(program, 0)
    chain = Chain([BoundLaunch(kernel, program, values, dependent=i > 0) for i in range(12)])
    for run_us in chain.times_us(10):
        assert 1.0 < run_us < 100.0


# -- the module ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_outputs_are_right_fresh_and_structured(
    block: tuple[nn.Module, Captured], target: Target, cuda_graph: bool
) -> None:
    model, captured = block
    options = Options(cuda_graph=cuda_graph)
    plan = make_plan(captured, (("linear", "gelu"),), target=target, options=options)
    compiled = CompiledModule(plan, captured)
    kept = []
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(4, 16).cuda(), torch.randn(16, 4).cuda().t()
        with torch.no_grad():
            expected = model(x, y)
        kept.append((compiled(x, y), expected))
    for result, expected in kept:
        assert result.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(result[name], tensor)
            assert not result[name].requires_grad


def test_static_outputs_are_the_same_tensors(
    block: tuple[nn.Module, Captured], target: Target
) -> None:
    _, captured = block
    plan = make_plan(captured, target=target, options=Options(static_outputs=True))
    compiled = CompiledModule(plan, captured)
    args = [torch.randn(4, 16).cuda() for _ in range(2)]
    first, second = compiled(*args), compiled(*args)
    assert first["out"].data_ptr() == second["out"].data_ptr()


def test_a_first_call_in_inference_mode_leaves_nothing_behind(
    block: tuple[nn.Module, Captured], target: Target
) -> None:
    model, captured = block
    args = [torch.randn(4, 16).cuda() for _ in range(2)]
    with torch.inference_mode():
        compiled = CompiledModule(make_plan(captured, target=target), captured)
        compiled(*args)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args)["out"], model(*args)["out"])


def test_wrong_inputs_name_the_argument_and_leave_it_usable(
    block: tuple[nn.Module, Captured], target: Target
) -> None:
    _, captured = block
    compiled = CompiledModule(make_plan(captured, target=target), captured)
    x, y = torch.randn(4, 16).cuda(), torch.randn(4, 16).cuda()
    with pytest.raises(ArgumentError, match=r"argument y: expected f32\[4,16\], got f32\[5,16\]"):
        compiled(x, torch.randn(5, 16).cuda())
    with pytest.raises(ArgumentError, match=r"argument x: .* got i32\[4,16\]"):
        compiled(x.int(), y)
    with pytest.raises(ArgumentError, match="argument y: expected a tensor on cuda:0, got one on"):
        compiled(x, y.cpu())
    with pytest.raises(ArgumentError, match="argument x requires grad"):
        compiled(x.requires_grad_(), y)
    assert compiled(x.detach(), y)["same"].shape == (4, 16)


def test_threads_on_their_own_streams_get_their_own_answers(target: Target) -> None:
    captured = negations(4)
    compiled = CompiledModule(make_plan(captured, generated="neg", target=target), captured)
    wrong: list[str] = []

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            generator = torch.Generator("cuda").manual_seed(seed)
            x = torch.randn(1 << 20, device="cuda", generator=generator)
            expected = torch.sigmoid(x)
            for turn in range(50):
                if not torch.equal(compiled(x), expected):
                    wrong.append(f"thread {seed}, turn {turn}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_calls_on_alternating_streams_do_not_overtake_each_other(target: Target) -> None:
    captured = negations(8, 1 << 24)  # long enough to overtake
    compiled = CompiledModule(make_plan(captured, generated="neg", target=target), captured)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [torch.full((1 << 24,), float(turn), device="cuda") for turn in range(12)]
    torch.cuda.synchronize()
    answers = []
    for turn, x in enumerate(inputs):
        with torch.cuda.stream(streams[turn % 3]):
            answers.append(compiled(x))
    torch.cuda.synchronize()
    for x, answer in zip(inputs, answers, strict=True):
        assert torch.equal(answer, torch.sigmoid(x))


def test_the_profiler_sees_generated_kernels_in_a_graph(target: Target) -> None:
    captured = negations(4)
    compiled = CompiledModule(make_plan(captured, generated="neg", target=target), captured)
    seen = profile_kernels(compiled, ((torch.randn(1 << 20, device="cuda"),), {}), calls=3)
    launches = {kernel.name: kernel.launches for kernel in seen if kernel.generated}
    assert launches == {kernel.name: kernel.launches for kernel in compiled.kernels}
    assert 0 < sum(kernel.share for kernel in seen if kernel.generated) < 1


def test_the_eager_peer_gives_fresh_answers_too() -> None:
    model = Negations(2).eval()
    first, second = (torch.randn(256, device="cuda") for _ in range(2))
    peer = GraphedEager(model, ((first,), {}))
    answers = [peer(first), peer(x=second)]
    for x, answer in zip((first, second), answers, strict=True):
        assert torch.equal(answer, torch.sigmoid(x))


def test_the_eager_peer_keeps_its_weights() -> None:
    """Nobody else holds a copy of the model that was made for it alone."""
    model = torch.nn.Linear(2048, 2048, bias=False).cuda()
    x = torch.randn(8, 2048, device="cuda")
    peer = GraphedEager(copy.deepcopy(model), ((x,), {}))
    torch.cuda.empty_cache()
    others = [torch.full_like(model.weight, torch.nan) for _ in range(4)]
    assert torch.allclose(peer(x), model(x))
    del others


def test_a_node_that_cannot_be_captured_splits_the_graph_and_is_named(target: Target) -> None:
    """`linalg.inv` waits for the GPU to look at its error flag, which a capture forbids."""
    size = 16
    builder = GraphBuilder()
    x = builder.input("x", TensorSpec((size, size), torch.float32))
    first = builder.add("neg", x)
    inverse = builder.add(
        "aten", first, hint="inverse", target="aten.linalg_inv.default", args=(Slot(0),), kwargs=()
    )
    graph = builder.build([builder.add("neg", inverse)])
    graph.verify()
    captured = dataclasses.replace(negations(2, size), graph=graph)
    compiled = CompiledModule(make_plan(captured, generated="neg", target=target), captured)
    (line,) = compiled.report().uncaptured
    assert line.startswith("g1: ")
    for seed in range(3):
        torch.manual_seed(seed)
        matrix = torch.eye(size, device="cuda") * 4 + torch.rand(size, size, device="cuda")
        torch.testing.assert_close(compiled(matrix), torch.linalg.inv(matrix))


def test_out_of_memory_is_one_error_and_the_next_try_works(target: Target) -> None:
    captured = negations(2, 1 << 28)
    gc.collect()  # what other tests left would be found free below
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    _, total = torch.cuda.mem_get_info()
    limit = torch.cuda.memory_reserved() + (64 << 20)
    torch.cuda.set_per_process_memory_fraction(limit / total)
    plan = make_plan(captured, generated="neg", target=target)
    try:
        with pytest.raises(GpuMemoryError, match=r"needs \d+ bytes .* and \d+ are free") as caught:
            CompiledModule(plan, captured)
        assert torch.cuda.memory_allocated() - held < (1 << 30)
        assert caught.value.__context__ is None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    x = torch.randn(1 << 28, device="cuda")
    assert torch.equal(CompiledModule(plan, captured)(x), torch.sigmoid(x))
