from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator

import networkx as nx
import pytest
import torch
from torch import Tensor

from experiments.partitions import greedy, unfused
from gtco.cost_model.model import roofline_us
from gtco.ir.graph import FusedGraph, Graph, GraphBuilder, Group
from gtco.ir.interpreter import interpret
from gtco.ir.spec import TensorSpec
from gtco.ir.views import resolve
from gtco.passes import legality, segments
from gtco.passes.dataflow import Flow, make_group, materialize_views, stored_form, trace
from gtco.passes.fusion import best_plans, clone_cheap, fuse
from gtco.passes.legality import Legality, explain, family
from gtco.passes.tasks import workload_key
from gtco.passes.workload import describe
from gtco.target import find_target
from tests.unit.random_graphs import random_graph
from tests.unit.vit_graph import vit_graph

H100 = find_target("sm_90a")
SIZES = (3, 5, 6, 7, 7, 8, 8, 9, 9, 10)
CASES = [(seed, SIZES[seed % len(SIZES)]) for seed in range(120)]


def random_price(group: Group) -> float:
    """A price that only the workload decides: one to five, whatever the size of the group."""
    digest = hashlib.blake2b(workload_key(group, H100).encode(), digest_size=4).digest()
    return 1 + 4 * int.from_bytes(digest, "big") / 2**32


def roofline(group: Group) -> float:
    return roofline_us(group, H100)


# -- the oracle: networkx and all partitions, without bit sets -------------------------------------


def dependence(graph: Graph) -> nx.DiGraph:
    digraph = nx.DiGraph()
    for node in graph.nodes:
        if not node.definition.is_view:
            digraph.add_node(node.name)
            for name in node.inputs:
                made_by = graph.producers.get(trace(graph, name).base)
                if made_by is not None:
                    digraph.add_edge(made_by.name, node.name)
    return digraph


def is_convex_by_networkx(digraph: nx.DiGraph, names: frozenset[str]) -> bool:
    below = set().union(*(nx.descendants(digraph, name) for name in names))
    above = set().union(*(nx.ancestors(digraph, name) for name in names))
    return below & above <= names


def legal_sets(graph: Graph, max_group: int) -> list[frozenset[str]]:
    digraph = dependence(graph)
    rules = Legality(Flow(graph), max_group)
    compute = [node for node in graph.nodes if not node.definition.is_view]
    found = []
    for size in range(1, min(len(compute), max_group) + 1):
        for nodes in itertools.combinations(compute, size):
            if rules.explain(nodes) is None:
                names = frozenset(node.name for node in nodes)
                assert is_convex_by_networkx(digraph, names), f"{sorted(names)} is not convex"
                assert nx.is_weakly_connected(digraph.subgraph(names))
                found.append(names)
    return found


def all_plans(graph: Graph, max_group: int) -> Iterator[list[frozenset[str]]]:
    """Every partition into legal groups that can be launched one after another."""
    digraph = dependence(graph)
    having: dict[str, list[frozenset[str]]] = {name: [] for name in digraph}
    for names in legal_sets(graph, max_group):
        for name in names:
            having[name].append(names)

    def complete(rest: frozenset[str], chosen: list[frozenset[str]]) -> Iterator[list]:
        if not rest:
            quotient = nx.quotient_graph(digraph, chosen) if chosen else nx.DiGraph()
            if nx.is_directed_acyclic_graph(quotient):
                yield chosen
            return
        for names in having[min(rest)]:
            if names <= rest:
                yield from complete(rest - names, [*chosen, names])

    yield from complete(frozenset(digraph), [])


def group_of(flow: Flow, names: frozenset[str]) -> Group:
    return make_group(flow, [node for node in flow.compute if node.name in names])


def run_groups(fused: FusedGraph, args: list[Tensor]) -> list[Tensor]:
    """Run each group on nothing but its declared inputs; keep nothing but its outputs."""
    values = dict(zip(fused.graph.inputs, args, strict=True))
    for group in fused:
        outputs = interpret(group.graph, [values[name] for name in group.graph.inputs])
        for name, tensor in zip(group.graph.outputs, outputs, strict=True):
            assert name not in values, f"%{name} is stored twice"
            values[name] = tensor
    results = []
    for name in fused.graph.outputs:
        read = trace(fused.graph, name)
        tensor = values[read.base] if read.base in values else fused.graph.constants[read.base]
        for view in read.views:
            tensor = view.definition.reference(tensor, **view.attrs)
        results.append(tensor)
    return results


