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
from tests.attention_groups import packed
from tests.groups import norm_linear, plain_linear
from tests.tile_groups import gelu_bias, layer_norm

GROUPS: dict[str, Callable[[], Group]] = {
    "gemm": lambda: norm_linear(197, 768, 2304, torch.float16),
    "gemm of one row": lambda: plain_linear(1, 768, 768, torch.float16),
    "attention": lambda: packed(197, 12, 64),
    "rowwise": lambda: layer_norm(197, 768),
    "elementwise": lambda: gelu_bias(197, 768),
}


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("kind", GROUPS)
def test_each_family_compiles(kind: str, arch: str) -> None:
    group = GROUPS[kind]()
    sketch = derive(group, family(group), TARGETS[arch]).sketches[0]
    program = sketch.emit(next(iter(sketch.defaults())))
    assert program.smem_bytes <= TARGETS[arch].smem_per_block
    compiled = compile_uncached(program.code, program.name, arch)
    assert compiled.cubin.startswith(b"\x7fELF") and compiled.spill_bytes == 0
