"""Attention in one pass over the keys, on `mma.sync` fed by `cp.async` or TMA: 16 bits, tf32 and
fp32, which is three products of tf32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gtco.codegen import timing
from gtco.codegen.emit import PointwiseEmitter, Region, index
from gtco.codegen.program import KernelProgram, TensorMapArgument
from gtco.codegen.scalars import C_TYPES, literal
from gtco.codegen.sketch import BlockWork, Illegal, Knob, Schedule, Sketch, check, launched
from gtco.codegen.sketches.gemm import EXACT, check_products, is_exact, pad_to
from gtco.codegen.sketches.heads import Heads, box_rows, check_tensor_map, map_text, tensor_map
from gtco.ir.graph import Group
from gtco.ir.spec import FLOATS
from gtco.ir.views import NotAView, resolve
from gtco.target import Target

MAX_BLOCK_K = 320
"""Most keys a tile that a search tries: of wide heads more find no room in shared memory."""
MOST_KEYS = 4096
"""More of the narrowest heads find none either."""
WARPS_K = (1, 2, 4, 7, 8)
"""Warps that share 16 queries; seven of 32 keys each suit 197 and 224 keys."""
COPY_WARPS = (0, 2, 4, 6)
"""Warps of a block beside those."""
MASK_REGISTERS = 24
"""Of a thread, about, that find the elements of a mask and bring some of them."""
COPYING_WARPS = 8
"""Warps of a block that ask for bytes faster than L2 gives them to a multiprocessor."""


def _block_k(keys: int) -> tuple[int, ...]:
    """Useful tiles of keys: powers of two and, while they fit, even cuts into one to three."""
    cuts = {pad_to(-(-keys // parts), 16 * warps) for parts in (1, 2, 3) for warps in WARPS_K}
    return tuple(sorted({32, 64, 128} | {cut for cut in cuts if cut <= MAX_BLOCK_K}))


class AttentionSketch(Sketch):
    """What the sketches of attention share: the operands, and a block's loop over the keys."""

    family: ClassVar[str] = "attention"
    multiplies_exactly: ClassVar[bool] = False
    narrowest_copy: ClassVar[int] = 16
    """Bytes of an operand that lie side by side and are copied at once, at least."""
    widest_head: ClassVar[int] = 128
    """Wider ones leave no registers for the scores."""

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        anchors = [node for node in group.nodes if node.definition.family == "attention"]
        check(len(anchors) == 1, f"an attention kernel has one attention, not {len(anchors)}")
        (self.anchor,) = anchors
        specs = [group.graph.specs[name] for name in self.anchor.inputs]
        self.dtype = specs[0].dtype
        check_products(self.anchor, self.dtype, target, exact=self.multiplies_exactly)
        self.exact = is_exact(self.anchor, self.dtype)
        self.chunk = 16 // self.dtype.itemsize
        check(len({spec.dtype for spec in specs[:3]}) == 1, "q, k and v have different dtypes")
        out = self.anchor.outputs[0].sizes
        check(len(out) >= 2 and math.prod(out) > 0, "attention of vectors or of nothing")
        self.queries, self.keys = out[-2], specs[1].sizes[-2]
        self.width, self.value_width = specs[0].sizes[-1], out[-1]
        self.heads = math.prod(out[:-2])
        check(self.keys > 0, "attention over no keys")
        for width in (self.width, self.value_width):
            whole = width * self.dtype.itemsize % self.narrowest_copy == 0
            narrow = f"a head of {width} elements is no multiple of {self.narrowest_copy} bytes"
            check(whole, narrow)
            wide = f"a head of {width} elements, at most {self.widest_head}"
            check(width <= self.widest_head, wide)
        lead = out[:-2]
        self.q = self._operand(0, (*lead, self.queries, self.width))
        self.k = self._operand(1, (*lead, self.keys, self.width))
        self.v = self._operand(2, (*lead, self.keys, self.value_width))
        self.masks: list[Heads] = []
        kinds = FLOATS | {torch.bool}
        for slot, spec in enumerate(specs[3:], 3):
            check(spec.dtype in kinds, f"a mask of {spec.dtype}")
            alone = len(specs) == 4 or spec.dtype != torch.bool
            check(alone, "a mask of bool chooses keys, and no sum of two masks does")
            self.masks.append(self._operand(slot, (*lead, self.queries, self.keys)))

    def _operand(self, slot: int, shape: tuple[int, ...]) -> Heads:
        graph, value = self.group.graph, self.anchor.inputs[slot]
        try:
            base, layout = resolve(graph, value)
            stored = base in graph.inputs or base in graph.constants
            check(stored, f"operand %{base} is made in the same kernel")
            layout = layout.expand(shape).reshape((self.heads, *shape[-2:]))
        except NotAView as error:
            raise Illegal(f"%{value} is no strided view over the heads: {error}") from None
        if slot < 3:
            run = layout.vector(math.gcd(self.chunk, shape[-1]))
            whole = run * self.dtype.itemsize >= self.narrowest_copy
            check(whole, f"%{value} is not contiguous in runs of {self.narrowest_copy} bytes")
            return Heads(base, layout, run)
        return Heads(base, layout)

    def knobs(self) -> tuple[Knob, ...]:
        return (
            Knob("block_q", (16, 32, 48, 64, 80, 96, 112, 128)),
            Knob("block_k", _block_k(self.keys), range(16, MOST_KEYS + 1, 16)),
            Knob("warps_k", WARPS_K),
            Knob("stages", (1, 2, 3, 4)),
        )

    def defaults(self) -> Iterable[Schedule]:
        """Tiles of queries as large as still give most multiprocessors a block; where blocks are
        few, keys split over warps, and all of K and V in flight at once."""
        fill = 0.6 * self.target.sm_count
        sizes = [q for q in (128, 64, 32, 16) if q < 2 * max(16, self.queries)]
        full = [q for q in sizes if self.heads * -(-self.queries // q) >= fill]
        best = full[0] if full else min(sizes[-1] * 2, sizes[0])
        candidates = []
        for block_q in (best, *sizes):
            split = 4 if block_q <= 32 else (2 if block_q == 64 else 1)
            rings = [
                self._schedule(block_q, block_k, warps_k, min(stages, -(-self.keys // block_k)))
                for warps_k in dict.fromkeys((split, 1))
                for block_k in (128, 64, 32)
                if block_k == 32 or self.keys > block_k // 2
                for stages in (2, 3, 1)
            ]
            # All keys in one tile: the softmax needs no second look.
            whole = [
                self._schedule(block_q, pad_to(self.keys, 16 * warps_k), warps_k, 1)
                for warps_k in WARPS_K
                if block_q * warps_k <= 256 and self.keys > 32 * (warps_k - 1)
            ]
            candidates += [*rings[:1], *whole, *rings[1:]]
        candidates.append(self._schedule(16, 32, 1 + self.exact, 1))
        seen: list[Schedule] = []
        for schedule in candidates:
            if schedule in seen:
                continue
            seen.append(schedule)
            try:
                self.emit(schedule)
            except Illegal:
                continue
            yield schedule

    def _epilogue(self) -> tuple[Region, PointwiseEmitter]:
        """Of results that are a row for each query of each head."""
        projected = any(node.definition.is_linear for node in self.group.nodes)
        check(not projected, "the projection of the result is no part of its epilogue")
        region = Region(self.group, (self.heads * self.queries, self.value_width))
        given = {self.anchor.values[0]: "acc"}
        return region, PointwiseEmitter(region, given, self.group.nodes)

    @staticmethod
    def _schedule(block_q: int, block_k: int, warps_k: int, stages: int) -> Schedule:
        return {"block_q": block_q, "block_k": block_k, "warps_k": warps_k, "stages": stages}

    def _mask_registers(self, keys: int) -> int:
        """Of a thread, which load and hold the mask of 16 queries and `keys` keys."""
        if not self.masks:
            return 0
        held = 0
        for mask in self.masks:
            run = _run(mask)
            elements = 2 if run % keys == 0 else keys // 4 if run % 8 == 0 else keys // 2
            held += elements * self.group.graph.specs[mask.base].dtype.itemsize // 4
        return held + MASK_REGISTERS

    def _registers(self, schedule: Schedule) -> int:
        part = schedule["block_k"] // schedule["warps_k"]
        steps, value16 = -(-self.width // (2 * self.chunk)), -(-self.value_width // 16)
        if self.exact:  # as counted in its kernels
            return value16 * 16 + part * 14 // 5 + self._mask_registers(part) + 48
        more = part // 4 if self.keys > schedule["block_k"] else 0  # of the next tile
        if self.dtype == torch.float32:  # the assembler loads ahead, as counted in its kernels
            more += part * 7 // 4
        if schedule.get("tma") and (
            self.keys > schedule["block_k"] or self.anchor.attrs.get("causal")
        ):
            # Between barriers of memory the assembler loads further ahead, as counted.
            more += part * (self.width + self.value_width) // 256
        return steps * 4 + value16 * 8 + part // 2 + more + self._mask_registers(part) + 40

    @staticmethod
    def _warps(schedule: Schedule) -> int:
        """Of a block, which hold queries."""
        return schedule["block_q"] // 16 * schedule["warps_k"]

    def _threads(self, schedule: Schedule) -> int:
        """Of a block.

        Raises:
            Illegal: the loop over the keys has a limit that `schedule` breaks.
        """
        block_k, warps_k, stages = (schedule[name] for name in ("block_k", "warps_k", "stages"))
        threads = (self._warps(schedule) + schedule.get("copy_warps", 0)) * 32
        check(threads <= 1024, f"{threads} threads, a block has at most 1024")
        check(block_k % (16 * warps_k) == 0, f"{block_k} keys over {warps_k} warps: mma takes 16")
        check(stages <= -(-self.keys // block_k), f"{stages} stages, and fewer tiles of keys")
        registers = self._registers(schedule)
        limit = min(255, timing.most_registers(threads))
        check(registers <= limit, f"about {registers} registers a thread, of {limit}")
        return threads

    def _ring_bytes(self, schedule: Schedule) -> int:
        """Of the queries, and of the keys and values in flight."""
        block_q, keys = schedule["block_q"], schedule["stages"] * schedule["block_k"]
        return 16 * (
            (block_q + keys) * chunk_pitch(2 * -(-self.width // (2 * self.chunk)))
            + keys * chunk_pitch(pad_to(self.value_width, 16) // self.chunk)
        )

    def _staged_bytes(self, parts: int, block_q: int) -> int:
        """Of the parts of the results that the warps of one query merge."""
        return parts * block_q * (pad_to(self.value_width, 16) + 8) * 4

    def _loop_work(self, schedule: Schedule) -> BlockWork:
        """What a block does for the results of its queries of one head."""
        block_q, block_k = schedule["block_q"], schedule["block_k"]
        steps = -(-self.keys // block_k)
        width = self.width + self.value_width
        filled = (block_q * self.width + steps * block_k * width) * self.dtype.itemsize
        return BlockWork(
            fill_bytes=filled,
            l2_bytes=filled,
            steps=steps,
            stages=schedule["stages"],
            mma_flops=2 * block_q * steps * block_k * width,
            tile_p=block_q,
            tile_q=self.value_width,
            split=1,
            registers=self._registers(schedule),
        )

    def _config(self, schedule: Schedule) -> str:
        """The part of the constexpr configuration that the loop over the keys reads."""
        return f"""\
{self._sizes()}
  static constexpr int BLOCK_Q = {schedule["block_q"]}, BLOCK_K = {schedule["block_k"]};
  static constexpr int WARPS_K = {schedule["warps_k"]}, STAGES = {schedule["stages"]};"""

    def _sizes(self) -> str:
        """The part of the configuration that says what is computed."""
        return f"""\
  using Element = {C_TYPES[self.dtype]};
  static constexpr int LQ = {self.queries}, LK = {self.keys};
  static constexpr int D = {self.width}, DV = {self.value_width};
  static constexpr bool CAUSAL = {str(bool(self.anchor.attrs.get("causal"))).lower()};
  static constexpr float SCALE = {literal(float(self.anchor.attrs["scale"]))};"""

    def _operand_texts(self, region: Region) -> tuple[str, str]:
        """The structs of the operands, and the arguments that make them."""
        operands = {"Q": self.q, "K": self.k, "V": self.v}
        texts = [self._operand_text(label, heads, region) for label, heads in operands.items()]
        texts.append(self._mask_text(region))
        arguments = [
            f"{label}{{{region.parameter(heads.base, 'in')}}}" for label, heads in operands.items()
        ]
        return "".join(texts), ", ".join((*arguments, self._mask_argument(region)))

    def _mask_argument(self, region: Region) -> str:
        made = [
            f"Mask{number}{{{region.parameter(mask.base, 'in')}}}"
            for number, mask in enumerate(self.masks)
        ]
        if len(made) == 2:
            return f"MaskSum<Mask0, Mask1>{{{', '.join(made)}}}"
        return made[0] if made else "NoMask{}"

    def _operand_text(self, label: str, heads: Heads, region: Region) -> str:
        parameter = region.parameter(heads.base, "in")
        run = f"  static constexpr int RUN = {heads.run};\n" if heads.run < self.chunk else ""
        return f"""struct {label} {{  // %{parameter}, {heads.layout}
{run}  const Config::Element* base;
  __device__ __forceinline__ const Config::Element* at(int head, int row, int column) const {{
    return base + {index(heads.layout, ("head", "row", "column"))};
  }}
}};
"""

    def _mask_text(self, region: Region) -> str:
        texts = []
        for number, mask in enumerate(self.masks):
            parameter = region.parameter(mask.base, "in")
            element = C_TYPES[self.group.graph.specs[mask.base].dtype]
            pairs = str(mask.layout.vector(2) == 2).lower()
            texts.append(f"""struct Mask{number} {{  // %{parameter}, {mask.layout}
  static constexpr bool PRESENT = true, PAIRS = {pairs};
  static constexpr int RUN = {_run(mask)}, PERIOD = {_period(mask)};
  using Element = {element};
  const {element}* base;
  __device__ __forceinline__ const {element}* at(int head, int query, int key) const {{
    return base + {index(mask.layout, ("head", "query", "key"))};
  }}
}};
""")
        return "".join(texts)


def _run(mask: Heads) -> int:
    """Keys in a row that have one element of a mask, from each multiple of so many on."""
    *_, (extent, stride) = mask.layout.dims[2] or ((1, 0),)
    return extent if stride == 0 else 1


def _period(mask: Heads) -> int:
    """Keys after which the elements of a mask come again, or 0."""
    (extent, stride), *inner = mask.layout.dims[2] or ((1, 1),)
    return math.prod(size for size, _ in inner) if stride == 0 and extent > 1 else 0


class Attention(AttentionSketch):
    """Block -> 16 queries a warp -> m16n8k16 (floats: m16n8k8); keys may be split over warps; a
    ring of tiles by cp.async, which warps without queries may help to fill, or by TMA."""

    name: ClassVar[str] = "attention"
    version: ClassVar[int] = 3
    schedule_version: ClassVar[int] = 3
    later_knobs: ClassVar[Mapping[str, int]] = {"tma": 0}
    ring: ClassVar[frozenset[str]] = frozenset({"stages"})
    multiplies_exactly: ClassVar[bool] = True
    narrowest_copy: ClassVar[int] = 4  # of cp.async
    widest_head: ClassVar[int] = 192  # of 256, queries and results fill the registers

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        self._epilogue()
        self.no_tma = self._why_no_tma()
        if max(self.width, self.value_width) > AttentionSketch.widest_head:
            none = f"heads of {self.width} and {self.value_width} elements leave no registers"
            check(any(self.defaults()), none)

    def _why_no_tma(self) -> str:
        """Why TMA cannot bring the operands, or ""."""
        if not self.target.has_wgmma:
            return f"tma: tensor maps are for sm_90a, not {self.target.arch}"
        try:
            for label, heads in (("q", self.q), ("k", self.k), ("v", self.v)):
                whole = heads.run == self.chunk
                check(whole, f"operand {label} {heads.layout} is not in runs of 16 bytes")
                check_tensor_map(label, heads)
        except Illegal as error:
            return f"tma: {error}"
        return ""

    def knobs(self) -> tuple[Knob, ...]:
        # Nothing to search where it is illegal; a schedule that asks for it is told why.
        tma = Knob("tma", (0,), range(1, 2)) if self.no_tma else Knob("tma", (0, 1))
        return (*super().knobs(), Knob("copy_warps", COPY_WARPS), tma)

    def defaults(self) -> Iterable[Schedule]:
        """Those of every attention, and behind each of too few warps to keep L2 busy the same with
        more of them."""
        for schedule in super().defaults():
            yield schedule
            spare = max(0, COPYING_WARPS - self._warps(schedule))
            if copy_warps := max(number for number in COPY_WARPS if number <= spare):
                yield {**schedule, "copy_warps": copy_warps}

    @staticmethod
    def _schedule(block_q: int, block_k: int, warps_k: int, stages: int) -> Schedule:
        shared = AttentionSketch._schedule(block_q, block_k, warps_k, stages)
        return {**shared, "copy_warps": 0, "tma": 0}

    def block_work(self, program: KernelProgram) -> BlockWork:
        loop = self._loop_work(program.schedule)
        if program.schedule["tma"]:
            return loop
        run = min(heads.run for heads in (self.q, self.k, self.v)) * self.dtype.itemsize
        copies = -(-loop.fill_bytes // (run * program.block))
        return replace(loop, copies=copies, copy_threads=program.schedule["copy_warps"] * 32)

    def _emit(self, schedule: Schedule) -> KernelProgram:
        threads = self._threads(schedule)
        block_q, warps_k = schedule["block_q"], schedule["warps_k"]
        region, emitter = self._epilogue()
        tma = self._tma(schedule, region) if schedule["tma"] else None
        structs, arguments = self._operand_texts(region) if tma is None else tma.texts
        functor = emitter.functor("Epilogue", "acc")
        ring = self._ring_bytes(schedule) if tma is None else tma.ring_bytes
        shares_at = max(ring, self._staged_bytes(warps_k, block_q))
        row_values_at = shares_at + 2 * warps_k * block_q * 4
        smem = row_values_at + block_q * 4 * len(emitter.row_fields)
        config = ""
        if tma is not None:
            config = f"{tma.config}  static constexpr int BARRIERS_AT = {smem};\n"
            smem += tma.barrier_bytes
        self.check_smem(smem)
        names = ", ".join(region.parameters)
        maps = {} if tma is None else tma.maps
        declared = (f"const __grid_constant__ ptx::TensorMap {each}" for each in maps)
        grid, axis = launched((-(-self.queries // block_q), self.heads, 1))
        source = f"""#include "attention.cuh"
using namespace gtco;

struct Config {{
{self._config(schedule)}
  static constexpr int COPY_WARPS = {schedule["copy_warps"]};
  static constexpr int SHARES_AT = {shares_at}, ROW_VALUES_AT = {row_values_at};
{config}{EXACT if self.exact else ""}{axis}}};

{structs}
{functor}
extern "C" __global__ void __launch_bounds__({threads})
ENTRY_POINT({", ".join((*declared, region.declarations))}) {{
  attention<Config>({arguments}, Epilogue{{{names}}});
}}
"""
        return self.program(
            schedule,
            source,
            grid,
            threads,
            smem,
            (*maps.values(), *(argument for _, argument in region.parameters.values())),
        )

    def _tma(self, schedule: Schedule, region: Region) -> _Tma:
        """How TMA brings the operands.

        Raises:
            Illegal: it cannot.
        """
        check(not self.no_tma, self.no_tma)
        copying = schedule["copy_warps"]
        check(copying == 0, f"{copying} warps that copy, and with TMA one thread asks for all")
        block_q, block_k, stages = (schedule[name] for name in ("block_q", "block_k", "stages"))
        key_chunks = 2 * -(-self.width // (2 * self.chunk))
        value_chunks = pad_to(self.value_width, 16) // self.chunk
        # What the swizzle of 128 bytes repeats after.
        keys_at = pad_to(block_q * _atoms_bytes(key_chunks), 1024)
        values_at = keys_at + pad_to(stages * block_k * _atoms_bytes(key_chunks), 1024)
        box = box_rows(block_k)
        operands = {
            "Q": (self.q, self.queries, block_q, key_chunks),
            "K": (self.k, self.keys, box, key_chunks),
            "V": (self.v, self.keys, box, value_chunks),
        }
        # Floats as they are: the kernel rounds them, or makes two of each.
        dtype = torch.int32 if self.dtype == torch.float32 else self.dtype
        structs = "".join(map_text(label, each[0]) for label, each in operands.items())
        arguments = [f"{label}{{{label.lower()}_map}}" for label in operands]
        return _Tma(
            {
                f"{label.lower()}_map": tensor_map(heads, dtype, rows, box, _atom_bytes(chunks))
                for label, (heads, rows, box, chunks) in operands.items()
            },
            (
                structs + self._mask_text(region),
                ", ".join((*arguments, self._mask_argument(region))),
            ),
            f"""\
  static constexpr bool TMA = true;
  static constexpr int BOX = {box}, KEYS_AT = {keys_at}, VALUES_AT = {values_at};
""",
            values_at + stages * block_k * _atoms_bytes(value_chunks),
            8 * (1 + 4 * stages),
        )


@dataclass(frozen=True)
class _Tma:
    """How TMA brings the operands of a schedule.

    Args:
        maps: by parameter.
        texts: the structs of the operands, and the arguments that make them.
        config: a part of the configuration.
        ring_bytes: of the queries, and of the keys and values in flight.
        barrier_bytes: of the barriers that count them.
    """

    maps: Mapping[str, TensorMapArgument]
    texts: tuple[str, str]
    config: str
    ring_bytes: int
    barrier_bytes: int


def chunk_pitch(chunks: int) -> int:
    """16-byte chunks from row to row of a tile of rows of so many (`ChunkedRows`)."""
    return chunks if chunks & (chunks - 1) == 0 else chunks + 1


def _atom_bytes(chunks: int) -> int:
    """Columns of a box of TMA, and its swizzle, where rows have so many chunks (`AtomRows`)."""
    return next((16 * atom for atom in (2, 4) if chunks <= atom), 128)


def _atoms_bytes(chunks: int) -> int:
    """Of a row of so many chunks, in whole atoms."""
    return pad_to(16 * chunks, _atom_bytes(chunks))
