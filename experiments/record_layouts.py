"""Which element each lane and register holds: the tensor core's layouts, as a GPU has them.

    python -m experiments.record_layouts tests/golden/hopper_layouts.json
    python -m experiments.record_layouts OUT.json --target host

Small kernels on the device library give numbered elements to ldmatrix, mma.sync, wgmma and the bulk
copy's swizzle, and the numbers that come out are the table. Recorded on a Hopper card, it is what
`tests/unit/test_host_layouts.py` holds the host library against.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtco.codegen.program import Argument, KernelProgram, Pointer, TensorMapArgument
from gtco.runtime.host import HostKernel

Run = Callable[[KernelProgram, Mapping[str, Tensor]], None]
Table = dict[str, Any]

WGMMA_COLUMNS = (8, 40, 104, 256)
OF_INTEGERS = (8, 48, 112, 256)
WHOLE = 8
"""Accumulators of wider products are recorded as a digest of their table."""

_ROUNDED = 13
"""Bits of a float's mantissa that tf32 does not have."""
FP8 = torch.float8_e4m3fn
_TYPES = {
    torch.float16: "half_t",
    torch.bfloat16: "bf16_t",
    torch.float32: "float",
    FP8: "e4m3_t",
    torch.int8: "signed char",
}
_NAMES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "tf32",
    FP8: "e4m3",
    torch.int8: "s8",
}

LDMATRIX = """\
  const int lane = threadIdx.x;
  u16* tile = reinterpret_cast<u16*>(smem);  // (32, 8)
  for (int i = 0; i < 8; ++i) tile[lane * 8 + i] = x[lane * 8 + i];
  __syncthreads();
  u32 r[4];
  ptx::LOAD(r, ptx::shared_address(tile + lane * 8));
  for (int i = 0; i < 4; ++i) y[lane * 4 + i] = r[i];
"""
MMA = """\
  const int lane = threadIdx.x, matrix = lane / 8, row = lane % 8;
  WORD* a_tile = reinterpret_cast<WORD*>(smem);  // (16 rows, DEPTH)
  WORD* b_tile = a_tile + 16 * DEPTH;            // (16 columns, DEPTH)
  for (int i = lane; i < 16 * DEPTH; i += 32) {
    a_tile[i] = a[i];
    b_tile[i] = b[i];
  }
  __syncthreads();
  u32 af[4], bf[4];
  const int at = (matrix % 2 * 8 + row) * DEPTH + matrix / 2 * (DEPTH / 2);
  ptx::ldmatrix_x4(af, ptx::shared_address(a_tile + at));
  const int bt = (matrix / 2 * 8 + row) * DEPTH + matrix % 2 * (DEPTH / 2);
  ptx::ldmatrix_x4(bf, ptx::shared_address(b_tile + bt));
  for (int i = 0; i < 4; ++i) {
    registers[lane * 8 + i] = af[i];
    registers[lane * 8 + 4 + i] = bf[i];
  }
  sum_t<ELEMENT> d[2][4] = {};
  for (int n = 0; n < 2; ++n)
    Mma<ELEMENT>::multiply(d[n], af, bf[2 * n], bf[2 * n + 1]);
  for (int i = 0; i < 8; ++i) y[lane * 8 + i] = d[i / 4][i % 4];
"""
COPY = """\
  const int thread = threadIdx.x;
  const u32 barrier = ptx::shared_address(smem + BARRIER_AT);
  if (thread == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (thread == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier, BYTES);
    COPIES
  }
  ptx::mbarrier_wait(barrier, 0);
"""
SWIZZLE = """\
  const u32* tile = reinterpret_cast<const u32*>(smem);  // (64, 32)
  for (int i = thread; i < 2048; i += 128) y[i] = tile[i];
"""
WGMMA = """\
  sum_t<ELEMENT> acc[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) acc[i] = 0;
  const u32 at = ptx::shared_address(smem);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < ROW; k += 32)
    ptx::PRODUCT<ELEMENT, N>::mma(acc, ptx::wgmma_descriptor<ROW>(at, k), B_SIDE, 1);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>(acc);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) y[thread * (N / 2) + i] = acc[i];
"""
SIDES = {
    False: ("Wgmma", "ptx::wgmma_descriptor<ROW>(at, 64 * ROW + k)"),
    True: ("WgmmaOfRows", "ptx::rows_descriptor<8192>(at, 8192 + k / 32 * 16 * 128)"),
}
"""The product and what it is told of B, by whether that lies in rows of K."""


