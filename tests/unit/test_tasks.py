from __future__ import annotations

import json

import torch

from gtco.cost_model.model import roofline_us
from gtco.ir.graph import Graph, GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.passes.fusion import fuse
from gtco.passes.tasks import tasks, workload_key
from gtco.target import find_target
from tests.groups import tf32
from tests.unit.vit_graph import vit_graph

H100, A100 = find_target("sm_90a"), find_target("sm_80")


def gelu_linear(
    *,
    rows: int = 4,
    hint: str = "x",
    constant: bool = True,
    bias_first: bool = False,
    turned: bool = False,
    dtype: torch.dtype = torch.float16,
    approximate: str = "none",
) -> Group:
    b = GraphBuilder()
    x = b.input(hint, TensorSpec((8, rows) if turned else (rows, 8), dtype))
    if turned:
        x = b.add("permute", x, dims=(1, 0))
    weight = torch.randn(8, 8).to(dtype)
    w = b.constant(hint, weight) if constant else b.input("w", TensorSpec.of(weight))
    y = b.add("linear", x, w, hint=hint)
    z = b.input("z", TensorSpec((rows, 8), dtype))
    y = b.add("add", *((z, y) if bias_first else (y, z)), hint=hint)
    return Group(hint, b.build([b.add("gelu", y, approximate=approximate)]))


def test_names_and_values_of_constants_do_not_count() -> None:
    assert workload_key(gelu_linear(), H100) == workload_key(gelu_linear(hint="other"), H100)


def test_all_that_changes_the_kernel_counts() -> None:
    variants = [
        gelu_linear(),
        gelu_linear(rows=5),
        gelu_linear(constant=False),
        gelu_linear(bias_first=True),
        gelu_linear(turned=True),
        gelu_linear(dtype=torch.float32),
        gelu_linear(approximate="tanh"),
    ]
    keys = {workload_key(group, H100) for group in variants}
    assert len(keys) == len(variants)
    assert workload_key(variants[0], A100) not in keys
    assert json.loads(workload_key(variants[0], H100))["arch"] == "sm_90a"


def two_branches(swapped: bool) -> Graph:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((4, 8), torch.float32))
    ops = ("exp", "tanh")
    made = {op: b.add(op, x) for op in (reversed(ops) if swapped else ops)}
    return b.build([b.add("sub", made["exp"], made["tanh"])])


def test_what_products_are_rounded_to_counts() -> None:
    plain = gelu_linear(dtype=torch.float32)
    assert workload_key(plain, H100) != workload_key(tf32(plain), H100)


def test_the_order_of_independent_nodes_does_not_count() -> None:
    one, other = (Group("g", two_branches(swapped)) for swapped in (False, True))
    assert workload_key(one, H100) == workload_key(other, H100)


def test_one_input_read_twice_is_not_two_inputs() -> None:
    def square(same: bool) -> Group:
        b = GraphBuilder()
        x, y = (b.input("x", TensorSpec((4,), torch.float32)) for _ in range(2))
        return Group("g", b.build([b.add("mul", x, x if same else y)]))

    assert workload_key(square(True), H100) != workload_key(square(False), H100)


def test_spellings_of_one_layout_are_one_workload() -> None:
    def reshaped(*shapes: tuple[int, ...]) -> Group:
        b = GraphBuilder()
        x = b.input("x", TensorSpec((4, 8), torch.float32))
        for shape in shapes:
            x = b.add("reshape", x, shape=shape)
        return Group("g", b.build([b.add("relu", x)]))

    assert workload_key(reshaped((32,)), H100) == workload_key(reshaped((2, 16), (32,)), H100)


def test_the_layers_of_a_transformer_share_their_tasks() -> None:
    fused = fuse(vit_graph(layers=4), lambda group: roofline_us(group, H100))
    found = tasks(fused, H100)
    assert sum(task.weight for task in found) == len(fused.groups)
    # linear + add + row_stats is two tasks (projection, FC2); the last FC2 has no statistics.
    assert [task.weight for task in found] == [1, 4, 4, 4, 4, 3, 1, 1, 1]
    assert all(task.group is task.groups[0] for task in found)
