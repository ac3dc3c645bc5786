"""Products of 8-bit integers: their kernels on the host build, and the passes around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.codegen.rules import derive
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.compiler import make_plan
from gtco.cost_model.judge import Judge
from gtco.ir.graph import Graph, GraphBuilder, Group
from gtco.ir.interpreter import interpret
from gtco.ir.ops import OPS
from gtco.ir.spec import TensorSpec
from gtco.passes import quantized_pairs
from gtco.passes.legality import family
from gtco.passes.quantized_pairs import multiply_pairs
from gtco.passes.rewrite import Editor
from gtco.runtime.host import run_on_host
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import TARGETS
from tests import groups, int8_groups
from tests.kernel_checks import inputs_of, sample, wrong_outputs

CASES: dict[str, Callable[[], Group]] = {**int8_groups.LINEARS, **int8_groups.CONVOLUTIONS}
SMALL = [case for case in CASES if case not in ("int8_fc1", "int8_fc2")]


@pytest.mark.compiler
@pytest.mark.parametrize("case", SMALL)
def test_right_in_every_sketch(case: str) -> None:
    group = CASES[case]()
    values = inputs_of(group, seed=1)
    sketches = derive(group, family(group), TARGETS["sm_90a"]).sketches
    assert {"gemm_wgmma", "gemm_mma"} <= {sketch.name for sketch in sketches}
    for sketch in sketches:
        for program in sample(sketch, 2):
            assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.parametrize("case", ["int8_fc1", "int8_fc2", "int8_conv_3x3"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_compiles_without_spills(case: str, arch: str) -> None:
    group = CASES[case]()
    for sketch in derive(group, family(group), TARGETS[arch]).sketches:
        (program,) = sample(sketch, 0)
        compiled = compile_uncached(program.code, program.name, program.arch)
        assert not compiled.spill_bytes and not compiled.serialized, program.sketch


@pytest.mark.parametrize(
    ("width", "first", "copied"), [(64, 0, True), (96, 32, True), (72, 8, False), (80, 8, False)]
)
def test_residuals_of_int8_are_copied_where_a_tensor_map_describes_them(
    width: int, first: int, copied: bool
) -> None:
    """Rows, and the first of them, at multiples of 16 bytes."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((1, 3000, 64), torch.int8))
    w = b.constant("w", torch.ones(64, 64, dtype=torch.int8))
    wide = b.input("residual", TensorSpec((1, 3000, width), torch.int8))
    part = b.add("slice", wide, dim=2, start=first, end=first + 64)
    y = b.add("linear", x, w, out_dtype=torch.float32)
    y = b.add("add", y, b.add("cast", part, dtype=torch.float32))
    target = replace(TARGETS["sm_90a"], sm_count=4)
    sketch = GemmPersistent(Group("g", b.build([y])), target)
    assert sketch.width == 8
    (copies,) = (knob.choices for knob in sketch.knobs() if knob.name == "copies")
    assert (1 in copies) == copied


def test_wgmma_takes_whole_sixteens_of_columns() -> None:
    group = int8_groups.linear(37, 656, 256, torch.float16)
    knobs = ("swap", "block_p", "block_q", "stages", "split", "multicast", "atoms", "depth")
    for block_q, taken in ((8, True), (24, True), (40, False), (48, True), (104, False)):
        values = (1, 64, block_q, 2, 1, 1, 1, 0)
        schedule = {**dict(zip(knobs, values, strict=True)), "cluster_q": 1}
        sketch = GemmWgmma(group, TARGETS["sm_90a"])
        if taken:
            assert f"BLOCK_Q = {block_q}" in sketch.emit(schedule).code
        else:
            with pytest.raises(Illegal, match=f"wgmma takes no {block_q} columns of torch.int8"):
                sketch.emit(schedule)


def test_rounding_is_torch_s() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e9, -1e9, 3e38, -0.49])
    one, zero = torch.ones(1), torch.zeros(1)
    found = OPS["quantize_int8"].reference(x, one, zero, low=-128, high=127)
    assert found.tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -128, 127, 0]
    assert OPS["quantize_int8"].reference(x, one, zero - 3, low=-127, high=127).tolist()[7:9] == [
        127,
        -127,
    ]


