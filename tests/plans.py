"""Small plans for tests of the runtime, made by hand: no fusion, no sketches."""

from __future__ import annotations

from torch import Tensor, nn

from gtco.codegen.program import KernelProgram, Pointer
from gtco.frontend.torch_export import Captured
from gtco.ir.graph import FusedGraph, Graph, Group, Node, subgraph
from gtco.options import Options
from gtco.runtime.plan import Launch, Plan
from gtco.target import TARGETS, Target


class Block(nn.Module):
    """linear, gelu, linear and a transposed result, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = nn.functional.gelu(self.up(x))
        return {"out": (self.down(hidden) + y).transpose(0, 1), "same": y}


def groups_of(graph: Graph, fused: tuple[tuple[str, ...], ...]) -> tuple[Group, ...]:
    """One group per compute node, or per tuple of ops in `fused` where they follow each other."""
    runs: list[list[Node]] = []
    for node in graph.nodes:
        if node.definition.is_view:
            continue
        ops = (*(each.op for each in runs[-1]), node.op) if runs else (node.op,)
        if runs and any(chain[: len(ops)] == ops for chain in fused):
            runs[-1].append(node)
        else:
            runs.append([node])
    groups = []
    for index, run in enumerate(runs):
        own = {value for node in run for value in node.values}
        outside = [node for node in graph.nodes if node not in run]
        read = {name for node in outside for name in node.inputs} | set(graph.outputs)
        outputs = [value for value in own if value in read]
        groups.append(Group(f"g{index}", subgraph(graph, run, outputs)))
    return tuple(groups)


NEGATE = """#include "ptx.cuh"
extern "C" __global__ void ENTRY_POINT(const float* x, float* y) {
  gtco::ptx::griddepcontrol_launch_dependents();  // as early as it can be: a race would show
  gtco::ptx::griddepcontrol_wait();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < COUNT; i += gridDim.x * blockDim.x)
    y[i] = -x[i];
}
"""


def negate_program(group: Group, target: Target, cluster: int = 1) -> KernelProgram:
    """y = -x in float32."""
    (source,) = group.graph.inputs
    code = NEGATE.replace("COUNT", str(group.graph.specs[source].numel))
    arguments = (Pointer(source), Pointer(group.graph.outputs[0]))
    return KernelProgram(
        "elementwise",
        "negate",
        {"cluster": cluster},
        code,
        target.arch,
        (128, 1, 1),
        256,
        64,
        arguments,
        (cluster, 1, 1),
    )


def make_plan(
    captured: Captured,
    fused: tuple[tuple[str, ...], ...] = (),
    *,
    generated: str = "",
    target: Target = TARGETS["sm_90a"],
    options: Options | None = None,
    cluster: int = 1,
) -> Plan:
    """Every group runs in ATen but those of the one op `generated`, which is "neg" or nothing."""
    groups = groups_of(captured.graph, fused)
    launches = []
    for group in groups:
        if [node.op for node in group.compute] == [generated]:
            program = negate_program(group, target, cluster)
            launches.append(Launch(group, "elementwise", program, "default", "", 2.0))
        else:
            launches.append(Launch(group, "gemm", None, "fallback", "no sketch", 6.0))
    refusals = (("a", "b", "the reduction axis crosses the tile"),) * 2
    graph = FusedGraph(captured.graph, groups, refusals, 42)
    return Plan(graph, tuple(launches), target, options or Options())
