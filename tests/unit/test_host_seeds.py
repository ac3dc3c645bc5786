"""A seed chooses the order of threads, blocks and landings: always the same one, and its own."""

from __future__ import annotations

import pytest
import torch

from gtco.runtime.host import HostError
from tests.faults.kernels import Planted, run

pytestmark = pytest.mark.compiler

SEEDS = range(4)
RACE = Planted("  ptx::griddepcontrol_wait();\n  y[thread] = x[thread];\n", "y[thread]", "y[0]", "")


def culprit(seed: int) -> str:
    with pytest.raises(HostError, match="no barrier orders it after the write") as caught:
        run(RACE.wrong, seed)
    return str(caught.value)


def test_two_seeds_run_threads_in_two_orders() -> None:
    found = [culprit(seed) for seed in SEEDS]
    assert len(set(found)) == len(found)
    assert found == [culprit(seed) for seed in SEEDS]


def test_a_right_kernel_gives_the_same_bits_under_every_seed() -> None:
    first, *others = (run(RACE.right, seed) for seed in SEEDS)
    assert all(torch.equal(first, each) for each in others)
