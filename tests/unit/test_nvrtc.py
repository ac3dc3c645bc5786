"""Cubins without a GPU, the cache under faults, compile workers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gtco.runtime import nvrtc
from gtco.runtime.compile_pool import CompileJob, _Worker, compile_many
from gtco.runtime.cubin import CompiledKernel, CubinCache
from gtco.runtime.nvrtc import CompileError, cache_key, compile_kernel, compile_uncached
from gtco.target import TARGETS
from tests.processes import environment

SOURCE = """#include "types.cuh"
extern "C" __global__ void reverse(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[63 - threadIdx.x];
}
"""
BROKEN = 'extern "C" __global__ void reverse(float* x) { x[0] = nothing; }'
KEY = cache_key(SOURCE, "reverse", "sm_80")


@pytest.fixture
def cache(tmp_path: Path) -> CubinCache:
    return CubinCache(tmp_path / "cubins")


@pytest.mark.parametrize("arch", TARGETS)
def test_a_cubin_says_what_it_needs(arch: str) -> None:
    compiled = compile_uncached(SOURCE, "reverse", arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.registers > 0
    assert compiled.smem_bytes == 256
    assert compiled.spill_bytes == compiled.local_bytes == 0


def test_a_stack_frame_is_seen() -> None:
    code = """extern "C" __global__ void k(float* x, int n) {
      float a[512];
      for (int i = 0; i < 512; ++i) a[i] = x[i * n];
      x[0] = a[n];
    }"""
    assert compile_uncached(code, "k", "sm_80").local_bytes >= 128


def test_an_error_names_the_kernel_and_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: CubinCache
) -> None:
    monkeypatch.setenv("GTCO_DUMP", str(tmp_path))
    with pytest.raises(CompileError) as caught:
        compile_kernel(BROKEN, "reverse", "sm_90a", cache)
    message = str(caught.value)
    assert "kernel reverse does not compile for sm_90a" in message
    assert "reverse.cu(1): error: identifier" in message
    assert str(tmp_path / "reverse.cu") in message
    assert (tmp_path / "reverse.cu").read_text() == BROKEN
    assert compile_kernel(SOURCE, "reverse", "sm_90a", cache).registers > 0


def test_the_key_names_all_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        KEY,
        cache_key(SOURCE + " ", "reverse", "sm_80"),
        cache_key(SOURCE, "other", "sm_80"),
        cache_key(SOURCE, "reverse", "sm_86"),
    }
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "99.0")
    keys.add(cache_key(SOURCE, "reverse", "sm_80"))
    monkeypatch.setattr(nvrtc, "_headers_digest", lambda: "other headers")
    keys.add(cache_key(SOURCE, "reverse", "sm_80"))
    assert len(keys) == 6


# -- the cache -----------------------------------------------------------------------------------


def forbid_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: str, name: str, arch: str) -> CompiledKernel:
        raise AssertionError(f"compiled {name} again")

    monkeypatch.setattr(nvrtc, "compile_uncached", refuse)


def test_a_hit_compiles_nothing(cache: CubinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_kernel(SOURCE, "reverse", "sm_80", cache)
    assert cache.folder is not None
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert [path.name for path in cache.folder.iterdir()] == [f"{KEY}.cubin"]
    forbid_compiling(monkeypatch)
    assert compile_kernel(SOURCE, "reverse", "sm_80", cache) == first
    with pytest.raises(AssertionError, match="compiled reverse again"):
        compile_kernel(SOURCE + " ", "reverse", "sm_80", cache)


@pytest.mark.parametrize("damage", ["torn", "flipped", "header", "empty", "rubbish"])
def test_a_damaged_entry_is_reported_and_built_again(
    cache: CubinCache, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = compile_kernel(SOURCE, "reverse", "sm_80", cache)
    assert cache.folder is not None
    path = cache.folder / f"{KEY}.cubin"
    data = bytearray(path.read_bytes())
    if damage == "torn":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[-100] ^= 1
    elif damage == "header":
        data[80] ^= 1
    elif damage == "empty":
        data = bytearray()
    else:
        data = bytearray(b"\xff\n" * 50)
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "gtco.codegen"):
        assert compile_kernel(SOURCE, "reverse", "sm_80", cache).cubin == first.cubin
    assert "dropped the damaged cubin" in caplog.text
    caplog.clear()
    assert cache.read(KEY) is not None
    assert not caplog.text


def test_a_read_only_cache_is_read_and_left_alone(
    cache: CubinCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = compile_kernel(SOURCE, "reverse", "sm_80", cache)
    assert cache.folder is not None
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    reader = CubinCache(cache.folder)
    assert compile_kernel(SOURCE, "reverse", "sm_80", reader) == first
    assert not caplog.text
    compile_kernel(SOURCE + " ", "reverse", "sm_80", reader)
    compile_kernel(SOURCE + "  ", "reverse", "sm_80", reader)
    assert caplog.text.count("is read-only") == 1
    assert len(list(cache.folder.iterdir())) == 1


def test_an_entry_without_a_key_is_dropped_in_words(
    cache: CubinCache, caplog: pytest.LogCaptureFixture
) -> None:
    compile_kernel(SOURCE, "reverse", "sm_80", cache)
    assert cache.folder is not None
    path = cache.folder / f"{KEY}.cubin"
    line, _, cubin = path.read_bytes().partition(b"\n")
    header = json.loads(line.partition(b" ")[2])
    del header["key"]
    body = json.dumps(header).encode() + b"\n"
    digest = hashlib.sha256(body[:-1] + cubin).hexdigest().encode()
    path.write_bytes(digest + b" " + body + cubin)
    with caplog.at_level(logging.WARNING, "gtco.codegen"):
        assert cache.read(KEY) is None
    assert "it is the entry of another kernel" in caplog.text


def test_verify_drops_what_is_damaged_and_clear_drops_all(cache: CubinCache) -> None:
    for index in range(3):
        compile_kernel(SOURCE + " " * index, "reverse", "sm_80", cache)
    assert cache.folder is not None
    good, bad, cut = cache.entries()
    assert cache.verify() == []
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    cut.write_bytes(cut.read_bytes()[:50])
    assert cache.verify() == [bad, cut]
    assert cache.entries() == [good] and cache.verify() == []
    left = cache.folder / "killed.tmp"
    left.write_bytes(bytes(100))
    expected = 100 + good.stat().st_size
    assert cache.clear() == expected
    assert list(cache.folder.iterdir()) == []


def test_a_full_disk_costs_only_the_cache(
    cache: CubinCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert compile_kernel(SOURCE, "reverse", "sm_80", cache).registers > 0
    assert "No space left" in caplog.text
    assert cache.folder is not None
    assert list(cache.folder.iterdir()) == []


def test_a_folder_that_others_write_to_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    cache = CubinCache(folder)
    assert cache.folder is None
    assert "can be written by other users" in caplog.text
    assert compile_kernel(SOURCE, "reverse", "sm_80", cache).registers > 0
    assert list(folder.iterdir()) == []


def test_another_users_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert CubinCache(tmp_path).folder is None
    assert "belongs to another user" in caplog.text


def test_two_processes_fill_one_cold_cache(tmp_path: Path) -> None:
    folder = tmp_path / "cubins"
    script = f"""
