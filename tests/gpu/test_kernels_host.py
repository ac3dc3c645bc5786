"""What the host build's own tests run, on a GPU: the same answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.codegen.sketches.gemm_skinny import GemmSkinny
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.cost_model.judge import random_values
from gtco.ir.graph import Group
from gtco.runtime import run as gpu
from gtco.runtime.driver import BoundLaunch
from gtco.target import TARGETS
from tests import turned
from tests.faults import kernels
from tests.faults.test_planted import PLANTED
from tests.kernel_checks import wrong_outputs
from tests.unit import test_host_persistent, test_host_skinny, test_host_wgmma

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs wgmma",
    ),
]


def run_on_gpu(
    program: KernelProgram, group: Group, values: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    there = {name: value.cuda() for name, value in values.items()}
    return {name: y.cpu() for name, y in gpu.run_group(program, group, there).items()}


@pytest.mark.parametrize(("name", "values"), test_host_wgmma.CASES)
def test_wgmma_matches_fp64(name: str, values: tuple[int, ...]) -> None:
    group = test_host_wgmma.GROUPS[name]()
    schedule = dict(zip(test_host_wgmma.KNOBS, values, strict=True))
    program = GemmWgmma(group, TARGETS["sm_90a"]).emit(schedule)
    given = random_values(group, torch.device("cpu"), seed=1)
    assert not wrong_outputs(program, group, given, run_on_gpu)


@pytest.mark.parametrize(("name", "values"), test_host_persistent.CASES)
def test_persistent_matches_fp64(name: str, values: tuple[int, ...]) -> None:
    group = test_host_persistent.GROUPS[name]()
    schedule = dict(zip(test_host_persistent.KNOBS, values, strict=True))
    program = GemmPersistent(group, test_host_persistent.FEW).emit(schedule)
    given = random_values(group, torch.device("cpu"), seed=1)
    assert not wrong_outputs(program, group, given, run_on_gpu)


@pytest.mark.parametrize(("name", "values"), test_host_skinny.CASES)
def test_skinny_matches_fp64_with_the_same_bits_twice(name: str, values: tuple[int, ...]) -> None:
    group = test_host_skinny.GROUPS[name]()
    schedule = dict(zip(test_host_skinny.KNOBS, values, strict=True))
    program = GemmSkinny(group, TARGETS["sm_90a"]).emit(schedule)
    given = random_values(group, torch.device("cpu"), seed=1)
    assert not wrong_outputs(program, group, given, run_on_gpu)
    first, again = (run_on_gpu(program, group, given) for _ in range(2))
    assert all(torch.equal(first[each], again[each]) for each in group.graph.outputs)


@pytest.mark.parametrize("case", turned.CASES)
def test_either_way_gives_the_same_bits(case: str) -> None:
    group, forward = turned.made(case)
    given = random_values(group, torch.device("cpu"), seed=1)
    assert not wrong_outputs(forward, group, given, run_on_gpu)
    one, other = (
        run_on_gpu(replace(forward, backward=back), group, given) for back in (False, True)
    )
    assert all(torch.equal(one[each], other[each]) for each in group.graph.outputs)


@pytest.mark.compiler
@pytest.mark.parametrize("name", PLANTED)
def test_the_right_twins_of_planted_mistakes_give_the_same(name: str) -> None:
    program = PLANTED[name].right
    tensors = {name: tensor.cuda() for name, tensor in kernels.tensors().items()}
    kernel = gpu.load_program(program, torch.cuda.current_device())
    launch = BoundLaunch(kernel, program, tensors, dependent=False)
    torch.cuda.synchronize()
    launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    torch.testing.assert_close(tensors["y"].cpu(), kernels.run(program, seed=0))
