"""Faults planted in how pieces of a concat are read, of each way; without, each is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gtco.codegen.program import KernelProgram, TensorMapArgument
from gtco.codegen.sketch import Sketch
from gtco.codegen.sketches.conv_mma import ConvMma
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests.faults.templates import check_caught, planted, verdicts
from tests.groups import F16, joined

pytestmark = pytest.mark.compiler

FEW = replace(TARGETS["sm_90a"], sm_count=1)
"""Where small results have two tiles for each block that stays."""
Way = tuple[Callable[[], Group], type[Sketch]]


def _linear() -> Group:
    return joined((150,), (72, 64, 40), 72, F16)


def _convolution() -> Group:
    return joined((2, 6, 7), (72, 64, 40), 72, F16, (2, 2))


COPIED: Way = (_convolution, GemmWgmma)
COPIED_ROWS: Way = (_linear, GemmWgmma)
GATHERED: Way = (_convolution, GemmMma)
GATHERED_ROWS: Way = (_linear, GemmMma)
PATCHES: Way = (_convolution, ConvMma)
STAYING: Way = (_linear, GemmPersistent)

WAYS = {
    "copied": COPIED,
    "copied rows": COPIED_ROWS,
    "gathered": GATHERED,
    "gathered rows": GATHERED_ROWS,
    "in patches": PATCHES,
    "by blocks that stay": STAYING,
}
FAULTS: dict[str, tuple[Way, str, str]] = {
    "copied, all of the first piece": (COPIED, "map = more.of[piece - 1];", "map = &first;"),
    "copied, none of the last piece": (COPIED, "more.of[piece - 1]", "more.of[0]"),
    "copied, channels of the whole": (
        COPIED,
        "const int channel = (in_tap - atoms) * ATOM_K;",
        "const int channel = in_tap * ATOM_K;",
    ),
    "copied, weights of the first piece": (
        COPIED,
        "before + channels + channel}",
        "before + channel}",
    ),
    "copied, weights of the first tap": (COPIED, "before = tap * W::CHANNELS;", "before = 0;"),
    "copied, pixels of the next tap": (COPIED, "at = {tap, piece,", "at = {tap + 1, piece,"),
    "copied, atoms that no piece fills left out": (
        COPIED,
        "atoms += ceil_div(W::channels_of(piece), ATOM_K);",
        "atoms += W::channels_of(piece) / ATOM_K;",
    ),
    "copied, one atom of each piece ahead": (
        COPIED,
        "atoms += ceil_div(W::channels_of(piece - 1), ATOM_K);",
        "atoms += 1;",
    ),
    "copied rows, all of the first piece": (
        COPIED_ROWS,
        "map = more.of[piece - 1];",
        "map = &first;",
    ),
    "copied rows, of the first tile": (
        COPIED_ROWS,
        "else\n      return row;",
        "else\n      return 0;",
    ),
    "copied rows, weights of another piece": (
        COPIED_ROWS,
        "channels += W::channels_of(piece - 1);",
        "channels += W::channels_of(0);",
    ),
    "gathered, the first piece's pixels": (GATHERED, "{base1 +", "{base +"),
    "gathered, the last piece's pixels": (GATHERED, "{base1 +", "{base2 +"),
    "gathered, channels of the whole": (GATHERED, "(channel - 72)", "channel"),
    "gathered, pieces of other sizes": (GATHERED, "channel < 72", "channel < 64"),
    "gathered, pixels of the next row": (
        GATHERED,
        "bits |= is_below(first.x + x * W::DILATION_W, W::SIZE_W)",
        "bits |= 1u",
    ),
    "gathered, pixels of the first piece's pitch": (
        GATHERED,
        "pitch = piece.pitch;",
        "pitch = 72;",
    ),
    "gathered, channels of the first tap": (GATHERED, "channel = tap.channel;", "channel = here;"),
    "gathered rows, the first piece's": (GATHERED_ROWS, "{base1 +", "{base +"),
    "gathered rows, k of the whole": (GATHERED_ROWS, "(channel - 136)", "channel"),
    "gathered rows, pieces of other sizes": (GATHERED_ROWS, "channel < 136", "channel < 128"),
    "in patches, the first piece's pixels": (PATCHES, "{base1 +", "{base +"),
    "in patches, channels of the whole": (PATCHES, "(channel - 136)", "channel"),
    "in patches, channels of the first step": (
        PATCHES,
        "group * A::CHANNELS + chunk * Patch::CHUNK",
        "item % C::CHUNKS * Patch::CHUNK",
    ),
    "by blocks that stay, atoms of the first step": (
        STAYING,
        "source.windows.copy(to, a_map, more, i,",
        "source.windows.copy(to, a_map, more, atom,",
    ),
    "by blocks that stay, weights of the whole": (
        STAYING,
        "k = source.windows.k(step * C::ATOMS + atom)",
        "k = (step * C::ATOMS + atom) * ATOM_K",
    ),
}


def _first(way: Way) -> tuple[KernelProgram, Group]:
    make, sketch = way
    group = make()
    made = sketch(group, FEW)
    return made.emit(next(iter(made.defaults()))), group


@pytest.mark.parametrize("way", WAYS)
def test_right_without(way: str) -> None:
    assert not verdicts(*_first(WAYS[way]))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    way, old, new = FAULTS[fault]
    program, group = _first(way)
    check_caught(planted(program, old, new), group)


@pytest.mark.parametrize("way", ["copied", "copied rows", "by blocks that stay"])
def test_the_map_of_another_piece(way: str) -> None:
    """Those of the second and the third are exchanged."""
    program, group = _first(WAYS[way])
    arguments = list(program.arguments)
    places = [at for at, each in enumerate(arguments) if isinstance(each, TensorMapArgument)]
    second, third = places[-2:]
    arguments[second], arguments[third] = arguments[third], arguments[second]
    check_caught(replace(program, arguments=tuple(arguments)), group)