def kernel(
    body: str, parameters: Mapping[str, str | TensorMapArgument], threads: int, smem_bytes: int
) -> KernelProgram:
    """A program of one block; `parameters` are pointers by their C++ type, and tensor maps."""
    declared, passed = [], []
    arguments: list[Argument] = []
    for name, kind in parameters.items():
        if isinstance(kind, str):
            declared.append(f"{kind} {name}")
            arguments.append(Pointer(name))
        else:
            declared.append(f"const __grid_constant__ ptx::TensorMap {name}")
            arguments.append(kind)
        passed.append(name)
    inner = [
        each.replace("__grid_constant__ ptx::TensorMap", "ptx::TensorMap&") for each in declared
    ]
    source = f"""\
#include "wgmma.cuh"
#include "mma.cuh"
#include "vector.cuh"

namespace gtco {{
__device__ __forceinline__ void probe({", ".join(inner)}) {{
  extern __shared__ __align__(1024) unsigned char smem[];
  ptx::griddepcontrol_wait();
{body}}}
}}  // namespace gtco
using namespace gtco;

extern "C" __global__ void __launch_bounds__({threads})
ENTRY_POINT({", ".join(declared)}) {{
  probe({", ".join(passed)});
}}
"""
    return KernelProgram(
        "layout", "layout", {}, source, "sm_90a", (1, 1, 1), threads, smem_bytes, tuple(arguments)
    )


def whole(x: Tensor) -> list[Any]:
    """A table of small numbers that came out as floats."""
    return list(x.int().tolist())


def halves(words: Tensor) -> list[list[int]]:
    """The 16-bit elements of each lane's 32-bit registers, low half first."""
    pairs = torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), dim=-1)
    return list(pairs.flatten(1).tolist())


def numbers(rows: int, columns: int) -> Tensor:
    return torch.arange(rows * columns, dtype=torch.int16).view(rows, columns)


def record_ldmatrix(run: Run) -> Table:
    """Per lane its eight elements; element 8 r + c is column c of the row that lane r names."""
    found: Table = {}
    for name in ("ldmatrix_x4", "ldmatrix_x4_trans"):
        program = kernel(LDMATRIX.replace("LOAD", name), {"x": "const u16*", "y": "u32*"}, 32, 512)
        y = torch.zeros(32, 4, dtype=torch.int32)
        run(program, {"x": numbers(32, 8), "y": y})
        found[name] = halves(y)
    return found


