"""The convolutions of whole models, for `experiments.op_table`, and cuDNN's way to run one.

They are groups as a compile makes them, so each carries what the model computes around it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments import e2e
from experiments.op_rivals import Maker, References, Tensors, peers, random_halves
from experiments.op_shapes import Operator, Sizes
from gtco.compiler import capture_for, fuse_known, rewritten
from gtco.cost_model.knowledge import Knowledge
from gtco.ir.graph import Graph, Group, Node
from gtco.options import Options
from gtco.passes.fusion import fuse
from gtco.passes.legality import family
from gtco.passes.tasks import tasks
from gtco.target import Target

CONVOLUTIONAL = (
    "resnet50",
    "resnet50_batch32",
    "se_resnet9",
    "convnext_t",
    "cvt_13",
    "mobilenet_v2",
    "unet",
    "detr_e6",
    "setr_pup",
)
"""Rows of `experiments.e2e`."""
WITHOUT_LINEARS = ("resnet50", "resnet50_batch32", "mobilenet_v2")
"""Models whose only linear is the head, of a row an image: the others are 1x1 convolutions."""


class Convolution(NamedTuple):
    """One convolution of an image [N, H, W, C] by weights [out, KH, KW, C / groups]; `before` and
    `after` are rows and columns of zeros around the image."""

    image: Sizes
    weight: Sizes
    stride: Sizes
    before: Sizes
    after: Sizes
    dilation: Sizes
    groups: int

    @staticmethod
    def of(operator: Operator) -> tuple[Convolution, ...]:
        """What a library is asked for in place of `operator`."""
        graph = operator.group.graph
        return tuple(_asked(node, graph) for node in operator.convolutions)


def _asked(node: Node, graph: Graph) -> Convolution:
    image, weight = (graph.specs[name].sizes for name in node.inputs[:2])
    groups = node.attrs.get("groups", 1)
    if node.op == "depthwise_conv":
        groups = weight[2]
        weight = (groups, *weight[:2], 1)
    stride, before, after, dilation = (
        tuple(node.attrs[each]) for each in ("stride", "before", "after", "dilation")
    )
    return Convolution(image, weight, stride, before, after, dilation, groups)


def operators(name: str, target: Target, known: Knowledge) -> tuple[Operator, ...]:
    """The convolutions of the model called `name`, each once, in the order in which they run."""
    (make,) = e2e.SUITE.row(name).cases(quick=False).values()
    model = make()
    options = Options.of(target=target.arch)
    captured = capture_for(model.module, model.args, model.kwargs, options)
    fused = fuse_known(known, rewritten(captured, options, target), target)
    batch = model.args[0].shape[0]
    found = []
    weighed = [
        (group, task.weight) for task in tasks(fused, target) for group in _apart(task.group)
    ]
    for group, weight in weighed:
        operator = Operator(name, "", batch, group, weight)
        linears = [node for node in group.nodes if node.definition.is_linear]
        if operator.convolutions:
            found.append(replace(operator, name=_title(Convolution.of(operator))))
        elif name in WITHOUT_LINEARS and linears and operator.sizes[0] > batch:
            found.append(replace(operator, name="1x1"))
    return tuple(found)


def _apart(group: Group) -> Sequence[Group]:
    """`group`, or one of each of the two linears that its kernel holds."""
    if family(group) != "back_to_back":
        return (group,)
    return fuse(
        group.graph, lambda part: math.inf if family(part) == "back_to_back" else 1.0
    ).groups


def _title(all_of: tuple[Convolution, ...]) -> str:
    of = all_of[0]
    out, height, width, _ = of.weight
    words = f"{height}x{width}"
    if max(of.stride) > 1:
        words += f"/{max(of.stride)}"
    if max(of.dilation) > 1:
        words += f" dilated by {max(of.dilation)}"
    if of.groups > 1:
        words += " depthwise" if of.groups == of.image[3] else f" in {of.groups} groups"
    if len(all_of) > 1:
        words = f"{len(all_of)} of {words}"
    return f"{words} to {out}"


def cudnn(operator: Operator, device: torch.device) -> dict[str, Maker]:
    """torch's `conv2d` with a bias and nothing else, channels last, by the algorithm that cuDNN's
    own benchmark finds. Where the zeros differ from side to side they are there already."""
    normal, asked = random_halves(device), Convolution.of(operator)
    image = normal(*asked[0].image)
    shared: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for index, of in enumerate(asked):
        out, height, width, depth = of.weight
        (top, left), (bottom, right) = of.before, of.after
        whole = image if of.before == of.after else F.pad(image, (0, 0, left, right, top, bottom))
        shared[f"x{index}"] = whole
        weights[f"w{index}"] = normal(*of.weight) * (height * width * depth) ** -0.5
        weights[f"bias{index}"] = normal(out)

    def run(tensors: Tensors) -> tuple[Tensor, ...]:
        results = []
        for index, of in enumerate(asked):
            x, w = (tensors[f"{name}{index}"].permute(0, 3, 1, 2) for name in "xw")
            padding = of.before if of.before == of.after else (0, 0)
            given = (tensors[f"bias{index}"], of.stride, padding, of.dilation, of.groups)
            with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
                results.append(F.conv2d(x, w, *given).permute(0, 2, 3, 1))
        return tuple(results)

    given = {**shared, **weights}
    exact = run({name: each.float() for name, each in given.items()})
    return peers({"conv2d": run}, shared, weights, References(run(given), exact))
