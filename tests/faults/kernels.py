"""Small kernels with one mistake each, and how the host build must name it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gtco.codegen.program import KernelProgram, Pointer, TensorMapArgument
from gtco.runtime.host import HostKernel

ROWS, COLUMNS = 64, 32
X_MAP = TensorMapArgument(
    "x", 0, torch.float32, (COLUMNS, ROWS, 1), (COLUMNS, ROWS * COLUMNS), (COLUMNS, ROWS, 1)
)
_HEAD = """\
#include "wgmma.cuh"
#include "vector.cuh"

namespace gtco {
__device__ __forceinline__ void run(const ptx::TensorMap& map, const float* x, const float* w,
                                    float* y) {
  extern __shared__ __align__(1024) unsigned char smem[];
  float* tile = reinterpret_cast<float*>(smem);
  const int thread = threadIdx.x, block = blockIdx.x;
"""
_TAIL = """\
}
}  // namespace gtco

extern "C" __global__ void
ENTRY_POINT(const __grid_constant__ gtco::ptx::TensorMap map, const float* x, const float* w,
            float* y) {
  gtco::run(map, x, w, y);
}
"""


@dataclass(frozen=True)
class Planted:
    """A right kernel, and the edit that makes it wrong.

    Args:
        body: of the right kernel: x and the constant w are f32[64,32], y is f32[64,32] too. A line
            that the message must name ends in `// here`.
        old: what the edit takes away.
        new: what the edit puts there.
        message: what the error says, a regular expression.
        threads: of a block.
        blocks: of the grid.
        cluster: blocks of a cluster.
        map: how `map` describes x.
    """

    body: str
    old: str
    new: str
    message: str
    threads: int = 64
    blocks: int = 1
    cluster: int = 1
    map: TensorMapArgument = X_MAP

    def program(self, body: str) -> KernelProgram:
        arguments = (self.map, Pointer("x"), Pointer("w"), Pointer("y"))
        return KernelProgram(
            "fault",
            "fault",
            {},
            _HEAD + body + _TAIL,
            "sm_90a",
            (self.blocks, 1, 1),
            self.threads,
            32 * 1024,
            arguments,
            (self.cluster, 1, 1),
        )

    @property
    def right(self) -> KernelProgram:
        return self.program(self.body)

    @property
    def wrong(self) -> KernelProgram:
        assert self.body.count(self.old) == 1
        return self.program(self.body.replace(self.old, self.new))


def tensors() -> dict[str, Tensor]:
    """What a kernel reads, and y: -1 where it stores nothing."""
    return {
        "x": torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS),
        "w": torch.ones(ROWS, COLUMNS),
        "y": torch.full((ROWS, COLUMNS), -1.0),
    }


def run(program: KernelProgram, seed: int) -> Tensor:
    """What the kernel leaves in y.

    Raises:
        HostError: the machine found a mistake.
    """
    given = tensors()
    HostKernel(program)(program, given, constants=("w",), outputs=("y",), seed=seed)
    return given["y"]