def random_args(graph: Graph) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(spec.sizes, generator=generator).to(spec.dtype)
        for spec in graph.inputs.values()
    ]


def check_plan(graph: Graph, fused: FusedGraph) -> None:
    """Cover, convexity, order, legality, reasons and meaning."""
    check_groups(graph, fused)
    digraph = dependence(fused.graph)
    home = {node.name: group.name for group in fused for node in group.compute}
    apart = {(a, b) for a, b in digraph.edges if home[a] != home[b]}
    assert {(a, b) for a, b, _ in fused.refusals} == apart
    assert all(reason for _, _, reason in fused.refusals)


def check_groups(graph: Graph, fused: FusedGraph) -> None:
    """All of `check_plan` but the reasons."""
    fused.graph.verify()
    digraph = dependence(fused.graph)
    names = [node.name for group in fused for node in group.compute]
    assert sorted(names) == sorted(digraph)
    done: set[str] = set()
    for group in fused:
        members = frozenset(node.name for node in group.compute)
        assert is_convex_by_networkx(digraph, members)
        assert explain(fused.graph, group.compute) is None
        done |= members
        assert all(nx.ancestors(digraph, name) <= done for name in members)
        group.graph.verify()
        assert all(not trace(group.graph, name).views for name in group.graph.inputs)
        for node in group.compute:
            for name in node.inputs:
                if trace(group.graph, name).base not in group.graph.producers:
                    resolve(group.graph, name)
    args = random_args(graph)
    expected = interpret(graph, args)
    for results in (interpret(fused, args), run_groups(fused, args)):
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value, equal_nan=True)


def total(fused: FusedGraph, price) -> float:
    return sum(price(group) for group in fused)


# -- the dynamic programme -------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "nodes"), CASES)
def test_equals_exhaustive_search(seed: int, nodes: int) -> None:
    graph = random_graph(seed, nodes)
    max_group = (16, 16, 3)[seed % 3]
    fused = fuse(graph, random_price, max_group=max_group)
    flow = Flow(fused.graph)
    prices: dict[frozenset[str], float] = {}
    count, best = 0, math.inf
    for plan in all_plans(fused.graph, max_group):
        count += 1
        for names in plan:
            if names not in prices:
                prices[names] = random_price(group_of(flow, names))
        best = min(best, sum(prices[names] for names in plan))
    assert fused.legal_plans == count
    assert total(fused, random_price) == pytest.approx(best)
    check_plan(graph, fused)


KEPT = 16


def alike_segments(graph: Graph, max_group: int) -> bool:
    """Whether two segments are the same work, so that `best_plans` gives them one plan."""
    rules = Legality(Flow(graph), max_group)
    segments_found = segments.find_segments(rules, rules.flow.compute)
    keys = [
        describe(make_group(rules.flow, each).graph).text()
        for each in segments_found
        if len(each) > 1
    ]
    return len(set(keys)) < len(keys)


@pytest.mark.parametrize(("seed", "nodes"), CASES)
def test_the_best_plans_equal_exhaustive_search(seed: int, nodes: int) -> None:
    graph = random_graph(seed, nodes)
    max_group = (16, 16, 3)[seed % 3]
    plans = best_plans(graph, random_price, KEPT, max_group=max_group)
    flow = Flow(plans[0].graph)
    every = [
        sum(random_price(group_of(flow, names)) for names in plan)
        for plan in all_plans(plans[0].graph, max_group)
    ]
    costs = [total(plan, random_price) for plan in plans]
    partitions = {
        frozenset(frozenset(node.name for node in group.compute) for group in plan)
        for plan in plans
    }
    assert len(partitions) == len(plans)
    if alike_segments(plans[0].graph, max_group):
        assert costs == sorted(costs) and costs[0] == pytest.approx(min(every))
    else:
        assert costs == pytest.approx(sorted(every)[:KEPT])
    for plan in plans[:3]:
        check_plan(graph, plan)


def test_most_random_graphs_have_no_two_segments_alike() -> None:
    alike = sum(alike_segments(random_graph(seed, n), 16) for seed, n in CASES)
    assert alike < len(CASES) / 10


def test_layers_that_are_alike_have_one_plan() -> None:
    plans = best_plans(vit_graph(layers=4), roofline, KEPT)
    assert len(plans) == KEPT
    costs = [total(plan, roofline) for plan in plans]
    assert costs == pytest.approx(sorted(costs))
    assert str(plans[0]) == str(fuse(vit_graph(layers=4), roofline))
    for plan in plans:
        counts = Counter(workload_key(group, H100) for group in plan)
        attention = [workload_key(g, H100) for g in plan if family(g) == "attention"]
        assert counts[attention[0]] >= 3
    texts = {reason for plan in plans[1:] for _, _, reason in plan.refusals}
    assert any("but this is not the cheapest plan" in reason for reason in texts)
    assert not any("the search was cut here" in reason for reason in texts)


