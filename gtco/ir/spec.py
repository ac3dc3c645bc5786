"""What a value is: its shape and dtype, and their names in print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float16: "f16",
        torch.bfloat16: "bf16",
        torch.float32: "f32",
        torch.float64: "f64",
        torch.int64: "i64",
        torch.int32: "i32",
        torch.int16: "i16",
        torch.int8: "i8",
        torch.uint8: "u8",
        torch.bool: "bool",
        torch.float8_e4m3fn: "f8_e4m3",
    }
)

HALVES = (torch.float16, torch.bfloat16)
"""Types of 16 bits that tensor cores multiply."""
FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32))
"""Types that generated kernels reduce and multiply."""
BYTES = frozenset({torch.float8_e4m3fn, torch.int8})
"""Types that they multiply alone."""


class GraphError(ValueError):
    """A graph that breaks one of the rules `Graph.verify` checks."""


@dataclass(frozen=True)
class Dim:
    """A dimension whose size is known only when the model runs.

    Args:
        name: how it prints.
        low: the smallest size it may take.
        high: the largest size it may take, or None.
    """

    name: str
    low: int = 1
    high: int | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one value."""

    shape: tuple[int | Dim, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(tuple(int(size) for size in tensor.shape), tensor.dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape as integers.

        Raises:
            GraphError: a dimension is symbolic.
        """
        for dim in self.shape:
            if isinstance(dim, Dim):
                raise GraphError(f"{self} has the dynamic dimension {dim}; a fixed size is needed")
        return tuple(int(dim) for dim in self.shape if not isinstance(dim, Dim))

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        count = 1
        for size in self.sizes:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.numel * self.dtype.itemsize

    def meta(self) -> torch.Tensor:
        """A tensor of this shape and dtype that holds no data."""
        return torch.empty(self.sizes, dtype=self.dtype, device="meta")

    def __str__(self) -> str:
        name = DTYPE_NAMES.get(self.dtype, self.dtype)
        return f"{name}[{','.join(str(dim) for dim in self.shape)}]"
