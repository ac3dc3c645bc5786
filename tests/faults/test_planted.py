"""Mistakes planted in small kernels: the host build names each, and passes the right twin."""

from __future__ import annotations

import dataclasses
import re

import pytest

from gtco.runtime.host import HostError
from tests.faults.kernels import X_MAP, Planted, run

pytestmark = pytest.mark.compiler

SEEDS = (0, 1)

WAIT = "  ptx::griddepcontrol_wait();\n"
NEIGHBOUR = """\
  tile[thread] = x[thread];
  __syncthreads();
  y[thread] = tile[(thread + 32) % 64];  // here
"""
ONE_COPY = """\
  const u32 barrier = ptx::shared_address(smem + 16384), to = ptx::shared_address(smem);
  if (thread == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (thread == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier, 8192);
    ptx::cp_async_bulk_tensor(to, map, 0, 0, 0, barrier);
  }
"""
COPIED = """\
  ptx::mbarrier_wait(barrier, 0);  // here
  y[thread] = tile[thread];
"""
TWO_COPIES = (
    ONE_COPY
    + """\
  ptx::mbarrier_wait(barrier, 0);
  y[thread] = tile[thread % 4];
  __syncthreads();  // the slot is free
  if (thread == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier, 8192);
    ptx::cp_async_bulk_tensor(to, map, 0, 8, 0, barrier);
  }
  ptx::mbarrier_wait(barrier, 1);
  y[64 + thread] = tile[thread % 4];
"""
)
PRODUCT = """\
  float acc[4] = {};
  for (int i = thread; i < 2304; i += 128) tile[i] = w[i % 1024];
  ptx::fence_proxy_async();
  __syncthreads();
  const u32 at = ptx::shared_address(smem);
  ptx::wgmma_fence();
  const u64 a = ptx::wgmma_descriptor(at, 0), b = ptx::wgmma_descriptor(at, 8192);
  ptx::Wgmma<float, 8>::mma(acc, a, b, 1);  // here
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>(acc);
  for (int i = 0; i < 4; ++i) y[thread * 4 + i] = acc[i];  // here
"""
PRODUCT_OF_REGISTERS = """\
  float acc[8] = {};
  for (int i = thread; i < 2304; i += 128) tile[i] = w[i % 1024];
  ptx::fence_proxy_async();
  __syncthreads();
  const u64 b = ptx::wgmma_descriptor(ptx::shared_address(smem), 0);
  u32 a[4];
  for (int i = 0; i < 4; ++i) a[i] = thread + i;
  ptx::wgmma_fence();
  ptx::WgmmaFromRegisters<half_t, 16>::mma(acc, a, b, 1);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>(acc);
  a[0] = thread;  // here
  ptx::wgmma_fence();  // the second
  ptx::WgmmaFromRegisters<half_t, 16>::mma(acc, a, b, 1);  // there
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>(acc);
  for (int i = 0; i < 4; ++i) y[thread * 4 + i] = acc[i] + acc[i + 4];
"""
SEND = """\
  const u32 inbox = ptx::shared_address(smem + 8192), full = ptx::shared_address(smem + 16384);
  if (thread == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(full, 256);
  }
  ptx::barrier_cluster_arrive_relaxed();
  tile[thread] = x[thread] + block;
  ptx::fence_proxy_async();
  __syncthreads();
  ptx::barrier_cluster_wait();
  const u32 to = ptx::mapa(inbox, 1 - block), from = ptx::shared_address(tile);
  const u32 there = ptx::mapa(full, 1 - block);
  if (thread == 0) ptx::cp_async_bulk_to_cluster(to, from, 256, there);  // here
"""
STORE = """\
  const u32 inbox = ptx::shared_address(smem + 8192), full = ptx::shared_address(smem + 16384);
  if (thread == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(full, 512);
  }
  ptx::barrier_cluster_arrive_relaxed();
  __syncthreads();
  ptx::barrier_cluster_wait();
  if (block == 1) {
    ptx::st_async(ptx::mapa(inbox, 0) + 8 * thread, x[thread], 1.0f, ptx::mapa(full, 0));  // here
    return;
  }
  ptx::mbarrier_wait(full, 0);
  y[thread] = tile[2048 + 2 * thread + 1];  // there
"""
RECEIVE = """\
  ptx::mbarrier_wait(full, 0);
  y[block * 64 + thread] = tile[2048 + thread];
  ptx::barrier_cluster_arrive_relaxed();
  ptx::barrier_cluster_wait();
"""