def probes(rows: int, columns: int, k: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Operands A [rows, k] and B [columns, k] whose product tells an accumulator's place.

    `rows` gives 1 + its row, `columns` 1 + its column, and `k` 1 + the k that its row picks.
    """
    a_one, b_one = torch.zeros(rows, k), torch.zeros(columns, k)
    a_one[:, 0] = b_one[:, 0] = 1
    row, column = torch.arange(1.0, rows + 1)[:, None], torch.arange(1.0, columns + 1)[:, None]
    picked = torch.eye(k)[(torch.arange(rows) * 5 + 3) % k]
    ramp = torch.arange(1.0, k + 1).expand(columns, k)
    pairs = {"rows": (a_one * row, b_one), "columns": (a_one, b_one * column), "k": (picked, ramp)}
    return pairs


def product(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """What `multiply` makes of numbers up to 256, digit by digit: 8 bits have those up to 16."""
    (a1, a0), (b1, b0) = ((x // 16, x % 16) for x in (a, b))
    return 16 * (multiply(a1, b0) + multiply(a0, b1)) + multiply(a0, b0)


def record_mma(run: Run, dtype: torch.dtype) -> Table:
    """Per lane: elements of A (k of row m is m times all k, and k) and of two B likewise, places of
    the accumulators."""
    word, depth = f"u{8 * dtype.itemsize}", 32 // dtype.itemsize
    pointer = f"const {word}*"
    parameters = {"a": pointer, "b": pointer, "registers": "u32*", "y": "float*"}
    body = MMA.replace("WORD", word).replace("DEPTH", str(depth))
    program = kernel(body.replace("ELEMENT", _TYPES[dtype]), parameters, 32, 1024)
    found: Table = {}

    def launch(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        registers, y = torch.zeros(32, 8, dtype=torch.int32), torch.zeros(32, 8)
        run(program, {"a": a, "b": b, "registers": registers, "y": y})
        return registers, y

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return launch(a.to(dtype).contiguous(), b.to(dtype).contiguous())[1]

    if dtype.itemsize > 1:  # else ldmatrix brings two together
        numbered = numbers(16, depth)
        if dtype == torch.float32:
            numbered = numbered.int()
        registers, _ = launch(numbered, numbered)
        for name, part in (("a", registers[:, :4]), ("b", registers[:, 4:])):
            found[name] = part.tolist() if dtype == torch.float32 else halves(part)
    for name, (a, b) in probes(16, 16, depth).items():
        found[name] = whole(product(multiply, a, b))
    return found


def tensor_map(value: str, rows: int, dtype: torch.dtype, row: int = 128) -> TensorMapArgument:
    """Rows of so many bytes, as products take them."""
    columns = row // dtype.itemsize
    sizes, box = (columns, rows, 1), (columns, rows, 1)
    strides = (columns, rows * columns)
    return TensorMapArgument(value, 0, dtype, sizes, strides, box, swizzle_bytes=row)


def copies(body: str, loads: Mapping[str, tuple[int, int]], row: int = 128) -> tuple[str, int]:
    """The body behind bulk copies, `(offset, rows)` by map name, and its shared memory."""
    total = sum(rows * row for _, rows in loads.values())
    lines = "\n    ".join(
        f"ptx::cp_async_bulk_tensor(ptx::shared_address(smem + {at}), {name}, 0, 0, 0, barrier);"
        for name, (at, _) in loads.items()
    )
    head = COPY.replace("BARRIER_AT", str(total)).replace("BYTES", str(total))
    return head.replace("COPIES", lines) + body, total + 16


def record_swizzle(run: Run, dtype: torch.dtype) -> list[int]:
    """For each 16 bytes of a tile of 64 rows, which 16 bytes of the tensor they hold."""
    body, smem_bytes = copies(SWIZZLE, {"x": (0, 64)})
    program = kernel(body, {"x": tensor_map("x", 64, dtype), "y": "u32*"}, 128, smem_bytes)
    y = torch.zeros(2048, dtype=torch.int32)
    words = torch.arange(2048, dtype=torch.int32) << _ROUNDED  # as floats, they are tf32
    run(program, {"x": words.view(dtype).view(64, -1), "y": y})
    y >>= _ROUNDED
    if not torch.equal(y.view(-1, 4) - y.view(-1, 4)[:, :1], torch.arange(4).expand(512, 4)):
        raise ValueError("the swizzle moves something smaller than 16 bytes")
    return list((y[::4] // 4).tolist())


def record_wgmma(
    run: Run, dtype: torch.dtype, columns: int, *, rows_of_k: bool = False, row: int = 128
) -> Table:
    """Per thread the places of its accumulators; one digest each for wide products. With
    `rows_of_k`, B lies in squares of 64 rows of K and 64 columns; else `row` are the bytes of K
    that lie side by side."""
    body, smem_bytes = copies(WGMMA, {"p": (0, 64), "q": (64 * row, columns)}, row)
    product_of, side = SIDES[rows_of_k]
    body = body.replace("PRODUCT", product_of).replace("B_SIDE", side).replace("ROW", str(row))
    body = body.replace("ELEMENT", _TYPES[dtype]).replace("N", str(columns))
    maps = {
        "p": tensor_map("a", 64, dtype, row),
        "q": tensor_map("b", columns, dtype, row),
    }
    program = kernel(body, {**maps, "y": "float*"}, 128, smem_bytes)
    found: Table = {}

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        y = torch.zeros(128, columns // 2)
        if rows_of_k:
            b = b.T.reshape(64, columns // 64, 64).transpose(0, 1).reshape(columns, 64)
        run(program, {"a": a.to(dtype).contiguous(), "b": b.to(dtype).contiguous(), "y": y})
        return y

    for name, (a, b) in probes(64, columns, row // dtype.itemsize).items():
        table = whole(product(multiply, a, b))
        text = json.dumps(table, separators=(",", ":"))
        found[name] = table if columns == WHOLE else hashlib.sha256(text.encode()).hexdigest()
    return found


def record(run: Run) -> Table:
    """Every layout, by instruction."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    return {
        **record_ldmatrix(run),
        "mma_m16n8k16": {_NAMES[each]: record_mma(run, each) for each in (half, brain)},
        "mma_m16n8k8": {_NAMES[single]: record_mma(run, single)},
        "mma_m16n8k32": {_NAMES[each]: record_mma(run, each) for each in (FP8, torch.int8)},
        "swizzle_128": {_NAMES[each]: record_swizzle(run, each) for each in (half, single)},
        "wgmma": {
            _NAMES[each]: {str(n): record_wgmma(run, each, n) for n in WGMMA_COLUMNS}
            for each in (half, brain, single)
        },
        "wgmma_rows_of_k": {
            _NAMES[each]: {str(n): record_wgmma(run, each, n, rows_of_k=True) for n in (64, 192)}
            for each in (half, brain)
        },
        "wgmma_narrow_rows": {
            str(row): {str(n): record_wgmma(run, half, n, row=row) for n in (8, 32, 128)}
            for row in (32, 64)
        },
        "wgmma_e4m3": {str(n): record_wgmma(run, FP8, n) for n in WGMMA_COLUMNS},
        "wgmma_s8": {str(n): record_wgmma(run, torch.int8, n) for n in OF_INTEGERS},
    }


