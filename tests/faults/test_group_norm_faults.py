"""Faults planted where a block merges the statistics of groups; the twin without one passes."""

from __future__ import annotations

import pytest

from gtco.codegen.sketches.elementwise import Elementwise
from gtco.target import TARGETS
from tests import tile_groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

SCHEDULE = {"threads": 128, "vectors": 1}
LARGE = (7, 3, 9, 120), 12, 3
"""Blocks begin within images; several threads merge a group."""
SMALL = (19, 2, 60), 60, 2
"""Blocks have points of ten images, and more groups than threads."""
FAULTS = {
    "statistics read before they are merged": ("    __syncthreads();\n", ""),
    "groups of another image": ("moments_[at - first_ * GROUPS]", "moments_[at % GROUPS]"),
    "the spread of the parts' means left out": (" + apart * apart * COUNT;", ";"),
    "the first part's mean left out": ("{origin + total, ", "{total, "),
    "the last part left out": ("chunk < CHUNKS; chunk", "chunk < CHUNKS - 1; chunk"),
    "lanes that do not add up": ("lanes_sum<32, NEAR>(total)", "lanes_sum<16, NEAR>(total)"),
    "lanes of other groups added up": (
        "lanes_sum<32, NEAR>(total)",
        "lanes_sum<32, NEAR / 2>(total)",
    ),
    "groups beyond the first of each thread left out": ("start < SPAN * GROUPS;", "start < 1;"),
    "images beyond the last": ("unit < SPAN * GROUPS && image < IMAGES", "unit < SPAN * GROUPS"),
}


@pytest.mark.parametrize("fault", ["none", "none beyond", *FAULTS])
def test_faults(fault: str) -> None:
    shape, groups, chunks = SMALL if "beyond" in fault else LARGE
    group = tile_groups.normalize_groups(*shape, groups=groups, chunks=chunks)
    program = Elementwise(group, TARGETS["sm_90a"]).emit(SCHEDULE)
    if fault.startswith("none"):
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *FAULTS[fault]), group)