@pytest.mark.compiler
@pytest.mark.parametrize("zero", [0.0, -7.0, 100.0])
def test_kernels_round_as_torch_does(zero: float) -> None:
    """Halves, what is cut off, and what is beyond the numbers whose steps are seen."""

    class Rounds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            steps = torch.round(x / 0.25) + zero
            return steps.clamp(-128, 127).to(torch.int8)

    x = torch.cat([torch.arange(-300, 300) / 8, torch.tensor([1e6, -1e6, 1e9, -1e9, 3e38, -3e38])])
    captured = gtco.capture(Rounds(), (x,))
    assert "quantize_int8" in {node.op for node in multiply_pairs(captured).nodes}
    assert torch.equal(gtco.compile(Rounds(), (x,), target="host")(x), Rounds()(x))


@pytest.mark.parametrize(
    ("zero", "low", "high", "divisor"),
    [(0.5, -128, 127, 0.25), (0, -127.5, 127, 0.25), (0, -128, 200, 0.25), (0, -128, 127, 1e-30)],
)
def test_what_no_integers_stand_for_is_left_as_it_is(
    zero: float, low: float, high: float, divisor: float
) -> None:
    class Rounds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (torch.round(x / divisor) + zero).clamp(low, high).to(torch.int8)

    graph = multiply_pairs(gtco.capture(Rounds(), (torch.randn(5),)))
    assert "quantize_int8" not in {node.op for node in graph.nodes}


def test_the_judge_allows_a_step_here_and_there_and_no_more() -> None:
    group = int8_groups.linear(64, 64, 64, torch.float16)
    values = inputs_of(group)
    judge = Judge(group, values)
    right = dict(
        zip(
            group.graph.outputs,
            interpret(group.graph, [values[name] for name in group.graph.inputs]),
            strict=True,
        )
    )
    assert not judge(right)
    off = right["quantize_int8"].clone()
    off[..., :8] += 1
    assert "quantize_int8" in judge({**right, "quantize_int8": off})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_the_judge_allows_the_last_bit_of_one_number_however_near_eager_is(
    dtype: torch.dtype,
) -> None:
    group = (
        int8_groups.linear(8, 64, 64, torch.float16, residual=False)
        if dtype == torch.int8
        else groups.fp8_linear(8, 64, 64, torch.float16, norm=True)
    )
    values = inputs_of(group)
    judge, (name,) = Judge(group, values, slack=1e-6), group.graph.outputs
    (right,) = interpret(group.graph, [values[name] for name in group.graph.inputs], rounded=True)
    assert right.dtype == dtype and not judge({name: right})
    largest = right.float().abs().view(-1).argsort(descending=True)
    for numbers, wrong in ((1, False), (64, True)):
        off = right.clone().view(torch.int8)
        off.view(-1)[largest[:numbers]] -= 1
        assert bool(judge({name: off.view(dtype)})) == wrong, numbers


# -- convolutions ----------------------------------------------------------------------------------


class Rounded(nn.Module):
    """A convolution of int8 with a norm and a residual behind it, and another; scales are powers
    of two, so that torch's own answer is the same."""

    def __init__(
        self, channels: int = 32, groups: int = 1, zero: int = 0, padding: int = 1, kernel: int = 3
    ) -> None:
        super().__init__()
        self.padding, self.groups, self.zero = padding, groups, zero
        shapes = {"first": (48, channels, kernel, kernel), "second": (32, 48, 1, 1)}
        for name, (out, depth, *taps) in shapes.items():
            depth = depth // groups if name == "first" else depth
            w = torch.randint(-127, 128, (out, depth, *taps))
            self.register_buffer(f"{name}_w", w.to(torch.int8))
            self.register_buffer(f"{name}_s", 2.0 ** torch.randint(-12, -8, (out, 1, 1, 1)))

    def weights(self, name: str) -> Tensor:
        scale: Tensor = getattr(self, f"{name}_s")
        w: Tensor = getattr(self, f"{name}_w")
        return w.float() * scale

    def rounded(self, x: Tensor) -> Tensor:
        steps = (torch.round(x / 0.0625) + self.zero).clamp(-128, 127).to(torch.int8)
        return (steps.float() - self.zero) * 0.0625

    def forward(self, x: Tensor) -> Tensor:
        read = self.rounded(x)
        y = F.conv2d(read, self.weights("first"), padding=self.padding, groups=self.groups)
        y = F.conv2d(self.rounded(y.relu()), self.weights("second"))
        return y + read if y.shape == read.shape else y


