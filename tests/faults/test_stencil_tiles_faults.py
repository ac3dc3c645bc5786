"""Faults planted in depthwise convolutions of tiles; the twin without one passes."""

from __future__ import annotations

import pytest

from gtco.codegen.sketches.stencil_tiles import StencilTiles
from gtco.target import TARGETS
from tests.faults.templates import check_caught, planted, verdicts
from tests.stencil_groups import BF16, depthwise

pytestmark = pytest.mark.compiler

FAULTS = {
    "pixels read before they came": ("ptx::cp_async_wait<0>();", ""),
    "pixels read before others copied them": ("ptx::cp_async_wait<0>();\n  __syncthreads();",
                                              "ptx::cp_async_wait<0>();"),
    "rows above the image": ("y >= 0 && y < C::HEIGHT &&", "y < C::HEIGHT &&"),
    "rows below the image": ("y >= 0 && y < C::HEIGHT &&", "y >= 0 &&"),
    "pixels left of the image": ("x >= 0 && x < C::WIDTH;", "x < C::WIDTH;"),
    "pixels right of the image": ("x >= 0 && x < C::WIDTH;", "x >= 0;"),
    "a tile without its stride": ("p0 * C::STRIDE_H - C::BEFORE_H", "p0 - C::BEFORE_H"),
    "channels of the first block": ("image.at(n, y, x, col0 + chunk * CHUNK)",
                                    "image.at(n, y, x, chunk * CHUNK)"),
    "weights of the first block": ("at % C::KERNEL_W, col0 + c)", "at % C::KERNEL_W, c)"),
    "the next image": ("image.at(n, y,", "image.at(0, y,"),
    "a dilated tap between two": ("|| reach % C::DILATION_H != 0) continue;", ") continue;"),
    "taps of the row before": ("const int reach = line - r * C::STRIDE_H;",
                               "const int reach = line - r * C::STRIDE_H - 1;"),
    "the last line left out": ("line < LINES; ++line", "line < LINES - 1; ++line"),
    "results below the last": ("result / C::STRIP < C::P &&", "result / C::STRIP < 2 * C::P &&"),
    "results right of the last": ("result % C::STRIP < C::Q;", "result % C::STRIP < 2 * C::Q;"),
    "one turn alone": ("first < ITEMS; first += C::THREADS", "first < 1; first += C::THREADS"),
    "strips of the first row": ("place / C::ACROSS * C::ROWS,", "place / C::ACROSS,"),
}  # fmt: skip
OF_ROWS = {
    "what the epilogue reads of the first result": ("? result : 0];", "? 0 : 0];"),
    "what it reads of a result beyond the last": ("is_there(i) ? row_of(i) : 0,", "row_of(i),"),
}
OF_STATISTICS = {
    "lanes in the order of pixels": ("strip = place.row, c = place.col,", ""),
    "the strip of another chunk": (
        "rest / max_of(1, Place::LAST);",
        "item / max_of(1, Place::LAST);",
    ),
    "the narrow chunk as a whole one": ("is_whole = rest < 0;", "is_whole = true;"),
    "halves that go the wrong way": ("gives_low = upper ||", "gives_low = !upper ||"),
    "halves that stay the wrong way": (
        "kept = {upper ? high.mean : low.mean",
        "kept = {upper ? low.mean : high.mean",
    ),
    "the last step left out": (
        "apart > 0; apart /= 2) {\n    const bool upper = left",
        "apart > 1; apart /= 2) {\n    const bool upper = left",
    ),
    "a result of another lane": ("lane / SPREAD * KEPT + i", "lane % SPREAD * KEPT + i"),
    "results beyond the last stored": ("if (result < N) store(result", "store(result"),
    "statistics below the last pixel": (
        "if (chunk_strip < STRIPS && is_there(result))",
        "if (chunk_strip < STRIPS)",
    ),
    "statistics of the other chunk": ("(col0 + c) / STATS_CHUNK) * 2", "0) * 2"),
}
OF_BOXES = {
    "sums read before others have theirs": (
        "if constexpr (BOXES) {\n    __syncthreads();", "if constexpr (BOXES) {"
    ),
    "sums of strips that are idle": ("if (on) store<V>(reinterpret_cast<float*>(smem + C::SUMS_AT)",
                                     "store<V>(reinterpret_cast<float*>(smem + C::SUMS_AT)"),
    "boxes below the image": ("if (p >= C::P || q >= C::Q) continue;", "if (q >= C::Q) continue;"),
    "boxes right of the image": ("if (p >= C::P || q >= C::Q) continue;",
                                 "if (p >= C::P) continue;"),
    "strips of the box above": ("box / BOXES_W * HEIGHT * C::ACROSS +", ""),
    "strips of the box to the left": (" + box % BOXES_W * WIDTH;", ";"),
    "strips side by side alone": ("strip / WIDTH * C::ACROSS +", ""),
    "a strip left out": ("strip < HEIGHT * WIDTH;", "strip < HEIGHT * WIDTH - 1;"),
    "sums as means": ("return total[j] / (C::BOX_H * C::BOX_W);", "return total[j];"),
    "the first image's means": ("(n * (C::P / C::BOX_H) + p / C::BOX_H)", "(p / C::BOX_H)"),
    "channels of the first block's means": ("means + to * C::COLUMNS + col0 + c,",
                                            "means + to * C::COLUMNS + c,"),
}  # fmt: skip
KNOBS = {"channels": 48, "rows": 2, "strip": 4, "down": 4, "across": 2, "threads": 128}


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_faults(fault: str) -> None:
    group = depthwise(
        (2, 21, 15, 96), (3, 3), BF16, stride=(2, 1), before=(2, 1), after=(2, 1), dilation=(2, 1)
    )
    program = StencilTiles(group, TARGETS["sm_90a"]).emit(KNOBS)
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *FAULTS[fault]), group)


@pytest.mark.parametrize("fault", ["none", *OF_ROWS])
def test_faults_of_operands_by_row(fault: str) -> None:
    """Such as a residual."""
    group = depthwise((1, 9, 9, 96), (3, 3), stats=True)
    program = StencilTiles(group, TARGETS["sm_90a"]).emit(KNOBS | {"channels": 96, "strip": 5})
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *OF_ROWS[fault]), group)


@pytest.mark.parametrize("fault", ["none", *OF_STATISTICS])
def test_faults_of_statistics(fault: str) -> None:
    group = depthwise((1, 9, 9, 96), (3, 3), stats=True)
    program = StencilTiles(group, TARGETS["sm_90a"]).emit(KNOBS | {"channels": 96, "strip": 5})
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *OF_STATISTICS[fault]), group)


@pytest.mark.parametrize("fault", ["none", *OF_BOXES])
def test_faults_of_means(fault: str) -> None:
    group = depthwise((2, 12, 20, 96), (3, 3), box=(4, 4))
    tile = {"rows": 2, "strip": 4, "down": 4, "across": 2, "channels": 48, "threads": 256}
    program = StencilTiles(group, TARGETS["sm_90a"]).emit(tile)
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *OF_BOXES[fault]), group)
