"""Every GEMM sketch at odd shapes against fp64, outputs poisoned, twice for the same bits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from gtco.codegen.sketch import Illegal, Sketch
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.graph import Group
from gtco.interpreter import interpret
from gtco.target import target_of_capability
from tests import groups

pytestmark = pytest.mark.gpu

F16, BF16 = torch.float16, torch.bfloat16
CASES: dict[str, Callable[[], Group]] = {
    "norm_197": lambda: groups.norm_linear(197, 768, 2304, F16),
    "norm_gelu_197": lambda: groups.norm_linear(197, 768, 3072, F16, gelu=True),
    "norm_odd": lambda: groups.norm_linear(7, 200, 1000, BF16, gelu=True),
    "residual_197": lambda: groups.residual_linear(197, 768, 768, F16),
    "residual_deep": lambda: groups.residual_linear(197, 3072, 768, F16),
    "residual_1": lambda: groups.residual_linear(1, 768, 768, BF16),
    "residual_odd": lambda: groups.residual_linear(33, 136, 104, F16),
    "residual_batch": lambda: groups.residual_linear(50, 64, 192, F16, batch=3),
    "head": lambda: groups.plain_linear(1, 768, 1000, F16),
    "narrow": lambda: groups.plain_linear(100, 256, 4, F16),
    "odd_columns": lambda: groups.plain_linear(19, 72, 91, F16),
    "patch_16": lambda: groups.patch_embedding(224, 16, 768, F16),
    "patch_14": lambda: groups.patch_embedding(56, 14, 128, F16),
    "bmm": lambda: groups.batched_matmul(3, 33, 64, 40, F16),
    "bmm_odd": lambda: groups.batched_matmul(2, 17, 197, 197, BF16),
    "bmm_transposed": lambda: groups.batched_matmul(2, 65, 64, 72, F16, transposed=True),
}


def sketches(group: Group) -> Iterator[Sketch]:
    target = target_of_capability(*torch.cuda.get_device_capability())
    for kind in (GemmMma, GemmWgmma):
        try:
            yield kind(group, target)
        except Illegal:
            continue


@pytest.mark.parametrize("case", CASES)
def test_gemm_matches_fp64(case: str) -> None:
    from gtco.runtime.run import run_group

    group = CASES[case]()
    graph = group.graph
    values = groups.inputs_of(group, seed=1)
    args = [values[name] for name in graph.inputs]
    exact = interpret(graph, args, dtype=torch.float64)
    eager = interpret(graph, args)
    chosen = random.Random(0)
    tried = 0
    for sketch in sketches(group):
        legal = [program for _, program in itertools.islice(sketch.legal(), 400)]
        some = [
            sketch.emit(next(iter(sketch.defaults()))),
            *chosen.sample(legal, min(4, len(legal))),
        ]
        for program in some:
            first = run_group(program, group, values)
            again = run_group(program, group, values)
            tried += 1
            for name, reference, torch_eager in zip(graph.outputs, exact, eager, strict=True):
                assert torch.equal(first[name], again[name]), f"{program.schedule}: bits differ"
                error = (first[name].double() - reference).square().mean().sqrt()
                allowed = (torch_eager.double() - reference).square().mean().sqrt()
                bound = 3 * allowed + 1e-3 * reference.square().mean().sqrt()
                assert error <= bound, f"{program.sketch} {dict(program.schedule)} %{name}"
    assert tried