PLANTED = {
    "a load outside a tensor": Planted(
        WAIT + "  y[thread] = x[thread + 1984];  // here\n", "1984", "1985",
        r"reads byte 8192 of %x, which has 8192",
    ),
    "a store outside a tensor": Planted(
        WAIT + "  y[2047 - thread] = x[thread];  // here\n", "2047 -", "62 -",
        r"writes byte -4 of %y",
    ),
    "a vector that crosses a tensor's end": Planted(
        WAIT + "  y[thread] = load<4>(x + 4 * (thread + 448))[0];  // here\n", "448", "449",
        r"reads byte 8192 of %x",
    ),
    "a vector that is not aligned": Planted(
        WAIT + "  y[thread] = load<4>(x + 4 * thread)[0];  // here\n",
        "load<4>(x + 4 *", "load<4>(x + 1 *", r"\d+ bytes that is not aligned",
    ),
    "cp.async outside a tensor": Planted(
        WAIT + """\
  ptx::cp_async<16>(ptx::shared_address(tile + 4 * thread), x + 4 * (thread + 448), true);  // here
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  y[thread] = tile[4 * thread];
""", "448", "449", r"reads byte 8192 of %x",
    ),
    "a tensor map larger than its tensor": Planted(
        WAIT + ONE_COPY + "  ptx::mbarrier_wait(barrier, 0);\n  y[thread] = tile[thread];\n",
        "map, 0, 0, 0", "map, 0, 1, 0", r"reads byte 8192 of %x",
        map=dataclasses.replace(X_MAP, sizes=(32, 65, 1)),
    ),
    "a prefetch outside a tensor": Planted(
        "  ptx::cp_async_bulk_prefetch(w + 1984, 256);  // here\n" + WAIT, "1984", "1988",
        r"reads byte 7952 of %w, which has 8192",
    ),
    "a prefetch of what an earlier kernel writes": Planted(
        "  ptx::cp_async_bulk_prefetch(w, 256);  // here\n" + WAIT, "(w", "(x",
        r"reads %x, which is no constant, before griddepcontrol.wait",
    ),
    "a prefetch that is not aligned": Planted(
        "  ptx::cp_async_bulk_prefetch(w, 256);  // here\n" + WAIT, "w, 256", "w + 1, 256",
        "a prefetch from an address or of a size that is no multiple of 16",
    ),
    "a store to an input": Planted(
        WAIT + "  y[thread] = x[thread];  // here\n",
        "y[thread] = x", "const_cast<float*>(x)[thread] = w", "writes %x, which is no output",
    ),
    "shared memory that nobody wrote": Planted(
        WAIT + NEIGHBOUR, "tile[thread] = x[thread]", "if (thread > 0) tile[thread] = x[thread]",
        r"reads shared memory at byte 0: nobody wrote it",
    ),
    "no barrier between a write and another thread's read": Planted(
        WAIT + NEIGHBOUR, "  __syncthreads();\n", "",
        r"no barrier orders it after the write by block \(0, 0, 0\), thread \d+ at|nobody wrote it",
    ),
    "no barrier between a read and another thread's write": Planted(
        WAIT + NEIGHBOUR + "  __syncthreads();\n  tile[thread] = 0.0f;  // here\n",
        "// here\n  __syncthreads();\n", "\n",
        r"no barrier orders it after the read by block|no barrier orders it after the write by",
    ),
    "a warp's barrier between two warps": Planted(
        WAIT + NEIGHBOUR, "  __syncthreads();", "  __syncwarp();",
        r"no barrier orders it after the write by block|nobody wrote it",
    ),
    "a shuffle in place of a warp's barrier": Planted(
        WAIT + """\
  tile[thread] = x[thread];
  __syncwarp();
  const float other = __shfl_xor_sync(~0u, x[thread], 1);
  y[thread] = tile[thread ^ 1] + other;  // here
""", "  __syncwarp();\n", "", "no barrier orders it after the write by",
    ),
    "no wait for cp.async": Planted(
        WAIT + """\
  tile[thread] = 0.0f;
  ptx::cp_async<4>(ptx::shared_address(tile + thread), x + thread, true);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  y[thread] = tile[thread];  // here
""", "  ptx::cp_async_wait<0>();\n", "",
        "reads shared memory at byte .* an asynchronous copy that is under way, started at",
    ),
    "a wait for cp.async and no barrier": Planted(
        WAIT + """\
  ptx::cp_async<4>(ptx::shared_address(tile + thread), x + thread, true);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  y[thread] = tile[(thread + 1) % 64];  // here
""", "  __syncthreads();\n", "",
        "asynchronous copy that is under way|nobody wrote|orders it after the write",
    ),
    "no wait for a bulk copy": Planted(
        WAIT + ONE_COPY + """\
  ptx::mbarrier_wait(barrier, 0);
  y[thread] = tile[thread];  // here
""", "  ptx::mbarrier_wait(barrier, 0);\n", "",
        "asynchronous copy that is under way|nobody wrote|a bulk copy into it is under way",
    ),
    "a slot filled again while it is read": Planted(
        WAIT + TWO_COPIES, "  __syncthreads();  // the slot is free\n", "",
        "orders it after the read by block|an asynchronous copy that is under way",
    ),
    "no fence.proxy.async": Planted(
        WAIT + PRODUCT, "  ptx::fence_proxy_async();\n", "",
        "no fence.proxy.async comes after the write by block", threads=128,
    ),
    "accumulators read before wgmma.wait_group": Planted(
        WAIT + PRODUCT, "  ptx::wgmma_wait_group<0>(acc);\n", "",
        "touches registers of a product before wgmma.wait_group", threads=128,
    ),
    "no wgmma.fence": Planted(
        WAIT + PRODUCT.replace("acc[i];  // here", "acc[i];"), "  ptx::wgmma_fence();\n", "",
        "no wgmma.fence comes between an access to registers and the wgmma", threads=128,
    ),
    "accumulators that are set after wgmma.fence": Planted(
        WAIT + PRODUCT.replace("acc[i];  // here", "acc[i];"),
        "  ptx::wgmma_fence();\n", "  ptx::wgmma_fence();\n  acc[thread % 4] = 0.0f;\n",
        "no wgmma.fence comes between an access to registers and the wgmma", threads=128,
    ),
    "registers changed while a product reads them": Planted(
        WAIT + PRODUCT_OF_REGISTERS, "<0>(acc);\n  a[0] = thread;", "<1>();\n  a[0] = thread;",
        "touches registers of a product before wgmma.wait_group", threads=128,
    ),
    "no wgmma.fence after the registers that a product reads": Planted(
        WAIT + PRODUCT_OF_REGISTERS.replace("  // here", "").replace("  // there", "  // here"),
        "  ptx::wgmma_fence();  // the second\n", "",
        "no wgmma.fence comes between an access to registers and the wgmma", threads=128,
    ),
    "too few bytes expected": Planted(
        WAIT + ONE_COPY + "  ptx::mbarrier_wait(barrier, 0);\n  y[thread] = tile[thread];\n",
        "8192);", "4096);", "lacks -4096 bytes|is under way|nobody wrote",
    ),
    "too many bytes expected": Planted(
        WAIT + ONE_COPY + COPIED,
        "8192);", "8196);", "waits for ever for a phase of an mbarrier.* lacks 4 bytes",
    ),
    "a reused parity": Planted(
        WAIT + TWO_COPIES, "ptx::mbarrier_wait(barrier, 1);", "ptx::mbarrier_wait(barrier, 0);",
        "an asynchronous copy that is under way|orders it after the (read|write) by",
    ),
    "a peer that ends before its shared memory is read": Planted(
        WAIT + SEND + RECEIVE,
        "thread];\n  ptx::barrier_cluster_arrive_relaxed();\n  ptx::barrier_cluster_wait();\n",
        "thread];\n",
        "its block ends, and no barrier orders that after the access|its block has ended|"
        "its block ended before what it sent had left",
        blocks=2, cluster=2,
    ),
    "a copy to a block that may not have begun": Planted(
        WAIT + SEND + RECEIVE,
        "  __syncthreads();\n  ptx::barrier_cluster_wait();\n", "  __syncthreads();\n",
        "an mbarrier that nobody initialised|no barrier orders that after its mbarrier.init",
        blocks=2, cluster=2,
    ),
    "no fence.proxy.async before a copy from shared memory": Planted(
        WAIT + SEND + RECEIVE, "  ptx::fence_proxy_async();\n", "",
        "no fence.proxy.async comes after the write by block", blocks=2, cluster=2,
    ),
    "no barrier before a copy of what others wrote": Planted(
        WAIT + SEND + RECEIVE, "  __syncthreads();\n", "",
        "nobody wrote|no barrier orders it after the write by", blocks=2, cluster=2,
    ),
    "no wait for a peer's copy": Planted(
        WAIT + SEND + RECEIVE.replace("+ thread];", "+ thread];  // here"),
        "  ptx::mbarrier_wait(full, 0);\n", "",
        "asynchronous copy that is under way|nobody wrote", blocks=2, cluster=2,
    ),
    "too many bytes expected of a peer": Planted(
        WAIT + SEND.replace("  // here", "") + RECEIVE, "tx(full, 256)", "tx(full, 272)",
        "waits for ever for a phase of an mbarrier.* lacks 16 bytes", blocks=2, cluster=2,
    ),
    "a copy to a peer of no multiple of 16 bytes": Planted(
        WAIT + SEND + RECEIVE, "from, 256", "from, 252",
        "of a size that is no multiple of 16", blocks=2, cluster=2,
    ),
    "a copy outside a peer's shared memory": Planted(
        WAIT + SEND + RECEIVE, "mapa(inbox,", "mapa(inbox + 24400,",
        "outside the 32768 bytes of a block", blocks=2, cluster=2,
    ),
    "no wait for a peer's stores": Planted(
        WAIT + STORE.replace("  // here", "").replace("// there", "// here"),
        "  ptx::mbarrier_wait(full, 0);\n", "",
        "asynchronous copy that is under way|nobody wrote", blocks=2, cluster=2,
    ),
    "too many bytes expected of a peer's stores": Planted(
        WAIT + STORE.replace("  // here", ""), "tx(full, 512)", "tx(full, 520)",
        "waits for ever for a phase of an mbarrier.* lacks 8 bytes", blocks=2, cluster=2,
    ),
    "a store to a block that may not have begun": Planted(
        WAIT + STORE,
        "  __syncthreads();\n  ptx::barrier_cluster_wait();\n", "  __syncthreads();\n",
        "an mbarrier that nobody initialised|no barrier orders that after its mbarrier.init",
        blocks=2, cluster=2,
    ),
    "a store to a peer that is not aligned": Planted(
        WAIT + STORE, "mapa(inbox, 0)", "mapa(inbox + 4, 0)",
        "st.async to an address that is not aligned", blocks=2, cluster=2,
    ),
    "a store outside a peer's shared memory": Planted(
        WAIT + STORE, "mapa(inbox, 0)", "mapa(inbox + 24400, 0)",
        "outside the 32768 bytes of a block", blocks=2, cluster=2,
    ),
    "a store that counts on another block's mbarrier": Planted(
        WAIT + STORE, "mapa(full, 0)", "mapa(full, 1)",
        "st.async to one block and an mbarrier of another", blocks=2, cluster=2,
    ),
    "a block that ends before a peer's stores have landed": Planted(
        WAIT + STORE.replace("  y[thread] = tile[2048 + 2 * thread + 1];  // there\n", "").replace(
            "  // here", ""
        ),
        "  ptx::mbarrier_wait(full, 0);\n", "",
        "its block ends|its block has ended|of a block that has ended", blocks=2, cluster=2,
    ),
    "a relaxed arrival that publishes nothing": Planted(
        WAIT + """\
  tile[thread] = x[thread];
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  y[block * 64 + thread] = tile[(thread + 32) % 64];  // here
""", "barrier_cluster_arrive();", "barrier_cluster_arrive_relaxed();",
        "no barrier orders it after the write by block", blocks=2, cluster=2,
    ),
    "an mbarrier that is used before everybody knows of it": Planted(
        WAIT + ONE_COPY + COPIED,
        "  __syncthreads();\n", "",
        "an mbarrier that nobody initialised|no barrier orders that after its mbarrier.init",
    ),
    "an input before the dependent-launch wait": Planted(
        f"  const float mine = w[thread];\n{WAIT}  y[thread] = mine + x[thread];\n",
        "mine = w[", "mine = x[", r"reads %x, which is no constant, before griddepcontrol.wait",
    ),
    "an output before the dependent-launch wait": Planted(
        f"{WAIT}  y[thread] = w[thread];  // here\n  ptx::griddepcontrol_wait();\n",
        WAIT + "  y", "  y", r"writes %y, which is no constant, before griddepcontrol.wait",
    ),
    "a bulk copy of an input before the dependent-launch wait": Planted(
        WAIT + ONE_COPY + "  ptx::mbarrier_wait(barrier, 0);\n  ptx::griddepcontrol_wait();\n",
        WAIT + "  const", "  const", r"reads %x, which is no constant, before griddepcontrol.wait",
    ),
    "a path without the dependent-launch wait": Planted(
        WAIT, WAIT, "  if (thread > 0) ptx::griddepcontrol_wait();\n",
        "thread 0.*ends without griddepcontrol.wait",
    ),
    "a barrier that some threads do not reach": Planted(
        WAIT + "  __syncthreads();  // here\n", "__sync", "if (thread < 40) __sync",
        "for ever for the other threads at a block barrier; 24 threads of its block have ended",
    ),
    "two barriers for the lanes of a warp": Planted(
        WAIT + "  if (thread % 2 == 0) y[thread] = 1.0f;\n  __syncthreads();\n",
        "y[thread] = 1.0f;\n", "__syncthreads();\n  else\n",
        r"is at the barrier of line \d+ while other threads are at that of line \d+",
    ),
    "lanes that do not take part in a shuffle": Planted(
        WAIT + "  const float a = x[thread];\n  y[thread] = __shfl_xor_sync(~0u, a, 1);  // here\n",
        "y[thread] = __shfl", "if (thread % 32 < 16) y[thread] = __shfl",
        "waits for ever for shfl.sync",
    ),
    "a shuffle whose mask lacks lanes": Planted(
        WAIT + "  const float a = x[thread];\n  y[thread] = __shfl_xor_sync(~0u, a, 1);  // here\n",
        "(~0u, a", "(0xffffu, a", "shfl.sync whose mask lacks lanes",
    ),
    "two threads that store one output": Planted(
        WAIT + "  y[thread] = x[thread];  // here\n", "y[thread]", "y[thread % 63]",
        r"byte 0 of %y: no barrier orders it after the write by block \(0, 0, 0\), thread \d+",
    ),
    "two blocks that store one output": Planted(
        WAIT + "  y[block * 64 + thread] = x[thread];  // here\n", "block * 64", "block * 63",
        r"byte \d+ of %y: no barrier orders it after the write by a block of another cluster",
        blocks=2,
    ),
    "a thread that stores two values to one output": Planted(
        WAIT + "  for (int i = 0; i < 8; ++i) y[thread * 8 + i] = x[thread * 8 + i];  // here\n",
        "y[thread * 8 + i]", "y[thread]",
        r"writes byte \d+ of %y again, and another value",
    ),
    "a thread whose last store is another value": Planted(
        WAIT + "  y[thread] = x[thread];\n  __syncthreads();\n  y[thread] = x[thread];  // here\n",
        "  y[thread] = x[thread];  // here", "  y[thread] = x[thread] + 1;  // here",
        r"writes byte \d+ of %y again, and another value",
    ),
    "an output read that nobody wrote": Planted(
        WAIT + "  y[thread] = 1.0f;\n  y[64 + thread] = y[thread];  // here\n",
        "  y[thread] = 1.0f;\n", "", "of %y: nobody wrote it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PLANTED)
def test_the_right_twin_passes(name: str, seed: int) -> None:
    run(PLANTED[name].right, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PLANTED)
def test_the_mistake_is_named(name: str, seed: int) -> None:
    planted = PLANTED[name]
    program = planted.wrong
    with pytest.raises(HostError, match=planted.message) as caught:
        run(program, seed)
    message = str(caught.value)
    where = rf"kernel {program.name}, block \(\d+, 0, 0\), thread \d+, .*{program.name}\.cu:\d+"
    assert re.match(where, message), message
    lines = program.code.splitlines()
    here = [f".cu:{i}" for i, line in enumerate(lines, 1) if line.endswith("// here")]
    assert not here or any(re.search(rf"\{each}\b", message) for each in here), message
