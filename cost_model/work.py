"""What a program does, in numbers: the group's arithmetic and bytes, and one block's part of them.

Nothing here is a time, and nothing needs the program compiled. A `TuningRecord` carries these
numbers, so that models are trained and searches replayed from records alone.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields

import torch

from gtco.codegen.sampler import Candidate
from gtco.codegen.sketch import BlockWork
from gtco.codegen.timing import TANH_FLOPS
from gtco.ir.graph import Graph, Group, Node
from gtco.ir.views import takes_even
from gtco.passes.dataflow import trace
from gtco.target import Target

CONTRACTIONS = ("gemm", "attention")
"""Families whose ops are matrix products."""
HALVED = {torch.float16: 1, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.int8: 2}
"""How often 32 bits are halved to those of a type."""


@dataclass(frozen=True)
class GroupWork:
    """What any program of one group does.

    Args:
        matmul_flops: of linear, matmul, attention and convolutions, without padding.
        pointwise_flops: fp32 instructions of all other nodes and of attention's softmax.
        weight_bytes: constants, which come from device memory.
        read_bytes: inputs, which the kernels before have just written; of a slice, only the slice.
        written_bytes: outputs.
        half: how often the 32 bits of an operand of the contraction (or else of the first output)
            are halved: 1 for 16-bit operands, 2 for 8-bit ones, else 0.
        tf32: 1 if its operands are rounded to tf32, else 0.
    """

    matmul_flops: int
    pointwise_flops: int
    weight_bytes: int
    read_bytes: int
    written_bytes: int
    half: int
    tf32: int = 0

    def peak_tflops(self, target: Target) -> float:
        """The dense rate of its products on `target`, TFLOP/s."""
        dtype = (torch.float32, torch.float16, torch.float8_e4m3fn)[self.half]
        return target.products_tflops(dtype, "tf32" if self.tf32 else None)

    @property
    def exact(self) -> bool:
        """Whether its products, if it has any, are fp32."""
        return not self.half and not self.tf32


@dataclass(frozen=True)
class Work:
    """One program of one group.

    Args:
        sketch: its name.
        schedule: knob name to value.
        group: what the group asks of any program.
        block: what one block does of it.
        blocks: of the grid.
        threads: of a block.
        smem_bytes: dynamic shared memory of a block.
        cluster: blocks of a cluster.
    """

    sketch: str
    schedule: Mapping[str, int]
    group: GroupWork
    block: BlockWork
    blocks: int
    threads: int
    smem_bytes: int
    cluster: int

    def numbers(self) -> dict[str, int]:
        """All but sketch and schedule, flat: the `work` of a `TuningRecord`."""
        own = {name: getattr(self, name) for name in _OWN}
        return {**asdict(self.group), **asdict(self.block), **own}

    @staticmethod
    def of_numbers(sketch: str, schedule: Mapping[str, int], numbers: Mapping[str, int]) -> Work:
        """What `numbers` gave, for example of a record: an older one has fewer of them.

        Raises:
            KeyError: a number is missing, which it names.
        """
        group, block = (
            {
                each.name: int(numbers[each.name])
                for each in fields(part)
                if each.name in numbers or each.default is MISSING
            }
            for part in (GroupWork, BlockWork)
        )
        own = {name: int(numbers[name]) for name in _OWN}
        return Work(sketch, schedule, GroupWork(**group), BlockWork(**block), **own)


_OWN = ("blocks", "threads", "smem_bytes", "cluster")


def work_of(candidate: Candidate) -> Work:
    """The numbers of one program."""
    program, sketch = candidate.program, candidate.sketch
    group = _cached_group_work(sketch.group)
    x, y, z = program.grid
    across, down, deep = program.cluster
    blocks = x * y * z
    block = sketch.block_work(program) or _even_share(
        group, blocks, program.block, sketch.requests(program), sketch.read_again(program)
    )
    return Work(
        sketch.name,
        dict(program.schedule),
        group,
        block,
        blocks,
        program.block,
        program.smem_bytes,
        across * down * deep,
    )


def _even_share(
    group: GroupWork, blocks: int, threads: int, requests: int, again: int
) -> BlockWork:
    """A kernel without a main loop: every byte is read once, by one block, but for those that each
    reads `again`."""
    fill_bytes = -(-(group.read_bytes + group.weight_bytes) // blocks)
    written = -(-group.written_bytes // (blocks * (4 >> group.half)))
    live = 24 + -(-fill_bytes // (4 * threads))
    registers = min(255, live)
    filled = fill_bytes + again
    return BlockWork(filled, filled, 1, 1, 0, 1, written, 1, registers, requests=requests)


def group_work(group: Group) -> GroupWork:
    """What any program of `group` does."""
    graph = group.graph
    matmul_flops = pointwise_flops = tf32 = 0
    half = int(graph.specs[graph.outputs[0]].dtype.itemsize == 2)
    halved = halved_nodes(graph)
    for node in group.compute:
        flops = node_flops(graph, node)
        if node.definition.family in CONTRACTIONS:
            matmul_flops += flops
            half = HALVED.get(graph.specs[node.inputs[0]].dtype, 0)
            tf32 |= node.attrs.get("products") == "tf32"
        if node.definition.family == "attention":
            q, k = (graph.specs[name] for name in node.inputs[:2])
            pointwise_flops += TANH_FLOPS * q.numel // max(1, q.sizes[-1]) * k.sizes[-2]
        elif node.definition.family not in CONTRACTIONS:
            pointwise_flops += fp32_instructions(graph, node, halved)
    return GroupWork(
        matmul_flops,
        pointwise_flops,
        weight_bytes(graph),
        read_bytes(graph),
        sum(graph.specs[name].nbytes for name in graph.outputs),
        half,
        int(tf32),
    )


_cached_group_work = functools.lru_cache(maxsize=256)(group_work)


def gathered_bytes(graph: Graph) -> int:
    """Bytes of the pixels around the points of samplings, whatever points have in common."""
    return sum(
        node_flops(graph, node) // 2 * graph.specs[node.inputs[0]].dtype.itemsize
        for node in graph.nodes
        if node.definition.samples
    )


def node_flops(graph: Graph, node: Node) -> int:
    """Operations of one node as `gtco.ir.ops` counts them."""
    specs = [graph.specs[name] for name in node.inputs]
    return node.definition.flops(specs, node.outputs, node.attrs)


def fp32_instructions(graph: Graph, node: Node, halved: frozenset[str] = frozenset()) -> int:
    """The same in fp32 instructions: a transcendental is many, and of `halved_nodes` every other
    element is computed."""
    instructions = (TANH_FLOPS if node.definition.slow else 1) * node_flops(graph, node)
    return instructions // 2 if node.name in halved else instructions


def halved_nodes(graph: Graph) -> frozenset[str]:
    """The pointwise nodes of `graph` of which one column of each pair is wanted, and which compute
    no other: those behind which only the even columns are stored."""
    if not any(_takes_even(graph, node) for node in graph.nodes):
        return frozenset()
    wanted = dict.fromkeys(graph.outputs, _EVEN | _ODD)
    halved = set()
    for node in reversed(graph.nodes):
        own = functools.reduce(operator.or_, (wanted.get(name, 0) for name in node.values))
        if node.definition.is_pointwise and own in (_EVEN, _ODD):
            halved.add(node.name)
        if _takes_even(graph, node):
            read = _EVEN
        elif node.definition.of_pairs:
            read = (_EVEN if own & _ODD else 0) | (_ODD if own & _EVEN else 0)
        else:
            read = own if node.definition.is_pointwise else _EVEN | _ODD
        for name in node.inputs:
            wanted[name] = wanted.get(name, 0) | read
    return frozenset(halved)


_EVEN, _ODD = 1, 2


def _takes_even(graph: Graph, node: Node) -> bool:
    return node.definition.is_view and takes_even(node, graph.specs[node.inputs[0]].sizes)


def weight_bytes(graph: Graph) -> int:
    """Bytes of the constants."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in graph.constants.values())


def read_bytes(graph: Graph) -> int:
    """Bytes of the inputs that the members read: of a slice, only the slice."""
    read: dict[str, int] = {}
    for node in graph.nodes:
        if node.definition.is_view:
            continue
        for name in node.inputs:
            base = trace(graph, name).base
            if base in graph.inputs:
                elements = min(graph.specs[name].numel, graph.specs[base].numel)
                total = read.get(base, 0) + elements * graph.specs[base].dtype.itemsize
                read[base] = min(total, graph.specs[base].nbytes)
    return sum(read.values())
