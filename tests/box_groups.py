"""Groups whose kernels leave means of boxes beside their result, for kernel tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gtco.ir.graph import Graph, Group, Node, infer_outputs
from gtco.passes.box_means import RUN
from tests import groups

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def of_runs(
    group: Group, images: int = 1, *, stored: bool = True, columns: int | None = None
) -> Group:
    """`group`, whose result is that of so many `images`, with the means of its runs, or the moments
    of so many `columns` of them; without the result itself, unless it is `stored`."""
    graph = group.graph
    (value,) = graph.outputs
    pixels = graph.specs[value].numel // graph.specs[value].sizes[-1] // images
    shape = (images, pixels, graph.specs[value].sizes[-1])
    of_box: tuple[str, dict[str, Any]] = ("box_means", {"box": (RUN,)})
    if columns is not None:
        of_box = ("box_moments", {"box": (RUN,), "columns": columns})
    given: list[tuple[str, dict[str, Any]]] = [("reshape", {"shape": shape}), of_box]
    nodes, last = list(graph.nodes), value
    for op, attrs in given:
        spec = {**graph.specs, **{node.name: node.outputs[0] for node in nodes}}[last]
        nodes.append(Node(f"of_{op}", op, (last,), attrs, infer_outputs(op, [spec], attrs)))
        last = nodes[-1].name
    outputs = (value, last) if stored else (last,)
    return Group("means", Graph(graph.inputs, graph.constants, tuple(nodes), outputs))


def of_lines(group: Group, columns: int, *, stored: bool = True) -> Group:
    """`of_runs` of so many `columns`, of a group whose result is images in lines of whole runs."""
    graph = group.graph
    images, *_, wide, _ = graph.specs[graph.outputs[0]].sizes
    assert wide % RUN == 0
    return of_runs(group, images, stored=stored, columns=columns)


LINES: dict[str, Callable[[], Group]] = {
    "channels": lambda: of_lines(groups.convolution((2, 10, 48, 16), 32, (3, 3), F16), 1),
    "channels of 40 columns": lambda: of_lines(
        groups.convolution((1, 6, 16, 24), 40, (3, 3), BF16), 1
    ),
    "pairs of channels": lambda: of_lines(groups.convolution((2, 3, 16, 16), 96, (3, 3), F16), 2),
    "eight channels, volumes": lambda: of_lines(
        groups.convolution((2, 3, 6, 16, 16), 32, (3, 3, 3), F16), 8
    ),
    "channels alone": lambda: of_lines(
        groups.convolution((1, 7, 16, 16), 48, (3, 3), F16), 1, stored=False
    ),
    "of strides": lambda: of_lines(
        groups.convolution((1, 9, 16, 18, 16), 24, (3, 3, 3), BF16, stride=(2, 2, 1),
                           before=(1, 1, 0)), 1
    ),
    "of a concat": lambda: of_lines(groups.joined((1, 10, 16), (16, 32), 32, F16, (3, 3)), 1),
}  # fmt: skip
"""Convolutions whose blocks have patches."""


RUNS: dict[str, Callable[[], Group]] = {
    "means, residual": lambda: of_runs(
        groups.residual_linear(304, 72, 160, F16, stats=False), images=19
    ),
    "means, residual in tf32": lambda: of_runs(
        groups.tf32(groups.residual_linear(288, 72, 96, F32, stats=False))
    ),
    "means, norm and GELU of 144": lambda: of_runs(
        groups.norm_linear(304, 136, 144, BF16, gelu=True)
    ),
    "means of 72 columns": lambda: of_runs(groups.norm_linear(208, 24, 72, F16, gelu=True)),
    "means of windows": lambda: of_runs(
        groups.convolution((2, 12, 8, 72), 104, (3, 3), F16), images=2
    ),
    "means of a concat": lambda: of_runs(groups.joined((2, 80), (64, 96, 8), 72, BF16), images=2),
    "moments of 4, residual": lambda: of_runs(
        groups.residual_linear(304, 72, 160, F16, stats=False), images=19, columns=4
    ),
    "moments of 16 in tf32": lambda: of_runs(
        groups.tf32(groups.residual_linear(288, 72, 96, F32, stats=False)), columns=16
    ),
    "moments of 16 of 144": lambda: of_runs(
        groups.norm_linear(304, 136, 144, BF16, gelu=True), columns=16
    ),
    "moments of 8 of 72": lambda: of_runs(
        groups.norm_linear(208, 24, 72, F16, gelu=True), columns=8
    ),
    "moments of 32, windows": lambda: of_runs(
        groups.convolution((2, 12, 8, 72), 96, (3, 3), F16), images=2, columns=32
    ),
    "moments of 4 of a concat": lambda: of_runs(
        groups.joined((2, 80), (64, 96, 8), 72, BF16), images=2, columns=4
    ),
    "moments of 8 alone": lambda: of_runs(
        groups.plain_linear(320, 64, 64, BF16), stored=False, columns=8
    ),
    "means alone": lambda: of_runs(groups.plain_linear(320, 64, 64, BF16), stored=False),
}
"""Products of 16 bits and tf32, with whole parts of columns, of 16 and of neither."""