def reading_int8(graph: Graph) -> list[str]:
    """The products of `graph` that read int8."""
    return [
        node.op
        for node in graph.nodes
        if node.definition.multiplies and graph.specs[node.inputs[0]].dtype == torch.int8
    ]


FORMS: dict[str, tuple[dict[str, int], int]] = {
    "3x3": ({}, 2),
    "another zero, no border": ({"zero": 3, "padding": 0}, 2),
    "another zero behind a border": ({"zero": 3}, 2),
    "another zero behind a border of 1x1": ({"zero": -128, "kernel": 1}, 2),
    "groups": ({"groups": 2}, 2),
    "groups, another zero": ({"groups": 2, "zero": 3}, 2),
    "narrow groups": ({"groups": 4}, 2),
    "groups of 2": ({"channels": 16, "groups": 8}, 1),
    "24 channels": ({"channels": 24}, 2),
    "groups of 4": ({"channels": 16, "groups": 4}, 2),
    "odd channels": ({"channels": 22}, 1),
    "a patch": ({"kernel": 1, "padding": 0}, 2),
}
"""And how many of the two convolutions are multiplied in int8."""


@pytest.mark.compiler
@pytest.mark.parametrize("form", FORMS)
def test_convolutions_multiply_int8_or_what_the_model_says(form: str) -> None:
    given, count = FORMS[form]
    torch.manual_seed(0)
    model = Rounded(**given).eval()
    x = torch.randn(1, given.get("channels", 32), 7, 6)
    plan, _ = make_plan(model, (x,), None, gtco.Options(target="sm_90a"))
    assert len(reading_int8(plan.graph)) == count
    assert all(launch.program is not None for launch in plan.launches)
    assert torch.allclose(interpret(plan.graph, (x,))[0], model(x), rtol=1e-5, atol=1e-3)
    compiled = gtco.compile(model, (x,), target="host")
    for scale in (1.0, 30.0):
        torch.testing.assert_close(compiled(scale * x), model(scale * x), rtol=1e-5, atol=1e-3)


@pytest.mark.compiler
def test_what_is_transposed_behind_rounding_is_rounded_behind_it() -> None:
    """No kernel reads columns of bytes, and none is left to ATen for that."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.randint(-127, 128, (24, 32)).to(torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            steps = torch.round(x / 0.0625).clamp(-128, 127).to(torch.int8)
            return F.linear((steps.float() * 0.0625).mT, self.w.float() * 0.01)

    model, x = Transposed(), torch.randn(2, 32, 20)
    plan, _ = make_plan(model, (x,), None, gtco.Options(target="sm_90a"))
    assert reading_int8(plan.graph) == ["linear"]
    assert all(launch.program is not None for launch in plan.launches)
    torch.testing.assert_close(gtco.compile(model, (x,), target="host")(x), model(x))


def test_a_border_of_another_zero_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(edit: Editor, match: quantized_pairs.Match) -> Tensor:
        return match.weights.double().flatten(1).sum(1).reshape(-1, 1, 1)

    monkeypatch.setattr(quantized_pairs, "_sums", careless)
    model, x = Rounded(zero=3).eval(), torch.randn(1, 32, 7, 6)
    graph = multiply_pairs(gtco.capture(model, (x,)))
    off = (interpret(graph, (x,))[0] - model(x)).abs()
    assert off[..., 1:-1, 1:-1].max() < 1e-3 and off.max() > 0.1


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_what_takes_sums_back_stays_in_fp32(precision: str) -> None:
    """A scale of 2^-20 is nothing in fp16, and sums of int8 may be infinite there."""
    torch.manual_seed(0)
    model, x = Rounded().eval(), torch.randn(1, 32, 7, 6)
    model.first_s *= 2.0**-12
    model.second_s *= 2.0**12
    plan, _ = make_plan(model, (x,), None, gtco.Options(target="sm_90a", precision=precision))
    assert len(reading_int8(plan.graph)) == 2
    graph = plan.graph
    for node in graph.nodes:
        if node.definition.multiplies:
            assert node.outputs[0].dtype == torch.float32
            (reader,) = (each for each in graph.nodes if node.name in each.inputs)
            assert {graph.specs[name].dtype for name in reader.inputs} == {torch.float32}
