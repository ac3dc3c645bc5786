"""The elementwise sketch: derivation, compilation for two architectures, meaning on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.elementwise import Elementwise
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import tile_groups
from tests.kernel_checks import compile_for_all, inputs_of, sample, wrong_outputs

H100 = TARGETS["sm_90a"]
LARGE = ("gelu_197",)


@pytest.mark.parametrize("case", tile_groups.ELEMENTWISE)
def test_compiles(case: str) -> None:
    group = tile_groups.ELEMENTWISE[case]()
    assert not list(compile_for_all(lambda target: Elementwise(group, target)))


@pytest.mark.compiler
@pytest.mark.parametrize("case", [case for case in tile_groups.ELEMENTWISE if case not in LARGE])
def test_is_right_on_the_cpu(case: str) -> None:
    group = tile_groups.ELEMENTWISE[case]()
    values = inputs_of(group)
    if case.startswith("nans"):
        values["x"][0] = float("nan")
        values["y"][1] = float("nan")
    for program in sample(Elementwise(group, H100), 1):
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_numbers_beyond_small_integers_wrap_around(dtype: torch.dtype) -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((5,), torch.float64))
    group = Group("small", b.build([b.add("cast", x, dtype=dtype)]))
    large = torch.tensor([-1.5, 300.0, -40000.7, 2.0**33 + 5, -(2.0**40) - 7], dtype=torch.float64)
    for program in sample(Elementwise(group, H100), 1):
        (answer,) = run_on_host(program, group, {"x": large}).values()
        assert torch.equal(answer, large.to(torch.int64).to(dtype))


@pytest.mark.compiler
def test_the_check_rejects_a_kernel_that_drops_nan() -> None:
    group = tile_groups.nans(torch.float32)
    values = inputs_of(group)
    values["x"][0] = float("nan")
    program = sample(Elementwise(group, H100), 0)[0]
    source = program.source.replace("math::relu(", "fmaxf(0.0f, ")
    wrong = dataclasses.replace(program, source=source)
    assert source != program.source
    assert wrong_outputs(wrong, group, values, run_on_host)


def test_source(golden: Callable[[str, object], None]) -> None:
    group = tile_groups.class_token(197, 768)
    sketch = Elementwise(group, H100)
    golden("elementwise_class_token.cu", sketch.emit(next(iter(sketch.defaults()))).source)


def test_equal_groups_have_equal_source() -> None:
    first, second = tile_groups.gelu_bias(4, 8), tile_groups.gelu_bias(4, 8)
    a, b = (sample(Elementwise(group, H100), 0)[0] for group in (first, second))
    assert a.source == b.source and a.name == b.name


def test_columns_join_where_the_last_dimension_is_odd() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((8, 7), torch.float16))
    sketch = Elementwise(Group("g", b.build([b.add("relu", x)])), H100)
    assert (sketch.space.columns, sketch.vector) == (56, 8)


def test_no_vector_straddles_two_pieces() -> None:
    assert Elementwise(tile_groups.concat_columns(9, 5, 8, 3), H100).vector == 1
    assert Elementwise(tile_groups.concat_columns(9, 4, 8, 12), H100).vector == 4


def test_no_vector_straddles_the_edge_of_a_padded_value() -> None:
    widths = {"pad_patch_16": 8, "pad_patch_14": 2, "pad_patch_7": 1, "pad_odd": 1, "pad_even": 4,
              "pad_shifted": 2, "pad_all_sides": 4}  # fmt: skip
    for case, width in widths.items():
        assert Elementwise(tile_groups.ELEMENTWISE[case](), H100).vector == width


def test_source_of_padded_patches(golden: Callable[[str, object], None]) -> None:
    group = tile_groups.padded_patches(3, 14, (0, 1, 0), (0, 0, 4))
    golden("elementwise_patches.cu", sample(Elementwise(group, H100), 0)[0].source)


def test_refuses_a_pad_of_nothing() -> None:
    with pytest.raises(Illegal, match="pads nothing"):
        Elementwise(tile_groups.padded(3, 8, before=0, after=0), H100)


def test_refuses_two_iteration_shapes() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((8, 7), torch.float16))
    y = b.input("y", TensorSpec((8, 1), torch.float16))
    group = Group("g", b.build([b.add("add", x, b.add("relu", y))]))
    with pytest.raises(Illegal, match="elements"):
        Elementwise(group, H100)
