"""What code generation hands to the runtime: sources, launch shapes and arguments."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch


@dataclass(frozen=True)
class Pointer:
    """A kernel argument: the address of a stored value.

    Args:
        value: the stored value.
        origin: bytes further on, of what its group reads first: see `gtco.passes.origins`.
    """

    value: str
    origin: int = field(default=0, repr=False)


@dataclass(frozen=True)
class WindowBox:
    """Where the windows begin whose first tap a tensor map of an image walks over, width first,
    then height and, of volumes, frames.

    Args:
        lower: of the first window, in pixels of the image; negative where zeros lie around it.
        upper: beyond the last pixel, which the last window begins at or before.
        stride: pixels from one window to the next.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class TensorMapArgument:
    """A kernel argument: a tensor map over a stored value, of tiles or of windows of images.

    Tiled maps have three or five dimensions. A map of windows has four, channel, column, row and
    image, or five with frames ahead of the image, and its box is so many channels of so many
    windows, one after another.

    Args:
        value: the stored value.
        offset: of the first element, in elements.
        dtype: of the elements; a copy rounds f32 to the nearest tf32, ties to even. i32 over f32
            brings it as it is.
        sizes: innermost dimension first, in elements.
        strides: of all dimensions but the innermost, in elements.
        box: the tile that one copy brings, innermost dimension first.
        swizzle_bytes: 0, 32, 64 or 128.
        window: which windows there are; None for a map of tiles.
        origin: as for `Pointer`, ahead of the offset.
    """

    value: str
    offset: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 128
    window: WindowBox | None = None
    origin: int = field(default=0, repr=False)


Argument = Pointer | TensorMapArgument
Access = Literal["map", "read", "write", "fetch"]
"""What a kernel does with an argument: reads it through a tensor map or a pointer, writes it, or
brings it to L2 for a later kernel."""
_AHEAD = "const char* __restrict__ ahead"


def _access(parameter: str) -> Access:
    """Of a parameter as the source declares it."""
    if parameter == _AHEAD:
        return "fetch"
    if "TensorMap" in parameter:
        return "map"
    return "read" if parameter.startswith("const ") else "write"


def _entry(text: str) -> re.Match[str]:
    """The entry point's head in a kernel's text; its parameters are group 1."""
    entry = re.search(r"ENTRY_POINT\((.*?)\) \{\n?", text, re.DOTALL)
    if entry is None:
        raise ValueError("the source has no entry point")
    return entry


LARGEST_GRID = (2**31 - 1, 65535, 65535)
"""Blocks along x, y and z that CUDA launches."""

TURNING = frozenset(
    {
        "columnwise",
        "conv_mma",
        "conv_wgmma",
        "elementwise",
        "gemm_back_to_back",
        "gemm_mma",
        "gemm_persistent",
        "gemm_wgmma",
        "grid_sample",
        "resize",
        "rowwise",
        "squeeze",
        "stencil",
        "stencil_tiles",
        "transpose",
    }
)
"""Sketches whose kernels walk either way (order.cuh); those of others go forward whatever is said.
"""


@dataclass(frozen=True)
class KernelProgram:
    """One generated kernel and how to launch it.

    Groups that do the same work have programs with equal `source`: only the arguments differ.

    Args:
        family: the sketch's family, such as "gemm".
        sketch: the sketch's name.
        schedule: knob name to value.
        source: CUDA C++ of the sketch, with the entry point `ENTRY_POINT`; it includes only gtco's
            headers.
        arch: what to compile for.
        grid: blocks.
        block: threads a block.
        smem_bytes: dynamic shared memory a block is given.
        arguments: in the order of the entry point's parameters.
        cluster: blocks a cluster, (1, 1, 1) for none.
        used_smem_bytes: of that, what the code uses; more only keeps other blocks away.
        binding: `Binding.digest` of its group and arguments; empty where no group stands behind it.
        fetch_bytes: a knob of the plan: so many bytes of a later kernel's weights, which are the
            last argument then, are brought to L2.
        late_trigger: a knob of the plan: the kernel behind this one, of `gemm_wgmma`, begins only
            when this one has asked for its last tile.
        backward: the plan's: blocks take tiles, and what else a kernel walks over, from the last to
            the first.
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
    used_smem_bytes: int = 0
    binding: str = ""
    fetch_bytes: int = 0
    late_trigger: bool = False
    backward: bool = False

    @property
    def turns(self) -> bool:
        """Whether the kernel heeds `backward`."""
        return self.sketch in TURNING

    def fetching(self, weights: str, nbytes: int) -> KernelProgram:
        """The same kernel, which also brings a later kernel's weights to L2.

        Args:
            weights: a stored constant; 16-byte aligned.
            nbytes: its size.
        """
        arguments = (*self.arguments, Pointer(weights))
        return replace(self, arguments=arguments, fetch_bytes=nbytes // 16 * 16)

    @cached_property
    def text(self) -> str:
        """The source with the knobs of the plan; the entry point has no name yet."""
        text = self.source
        if self.fetch_bytes:
            x, y, z = self.grid
            share = -(-self.fetch_bytes // (max(1, x * y * z) * 16)) * 16
            entry = _entry(text)
            text = (
                '#include "ahead.cuh"\n'
                + text[: entry.end(1)]
                + f", {_AHEAD}) {{\n"
                + f"  prefetch_ahead<{self.fetch_bytes}, {share}>(\n"
                + f"      ahead, blockIdx.x + {x} * (blockIdx.y + {y} * blockIdx.z),\n"
                + f"      threadIdx.x == {self.block - 1});\n"
                + text[entry.end() :]
            )
        if self.late_trigger:
            text = f"#define GTCO_LATE_TRIGGER\n{text}"
        return f"#define GTCO_BACKWARD\n{text}" if self.backward else text

    @cached_property
    def name(self) -> str:
        """The entry point: the family and a hash of the code and of all that its launches share.

        The compiled code holds the name. So a launch of other shape, or of other arguments, than
        the code was made for names a kernel that is not there; origins, which no text of an
        argument has, may be others.
        """
        values = list(dict.fromkeys(argument.value for argument in self.arguments))
        arguments = [replace(each, value=f"{values.index(each.value)}") for each in self.arguments]
        shape = (self.grid, self.block, self.used_smem_bytes, self.cluster)
        launch = (*shape, arguments, self.binding)
        digest = hashlib.sha256(f"{self.text}\n{launch!r}".encode()).hexdigest()
        return f"gtco_{self.family}_{digest[:12]}"

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """What the entry point does with each of its parameters.

        Raises:
            ValueError: the source has no entry point.
        """
        entry = _entry(self.text)
        return tuple(_access(text.strip()) for text in entry[1].split(",") if text.strip())

    @property
    def code(self) -> str:
        """What is compiled: the text with the entry point's name filled in."""
        return self.text.replace("ENTRY_POINT", self.name)
