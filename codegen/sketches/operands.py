"""What a GEMM kernel reads: a matrix, windows of an image, or several of either, one behind another
along K."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from gtco.codegen.emit import Region, axis_index, index
from gtco.codegen.sketches.windows import WindowOperand, single_stride
from gtco.ir.views import Layout, NotAView


@dataclass(frozen=True)
class GemmOperand:
    """A or B as (batch, rows or columns, K)."""

    base: str
    layout: Layout
    constant: bool

    @property
    def k_major(self) -> bool:
        """Whether neighbours along K are neighbours in memory."""
        return self.layout.contiguous_run(2) > 1 or self.layout.contiguous_run(1) <= 1

    def copied(self, dtype: torch.dtype) -> int:
        """Elements that a copy of at most 16 bytes takes."""
        return self.layout.vector(16 // dtype.itemsize, 2 if self.k_major else 1)


Piece = GemmOperand | WindowOperand
"""What lies in one place."""


@dataclass(frozen=True)
class JoinedOperand:
    """Pieces whose channels follow one another: K is taps, and in a tap the channels of each piece.

    Args:
        pieces: two at least; windows of one geometry, or matrices of as many rows.
    """

    pieces: tuple[Piece, ...]

    @property
    def constant(self) -> bool:
        """Whether nothing in the launch chain writes any of them."""
        return all(piece.constant for piece in self.pieces)

    @property
    def k_major(self) -> bool:
        """Neighbours along K are neighbours in memory, or are treated so."""
        return True

    def copied(self, dtype: torch.dtype) -> int:
        """Elements that a copy of at most 16 bytes takes, of whichever piece."""
        return math.gcd(*(piece.copied(dtype) for piece in self.pieces), *self.channels)

    @cached_property
    def channels(self) -> tuple[int, ...]:
        """Of each piece."""
        return tuple(piece.layout.shape[-1] for piece in self.pieces)

    @cached_property
    def windows(self) -> WindowOperand | None:
        """The geometry of the windows, if they are."""
        first = self.pieces[0]
        return first if isinstance(first, WindowOperand) else None

    def atoms(self, elements: int) -> int:
        """How many parts of `elements` K has, of which none is of two pieces."""
        taps = 1 if self.windows is None else self.windows.taps
        return taps * sum(-(-channels // elements) for channels in self.channels)

    @property
    def fields(self) -> str:
        """The constants that the device library's structs have, of windows or rows."""
        chosen = "".join(
            f"piece == {number} ? {channels} : " for number, channels in enumerate(self.channels)
        )
        shared = "" if self.windows is None else self.windows.fields_of(sum(self.channels)) + "\n"
        return f"""{shared}  static constexpr int PIECES = {len(self.pieces)};
  __host__ __device__ static constexpr int channels_of(int piece) {{
    return {chosen}0;
  }}"""

    def text(self, label: str, dtype: torch.dtype, parameter: str) -> str:
        """The struct called `label` through which mma.sync templates read the pieces."""
        element = "Config::Element"
        apart = all(self._pitch(piece) is not None for piece in self.pieces)
        along, place = ("k", "row") if self.windows is None else ("at.channel", "place(at)")
        found = self._choice(along, self._place_in)
        if apart:
            found = f"    const auto piece = piece_of({along});\n"
            found += f"    return piece.base + {place} * piece.pitch;\n"
        beside = self._apart(element) if apart else ""
        if self.windows is None:
            at = "at(int batch, int row, int k)"
            body = f"""  __device__ __forceinline__ const {element}* {at} const {{
{found}  }}"""
        else:
            body = f"""{self.windows.fields_of(sum(self.channels))}
  {self.windows.sizes}
  __device__ __forceinline__ const {element}* pixel(const Pixel& at) const {{
{found}  }}
  __device__ __forceinline__ const {element}* at(int, int row, int k, bool& valid) const {{
    const auto at = pixel_of<{label}>(row, k);
    valid = valid && is_inside<{label}>(at);
    return pixel(at);
  }}"""
        bases = "".join(f"  const {element}* {name};\n" for name in self._bases)
        return f"""struct {label} {{  // %{parameter}, the first {self.pieces[0].layout}
{bases}  static constexpr bool K_MAJOR = true;
  static constexpr bool CONSTANT = {str(self.constant).lower()};
  static constexpr int VECTOR = {self.copied(dtype)}, PIECES = {len(self.pieces)};
  static constexpr bool APART = {str(apart).lower()};
{beside}{body}
}};
"""

    @property
    def _bases(self) -> list[str]:
        """What the pointers of the pieces are called."""
        return ["base", *(f"base{number}" for number in range(1, len(self.pieces)))]

    def _choice(self, along: str, result: Callable[[Piece, str, str], str]) -> str:
        """Statements that return the `result` of the piece in which `along` lies, of its pointer
        and of where `along` is in it."""
        text, start = "", 0
        for piece, base, channels in zip(self.pieces, self._bases, self.channels, strict=True):
            at = f"({along} - {start})" if start else along
            start += channels
            condition = f"if ({along} < {start}) " if start < sum(self.channels) else ""
            text += f"    {condition}return {result(piece, base, at)};\n"
        return text

    def _place_in(self, piece: Piece, base: str, at: str) -> str:
        """Where an element of `piece` lies."""
        if self.windows is None:
            return f"{base} + {index(piece.layout, ('batch', 'row', at))}"
        return f"{base} + {self.windows.place_of(piece.layout, at)}"

    def _base_and_pitch(self, piece: Piece, base: str, at: str) -> str:
        """A `Piece` of the struct."""
        offset = f" + {piece.layout.offset}" if piece.layout.offset else ""
        return f"{{{base} + {at}{offset}, {self._pitch(piece)}}}"

    def _apart(self, element: str) -> str:
        """What says where pieces lie that have a pitch each."""
        if self.windows is None:
            start = "  __device__ __forceinline__ static int"
            places = f"{start} row_place(int, int row) {{ return row; }}\n"
            places += f"{start} k_place(int) {{ return 0; }}\n"
        else:
            place = self.windows.place_of(Layout.contiguous((*self._image, 1)), "0")
            places = f"""  __device__ __forceinline__ static int place(const Pixel& at) {{
    return {place};
  }}
"""
        return f"""  struct Piece {{
    const {element}* base;  // of a channel
    int pitch;
  }};
  __device__ __forceinline__ Piece piece_of(int channel) const {{
{self._choice("channel", self._base_and_pitch)}  }}
{places}"""

    @property
    def _image(self) -> tuple[int, ...]:
        """The sizes of what each piece has channels of: pixels, or rows."""
        return self.pieces[0].layout.shape[:-1]

    def _pitch(self, piece: Piece) -> int | None:
        """How far the pixels or rows of `piece` are apart, None if they are not all as far."""
        try:
            pixels = piece.layout.reshape((math.prod(self._image), piece.layout.shape[-1]))
        except NotAView:
            return None
        rows, channels = pixels.dims
        plain = len(rows) == 1 and channels == ((piece.layout.shape[-1], 1),)
        return rows[0][1] if plain else None