def test_the_best_plans_of_a_cut_segment_are_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(7, 24)
    monkeypatch.setattr(segments, "MAX_SETS", 40)
    plans = best_plans(graph, random_price, KEPT)
    costs = [total(plan, random_price) for plan in plans]
    assert costs == sorted(costs) and len(plans) == KEPT
    for plan in plans:
        check_plan(graph, plan)


def test_the_random_graphs_cover_the_families() -> None:
    kinds = {family(group) for seed, n in CASES for group in fuse(random_graph(seed, n), roofline)}
    assert kinds == {"gemm", "rowwise", "elementwise"}


@pytest.mark.parametrize("seed", range(1000, 1012))
@pytest.mark.parametrize("price", [random_price, roofline])
def test_never_worse_than_greedy_or_no_fusion(seed: int, price) -> None:
    graph = random_graph(seed, 16)
    fused = fuse(graph, price)
    cost = total(fused, price) - 1e-9
    flow = Flow(fused.graph)
    assert cost <= sum(price(make_group(flow, [node])) for node in flow.compute)
    others = greedy(graph)
    assert cost <= total(others, price)
    check_plan(graph, fused)
    check_groups(graph, others)


def test_greedy_takes_the_largest_group_and_leaves_an_order_of_launch() -> None:
    graph = vit_graph(layers=2)
    assert [len(each.compute) for each in greedy(graph)] == [
        len(each.compute) for each in fuse(graph, roofline)
    ]
    sizes = Counter(len(each.compute) for each in unfused(graph))
    assert set(sizes) == {1}
    check_groups(graph, unfused(graph))
    (largest,) = {
        max(len(names) for names in legal_sets(random_graph(1003, 10), 16)),
        max(len(each.compute) for each in greedy(random_graph(1003, 10))),
    }
    assert largest > 2


def test_greedy_in_a_segment_too_large_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(7, 24)
    monkeypatch.setattr(segments, "MAX_SETS", 40)
    check_groups(graph, greedy(graph))


def test_a_wrong_convexity_check_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((4, 8), torch.float32))
    top = b.add("relu", x)
    side = b.add("softmax", b.add("linear", top, b.constant("w", torch.randn(8, 8))), dim=-1)
    graph = b.build([b.add("add", top, side)])
    list(all_plans(graph, 16))
    monkeypatch.setattr(legality, "is_convex", lambda flow, mask: True)
    with pytest.raises(AssertionError, match="is not convex"):
        list(all_plans(graph, 16))


def test_a_segment_too_large_for_the_table_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(7, 24)
    best = total(fuse(graph, random_price), random_price)
    monkeypatch.setattr(segments, "MAX_SETS", 40)
    fused = fuse(graph, random_price)
    check_plan(graph, fused)
    assert total(fused, random_price) >= best - 1e-9


def test_a_segment_is_cut_where_least_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between parts that one value joins, not in the middle of one."""
    b = GraphBuilder()
    value = b.input("x", TensorSpec((4, 8), torch.float32))
    for _ in range(3):
        value = b.add("relu", value)
        value = b.add("add", b.add("tanh", value), b.add("exp", value))
    graph = b.build([value])
    assert [len(each.compute) for each in fuse(graph, roofline)] == [12]
    monkeypatch.setattr(segments, "MAX_SETS", 60)
    assert [len(each.compute) for each in fuse(graph, roofline)] == [4, 4, 4]


def test_a_segment_is_cut_where_least_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of places that as many edges cross: integers are stored, and widened by who reads them."""
    b = GraphBuilder()
    value = b.input("x", TensorSpec((4, 8), torch.float32))
    for _ in range(2):
        narrow = b.add("cast", b.add("tanh", value), dtype=torch.int8)
        value = b.add("relu", b.add("exp", b.add("cast", narrow, dtype=torch.float32)))
    graph = b.build([value])
    monkeypatch.setattr(segments, "MAX_SETS", 50)
    _, behind = fuse(graph, roofline)
    assert [behind.graph.specs[name].dtype for name in behind.graph.inputs] == [torch.int8]


# -- a vision transformer --------------------------------------------------------------------------

