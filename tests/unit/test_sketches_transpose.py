"""The transpose sketch: derivation, compilation, meaning on the CPU, its price."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.transpose import Transpose
from gtco.ir.graph import Group
from gtco.runtime.host import run_on_host
from gtco.selection import first_choice
from gtco.target import TARGETS
from tests import tile_groups
from tests.kernel_checks import compile_for_all, inputs_of, sample, wrong_outputs
from tests.transpose_groups import CASES, copied

H100 = TARGETS["sm_90a"]


@pytest.mark.parametrize("case", CASES)
def test_compiles(case: str) -> None:
    group = CASES[case]()
    assert not list(compile_for_all(lambda target: Transpose(group, target)))


@pytest.mark.compiler
@pytest.mark.parametrize("case", CASES)
def test_is_right_on_the_cpu(case: str) -> None:
    group = CASES[case]()
    values = inputs_of(group)
    for program in sample(Transpose(group, H100), 1):
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("PIXELS = 49", "PIXELS = 48"),
        ("channel * 49", "channel * 48"),
    ],
    ids=["a pixel less", "channels elsewhere"],
)
def test_the_check_rejects(text: str, other: str) -> None:
    group = CASES["copied_odd_pixels"]()
    (program, *_) = sample(Transpose(group, H100), 0)
    assert program.source.count(text) == 1
    wrong = dataclasses.replace(program, source=program.source.replace(text, other))
    assert wrong_outputs(wrong, group, inputs_of(group), run_on_host)


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (tile_groups.gelu_bias(197, 768), "0 operands have their columns apart"),
        (tile_groups.class_token(197, 768), "concat is not pointwise"),
    ],
    ids=["channels side by side", "a concat"],
)
def test_refuses(group: Group, reason: str) -> None:
    with pytest.raises(Illegal, match=reason):
        Transpose(group, H100)


def test_large_images_are_transposed_by_default() -> None:
    for shape in ((1, 256, 64, 64), (8, 256, 64, 64), (1, 2048, 32, 32)):
        best, _ = first_choice(derive(copied(shape, torch.float16), "elementwise", H100))
        assert best is not None
        assert best.sketch.name == "transpose"
