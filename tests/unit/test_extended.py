"""Images extended by their own pixels: captured as one operator, with channels last, right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.codegen.sketches.elementwise import Elementwise
from gtco.compiler import make_plan
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.interpreter import interpret
from gtco.ir.spec import TensorSpec
from gtco.options import Options
from gtco.passes import run_pipeline
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests.kernel_checks import inputs_of, sample, wrong_outputs
from tests.pass_checks import captured, ops, random

F16, BF16, I64 = torch.float16, torch.bfloat16, torch.int64
MODES = ("reflect", "replicate")


def extended(
    *shape: int, before: tuple[int, ...], after: tuple[int, ...], mode: str,
    dtype: torch.dtype = F16,
) -> Group:  # fmt: skip
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    y = b.add("extend", x, before=before, after=after, mode=mode)
    return Group("extended", b.build([b.add("neg", y)]))


CASES: dict[str, Callable[[str], Group]] = {
    "an image": lambda mode: extended(
        2, 7, 5, 24, before=(0, 3, 1, 0), after=(0, 2, 4, 0), mode=mode
    ),
    "odd channels": lambda mode: extended(
        1, 4, 6, 7, before=(0, 1, 0, 0), after=(0, 0, 2, 0), mode=mode, dtype=BF16
    ),
    "the last dimension": lambda mode: extended(
        3, 16, before=(0, 8), after=(0, 15), mode=mode, dtype=I64
    ),
    "all there is": lambda mode: extended(2, 2, before=(1, 1), after=(1, 1), mode=mode),
}


@pytest.mark.compiler
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_kernels_are_right(case: str, mode: str) -> None:
    group = CASES[case](mode)
    for program in sample(Elementwise(group, TARGETS["sm_90a"]), 2):
        assert not wrong_outputs(program, group, inputs_of(group), run_on_host)


PADDED: dict[str, Callable[[Tensor], Tensor]] = {
    "ReflectionPad1d": lambda x: F.pad(x[:, :, 0], (3, 2), mode="reflect"),
    "ReflectionPad2d": lambda x: F.pad(x, (3, 2, 1, 0), mode="reflect"),
    "ReflectionPad3d": lambda x: F.pad(x[None], (3, 2, 1, 0, 2, 1), mode="reflect"),
    "ReplicationPad1d": lambda x: F.pad(x[:, :, 0], (9, 2), mode="replicate"),
    "ReplicationPad2d": lambda x: F.pad(x, (0, 12, 1, 0), mode="replicate"),
    "ReplicationPad3d": lambda x: F.pad(x[None], (3, 2, 1, 0, 2, 1), mode="replicate"),
}


@pytest.mark.parametrize("case", PADDED)
def test_paddings_are_one_operator(case: str) -> None:
    graph, args = captured(lambda m, x: PADDED[case](x), random(2, 3, 4, 5))
    assert ops(graph) == {"extend": 1}
    (found,) = interpret(graph, args)
    assert torch.equal(found, PADDED[case](*args))


@pytest.mark.parametrize("mode", MODES)
def test_negative_paddings_are_taken_apart(mode: str) -> None:
    graph, args = captured(lambda m, x: F.pad(x, (-1, 2, 0, 1), mode=mode), random(2, 3, 6, 5))
    (found,) = interpret(graph, args)
    assert torch.equal(found, F.pad(*args, (-1, 2, 0, 1), mode=mode))


class Block(nn.Module):
    """A residual block of an image translator (Zhu et al., ICCV 2017)."""

    def __init__(self, channels: int, mode: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, padding_mode=mode) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.InstanceNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.convs[0](x)))
        result: Tensor = x + self.norms[1](self.convs[1](y))
        return result


@pytest.mark.parametrize("mode", MODES)
def test_images_keep_channels_last(mode: str) -> None:
    graph = run_pipeline(gtco.capture(Block(8, mode).eval(), torch.randn(1, 8, 6, 7)))
    *_, pad = (node for node in graph.nodes if node.op == "extend")
    assert pad.outputs[0].sizes == (1, 8, 9, 8)
    plan, _ = make_plan(
        Block(8, mode).eval(), (torch.randn(1, 8, 6, 7),), {}, Options.of(target="sm_90a")
    )
    assert all(launch.program is not None for launch in plan.launches)


@pytest.mark.compiler
@pytest.mark.parametrize("mode", MODES)
def test_a_block_compiles(mode: str) -> None:
    torch.manual_seed(0)
    model, x = Block(8, mode).eval().half(), torch.randn(2, 8, 6, 7).half()
    found = gtco.compile(model, (x,), target="host", fallback="error")(x).double()
    with torch.no_grad():
        eager, exact = model(x).double(), model.double()(x.double())
    assert (found - exact).norm() <= 2 * (eager - exact).norm() + 1e-6 * exact.norm()
