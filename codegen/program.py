"""What code generation hands to the runtime: sources, launch shapes and arguments."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch


@dataclass(frozen=True)
class Pointer:
    """A kernel argument: the address of a stored value."""

    value: str


@dataclass(frozen=True)
class WindowBox:
    """Where the windows begin whose first tap a tensor map of an image walks over, width first.

    Args:
        lower: of the first window, in pixels of the image; negative where zeros lie around it.
        upper: beyond the last pixel, which the last window begins at or before.
        stride: pixels from one window to the next.
    """

    lower: tuple[int, int]
    upper: tuple[int, int]
    stride: tuple[int, int]


@dataclass(frozen=True)
class TensorMapArgument:
    """A kernel argument: a tensor map over a stored value, of tiles or of windows of images.

    Tiled maps have three or five dimensions. A map of windows has four, channel, column, row and
    image, and its box is so many channels of so many windows, one after another.

    Args:
        value: the stored value.
        offset: of the first element, in elements.
        dtype: of the elements.
        sizes: innermost dimension first, in elements.
        strides: of all dimensions but the innermost, in elements.
        box: the tile that one copy brings, innermost dimension first.
        swizzle_bytes: 0, 32, 64 or 128.
        window: which windows there are; None for a map of tiles.
    """

    value: str
    offset: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 128
    window: WindowBox | None = None


Argument = Pointer | TensorMapArgument


@dataclass(frozen=True)
class KernelProgram:
    """One generated kernel and how to launch it.

    Groups that do the same work have programs with equal `source`: only the arguments differ.

    Args:
        family: the sketch's family, such as "gemm".
        sketch: the sketch's name.
        schedule: knob name to value.
        source: CUDA C++ that defines the entry point `{name}`; it includes only gtco's headers.
        arch: what to compile for.
        grid: blocks.
        block: threads a block.
        smem_bytes: dynamic shared memory a block.
        arguments: in the order of the entry point's parameters.
        cluster: blocks a cluster, (1, 1, 1) for none.
    """

    family: str
    sketch: str
    schedule: Mapping[str, int]
    source: str
    arch: str
    grid: tuple[int, int, int]
    block: int
    smem_bytes: int
    arguments: tuple[Argument, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)

    def fetching(self, weights: str, nbytes: int) -> KernelProgram:
        """The same kernel, which also brings a later kernel's weights to L2.

        Args:
            weights: a stored constant; 16-byte aligned.
            nbytes: its size.
        """
        x, y, z = self.grid
        share = -(-nbytes // (x * y * z * 16)) * 16
        entry = re.search(r"ENTRY_POINT\((.*?)\) \{\n", self.source, re.DOTALL)
        assert entry is not None, "a generated source has one entry point"
        source = (
            '#include "ahead.cuh"\n'
            + self.source[: entry.end(1)]
            + ", const char* __restrict__ ahead) {\n"
            + f"  prefetch_ahead<{nbytes // 16 * 16}, {share}>(\n"
            + f"      ahead, blockIdx.x + {x} * (blockIdx.y + {y} * blockIdx.z),\n"
            + f"      threadIdx.x == {self.block - 1});\n"
            + self.source[entry.end() :]
        )
        return replace(self, source=source, arguments=(*self.arguments, Pointer(weights)))

    @property
    def triggering_late(self) -> KernelProgram:
        """The same kernel of `gemm_wgmma`, which lets the one behind it begin only when it has
        asked for its last tile."""
        return replace(self, source=f"#define GTCO_LATE_TRIGGER\n{self.source}")

    @cached_property
    def name(self) -> str:
        """The entry point: the family and a hash of the source."""
        return f"gtco_{self.family}_{hashlib.sha256(self.source.encode()).hexdigest()[:12]}"

    @property
    def code(self) -> str:
        """The source with the entry point's name filled in."""
        return self.source.replace("ENTRY_POINT", self.name)
