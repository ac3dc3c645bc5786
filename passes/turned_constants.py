"""Known right operands of products lie as weights do, where no copy takes them as they are.

    %y: f16[14,448,7] = matmul(%x, %c)   (f16[14,96,7])    ->    %t = permute(%d, dims=[0, 2, 1])
                                                                 %y = matmul(%x, %t)

Relative positions by row and by column (MViTv2, CVPR 2022; SAM, ICCV 2023) are tables of as many
columns as an image has rows. Rows of 7 halves begin between two copies: a kernel would gather them
element by element. Behind `fold_constants`, which would fold the view.
"""

from __future__ import annotations

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


def _turned(edit: Editor, node: Node) -> str:
    x, c = node.inputs
    turned = edit.add_constant(f"{c}_turned", edit.constants[c].mT.contiguous())
    return edit.add("matmul", x, transpose(edit, turned), **node.attrs)


RULES: tuple[Rule[Node], ...] = (
    Rule("x @ constant -> x @ permute(constant)", ("matmul",), _match, _turned, never_refused),
)


def turn_constants(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
