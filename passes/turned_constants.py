"""Known operands of products lie as copies take them, where none takes them as they are.

    %y: f16[14,448,7] = matmul(%x, %c)   (f16[14,96,7])    ->    %t = permute(%d, dims=[0, 2, 1])
                                                                 %y = matmul(%x, %t)

Relative positions by row and by column (MViTv2, CVPR 2022; SAM, ICCV 2023) are tables of as many
columns as an image has rows. Rows of 7 halves begin between two copies: a kernel would gather them
element by element. They lie as weights do, then. A left operand of such rows, as of a transform of
real values (33 frequencies of 64 points), is a slice of longer ones:

    %y: f32[64,64,192] = matmul(%c, %x)   (f32[64,66])     ->    %s = slice(%d, dim=1, end=66)
                                                                 %y = matmul(%s, %x)

Behind `fold_constants`, which would fold the views.
"""

from __future__ import annotations

import torch

from gtco.ir.graph import Graph, Node
from gtco.passes.attention import transpose
from gtco.passes.channels import COPY_BYTES
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite

LEAST_BYTES = 4
"""Of a copy."""


def _match(edit: Editor, node: Node) -> Node | None:
    constant = edit.constant(node.inputs[1])
    if constant is None or constant.dim() < 2:
        return None
    column, row = (size * constant.itemsize for size in constant.shape[-2:])
    return node if row % LEAST_BYTES and column % COPY_BYTES == 0 else None


def _match_left(edit: Editor, node: Node) -> Node | None:
    constant = edit.constant(node.inputs[0])
    if constant is None or constant.dim() < 2:
        return None
    other = edit.specs[node.inputs[1]]
    columns = other.sizes[-1] * other.dtype.itemsize
    row = constant.shape[-1] * constant.itemsize
    return node if row % COPY_BYTES and columns % COPY_BYTES == 0 else None


def _lengthened(edit: Editor, node: Node) -> str:
    c, x = node.inputs
    known = edit.constants[c]
    k, unit = known.shape[-1], COPY_BYTES // known.itemsize
    longer = edit.add_constant(f"{c}_longer", torch.nn.functional.pad(known, (0, -k % unit)))
    part = edit.add("slice", longer, dim=known.dim() - 1, start=0, end=k)
    return edit.add("matmul", part, x, **node.attrs)


def _turned(edit: Editor, node: Node) -> str:
    x, c = node.inputs
    turned = edit.add_constant(f"{c}_turned", edit.constants[c].mT.contiguous())
    return edit.add("matmul", x, transpose(edit, turned), **node.attrs)


RULES: tuple[Rule[Node], ...] = (
    Rule("x @ constant -> x @ permute(constant)", ("matmul",), _match, _turned, never_refused),
    Rule("constant @ x -> slice(longer constant) @ x", ("matmul",),
         _match_left, _lengthened, never_refused),
)  # fmt: skip


def turn_constants(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
