"""Which workloads are alike: a schedule that was good for one is worth trying on the other."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from gtco.codegen.sampler import Candidate
from gtco.codegen.sketch import Illegal, Sketch
from gtco.cost_model.knowledge import Knowledge
from gtco.cost_model.record import TuningRecord
from gtco.cost_model.work import CONTRACTIONS, Work, group_work, work_of
from gtco.ir.ops import OPS

SAME_SIZE = 0.9
"""Least ratio of the FLOPs of two contractions whose best programs may have equal blocks: 197 rows
and 208, in equal columns."""


def likeness(first: str, second: str) -> float:
    """How alike two workloads are, from 0 to 1, the same.

    The share of operators that both have, times the ratio of the elements that they read.

    Args:
        first, second: from `gtco.passes.tasks.workload_key`.
    """
    if first == second:
        return 1.0
    (ops, size), (other_ops, other_size) = _summary(first), _summary(second)
    either = (ops | other_ops).total()
    shared = (ops & other_ops).total() / either if either else 1.0
    return shared * min(size, other_size) / max(size, other_size)


@functools.lru_cache(maxsize=1024)
def _summary(workload: str) -> tuple[Counter[str], int]:
    """The operators, and the elements of all tensors that are read."""
    content = json.loads(workload)
    sizes = (math.prod(_sizes(spec)) for spec, _ in content["externals"])
    return Counter(node[0] for node in content["nodes"]), max(1, sum(sizes))


def transferred(
    known: Knowledge, workload: str, sketches: Sequence[Sketch], limit_us: float = math.inf
) -> TuningRecord | None:
    """The best program of another workload, which is legal here and whose blocks do the same work.

    Another epsilon, another activation, 196 rows in place of 197 or operands that lie elsewhere
    change neither how many blocks there are nor what the main loop of one does. So what was
    measured there holds here, which no draft can say as well. Of several workloads the one most
    alike counts, and of those equally alike the fastest; where none was measured on this device,
    those of the nearest kin; None where there is none.

    Args:
        known: the records.
        workload: of the sketches' group.
        sketches: from `gtco.codegen.rules.derive`.
        limit_us: what took longer there is passed over.
    """
    by_name = {sketch.name: sketch for sketch in sketches}
    flops = group_work(sketches[0].group).matmul_flops if sketches else 0
    found = (_of_device(each, workload, by_name, flops, limit_us) for each in known.sources)
    return next(filter(None, found), None)


def _of_device(
    known: Knowledge, workload: str, by_name: Mapping[str, Sketch], flops: int, limit_us: float
) -> TuningRecord | None:
    """The same of one device's records."""
    near = [
        (-round(likeness(workload, record.workload), 2), record.run_us or math.inf, record)
        for record in known.leaders()
        if record.sketch in by_name
        and (record.run_us or 0.0) <= limit_us
        and _same_size(flops, record.work.get("matmul_flops", 0))
        and _loop(workload) == _loop(record.workload)
    ]
    for _, _, record in sorted(near, key=lambda each: each[:2]):
        sketch = by_name[record.sketch]
        try:
            here = Candidate(sketch, sketch.emit(record.schedule))
            there = Work.of_numbers(record.sketch, record.schedule, record.work)
        except (Illegal, KeyError):  # not legal here, or a record without a knob or a number
            continue
        if _blocks(work_of(here)) == _blocks(there):
            return record
    return None


@functools.lru_cache(maxsize=1024)
def _loop(workload: str) -> tuple[object, ...]:
    """The architecture, and of each contraction its columns and what its loop reads besides the
    operands: masks or where keys end, which attention has, and no bias."""
    content = json.loads(workload)
    return (
        content["arch"],
        *(
            (op, _sizes(outputs[0])[-1:], max(3, len(operands)), bool(attrs.get("causal")))
            for op, attrs, outputs, operands in content["nodes"]
            if OPS[op].family in CONTRACTIONS
        ),
    )


def _sizes(spec: str) -> list[int]:
    """Of a `TensorSpec` as a workload has it, such as "f16[1,197,768]"."""
    return [int(size) for size in spec[spec.index("[") + 1 : -1].split(",") if size]


def _same_size(flops: int, other: int) -> bool:
    return min(flops, other) > SAME_SIZE * max(flops, other)


def _blocks(work: Work) -> tuple[int, ...]:
    """How many there are, and what one does in its main loop; no field that a model fits."""
    block = work.block
    loop = (block.steps, block.stages, block.mma_flops, block.tile_p, block.tile_q, block.split)
    products = (work.group.half, work.group.tf32)  # of 8 bits, 16, tf32 or fp32
    return (work.blocks, work.threads, work.cluster, *loop, *products)
