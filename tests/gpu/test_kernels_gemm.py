"""Every GEMM sketch at odd shapes against fp64, outputs poisoned, twice for the same bits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

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
CASES = groups.GEMM_CASES


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
