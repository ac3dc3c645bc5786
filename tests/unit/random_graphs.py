"""Random small graphs of all families, for tests of fusion."""

from __future__ import annotations

import random

import torch

from gtco.ir.graph import Graph, GraphBuilder
from gtco.ir.spec import TensorSpec

ROWS, COLUMNS = 4, 8
FULL, ROW = (ROWS, COLUMNS), (ROWS, 1)


def random_graph(seed: int, nodes: int) -> Graph:
    """A graph of `nodes` compute nodes over [4, 8] values, row values and statistics."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    b = GraphBuilder()

    def constant(*shape: int) -> str:
        return b.constant("c", torch.randn(*shape, generator=generator))

    full = [b.input("x", TensorSpec(FULL, torch.float32)) for _ in range(2)]
    row: list[str] = []
    stats: list[str] = []

    def recent(names: list[str]) -> str:
        return rng.choice(names[-3:]) if rng.random() < 0.7 else rng.choice(names)

    def seen(name: str) -> str:
        """`name`, at times through views that give it back in its shape."""
        how = rng.random()
        if how < 0.1:
            split = b.add("reshape", name, shape=(ROWS, 2, COLUMNS // 2))
            return b.add("reshape", split, shape=FULL)
        if how < 0.2:
            turned = b.add("permute", name, dims=(1, 0))
            return b.add("reshape", turned, shape=FULL)
        return name

    def one_node() -> None:
        kinds = ["unary", "binary", "scale", "linear", "softmax", "sum", "row_stats"]
        weights = [3, 4, 1, 2, 0.7, 0.7, 1]
        if row:
            kinds += ["centre", "row"]
            weights += [2, 1]
        if stats:
            kinds.append("merge")
            weights.append(2)
        kind = rng.choices(kinds, weights)[0]
        if kind == "unary":
            full.append(b.add(rng.choice(("relu", "tanh")), seen(recent(full))))
        elif kind == "binary":
            full.append(b.add(rng.choice(("add", "sub")), seen(recent(full)), seen(recent(full))))
        elif kind == "scale":
            full.append(b.add("mul", recent(full), constant(COLUMNS)))
        elif kind == "linear":
            full.append(b.add("linear", seen(recent(full)), constant(COLUMNS, COLUMNS)))
        elif kind == "softmax":
            full.append(b.add("softmax", seen(recent(full)), dim=-1))
        elif kind == "sum":
            row.append(b.add("sum", recent(full), dims=(1,), keepdim=True))
        elif kind == "row_stats":
            stats.append(b.add("row_stats", recent(full)))
        elif kind == "centre":
            full.append(b.add("sub", recent(full), recent(row)))
        elif kind == "row":
            row.append(b.add("mul", recent(row), recent(row)))
        elif kind == "merge":
            row.extend(b.node("merge_stats", (recent(stats),), {"columns": COLUMNS, "eps": 1e-5}))

    for _ in range(nodes):
        one_node()
    read = {name for node in b.nodes for name in node.inputs}
    ends = [value for node in b.nodes for value in node.values if value not in read]
    return b.build([*ends, *rng.sample(full, 1)])
