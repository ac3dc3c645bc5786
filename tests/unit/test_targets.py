"""Each family has a kernel on every architecture, and NVRTC takes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.ir.graph import Group
from gtco.passes.legality import family
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import TARGETS
from tests.attention_groups import cross, packed
from tests.column_groups import COLUMNWISE
from tests.groups import convolution, fp8_linear, norm_linear, plain_linear, tf32
from tests.squeeze_groups import CASES as SQUEEZES
from tests.stencil_groups import CASES as STENCILS
from tests.stencil_groups import RESIZES
from tests.tile_groups import gelu_bias, layer_norm

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
GROUPS: dict[str, Callable[[], Group]] = {
    "gemm": lambda: norm_linear(197, 768, 2304, F16),
    "gemm in bf16": lambda: plain_linear(197, 768, 768, BF16),
    "gemm in tf32": lambda: tf32(plain_linear(197, 768, 768, F32)),
    "gemm in fp32": lambda: plain_linear(197, 768, 768, F32),
    "gemm in fp8": lambda: fp8_linear(197, 768, 768, F16),
    "gemm of one row": lambda: plain_linear(1, 768, 768, F16),
    "convolution": lambda: convolution((1, 28, 28, 64), 64, (3, 3), F16),
    "convolution in groups": lambda: convolution((1, 14, 14, 64), 64, (3, 3), F16, groups=2),
    "attention": lambda: packed(197, 12, 64),
    "attention in fp32": lambda: cross((1,), 16, 16, 64, dtype=F32),
    "stencil": STENCILS["depthwise_3x3"],
    "resize": RESIZES["bilinear_up"],
    "squeeze": SQUEEZES["se_512"],
    "rowwise": lambda: layer_norm(197, 768),
    "columnwise": COLUMNWISE["channels"],
    "elementwise": lambda: gelu_bias(197, 768),
}


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("kind", GROUPS)
def test_each_family_compiles(kind: str, arch: str) -> None:
    group, target = GROUPS[kind](), TARGETS[arch]
    derivation = derive(group, family(group), target)
    if kind == "gemm in fp8" and not target.has_fp8:
        assert not derivation.sketches and f"no fp8 on {arch}" in derivation.reason
        return
    sketch = derivation.sketches[0]
    program = sketch.emit(next(iter(sketch.defaults())))
    assert program.smem_bytes <= target.smem_per_block
    compiled = compile_uncached(program.code, program.name, arch)
    assert compiled.cubin.startswith(b"\x7fELF") and compiled.spill_bytes == 0


def test_fp8_is_multiplied_where_it_is_an_instruction() -> None:
    assert {arch for arch, target in TARGETS.items() if target.has_fp8} == {
        "sm_89", "sm_90a", "sm_120"
    }  # fmt: skip
