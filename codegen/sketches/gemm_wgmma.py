"""GEMM on `wgmma` fed by TMA: sm_90a; fp8, 16-bit types, tf32 and fp32, which is three products of
tf32. Operands are K-major, but that one of 16 bits or of fp32 may lie in rows of K."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from gtco.codegen import timing
from gtco.codegen.program import KernelProgram
from gtco.codegen.scalars import C_TYPES
from gtco.codegen.sketch import BlockWork, Illegal, Knob, Schedule, Sketch, check
from gtco.codegen.sketches.gemm import (
    BY_ROWS,
    EXACT,
    GROUPED,
    P_BY_ROWS,
    ROWS_OF_K,
    SHARED,
    analyse_wgmma,
    is_exact,
    is_promoted,
    pad_to,
)
from gtco.codegen.sketches.operands import MoreMaps, pieces_of
from gtco.codegen.sketches.row_orders import by_width, pairs
from gtco.ir.graph import Group
from gtco.target import PORTABLE_CLUSTER, Target

FETCHED_REGISTERS = 4
"""For what a part of 8 rows reads beside its results: an image's and a bias's two columns, of two
rows."""
LOOP_REGISTERS = 36
"""A thread's registers besides its accumulators, about."""
LOW_TILES = 3
"""Of shared memory, with what the tensor cores do not see of Q's floats (wgmma_exact.cuh)."""
STAGES = (2, 3, 4, 5, 6, 7, 8)
"""Of the ring."""
MOST_STAGES = 32
"""More of the smallest tiles find no room in shared memory."""
CLUSTERS_Q = (1, 2, 3, 4)
"""Tiles along Q whose blocks lie in one cluster."""
LEAST_FILL = 0.85
"""Part of a block's bytes that counts at least, whatever its neighbours ask for as well: they all
have to arrive. From first choices in whole graphs (experiments/notes/13-clusters.md)."""
RING_SHARE = 0.7
"""Part of a block's shared memory that a default's ring takes. In the whole graph rings of 120 to
160 KB are within 1% of the best for each of twelve GEMMs, and those of which two fit a
multiprocessor lose 2 to 15% (experiments/notes/11-multiprocessors.md); in chains of more rows, as
of batch 4, rings of 190 KB and more lose 5 to 8% (12-untuned.md)."""
FILLED_WAVES = (1, 2)
"""That tiles of just the right side fill: of more, the last one is a small part."""
LEAST_FILLING = 64
"""Columns or rows of Q of such a tile: `wgmma` takes as long for fewer."""
WIDE = 32
"""Columns of Q that lanes store 16 bytes each of."""
LEAST_STAGES = 4
"""That a default's ring may have beyond its share: with fewer of large tiles products wait."""


@dataclass(frozen=True)
class _SharedMemory:
    """Where what lies, in bytes. The ring comes first; an inbox that finds no room beside it lies
    over it."""

    row_values_at: int
    stats_at: int
    inbox_at: int
    barriers_at: int
    nbytes: int