def run_on_host(program: KernelProgram, tensors: Mapping[str, Tensor]) -> None:
    """Run a probe on the CPU; its outputs are written in place."""
    outputs = [name for name in tensors if name in ("y", "registers")]
    HostKernel(program)(program, tensors, constants=(), outputs=outputs)


def run_on_gpu(program: KernelProgram, tensors: Mapping[str, Tensor]) -> None:
    """Run a probe on the current GPU; its outputs are written in place.

    Raises:
        CompileError: NVRTC refuses the probe.
        DriverError: the driver refuses it.
    """
    from gtco.runtime.driver import BoundLaunch
    from gtco.runtime.run import load_program

    device = torch.cuda.current_device()
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    torch.cuda.synchronize()
    launch = BoundLaunch(load_program(program, device), program, there, dependent=False)
    launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    for name, tensor in tensors.items():
        tensor.copy_(there[name])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the JSON file to write")
    parser.add_argument("--target", choices=("gpu", "host"), default="gpu")
    options = parser.parse_args()
    if options.target == "gpu" and torch.cuda.get_device_capability() != (9, 0):
        parser.error("wgmma needs a GPU of compute capability 9.0")
    host = options.target == "host"
    table = {
        "device": "host" if host else torch.cuda.get_device_name(),
        **record(run_on_host if host else run_on_gpu),
    }
    text = json.dumps(table, separators=(",", ":"))
    options.out.write_text(text + "\n")
    print(f"{options.out}: {len(text)} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
