"""Group norm: captured, with channels last, as one kernel or two, at the sizes of models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.codegen.rules import derive
from gtco.ir.graph import FusedGraph, Graph, GraphBuilder
from gtco.ir.interpreter import interpret
from gtco.ir.spec import TensorSpec
from gtco.passes import run_pipeline
from gtco.passes.split_group_norm import split_group_norm
from gtco.target import TARGETS
from tests.pass_checks import captured, check, ops, random

H100 = TARGETS["sm_90a"]


def _norm(groups: int, *shape: int) -> tuple[Graph, tuple[Tensor, ...]]:
    w = {"w": random(shape[1], seed=1), "b": random(shape[1], seed=2)}
    return captured(lambda m, x: F.group_norm(x, groups, m.w, m.b), random(*shape), **w)


@pytest.mark.parametrize("shape", ((2, 6, 5, 7), (2, 6), (3, 6, 5), (1, 6, 2, 3, 4)))
def test_images_of_every_rank_are_captured(shape: tuple[int, ...]) -> None:
    graph, args = _norm(3, *shape)
    assert not {"aten"} & set(ops(graph))
    check(lambda g, log: run_pipeline(g, log=log), graph, args)
    w = (random(6, seed=seed) for seed in (1, 2))
    torch.testing.assert_close(interpret(graph, args)[0], F.group_norm(*args, 3, *w))


def test_instance_norm_has_groups_of_one_channel() -> None:
    x = random(2, 4, 5, 3)
    graph, args = captured(lambda m, x: F.instance_norm(x, weight=m.w, bias=m.w), x, w=random(4))
    assert ops(graph) == {"group_norm": 1}
    expected = F.instance_norm(x, weight=random(4), bias=random(4))
    torch.testing.assert_close(interpret(graph, args)[0], expected)


@pytest.mark.parametrize(
    ("shape", "groups", "chunks"),
    (
        ((1, 320, 64, 64), 32, 16),
        ((2, 640, 32, 32), 32, 8),
        ((1, 1280, 16, 16), 32, 4),  # fewer groups than there are blocks at a time
        ((8, 1280, 16, 16), 32, None),
        ((1, 1280, 8, 8), 32, None),
        ((1, 256, 64, 64), 256, 8),
        ((1, 256, 32, 32), 256, None),
        ((1, 128, 256, 256), 32, 16),  # of few channels: a block for each multiprocessor
        ((1, 128, 512, 512), 32, 32),  # of twice as many channels each, from device memory
        ((1, 64, 128, 128), 64, 32),
        ((8, 64, 128, 128), 64, 4),
        ((160, 6, 80, 80), 3, 1),
        ((1, 64, 101, 103), 64, 101),
        ((32, 512, 28, 28), 32, 7),  # less than a line of a pixel each; whole runs of box moments
        ((32, 1024, 14, 14), 32, 2),
        ((32, 256, 14, 14), 32, None),  # short
        ((32, 2048, 14, 14), 32, None),  # a line of a pixel each
        ((8, 512, 28, 28), 32, None),  # all blocks run at a time
        ((1, 4, 1, 32771), 4, None),  # no part of a prime number of pixels is small enough
    ),
)
def test_large_groups_are_read_in_parts(
    shape: tuple[int, ...], groups: int, chunks: int | None
) -> None:
    b = GraphBuilder()
    n, c, h, w = shape
    x = b.input("x", TensorSpec((n, h, w, c), torch.float16))
    graph = split_group_norm(b.build([b.add("group_norm", x, groups=groups, eps=1e-5)]))
    if chunks is None:
        assert ops(graph) == {"group_norm": 1}
        return
    assert ops(graph) == {"group_stats": 1, "normalize_groups": 1}
    (stats,) = (node for node in graph.nodes if node.op == "group_stats")
    assert stats.attrs["chunks"] == chunks


def test_groups_whose_channels_lie_apart_are_whole_in_one_block() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((32, 512, 28, 28), torch.float16))
    x = b.add("permute", x, dims=(0, 2, 3, 1))
    graph = split_group_norm(b.build([b.add("group_norm", x, groups=32, eps=1e-5)]))
    assert ops(graph)["group_norm"] == 1


def test_channels_that_lie_apart_are_parts_of_what_a_block_holds() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((1, 128, 512, 512), torch.float16))
    x = b.add("permute", x, dims=(0, 2, 3, 1))
    graph = split_group_norm(b.build([b.add("group_norm", x, groups=32, eps=1e-5)]))
    (stats,) = (node for node in graph.nodes if node.op == "group_stats")
    assert stats.attrs["chunks"] == 64


def test_two_kernels_mean_what_one_does() -> None:
    w = random(6)
    graph, args = captured(lambda m, x: F.group_norm(x, 2, m.w, m.w), random(2, 6, 80, 81), w=w)
    result = check(split_group_norm, graph, args)
    assert ops(result)["normalize_groups"] == 1


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, width) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.convs[0](F.silu(self.norms[0](x))) + time[:, :, None, None]
        result: Tensor = x + self.convs[1](F.silu(self.norms[1](y)))
        return result


def _fused(width: int, size: int) -> FusedGraph:
    args = torch.randn(1, width, size, size).half(), torch.randn(1, width).half()
    return gtco.fuse(gtco.capture(Block(width).eval().half(), args))


def test_a_diffusion_block_converts_no_layout_but_its_ends() -> None:
    for size, norm in ((8, ["rowwise"]), (32, ["rowwise", "elementwise"])):
        fused = _fused(640, size)
        families = [group.name.rpartition("_")[0] for group in fused]
        assert families == [*norm, "gemm", *norm, "gemm"]
        copies = [any(node.op == "copy" for node in group.nodes) for group in fused]
        assert not any(copies[1:])  # the first kernel may turn what the block is given
        for group, family in zip(fused, families, strict=True):
            assert derive(group, family, H100).sketches