from pathlib import Path
from gtco.runtime.cubin import CubinCache
from gtco.runtime.nvrtc import compile_kernel
cache = CubinCache(Path({str(folder)!r}))
for index in range(4):
    code = {SOURCE!r} + " " * index
    assert compile_kernel(code, "reverse", "sm_80", cache).registers > 0
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=environment()) for _ in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    cache = CubinCache(folder)
    names = sorted(path.name for path in folder.iterdir())
    keys = sorted(cache_key(SOURCE + " " * index, "reverse", "sm_80") for index in range(4))
    assert names == [f"{key}.cubin" for key in keys]
    assert all(cache.read(key) is not None for key in keys)


# -- workers -------------------------------------------------------------------------------------


def test_many_come_back_in_order_with_errors_as_values(cache: CubinCache) -> None:
    jobs = [
        CompileJob(SOURCE, "reverse", "sm_80"),
        CompileJob(BROKEN, "reverse", "sm_80"),
        CompileJob(SOURCE, "reverse", "sm_90a"),
        CompileJob(SOURCE, "reverse", "sm_80"),
    ]
    results = compile_many(jobs, workers=2, cache=cache)
    assert isinstance(results[1], CompileError)
    assert "identifier" in str(results[1])
    good = [result for result in results if isinstance(result, CompiledKernel)]
    assert [result.arch for result in good] == ["sm_80", "sm_90a", "sm_80"]
    assert cache.read(KEY) == good[0]


def test_a_worker_that_dies_is_an_error_and_is_replaced() -> None:
    worker = _Worker()
    job = CompileJob(SOURCE, "reverse", "sm_80")
    try:
        assert isinstance(worker.compile(job), CompiledKernel)
        assert worker._child is not None
        worker._child.process.kill()
        worker._child.process.wait()
        result = worker.compile(job)
        assert isinstance(result, CompileError)
        assert "died (-9)" in str(result)
        assert isinstance(worker.compile(job), CompiledKernel)
    finally:
        worker.kill()


def test_a_worker_does_not_import_torch() -> None:
    code = "import sys, gtco.runtime.compile_pool; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0
