"""fp32 as three products of tf32: as accurate as torch's fp32, and right where it is no number."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from gtco.check import BOUNDS
from gtco.codegen.rules import derive
from gtco.codegen.sketch import Illegal, Sketch
from gtco.codegen.sketches.attention import Attention
from gtco.codegen.sketches.conv_mma import ConvMma
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.ir.graph import Group
from gtco.ir.interpreter import interpret
from gtco.runtime.host import run_on_host
from gtco.selection import first_choice
from gtco.target import TARGETS
from tests import attention_groups, groups
from tests.exact_products import CASES, INPUTS, error, transform
from tests.kernel_checks import defaults, first_default, inputs_of, wrong_outputs

pytestmark = pytest.mark.compiler

F32 = torch.float32
GEMMS = (GemmMma, GemmWgmma)
LARGEST = torch.finfo(F32).max


def output(kind: type[Sketch], group: Group, values: Mapping[str, Tensor]) -> Tensor:
    """Of the sketch's first default."""
    program = next(defaults(kind(group, TARGETS["sm_90a"])))
    return next(iter(run_on_host(program, group, values).values()))


def errors(kind: type[Sketch], group: Group, values: Mapping[str, Tensor]) -> tuple[float, float]:
    """RMSE of the kernel and of torch's fp32."""
    return error(group, values, output(kind, group, values)), error(group, values)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", GEMMS)
def test_products_are_as_accurate_as_torch(kind: type[Sketch], case: str, inputs: str) -> None:
    group = CASES[case]()
    values = inputs_of(group)
    values["x"] = INPUTS[inputs](values["x"])
    ours, eager = errors(kind, group, values)
    assert ours <= BOUNDS[F32].multiple * eager


@pytest.mark.parametrize("inputs", INPUTS)
def test_convolutions_of_patches_are_as_accurate_as_torch(inputs: str) -> None:
    group = CASES["convolution"]()
    values = inputs_of(group)
    values["x"] = INPUTS[inputs](values["x"])
    ours, eager = errors(ConvMma, group, values)
    assert ours <= BOUNDS[F32].multiple * eager


@pytest.mark.parametrize("inputs", ["as_drawn", "large_mean", "outliers"])
@pytest.mark.parametrize("kind", GEMMS)
def test_long_sums_are_more_accurate(kind: type[Sketch], inputs: str) -> None:
    """Than torch's on a CPU, for cuBLAS cuts them into parts, which are as accurate as these."""
    group = CASES["long_sums"]()
    values = inputs_of(group)
    values["x"] = INPUTS[inputs](values["x"])
    ours, eager = errors(kind, group, values)
    assert ours <= 0.8 * eager


@pytest.mark.parametrize("inputs", ["as_drawn", "large_mean", "outliers"])
def test_attention_is_as_accurate_as_torch(inputs: str) -> None:
    group = attention_groups.cross((2,), 21, 150, 64, dtype=F32)
    values = inputs_of(group)
    for name in "kv":
        values[name] = INPUTS[inputs](values[name])
    ours, eager = errors(Attention, group, values)
    assert ours <= BOUNDS[F32].multiple * eager


@pytest.mark.parametrize("kind", [*GEMMS, Attention])
def test_one_product_of_tf32_is_not_as_accurate(kind: type[Sketch]) -> None:
    if kind is Attention:
        group = attention_groups.cross((2,), 21, 150, 64, dtype=F32)
    else:
        group = CASES["linear"]()
    values = inputs_of(group)
    off = error(group, values, output(kind, groups.tf32(group), values))
    assert off > 50 * error(group, values)


@pytest.mark.parametrize("kind", GEMMS)
def test_what_is_no_number_is_torchs(kind: type[Sketch]) -> None:
    """Infinities, NaN, and the largest floats, which are nearer to infinity than to a tf32."""
    group = groups.plain_linear(8, 72, 40, F32)
    values = inputs_of(group)
    x, w = values["x"], values["w"]
    x[0, 0, 5] = torch.inf
    x[0, 1, 6] = -torch.inf
    x[0, 2, 7] = torch.nan
    x[0, 3, 8], x[0, 3, 9] = torch.inf, -torch.inf
    x[0, 4, 10], x[0, 5, 11] = LARGEST, -LARGEST
    w[:, 10:12] = 0.25
    w[3, 5], w[4, 10] = 0.0, 0.0
    w[7, 20], w[8, 21], w[9, 22] = torch.inf, torch.nan, LARGEST
    x[..., 22] *= 0.1
    (expected,) = interpret(group.graph, [values[name] for name in group.graph.inputs])
    torch.testing.assert_close(output(kind, group, values), expected, equal_nan=True)
    assert not expected[0, :4].isfinite().any() and expected[0, 4:, :7].isfinite().all()
    assert expected[0, 4:, 9:].isfinite().all()


@pytest.mark.parametrize(("left", "swap"), [(False, 1), (True, 0)])
def test_rows_of_k_are_what_goes_through_registers(left: bool, swap: int) -> None:
    sketch = GemmWgmma(transform(2, 64, 64, 64, left=left), TARGETS["sm_90a"])
    assert {schedule["swap"] for schedule in sketch.defaults()} == {swap}
    assert "P_BY_ROWS" in sketch.emit(first_default(sketch)).source
    with pytest.raises(Illegal, match="rows of K of fp32 are wgmma's M side"):
        sketch.emit(first_default(sketch, swap=1 - swap))


def test_one_matrix_is_read_for_all_products() -> None:
    sketch = GemmWgmma(transform(3, 64, 64, 64, torch.float16), TARGETS["sm_90a"])
    program = sketch.emit(first_default(sketch))
    assert "SHARED" in program.source
    values = inputs_of(transform(3, 64, 64, 64, torch.float16))
    assert not wrong_outputs(program, sketch.group, values, run_on_host)


def test_long_images_are_wgmmas() -> None:
    """26 to 29 us instead of 38 on `mma.sync`, on an H200."""
    best, _ = first_choice(derive(transform(32, 224, 196, 384), "gemm", TARGETS["sm_90a"]))
    assert best is not None and best.sketch.name == "gemm_wgmma"


@pytest.mark.parametrize("size", [1e-30, 1e-38, 1e-42])
@pytest.mark.parametrize("kind", GEMMS)
def test_small_values_are_multiplied(kind: type[Sketch], size: float) -> None:
    """Of numbers below 1e-34 the low part has fewer bits than it needs."""
    group = groups.plain_linear(8, 72, 40, F32)
    values = inputs_of(group)
    values["x"] *= size
    values["w"] *= 1e30
    values["bias"].zero_()
    (expected,) = interpret(group.graph, [values[name] for name in group.graph.inputs])
    off = (output(kind, group, values) - expected).abs().max() / expected.abs().max()
    assert off < max(1e-6, 2**-136 / size)


def test_attention_gives_torchs_infinities() -> None:
    group = attention_groups.cross((1,), 9, 40, 32, dtype=F32, mask=F32)
    values = inputs_of(group)
    values["v"][0, 3, 2], values["v"][0, 4, 5] = torch.inf, torch.nan
    values["v"][0, 5, 7] = LARGEST
    values["mask"][:, 20:] = torch.finfo(F32).min
    (expected,) = interpret(group.graph, [values[name] for name in group.graph.inputs])
    torch.testing.assert_close(output(Attention, group, values), expected, equal_nan=True)
