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

import torch.nn.functional as F

from gtco.ir.graph import Graph, Node
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite

COPY_BYTES = 16
"""What the copy engine takes pixels in multiples of."""
MOST = 9 / 8
"""How far pixels may grow."""
LEAST_FLOPS = 4e8
"""Of a convolution that is worth a copy."""


def _match(edit: Editor, node: Node) -> Node | None:
    image, weight = node.inputs
    spec = edit.specs[image]
    channels = spec.sizes[-1]
    unit = COPY_BYTES // spec.dtype.itemsize
    whole = -(-channels // unit) * unit
    grows = channels < whole <= MOST * channels
    if not grows or image in edit.constants or edit.constant(weight) is None:
        return None
    flops = node.definition.flops(
        [edit.specs[name] for name in node.inputs], node.outputs, node.attrs
    )
    return node if flops >= LEAST_FLOPS else None


def _replace(edit: Editor, node: Node) -> str:
    image, weight = node.inputs
    spec = edit.specs[image]
    unit = COPY_BYTES // spec.dtype.itemsize
    more = -spec.sizes[-1] % unit
    border = {"before": (0,) * spec.rank, "after": (0,) * (spec.rank - 1) + (more,)}
    copies = [user.name for user in edit.users(image) if user.op == "pad" and user.attrs == border]
    padded = copies[0] if copies else edit.add("pad", image, **border)
    wider = edit.add_constant(f"{weight}_whole", F.pad(edit.constants[weight], (0, more)))
    return edit.add(node.op, padded, wider, **node.attrs)


_RULES = (Rule("conv(x, w) -> conv(pad(x), pad(w))", ("conv",), _match, _replace, never_refused),)


def copy_whole_pixels(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring; for targets whose products read what a tensor map describes."""
    return rewrite(graph, _RULES, log)
