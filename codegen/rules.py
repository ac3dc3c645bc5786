"""Which sketches a group has: each family's table row, tried in order.

A sketch's constructor holds its structural rules and refuses a group with a sentence, so deriving
is trying every row of the group's family and keeping what was refused and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gtco.codegen.sketch import Illegal, Sketch
from gtco.codegen.sketches.attention import Attention
from gtco.codegen.sketches.attention_projection import AttentionProjection
from gtco.codegen.sketches.attention_wgmma import AttentionWgmma
from gtco.codegen.sketches.columnwise import Columnwise
from gtco.codegen.sketches.conv_mma import ConvMma
from gtco.codegen.sketches.conv_wgmma import ConvWgmma
from gtco.codegen.sketches.elementwise import Elementwise
from gtco.codegen.sketches.gemm_back_to_back import GemmBackToBack
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.codegen.sketches.gemm_skinny import GemmSkinny
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.codegen.sketches.grid_sample import GridSample
from gtco.codegen.sketches.resize import Resize
from gtco.codegen.sketches.rowwise import Rowwise
from gtco.codegen.sketches.squeeze import Squeeze
from gtco.codegen.sketches.stencil import Stencil
from gtco.codegen.sketches.stencil_tiles import StencilTiles
from gtco.codegen.sketches.topk import TopK
from gtco.codegen.sketches.transpose import Transpose
from gtco.ir.graph import Group
from gtco.passes.origins import at_origins
from gtco.target import Target

SKETCHES: tuple[type[Sketch], ...] = (
    GemmSkinny,
    GemmWgmma,
    GemmMma,
    GemmPersistent,
    ConvMma,
    ConvWgmma,
    Attention,
    AttentionWgmma,
    AttentionProjection,
    GemmBackToBack,
    Squeeze,
    Stencil,
    StencilTiles,
    Resize,
    GridSample,
    TopK,
    Columnwise,
    Rowwise,
    Elementwise,
    Transpose,
)
"""Every sketch, the preferred one of a family first."""


@dataclass(frozen=True)
class Derivation:
    """The sketches of one group.

    Args:
        sketches: those that take it, preferred first.
        refusals: (sketch name, reason) of those of its family that do not.
    """

    sketches: tuple[Sketch, ...]
    refusals: tuple[tuple[str, str], ...]

    @property
    def reason(self) -> str:
        """Why no kernel can be generated, as one line."""
        sketches: dict[str, list[str]] = {}
        for name, reason in self.refusals:
            sketches.setdefault(reason, []).append(name)
        return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in sketches.items())

    def __str__(self) -> str:
        lines = [f"{sketch.family}/{sketch.name}" for sketch in self.sketches]
        return "\n".join([*lines, *(f"no {name}: {reason}" for name, reason in self.refusals)])


def sketch_of(kind: type[Sketch], group: Group, target: Target) -> Sketch:
    """The sketch of `group`, equal for groups that differ by where they begin to read.

    Raises:
        Illegal: it does not take the group.
    """
    return _made(kind, *_placed(group), target)


def _placed(group: Group) -> tuple[Group, Mapping[str, int]]:
    """`group` as it is wherever it begins to read, and where that is."""
    graph, origins = at_origins(group.graph)
    return (replace(group, graph=graph) if origins else group), origins


def _made(kind: type[Sketch], placed: Group, origins: Mapping[str, int], target: Target) -> Sketch:
    sketch = kind(placed, target)
    sketch.origins = origins
    return sketch


def derive(group: Group, family: str, target: Target) -> Derivation:
    """The sketches of `family` (see `gtco.passes.legality.family`) that take `group`."""
    placed, origins = _placed(group)
    sketches: list[Sketch] = []
    refusals: list[tuple[str, str]] = []
    for kind in SKETCHES:
        if kind.family != family:
            continue
        try:
            sketches.append(_made(kind, placed, origins, target))
        except Illegal as error:
            refusals.append((kind.name, str(error)))
    if not sketches and not refusals:
        ops = ", ".join(node.attrs.get("target", node.op) for node in group.compute)
        refusals.append((family, f"no sketch takes {ops}"))
    return Derivation(tuple(sketches), tuple(refusals))