class GemmWgmma(Sketch):
    """Producer warp with TMA, a warpgroup per 64 rows of P, split-K over a cluster.

    `swap` makes the output channels wgmma's M side: few rows then waste little of a tile. Blocks of
    a cluster of `cluster_q` tiles read the same weights then.
    """

    name: ClassVar[str] = "gemm_wgmma"
    family: ClassVar[str] = "gemm"
    version: ClassVar[int] = 7
    schedule_version: ClassVar[int] = 7
    ring: ClassVar[frozenset[str]] = frozenset({"stages", "atoms", "depth", "cluster_q"})

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        self.problem = problem = analyse_wgmma(group, target, exact=True, shares=True)
        self.exact = is_exact(problem.anchor, problem.dtype)
        self.block_k = 128 // problem.dtype.itemsize
        self.steps = problem.atoms(self.block_k)
        region = problem.region()
        emitter = problem.epilogue(region)
        self.row_fields, self.vector = len(emitter.row_fields), region.vector
        self.image = bool(emitter.images)
        self.a_by_rows = not problem.a.k_major
        rows_of_k = self.a_by_rows or not problem.b.k_major
        self.by_rows, self.p_by_rows = rows_of_k and not self.exact, rows_of_k and self.exact
        check(problem.b.k_major or not self.a_by_rows, "A and B lie in rows of K")
        stats = problem.row_stats and problem.grouped
        check(not stats, "row statistics of results that lie side by side")

    def knobs(self) -> tuple[Knob, ...]:
        return (
            Knob("swap", (0, 1)),
            Knob("block_p", (64, 128, 192, 256)),
            Knob("block_q", self._block_q(), range(8, 257, 8)),
            Knob("stages", STAGES, range(2, MOST_STAGES + 1)),
            Knob("split", (1, 2, 3, 4, 5, 6, 8)),
            Knob("multicast", (1, 2, 4)),
            Knob("atoms", (1, 2, 3, 4)),
            Knob("depth", (0, 1)),
            Knob("cluster_q", CLUSTERS_Q),
        )

    def defaults(self) -> Iterable[Schedule]:
        """Tiles that fill the chip in the fewest bytes from L2, ordered by a small model."""
        return sorted(self._candidates(), key=self._cost)

    def _candidates(self) -> list[Schedule]:
        """Each tile and cluster with one ring, since no formula ranks rings as the whole graph
        does; large tiles with one of `LEAST_STAGES` too."""
        room = int(self.target.smem_per_block * RING_SHARE)
        clusters = [(1, multicast, 1) for multicast in (2, 4)]
        clusters += [(split, 1, q) for split in (1, 2, 3, 4, 5, 6, 8) for q in CLUSTERS_Q]
        usual = self._block_q()
        found: list[Schedule] = []
        for swap, block_p, atoms, (split, multicast, cluster_q) in itertools.product(
            (1, 0), (64, 128, 192, 256), (1, 2, 4), clusters
        ):
            filling = self._filling(swap, block_p, split, split * multicast * cluster_q)
            for block_q in sorted({*usual, *filling}):
                atom_bytes = (block_p + block_q) * 128
                if atoms > 1 and atoms * STAGES[-1] * atom_bytes > room:
                    continue  # as many bytes in flight in shorter steps
                steps = -(-self.steps // (split * atoms))
                stages = min(
                    (room - self._low_bytes(block_q)) // (atom_bytes * atoms), steps, STAGES[-1]
                )
                least = 2 if self.exact else max(2, min(LEAST_STAGES, steps))
                for of_ring in sorted({max(2, stages), max(least, stages)}):
                    schedule = {
                        "swap": swap,
                        "block_p": block_p,
                        "block_q": block_q,
                        "stages": of_ring,
                        "split": split,
                        "multicast": multicast,
                        "atoms": atoms,
                        "depth": int(not self.exact),
                        "cluster_q": cluster_q,
                    }
                    try:
                        self._check(schedule)
                    except Illegal:
                        continue
                    found.append(schedule)
        check(bool(found), "no default tile fits the shared memory")
        return found

    def _cost(self, schedule: Schedule) -> float:
        """Microseconds, roughly; the epilogue's arithmetic is the same for all."""
        problem, target = self.problem, self.target
        block = self._block_work(schedule)
        blocks, resident = self._blocks(schedule), self._resident(schedule)
        efficiency = timing.mma_efficiency(self.name, target, exact=self.exact)
        rate = problem.matmul_tflops(target) * efficiency
        cluster = _cluster(schedule)
        operand_bytes = timing.operand_bytes(self.name, block)
        return timing.chain_us(
            block, blocks, resident, rate, target, operand_bytes=operand_bytes, cluster=cluster
        )

    def _block_q(self) -> tuple[int, ...]:
        """Useful N sides: powers of two and even cuts of the rows into tiles."""
        rows, columns = self.problem.rows, self.problem.columns
        if self.by_rows:
            widest = pad_to(rows if self.a_by_rows else columns, ROWS_OF_K)
            return tuple(range(ROWS_OF_K, min(256, widest) + 1, ROWS_OF_K))
        cuts = {pad_to(-(-rows // parts), self._unit) for parts in range(1, 9)}
        choices = {16, 32, 64, 96, 128, 192, 256} | cuts
        limit = pad_to(max(rows, columns), self._unit)
        return tuple(sorted(size for size in choices if size <= min(256, limit)))

    @property
    def _unit(self) -> int:
        """Of the N sides that wgmma takes; of integers also 8 and 24."""
        return 16 if self.problem.dtype == torch.int8 else 8

    def _filling(self, swap: int, block_p: int, split: int, cluster: int) -> Iterable[int]:
        """N sides whose tiles fill the multiprocessors, once or twice, as even cuts hardly do."""
        p_size, q_size = self._sides({"swap": swap})
        unit = ROWS_OF_K if self.by_rows else self._unit if swap else WIDE
        blocks = -(-p_size // block_p) * split * self.problem.batch  # of a tile along Q
        for waves in FILLED_WAVES:
            tiles = waves * timing.multiprocessors_for(cluster, self.target) // blocks
            if tiles > 0 and LEAST_FILLING <= (side := pad_to(-(-q_size // tiles), unit)) <= 256:
                yield side

    def _blocks(self, schedule: Schedule) -> int:
        """Of the grid."""
        p_size, q_size = self._sides(schedule)
        tiles = -(-p_size // schedule["block_p"]) * -(-q_size // schedule["block_q"])
        return self.problem.batch * tiles * schedule["split"]

    def _resident(self, schedule: Schedule) -> int:
        """Blocks on a multiprocessor at a time."""
        smem, registers = self._smem(schedule).nbytes, self._registers(schedule)
        return timing.resident_blocks(smem, _threads(schedule), registers, self.target)

    def _sides(self, schedule: Schedule) -> tuple[int, int]:
        sides = (self.problem.rows, self.problem.columns)
        return (sides[1], sides[0]) if schedule["swap"] else sides

    def _width(self, schedule: Schedule) -> int:
        """Columns side by side that a thread has: as wgmma numbers P's rows or Q's, or as the
        copies reorder them."""
        if schedule["swap"]:
            return 2 if self.problem.columns % 16 == 0 else 1
        width = self.problem.width(self.vector)
        whole = schedule["block_q"] % (4 * width) == 0
        return width if whole and schedule["multicast"] == 1 else 2

    def _part(self, schedule: Schedule) -> int:
        """Rows of Q that the epilogue does at a time, by one block of a cluster."""
        if schedule["swap"]:
            return 8
        return 64 if self.problem.row_stats else 4 * self._width(schedule)

    def _smem(self, schedule: Schedule) -> _SharedMemory:
        block_p, block_q, split = schedule["block_p"], schedule["block_q"], schedule["split"]
        tile_rows = block_q if schedule["swap"] else block_p
        part = self._part(schedule)
        most = -(-block_q // (part * split)) * part  # of Q, that a block finishes
        ring = schedule["stages"] * schedule["atoms"] * (block_p + block_q) * 128
        row_values_at = ring + self._low_bytes(block_q)
        stats_at = row_values_at + pad_to(tile_rows * 4 * self.row_fields, 16)
        moments = most * block_p // 8 * 4 if schedule["swap"] and self.problem.row_stats else 0
        inbox_at = stats_at + moments
        inbox = (split - 1) * most * block_p * 4
        barriers = 16 * (schedule["stages"] + 1)
        if inbox_at + inbox + barriers > self.target.smem_per_block and inbox <= row_values_at:
            end, inbox_at = inbox_at, 0
        else:
            end = inbox_at + inbox
        return _SharedMemory(row_values_at, stats_at, inbox_at, end, end + barriers)

    def _low_bytes(self, block_q: int) -> int:
        """Of the tiles of low parts."""
        return LOW_TILES * block_q * 128 if self.exact else 0

    def _registers(self, schedule: Schedule) -> int:
        """Of a thread, about."""
        if self.exact:  # three sums, both parts of P's fragments, and what a block finishes
            finished = 8 * (schedule["split"] > 1 and schedule["block_p"] > 64)
            return schedule["block_q"] * 3 // 2 + 32 + finished + LOOP_REGISTERS
        atoms, split = schedule["atoms"], schedule["split"]
        steps = -(-self.steps // (split * atoms))
        halves = 2 if is_promoted(self.problem.dtype, steps, atoms) else 1  # sets of them
        return schedule["block_q"] // 2 * halves + LOOP_REGISTERS

    def _check(self, schedule: Schedule) -> None:
        block_p, block_q, split = schedule["block_p"], schedule["block_q"], schedule["split"]
        self.problem.check_stats(block_p if schedule["swap"] else block_q, "tile")
        taken = block_q % self._unit == 0 or block_q in (8, 24)
        check(taken, f"wgmma takes no {block_q} columns of {self.problem.dtype}")
        paired = self._width(schedule) > 1 or not self.problem.of_pairs
        check(paired, f"a thread has single columns of {self.problem.columns}, and pairs are read")
        if self.by_rows:
            of_q = bool(schedule["swap"]) == self.a_by_rows
            check(of_q, "wgmma takes rows of K on its N side alone")
            check(block_q % ROWS_OF_K == 0, f"{block_q} rows of K come in parts of {ROWS_OF_K}")
            check(schedule["multicast"] == 1, "a copy of rows of K goes to one block")
        if self.p_by_rows:
            of_p = bool(schedule["swap"]) != self.a_by_rows
            check(of_p, "rows of K of fp32 are wgmma's M side, which goes through registers")
        steps = -(-self.steps // schedule["atoms"])
        if self.problem.atoms_are_apart:
            whole = self.steps % schedule["atoms"] == 0
            check(whole, f"{self.steps} atoms of taps in steps of {schedule['atoms']}")
        multicast, cluster_q = schedule["multicast"], schedule["cluster_q"]
        alone = split * cluster_q == 1 or multicast == 1
        check(alone, "a cluster splits K or shares tiles, not both")
        p_size, q_size = self._sides(schedule)
        p_tiles, q_tiles = -(-p_size // block_p), -(-q_size // block_q)
        check(p_tiles % multicast == 0, f"{p_tiles} tiles along P are not shared by {multicast}")
        check(q_tiles % cluster_q == 0, f"{q_tiles} tiles along Q in clusters of {cluster_q}")
        one = schedule["atoms"] == 1 and schedule["depth"] == 0
        check(one or not self.exact, "fp32 in steps of one atom, each awaited")
        cluster = _cluster(schedule)
        check(cluster <= PORTABLE_CLUSTER, f"a cluster of {cluster} blocks")
        check(split <= steps, f"split-K {split} exceeds the {steps} steps of K")
        registers = self._registers(schedule)
        most = min(240, timing.most_registers(_threads(schedule)))
        check(registers <= most, f"about {registers} registers a thread, of {most}")
        self.check_smem(self._smem(schedule).nbytes)

    def block_work(self, program: KernelProgram) -> BlockWork:
        return self._block_work(program.schedule)

    def _block_work(self, schedule: Schedule) -> BlockWork:
        p, q, split = schedule["block_p"], schedule["block_q"], schedule["split"]
        atoms = schedule["atoms"]
        steps = -(-self.steps // (split * atoms))
        blocks, resident = self._blocks(schedule), self._resident(schedule)
        waves = timing.in_waves(blocks, resident, self.target)
        # Of all tiles along Q that want the same of P, those of a cluster ask for it together.
        q_tiles = -(-self._sides(schedule)[1] // q)
        together = p * (schedule["cluster_q"] - 1) // q_tiles
        rows = max(p - together + q, int(LEAST_FILL * (p + q)))
        saved = q - q // schedule["multicast"]
        across = -(-self.problem.columns // (p if schedule["swap"] else q))
        return BlockWork(
            fill_bytes=steps * rows * 128 * atoms,
            l2_bytes=steps * (rows - saved) * 128 * atoms,
            steps=steps,
            stages=schedule["stages"],
            mma_flops=2 * p * q * steps * atoms * self.block_k,
            tile_p=p,
            tile_q=q,
            split=split,
            registers=self._registers(schedule),
            depth=schedule["depth"],
            writers=_threads(schedule) - timing.WARPGROUP if waves else 0,
            parts_of_b=split * across * self.problem.batch,
            awaited=self._awaited(schedule),
            # Products of fp32, three each, take longer than copies of whichever atoms.
            cut_atoms=0 if self.exact else -(-self.problem.cut_atoms(self.block_k) // split),
        )

    def _awaited(self, schedule: Schedule) -> int:
        """Parts of 8 rows whose image is loaded when it is their turn: there are no registers for
        those of all parts ahead of the products (`AHEAD` of gemm_wgmma.cuh)."""
        if not (schedule["swap"] and self.image):
            return 0
        parts = -(-schedule["block_q"] // (8 * schedule["split"]))
        free = self._bound_registers(schedule) - (self._registers(schedule) - LOOP_REGISTERS + 48)
        return parts if parts * FETCHED_REGISTERS > min(64, free) else 0

    def _bound_blocks(self, schedule: Schedule) -> int:
        """Blocks a multiprocessor that the compiler must leave registers for: where two fit, the
        next kernel's prologue runs beside this one's end."""
        smem, threads = self._smem(schedule).nbytes, _threads(schedule)
        fits_twice = 2 * (smem + 1024) <= self.target.smem_per_sm and threads <= 256
        return 2 if fits_twice and schedule["block_q"] <= 128 else 1

    def _bound_registers(self, schedule: Schedule) -> int:
        """That the compiler may give a thread."""
        threads = _threads(schedule) * self._bound_blocks(schedule)
        return min(255, timing.most_registers(threads))

    def _emit(self, schedule: Schedule) -> KernelProgram:
        self._check(schedule)
        problem = self.problem
        region = problem.region()
        emitter = problem.epilogue(region)
        swap, split, cluster_q = (schedule[name] for name in ("swap", "split", "cluster_q"))
        width = self._width(schedule)
        block_p, block_q, stages = schedule["block_p"], schedule["block_q"], schedule["stages"]
        p_size, q_size = self._sides(schedule)
        p_constant, q_constant = problem.a.constant, problem.b.constant
        if swap:
            p_constant, q_constant = q_constant, p_constant
        smem, threads = self._smem(schedule), _threads(schedule)
        blocks_per_sm = self._bound_blocks(schedule)
        functor = emitter.functor("Epilogue", "acc")
        windows, of = problem.windows
        more = MoreMaps(len(pieces_of(problem.a)) - 1)
        names, declared = ", ".join(region.parameters), more.declarations + region.declarations
        source = f"""#include "gemm_wgmma.cuh"
using namespace gtco;

struct Config {{
  using Element = {C_TYPES[problem.dtype]};
  static constexpr int ROWS = {problem.rows}, COLUMNS = {problem.columns}, K = {problem.k};
  static constexpr bool SWAP = {str(bool(swap)).lower()};
  static constexpr int BLOCK_P = {block_p}, BLOCK_Q = {block_q}, STAGES = {stages};
  static constexpr int SPLIT = {split}, MULTICAST = {schedule["multicast"]};
  static constexpr int CLUSTER_Q = {cluster_q};
  static constexpr bool P_CONSTANT = {str(p_constant).lower()};
  static constexpr bool Q_CONSTANT = {str(q_constant).lower()};
  static constexpr int REGISTERS = {self._bound_registers(schedule)};
  static constexpr int ATOMS = {schedule["atoms"]}, DEPTH = {schedule["depth"]};
  static constexpr int WIDTH = {width};
  static constexpr int ROW_VALUES_AT = {smem.row_values_at}, STATS_AT = {smem.stats_at};
  static constexpr int INBOX_AT = {smem.inbox_at}, BARRIERS_AT = {smem.barriers_at};
{EXACT if self.exact else ""}{BY_ROWS if self.by_rows else ""}{P_BY_ROWS if self.p_by_rows else ""}{
            SHARED if problem.shares_a else ""
        }{GROUPED if problem.grouped else ""}}};

{windows}{functor}
extern "C" __global__ void __launch_bounds__({threads}, {blocks_per_sm})
ENTRY_POINT(const __grid_constant__ ptx::TensorMap p_map,
            const __grid_constant__ ptx::TensorMap q_map, {declared}) {{
  gemm_wgmma<Config{of}>(p_map, q_map, Epilogue{{{names}}}{more.argument});
}}
"""
        a_map, *more_maps = problem.tensor_maps(problem.rows, block_q if swap else block_p)
        b_map = problem.tensor_map(problem.b, problem.columns, block_p if swap else block_q)
        if not swap:
            b_map = by_width(b_map, width)
        elif width == 2 and not self.p_by_rows:
            b_map = pairs(b_map)
        first = (b_map, a_map) if swap else (a_map, b_map)
        return self.program(
            schedule,
            source,
            (
                -(-p_size // block_p) * split * cluster_q,
                -(-q_size // block_q) // cluster_q,
                problem.batch,
            ),
            threads,
            smem.nbytes,
            (*first, *more_maps, *(argument for _, argument in region.parameters.values())),
            (_cluster(schedule), 1, 1),
        )


def _cluster(schedule: Schedule) -> int:
    """Blocks of a cluster."""
    return schedule["split"] * schedule["cluster_q"] * schedule["multicast"]


def _threads(schedule: Schedule) -> int:
    """Of a block: a warpgroup for each 64 rows of P, and the producer's."""
    return schedule["block_p"] * 2 + 128