Operand = GemmOperand | WindowOperand | JoinedOperand


def pieces_of(operand: Operand) -> tuple[Piece, ...]:
    """What lies in one place each."""
    return operand.pieces if isinstance(operand, JoinedOperand) else (operand,)


@dataclass(frozen=True)
class MoreMaps:
    """The tensor maps of so many pieces of A beside the first, as a kernel's parameters."""

    count: int

    @property
    def declarations(self) -> str:
        """Of the parameters, with a comma behind each."""
        return "".join(
            f"const __grid_constant__ ptx::TensorMap more{number}, " for number in range(self.count)
        )

    @property
    def argument(self) -> str:
        """What a template is handed, behind a comma; "" without any."""
        names = ", ".join(f"&more{number}" for number in range(self.count))
        return f", MoreMaps<{self.count}>{{{{{names}}}}}" if names else ""


def pointers(operand: Operand, region: Region) -> str:
    """The kernel's parameters that an operand's struct is made of."""
    return ", ".join(region.parameter(piece.base, "in") for piece in pieces_of(operand))


def operand_text(label: str, operand: Operand, dtype: torch.dtype, parameter: str) -> str:
    """The struct called `label` through which mma.sync templates read `operand`, of `dtype`."""
    if not isinstance(operand, GemmOperand):
        return operand.text(label, dtype, parameter)
    layout = operand.layout
    at, parts = index(layout, ("batch", "row", "k")), ""
    if any(single_stride(axis) is None for axis in layout.dims[1:]):
        at, parts = "row_place(batch, row) + k_place(k)", _apart(layout)
    element = "Config::Element"
    return f"""struct {label} {{  // %{parameter}, {layout}
  const {element}* base;
  static constexpr bool K_MAJOR = {str(operand.k_major).lower()};
  static constexpr bool CONSTANT = {str(operand.constant).lower()};
  static constexpr int VECTOR = {operand.copied(dtype)};
{parts}  __device__ __forceinline__ const {element}* at(int batch, int row, int k) const {{
    return base + {at};
  }}
}};
"""


def _apart(layout: Layout) -> str:
    """The parts that row and k have in the place of an element: what is costly is computed once."""
    row = index(Layout((*layout.dims[:2], ()), layout.offset), ("batch", "row", "k"))
    k = axis_index(layout.dims[2], "k")
    return f"""  static constexpr bool APART = true;
  __device__ __forceinline__ static int row_place(int batch, int row) {{ return {row}; }}
  __device__ __forceinline__ static int k_place(int k) {{ return {k}; }}
"""
