"""Faults in attention whose operands TMA brings, each of which the host build must catch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gtco.codegen.program import KernelProgram, TensorMapArgument
from gtco.codegen.sketch import Schedule
from gtco.codegen.sketches.attention import Attention
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests import attention_groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

KINDS: dict[str, Schedule] = {
    "a ring": {"block_q": 48, "block_k": 32, "warps_k": 1, "stages": 2},
    "two parts": {"block_q": 16, "block_k": 32, "warps_k": 2, "stages": 1},
}

FAULTS = {
    "keys that nobody waits for": ("a ring", "await(keys_full(tile % STAGES), tile);", ""),
    "queries that nobody waits for": (
        "two parts",
        "if (tile == 0) ptx::mbarrier_wait(barriers_, 0);",
        "",
    ),
    "values that nobody waits for": ("a ring", "await(values_full(slot), tile);", ""),
    "the keys of the turn before": ("two parts", "{ return tile / STAGES & 1; }", "{ return 0; }"),
    "a tile that comes before the last one was used": (
        "a ring",
        "ptx::mbarrier_wait(empty, round(tile));",
        "",
    ),
    "keys left before they are multiplied": (
        "a ring",
        "        state.multiply_keys(scores, tiles_.keys(slot), key);\n"
        "        tiles_.leave_keys(keys, values, tile);",
        "        tiles_.leave_keys(keys, values, tile);\n"
        "        state.multiply_keys(scores, tiles_.keys(slot), key);",
    ),
    "values left before they are multiplied": (
        "two parts",
        "      if (any) state.multiply_values(scores, tiles_.values(slot), key);\n"
        "      tiles_.leave_values(keys, values, tile);",
        "      tiles_.leave_values(keys, values, tile);\n"
        "      if (any) state.multiply_values(scores, tiles_.values(slot), key);",
    ),
    "values asked for in place of those in use": (
        "a ring",
        "refill(values_empty((tile + STAGES - 1) % STAGES), tile - 1,",
        "refill(keys_empty(slot), tile,",
    ),
    "a slot given back before all lanes have read": (
        "two parts",
        "__syncwarp();\n    if (thread_ % 32 == 0) ptx::mbarrier_arrive(empty);",
        "if (thread_ % 32 == 0) ptx::mbarrier_arrive(empty);",
    ),
    "a slot given back by one warp of all": (
        "two parts",
        "ptx::mbarrier_init(keys_empty(s), WARPS);",
        "ptx::mbarrier_init(keys_empty(s), 1);",
    ),
    "a barrier that expects too few bytes": (
        "a ring",
        "Rows::ATOMS * ROWS * ROW_BYTES",
        "Rows::ATOMS * ROWS * ROW_BYTES / 2",
    ),
    "copies asked for ahead of the dependent-launch wait": (
        "a ring",
        "  ptx::griddepcontrol_wait();\n  block.start(queries, keys, values);",
        "  block.start(queries, keys, values);\n  ptx::griddepcontrol_wait();",
    ),
    "barriers that others use before they are made": (
        "two parts",
        "values.prefetch();\n    }\n    __syncthreads();",
        "values.prefetch();\n    }\n",
    ),
    "chunks read where another swizzle has them": (
        "a ring",
        "moved = row / (8 / ATOM_CHUNKS) ^ chunk;",
        "moved = row ^ chunk;",
    ),
    "chunks read as if nothing moved them": (
        "two parts",
        "moved = row / (8 / ATOM_CHUNKS) ^ chunk;",
        "moved = chunk;",
    ),
    "the columns of the first atom again": (
        "a ring",
        "return ((atom * ROWS + row) * ATOM_CHUNKS",
        "return (row * ATOM_CHUNKS",
    ),
    "the rows of another tile": ("two parts", "tile * C::BLOCK_K,\n", "0,\n"),
    "results staged over a tile in use": (
        "two parts",
        "__syncthreads();  // the ring becomes the staging buffer",
        "",
    ),
}


def group(mask: torch.dtype | None = None) -> Group:
    """Keys in rows of 64 bytes, values in two atoms of 128."""
    return attention_groups.cross((2,), 50, 100, 24, 72, mask=mask)


def program(kind: str, mask: torch.dtype | None = None) -> KernelProgram:
    knobs = {**KINDS[kind], "copy_warps": 0, "tma": 1}
    return Attention(group(mask), TARGETS["sm_90a"]).emit(knobs)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_itself_is_right(kind: str) -> None:
    for mask in (None, torch.float16):
        assert verdicts(program(kind, mask), group(mask)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    kind, old, new = FAULTS[fault]
    check_caught(planted(program(kind), old, new), group())


@pytest.mark.parametrize("slot", range(3))
@pytest.mark.parametrize(
    "change", ("swizzle", "rows", "columns of a box", "rows of a box", "stride of heads")
)
def test_a_wrong_tensor_map_is_caught(slot: int, change: str) -> None:
    right = program("a ring")
    given = right.arguments[slot]
    assert isinstance(given, TensorMapArgument)
    width, rows, *outer = given.sizes
    columns, box, *others = given.box
    wrong = {
        "swizzle": replace(given, swizzle_bytes=0),
        "rows": replace(given, sizes=(width, rows - 1, *outer)),
        "columns of a box": replace(given, box=(columns // 2, box, *others)),
        "rows of a box": replace(given, box=(columns, box // 2, *others)),
        "stride of heads": replace(given, strides=(given.strides[0], *given.strides[:-1])),
    }[change]
    arguments = (*right.arguments[:slot], wrong, *right.arguments[slot + 1 :])
    check_caught(replace(right, arguments=arguments), group())
