"""Attention in one pass over the keys, on `wgmma` fed by TMA: sm_90a; 16 bits and tf32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gtco.codegen import timing
from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import BlockWork, Knob, Schedule, check, launched
from gtco.codegen.sketches.attention import AttentionSketch
from gtco.codegen.sketches.gemm import pad_to
from gtco.codegen.sketches.heads import box_rows, check_tensor_map, map_text, tensor_map
from gtco.ir.graph import Group
from gtco.target import Target

WARPGROUP_QUERIES = 64
"""Rows of `wgmma`'s M side."""
MOST_KEYS = 640
"""Of a tile: more of them find no room in shared memory or in registers."""
PARTS = (1, 2)
"""Warpgroups that share 64 queries."""
SPLITS = (1, 2, 4, 8)
"""Blocks of a cluster that share queries."""
RESTS = (0, 16)
"""Queries of a block beside those of its warpgroups."""
REST_WARPS = 4
"""Of a block, which have them."""
LOOP_REGISTERS = 32
"""Of a thread, beside its scores and results."""
TILE_US = 0.25
"""A tile's largest scores, and its products' latency."""
REFILL_US = 0.4
"""A tile that comes when another has left: one warpgroup waits for the slowest."""
MERGE_US = 0.9
"""Bringing two parts together."""
SQUARE = 32
"""Keys and columns of tf32 values that a warp transposes at a time."""
TRANSPOSING_THREADS = 128
"""Of a block, which transpose values of tf32."""
TRANSPOSING_REGISTERS = 80
"""Of a thread that holds a column of a square."""


@dataclass(frozen=True)
class _SharedMemory:
    """Where what lies, in bytes; the queries come first."""

    keys_at: int
    values_at: int
    shares_at: int
    row_values_at: int
    barriers_at: int
    nbytes: int


