"""Large convolutions of pixels that are no multiple of 16 bytes read a copy whose pixels are.

    %y = conv(%x: f16[1,64,64,180], %w: f16[180,3,3,180])
          ->    %p: f16[1,64,64,184] = pad(%x, before=[0, 0, 0, 0], after=[0, 0, 0, 4])
                %y = conv(%p, %w': f16[180,3,3,184])

No tensor map describes pixels that begin elsewhere, so that `wgmma` would go without them. Where
nothing between two products hinders it, `gtco.passes.channels` lets the product ahead make the
padding; this is for the others, such as images that a norm has made. A copy takes what a small
convolution saves: 2,400 MFLOP of 180 channels took 31 us on `mma.sync` (an H100), a copy of that
image takes 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F

from gtco.ir.graph import Graph, Node
from gtco.passes.channels import COPY_BYTES
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

MOST = 9 / 8
"""How far pixels may grow."""
LEAST_FLOPS = 4e8
"""Of a convolution that is worth a copy."""


class _Narrow(NamedTuple):
    """A convolution, and how many channels its image lacks to a multiple of 16 bytes."""

    node: Node
    lacks: int


def _match(edit: Editor, node: Node) -> _Narrow | None:
    image, weight = node.inputs
    spec = edit.specs[image]
    channels = spec.sizes[-1]
    lacks = -channels % (COPY_BYTES // spec.dtype.itemsize)
    grows = 0 < lacks <= (MOST - 1) * channels
    if not grows or image in edit.constants or edit.constant(weight) is None:
        return None
    flops = node.definition.flops([spec, edit.specs[weight]], node.outputs, node.attrs)
    return _Narrow(node, lacks) if flops >= LEAST_FLOPS else None


def _replace(edit: Editor, match: _Narrow) -> str:
    node, lacks = match
    image, weight = node.inputs
    rank = edit.specs[image].rank
    border = {"before": (0,) * rank, "after": (0,) * (rank - 1) + (lacks,)}
    copies = [user.name for user in edit.users(image) if user.op == "pad" and user.attrs == border]
    padded = copies[0] if copies else edit.add("pad", image, **border)
    wider = edit.add_constant(f"{weight}_whole", F.pad(edit.constants[weight], (0, lacks)))
    return edit.add(node.op, padded, wider, **node.attrs)


_RULES = (Rule("conv(x, w) -> conv(pad(x), pad(w))", ("conv",), _match, _replace),)


def copy_whole_pixels(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring; for targets whose products read what a tensor map describes."""
    return rewrite(graph, _RULES, log)
