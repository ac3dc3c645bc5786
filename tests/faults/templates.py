"""Mistakes planted in the template of a kernel, and what the host build says of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gtco.codegen import DEVICE_HEADERS
from gtco.codegen.program import KernelProgram
from gtco.cost_model.judge import random_values
from gtco.ir.graph import Group
from gtco.runtime.host import HostError, run_on_host
from tests.kernel_checks import wrong_outputs

SEEDS = (0, 1)
"""Schedules of the host build: each must find the mistake."""


def planted(program: KernelProgram, old: str, new: str) -> KernelProgram:
    """`program` with `old` replaced in its template, or in one that this includes; those down to it
    are pasted in for their includes."""
    source = program.source
    own = re.findall(r'#include "(.+)"', source)
    for header in (
        *own,
        "attention.cuh",
        "copied.cuh",
        "promotion.cuh",
        "wgmma_exact.cuh",
        "wgmma_sides.cuh",
        "attention_tiles.cuh",
        "patches.cuh",
        "pieces.cuh",
        "windows.cuh",
        "softmax.cuh",
        "epilogue.cuh",
        "stats.cuh",
        "vector.cuh",
    ):
        if old in source:
            break
        template = (DEVICE_HEADERS / header).read_text().replace("#pragma once\n", "")
        include = f'#include "{header}"'
        source = source.replace(include, template, 1).replace(include, "")
    assert old in source, "the fault's place has moved"
    return replace(program, source=source.replace(old, new) if old else source)


def verdicts(made: KernelProgram, work: Group) -> list[str]:
    """What every schedule finds wrong."""
    values = random_values(work, torch.device("cpu"), seed=3)
    found: list[str] = []
    for seed in SEEDS:

        def run(
            program: KernelProgram, group: Group, values: Mapping[str, Tensor], seed: int = seed
        ) -> Mapping[str, Tensor]:
            return run_on_host(program, group, values, seed)

        try:
            found += wrong_outputs(made, work, values, run)
        except HostError as error:
            found.append(str(error))
    return found


def check_caught(made: KernelProgram, work: Group) -> None:
    """Every schedule finds what is wrong, and names the kernel or the wrong output."""
    found = verdicts(made, work)
    assert len(found) == len(SEEDS), found
    kernel = f"kernel gtco_{made.family}"
    assert all(kernel in each or "with {" in each for each in found), found