class AttentionWgmma(AttentionSketch):
    """Block -> 64 queries a warpgroup; keys may be split over warpgroups, and over the blocks of a
    cluster; a ring of tiles of keys and values by TMA. A warpgroup more transposes values of tf32,
    which wgmma takes K-major alone. Or one more has a rest of 16 queries on `mma.sync`.
    """

    name: ClassVar[str] = "attention_wgmma"
    version: ClassVar[int] = 2
    schedule_version: ClassVar[int] = 2
    later_knobs: ClassVar[Mapping[str, int]] = {"split": 1, "rest": 0}
    ring: ClassVar[frozenset[str]] = frozenset({"stages"})

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        check(target.has_wgmma, f"{target.arch} has no wgmma")
        self.transposes = self.dtype == torch.float32
        self.atom = 128 // self.dtype.itemsize  # columns
        self.width_atoms = -(-self.width // self.atom)
        self.value_atoms = -(-self.value_width // self.atom)
        for label, heads in (("q", self.q), ("k", self.k), ("v", self.v)):
            check_tensor_map(label, heads)
        self.row_fields = len(self._epilogue()[1].row_fields)

    def knobs(self) -> tuple[Knob, ...]:
        cuts = {
            pad_to(-(-self.keys // tiles), 16 * parts) for tiles in (1, 2, 3, 4) for parts in PARTS
        }
        sizes = {64, 128, 192} | {cut for cut in cuts if cut <= MOST_KEYS}
        most = pad_to(self.keys, 16 * max(PARTS))
        return (
            Knob("block_q", (64, 128, 192, 256)),
            Knob(
                "block_k",
                tuple(sorted(size for size in sizes | {16} if size <= most)),
                range(16, MOST_KEYS + 1, 16),
            ),
            Knob("parts", PARTS),
            Knob("stages", (1, 2, 3, 4)),
            Knob("split", SPLITS),
            Knob("rest", (0,), range(16, 17)) if self.transposes else Knob("rest", RESTS),
        )

    def defaults(self) -> Iterable[Schedule]:
        """All of them, ordered by a small model."""
        return sorted((schedule for schedule, _ in self.legal()), key=self._cost)

    def _cost(self, schedule: Schedule) -> float:
        """Microseconds, roughly."""
        target, threads = self.target, _consumers(schedule)
        block, resident = self._loop_work(schedule), self._resident(schedule)
        split = schedule["split"]
        blocks = self.heads * -(-self.queries // block.tile_p) * split
        together = min(-(-blocks // target.sm_count), resident)
        flops = block.tile_p * block.steps * schedule["block_k"] * timing.TANH_FLOPS
        pointwise_us = flops / timing.fp32_per_us(together * threads, target)
        products = self.anchor.attrs.get("products")
        rate = target.products_tflops(self.dtype, products)
        rate *= target.constants.mma_efficiency[self.name]
        model_us = timing.chain_us(
            block, blocks, resident, rate, target, pointwise_us=pointwise_us, cluster=split
        )
        waves = -(-blocks // (timing.multiprocessors_for(split, target) * resident))
        refills = max(0, block.steps - block.stages)
        turns_us = TILE_US * block.steps + REFILL_US * refills + MERGE_US * (schedule["parts"] - 1)
        return model_us + waves * turns_us

    def _registers(self, schedule: Schedule) -> int:
        part = schedule["block_k"] // schedule["parts"]
        results = -(-self.value_width // 16) * 8
        held = part // 2 + results + self._mask_registers(part) + LOOP_REGISTERS
        if schedule["rest"]:
            rest = {**schedule, "block_q": schedule["rest"], "warps_k": REST_WARPS}
            held = max(held, super()._registers(rest))
        if not self.transposes:
            return held
        # Where products of tf32 want their weights, as counted in kernels of many keys.
        return max(TRANSPOSING_REGISTERS, held + max(0, part - 176) * 3 // 8)

    def _resident(self, schedule: Schedule) -> int:
        return timing.resident_blocks(
            self._smem(schedule).nbytes,
            self._threads(schedule),
            self._registers(schedule),
            self.target,
        )

    def _smem(self, schedule: Schedule) -> _SharedMemory:
        stages, queries, parts = (schedule[name] for name in ("stages", "block_q", "parts"))
        atom, rest = schedule["block_k"] * 128, schedule["rest"]
        boxes = -(-(queries + rest) // WARPGROUP_QUERIES)
        keys_at = boxes * WARPGROUP_QUERIES * self.width_atoms * 128
        values_at = keys_at + stages * self.width_atoms * atom
        end = values_at + stages * self._value_bytes(schedule)
        rows = parts * queries + REST_WARPS * rest  # that are merged
        shares_at = max(end, self._staged_bytes(1, rows))  # staged over the tiles
        row_values_at = shares_at + 2 * rows * 4
        barriers_at = row_values_at + pad_to((queries + rest) * 4 * self.row_fields, 16)
        barriers = 1 + (3 + self.transposes) * stages + (schedule["split"] > 1)
        nbytes = barriers_at + 8 * barriers
        return _SharedMemory(keys_at, values_at, shares_at, row_values_at, barriers_at, nbytes)

    def _tiles(self, schedule: Schedule) -> int:
        """Of keys, that a block multiplies at most."""
        tiles = -(-self.keys // schedule["block_k"])
        return -(-tiles // schedule["split"])

    def _loop_work(self, schedule: Schedule) -> BlockWork:
        rows = _rows(schedule)
        whole = super()._loop_work({**schedule, "block_q": rows})
        steps, queries = self._tiles(schedule), rows * self.width
        filled = queries * self.dtype.itemsize
        filled += (whole.fill_bytes - filled) * steps // whole.steps
        split = schedule["split"]
        # Stores of 8 bytes are half as fast as a product's, and its own part goes the same way.
        sent = schedule["block_q"] * self.value_width * 4 if split > 1 else 0
        return replace(
            whole,
            fill_bytes=filled,
            l2_bytes=filled,
            steps=steps,
            mma_flops=whole.mma_flops * steps // whole.steps,
            split=split,
            peer_bytes=sent,
        )

    def _value_bytes(self, schedule: Schedule) -> int:
        """Of a tile of values."""
        keys = schedule["block_k"]
        if self.transposes:  # each part in whole squares
            keys = schedule["parts"] * pad_to(keys // schedule["parts"], SQUARE)
        return self.value_atoms * keys * 128

    def _threads(self, schedule: Schedule) -> int:
        beside = TRANSPOSING_THREADS * self.transposes + REST_WARPS * 32 * (schedule["rest"] > 0)
        return _consumers(schedule) + beside

    def block_work(self, program: KernelProgram) -> BlockWork:
        beside = TRANSPOSING_THREADS if self.transposes else 0
        return replace(self._loop_work(program.schedule), copy_threads=beside)

    def _check(self, schedule: Schedule) -> None:
        block_k, parts, stages = (schedule[name] for name in ("block_k", "parts", "stages"))
        split, threads = schedule["split"], self._threads(schedule)
        check(threads <= 512, f"{threads} threads, of which none has registers for its scores")
        check(block_k % (16 * parts) == 0, f"{block_k} keys in {parts} parts: wgmma takes 16")
        tiles, rest = self._tiles(schedule), schedule["rest"]
        if rest:
            check(not self.transposes, "rest: values of tf32 lie by columns")
            check(split == 1, f"rest: {rest} queries, and {split} blocks that share the others")
            uneven = f"rest: {block_k} keys over {REST_WARPS} warps, of which mma takes 16"
            check(block_k % (16 * REST_WARPS) == 0, uneven)
        if split > 1:
            check(not self.anchor.attrs.get("causal"), "split: causal blocks have other keys each")
            all_tiles = -(-self.keys // block_k)
            none = f"split: of {all_tiles} tiles of keys one of {split} blocks gets none"
            check((split - 1) * tiles < all_tiles, none)
        check(stages <= tiles, f"{stages} stages, and fewer tiles of keys")
        check(stages > 1 or tiles == 1, "a ring of one stage, which is refilled beside a product")
        registers = self._registers(schedule)
        most = min(255, timing.most_registers(threads))
        check(registers <= most, f"about {registers} registers a thread, of {most}")
        self.check_smem(self._smem(schedule).nbytes)

    def _emit(self, schedule: Schedule) -> KernelProgram:
        self._check(schedule)
        block_q, block_k, parts = (schedule[name] for name in ("block_q", "block_k", "parts"))
        threads, smem = self._threads(schedule), self._smem(schedule)
        box = box_rows(block_k)
        region, emitter = self._epilogue()
        maps = {
            "Q": tensor_map(self.q, self.dtype, self.queries, WARPGROUP_QUERIES),
            "K": tensor_map(self.k, self.dtype, self.keys, box),
            "V": tensor_map(self.v, self.dtype, self.keys, SQUARE if self.transposes else box),
        }
        operands = zip(maps, (self.q, self.k, self.v), strict=True)
        structs = "".join(map_text(label, heads) for label, heads in operands)
        structs += self._mask_text(region)
        mask = self._mask_argument(region)
        functor = emitter.functor("Epilogue", "acc")
        names = ", ".join(region.parameters)
        split = schedule["split"]
        grid, axis = launched((-(-self.queries // _rows(schedule)) * split, self.heads, 1))
        check(not axis or split == 1, "blocks of a cluster lie along the axis that is exchanged")
        source = f"""#include "attention_wgmma.cuh"
using namespace gtco;

struct Config {{
{self._sizes()}
  static constexpr int BLOCK_Q = {block_q}, BLOCK_K = {block_k}, PARTS = {parts};
  static constexpr int REST = {schedule["rest"]};
  static constexpr int BOX = {box}, STAGES = {schedule["stages"]}, SPLIT = {split};
  static constexpr int KEYS_AT = {smem.keys_at}, VALUES_AT = {smem.values_at};
  static constexpr int SHARES_AT = {smem.shares_at};
  static constexpr int ROW_VALUES_AT = {smem.row_values_at}, BARRIERS_AT = {smem.barriers_at};
{axis}}};

{structs}
{functor}
extern "C" __global__ void __launch_bounds__({threads}, {self._resident(schedule)})
ENTRY_POINT(const __grid_constant__ ptx::TensorMap q_map,
            const __grid_constant__ ptx::TensorMap k_map,
            const __grid_constant__ ptx::TensorMap v_map, {region.declarations}) {{
  attention_wgmma<Config>(Q{{q_map}}, K{{k_map}}, V{{v_map}}, {mask}, Epilogue{{{names}}});
}}
"""
        return self.program(
            schedule,
            source,
            grid,
            threads,
            smem.nbytes,
            (*maps.values(), *(argument for _, argument in region.parameters.values())),
            (split, 1, 1),
        )


def _consumers(schedule: Schedule) -> int:
    """Threads of a block with queries: a warpgroup for each part of the keys of 64 of them."""
    return schedule["block_q"] // WARPGROUP_QUERIES * schedule["parts"] * 128


def _rows(schedule: Schedule) -> int:
    """Queries of a block, or of a cluster that shares them."""
    return schedule["block_q"] + schedule["rest"]
