"""Kernels of several parts, each the work of some of the blocks.

    %a = depthwise_conv(%x, %w)   %y = concat(%token, %a)

A concat at the end of a part: the part stores its result in its slice, and parts of their own copy
the pieces that are stored already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gtco.codegen.emit import Region, index
from gtco.codegen.scalars import C_TYPES
from gtco.codegen.sketch import Illegal, check
from gtco.ir.graph import Group
from gtco.ir.views import NotAView, piece_layout, resolve, through_views

BLOCK = "$block"


@dataclass(frozen=True)
class Part:
    """Some blocks of a kernel.

    Args:
        text: structs and functors that the call names.
        call: a statement; `BLOCK` stands for which of the blocks it is.
        blocks: how many there are.
    """

    text: str
    call: str
    blocks: int


def copies(group: Group, region: Region, threads: int) -> Iterator[Part]:
    """A part for each piece of a concat of `group` that is stored already.

    Args:
        group: whose other pieces are made in the kernel.
        region: takes the parameters.
        threads: of a block.

    Raises:
        Illegal: a piece is no strided view of what is stored, or of another dtype.
    """
    graph = group.graph
    stored = {through_views(graph.producers.get, name)[0]: name for name in graph.outputs}
    for node in group.compute:
        if node.op != "concat":
            continue
        output = stored[node.values[0]]
        for position, value in enumerate(node.inputs):
            spec = graph.specs[value]
            try:
                base, source = resolve(graph, value)
                if base in graph.producers or not spec.numel:
                    continue
                goal = piece_layout(graph, node, position, output)
                shape = (spec.numel // spec.sizes[-1], spec.sizes[-1])
                source, goal = source.reshape(shape), goal.reshape(shape)
            except NotAView as error:
                raise Illegal(f"%{value}, a piece of %{node.name}: {error}") from None
            check(spec.dtype == graph.specs[output].dtype, f"%{value} is no {graph.specs[output]}")
            vector = min(each.vector(16 // spec.dtype.itemsize) for each in (source, goal))
            element = C_TYPES[spec.dtype]
            from_name, to_name = region.parameter(base, "in"), region.parameter(output, "out")
            name = f"Piece{position}Of{list(stored).index(node.values[0])}"
            rows, columns = shape
            text = f"""struct {name} {{
  static constexpr int ROWS = {rows}, COLUMNS = {columns}, V = {vector}, THREADS = {threads};
  struct From {{  // {source}
    const {element}* base;
    __device__ __forceinline__ const {element}* at(int row, int col) const {{
      return base + {index(source, ("row", "col"))};
    }}
  }};
  struct To {{  // {goal}
    {element}* base;
    __device__ __forceinline__ {element}* at(int row, int col) const {{
      return base + {index(goal, ("row", "col"))};
    }}
  }};
}};
"""
            given = f"{name}::From{{{from_name}}}, {name}::To{{{to_name}}}"
            call = f"copy_piece<{name}>({given}, {BLOCK});"
            yield Part(text, call, -(-spec.numel // (vector * threads)))


def dispatch(parts: Sequence[Part]) -> str:
    """The kernel's body: each block does its own part."""
    if len(parts) == 1:
        return f"  {parts[0].call.replace(BLOCK, 'blockIdx.x')}"
    lines = ["  const int block = blockIdx.x;"]
    first = 0
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        condition = "" if last else f"if (block < {first + part.blocks}) "
        lines.append(f"  {'} else ' if number else ''}{condition}{{")
        at = f"block - {first}" if first else "block"
        lines.append(f"    {part.call.replace(BLOCK, at)}")
        first += part.blocks
    return "\n".join([*lines, "  }"])
