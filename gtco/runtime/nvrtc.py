"""CUDA C++ to cubins with NVRTC, on a machine with or without a GPU, cached by content.

This module must stay light to import (no torch): compile workers import it.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from functools import cache
from pathlib import Path

from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions

from gtco.codegen import DEVICE_HEADERS
from gtco.runtime.cubin import CompiledKernel, CubinCache, user_cache

_OPTIONS = ("std=c++17", "default-device", "lineinfo", "ptxas-options=-v", "target=cubin")
_ERROR_LINES = 12


class CompileError(RuntimeError):
    """NVRTC refused a kernel's source, or the process that compiled it died."""


@cache
def nvrtc_version() -> str:
    """The version of the NVRTC library in use, such as "13.0"."""
    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC does not say its version: {status.name}")
    return f"{major}.{minor}"


@cache
def _headers_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(DEVICE_HEADERS.glob("*.cuh")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cache_key(code: str, name: str, arch: str) -> str:
    """Names everything that the cubin depends on."""
    parts = (code, name, arch, _headers_digest(), nvrtc_version(), *_OPTIONS)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compile_kernel(
    code: str, name: str, arch: str, cache_folder: CubinCache | None = None
) -> CompiledKernel:
    """Compile one entry point, or take it from the cache.

    Args:
        code: CUDA C++ that defines the `extern "C"` kernel `name`.
        name: the entry point.
        arch: such as "sm_90a".
        cache_folder: where cubins are kept; the user's cache by default.

    Raises:
        CompileError: with the kernel's name and the first errors.
    """
    store = user_cache() if cache_folder is None else cache_folder
    key = cache_key(code, name, arch)
    found = store.read(key)
    if found is not None:
        return found
    compiled = compile_uncached(code, name, arch)
    store.write(key, compiled)
    return compiled


def compile_uncached(code: str, name: str, arch: str) -> CompiledKernel:
    """Compile one entry point with NVRTC.

    Raises:
        CompileError: with the kernel's name and the first errors.
    """
    options = ProgramOptions(
        name=f"{name}.cu",
        arch=arch,  # left out, cuda-core would ask the driver for a GPU
        std="c++17",
        device_as_default_execution_space=True,  # NVRTC 13.0 takes a generic lambda for host code
        lineinfo=True,
        ptxas_options=["-v"],
        no_cache=True,  # NVRTC's own cache gives a cubin back without the assembler's words
        include_path=str(DEVICE_HEADERS),
    )
    messages = io.StringIO()
    try:
        cubin = bytes(Program(code, "c++", options).compile("cubin", logs=messages).code)
    except Exception as error:  # cuda-core has one exception type per library
        text = f"{messages.getvalue()}\n{error}".replace("\0", "")
        raise CompileError(_explain(name, arch, text, _dump(code, name))) from None
    return _describe(name, arch, cubin, messages.getvalue().replace("\0", ""))


def _explain(name: str, arch: str, text: str, dumped: Path | None) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if re.search(r"\berror\s*:", line)), 0)
    where = str(dumped) if dumped else "set GTCO_DUMP=folder to keep it"
    shown = "\n".join(f"  {line}" for line in lines[first : first + _ERROR_LINES])
    return f"kernel {name} does not compile for {arch} (source: {where}):\n{shown}"


def _describe(name: str, arch: str, cubin: bytes, text: str) -> CompiledKernel:
    def largest(pattern: str) -> int:
        return max((int(number) for number in re.findall(pattern, text)), default=0)

    return CompiledKernel(
        name,
        arch,
        cubin,
        registers=largest(r"Used (\d+) registers"),
        smem_bytes=largest(r"(\d+) bytes smem"),
        spill_bytes=largest(r"(\d+) bytes spill stores"),
        local_bytes=largest(r"(\d+) bytes stack frame"),
        log=text,
    )


def _dump(code: str, name: str) -> Path | None:
    """Keep a source that was refused where GTCO_DUMP says; a plan's are there with the rest."""
    folder = os.environ.get("GTCO_DUMP")
    if not folder:
        return None
    path = Path(folder) / f"{name}.cu"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    return path