LAYER = [
    "gemm: merge_stats -> linear -> mul -> sub -> mul -> add -> cast",
    "attention: attention",
    "gemm: linear -> add -> row_stats",
    "gemm: merge_stats -> linear -> mul -> sub -> mul -> add -> cast -> gelu",
    "gemm: linear -> add -> row_stats",
]


def test_a_transformer_layer_is_five_groups() -> None:
    graph = vit_graph(layers=2)
    fused = fuse(graph, roofline)
    check_plan(graph, fused)
    lines = [f"{family(group)}: {str(group).split(': ')[1]}" for group in fused]
    assert lines == [
        "rowwise: add -> row_stats",
        *LAYER,
        *LAYER[:4],
        "gemm: linear -> add",
        "rowwise: layer_norm",
        "gemm: linear",
    ]


def test_attention_stores_through_the_permute_of_its_reader() -> None:
    fused = fuse(vit_graph(layers=1), roofline)
    (attention,) = (group for group in fused if family(group) == "attention")
    (output,) = attention.graph.outputs
    assert attention.graph.producers[output].op == "reshape"
    assert attention.graph.specs[output].sizes == (1, 13, 128)
    (qkv,) = attention.graph.inputs
    assert attention.graph.specs[qkv].sizes == (1, 13, 384)


def test_layers_that_are_alike_are_solved_once() -> None:
    def calls(layers: int) -> int:
        seen: list[str] = []

        def price(group: Group) -> float:
            seen.append(workload_key(group, H100))
            return roofline(group)

        fuse(vit_graph(layers), price)
        assert len(seen) == len(set(seen))
        return len(seen)

    assert calls(3) == calls(6)


def test_time_of_a_vit_b16() -> None:
    graph = vit_graph(12, 197, 768, 12, torch.float16)
    start = time.perf_counter()
    fused = fuse(graph, roofline)
    print(f"\n{len(fused.groups)} groups of {fused.legal_plans} plans in "
          f"{time.perf_counter() - start:.2f} s")  # fmt: skip
    assert len(fused.groups) == 12 * 5 + 3


# -- views and clones ------------------------------------------------------------------------------


def test_a_view_without_strides_becomes_a_copy() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((4, 6), torch.float32))
    turned = b.add("permute", x, dims=(1, 0))
    graph = b.build([b.add("relu", b.add("reshape", turned, shape=(8, 3))), turned])
    whole = materialize_views(graph)
    assert [node.op for node in whole.nodes] == ["permute", "copy", "reshape", "relu"]
    check_plan(graph, fuse(graph, roofline))


def test_what_the_graph_returns_is_stored_as_it_was_made() -> None:
    b = GraphBuilder()
    h = b.add("relu", b.input("x", TensorSpec((4, 6), torch.float32)))
    turned = b.add("permute", h, dims=(1, 0))
    reader = b.add("tanh", turned)
    assert stored_form(b.build([reader]), h) == turned
    assert stored_form(b.build([reader, turned]), h) == h
    assert stored_form(b.build([reader, h]), h) == h


def test_cheap_nodes_are_cloned_for_each_reader() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((4, 8), torch.float32))
    stats = b.input("s", TensorSpec((4, 1, 2), torch.float32))
    mean, rstd = b.node("merge_stats", (stats,), {"columns": 8, "eps": 1e-5})
    row = b.add("reshape", b.add("mul", mean, rstd), shape=(1, 4, 1))
    outs = []
    for _ in range(2):
        y = b.add("linear", x, b.constant("w", torch.randn(8, 8)))
        y = b.add("mul", y, rstd)
        outs.append(b.add("sub", b.add("reshape", y, shape=(1, 4, 8)), row))
    graph = b.build(outs)
    cloned = clone_cheap(graph)
    cloned.verify()
    assert sum(node.op == "merge_stats" for node in cloned.nodes) == 2
    fused = fuse(graph, roofline)
    check_plan(graph, fused)
    assert [family(group) for group in fused] == ["gemm", "gemm"]


def test_a_cheap_node_that_must_be_stored_has_no_clones() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 4, 8, 16), torch.float32))
    mask = b.add("mul", b.constant("m", torch.randn(8, 8)), other=2.0)
    outs = [b.add("attention", x, x, x, mask, scale=0.25) for _ in range(3)]
    fused = fuse(b.build(outs), roofline)
    assert [family(group) for group in fused] == ["elementwise"] + ["attention"] * 3


def test_dead_nodes_are_dropped() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((4,), torch.float32))
    b.add("relu", x)
    fused = fuse(b.build([b.add("tanh", x), x]), roofline)
    assert [node.op for group in fused for node in group.compute] == ["tanh"]
