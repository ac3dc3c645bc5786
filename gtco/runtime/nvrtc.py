"""CUDA C++ to cubins with NVRTC, on a machine with or without a GPU, cached by content.

A cache entry is a JSON line and the cubin. It is published by a rename, so a reader sees a whole
entry or none; a damaged one is reported, dropped and built again.

This module must stay light to import (no torch): compile workers import it.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import stat
import tempfile
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import platformdirs
from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions

from gtco.codegen import DEVICE_HEADERS
from gtco.runtime.cubin import CompiledKernel

log = logging.getLogger("gtco.codegen")

_OPTIONS = ("std=c++17", "default-device", "lineinfo", "ptxas-options=-v", "target=cubin")
_ERROR_LINES = 12
_SUFFIX = ".cubin"


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


# -- the cache -------------------------------------------------------------------------------------


class CubinCache:
    """Cubins by content in one folder; without a folder, nothing is kept.

    Args:
        folder: made with mode 0700 if missing. A folder that others could write to is not used: a
            cubin is code that runs.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.writable = False
        self._told = False  # why nothing is kept, once
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        except OSError as error:
            log.warning("no cubin cache: %s", error)
            self.folder = None
            return
        if reason := _distrust(status):
            log.warning("no cubin cache: %s %s", folder, reason)
            self.folder = None
            return
        self.writable = os.access(folder, os.W_OK)

    def read(self, key: str) -> CompiledKernel | None:
        """The entry called `key`; None if there is none or it was damaged (and is now dropped)."""
        if self.folder is None:
            return None
        path = self.folder / f"{key}{_SUFFIX}"
        try:
            data = path.read_bytes()
        except OSError:
            return None
        try:
            found = _decode(data)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("dropped the damaged cubin %s: %s", path, error)
            try:
                path.unlink()
            except OSError as failure:
                log.warning("cannot remove %s: %s", path, failure)
            return None
        log.debug("%s for %s was in the cache", found.name, found.arch)
        return found

    def entries(self) -> list[Path]:
        """The files of the entries."""
        return [] if self.folder is None else sorted(self.folder.glob(f"*{_SUFFIX}"))

    def verify(self) -> list[Path]:
        """Read every entry again and drop the damaged ones.

        Returns:
            The damaged ones.
        """
        return [path for path in self.entries() if self.read(path.stem) is None]

    def clear(self) -> int:
        """Remove every entry, and what a killed process left of one.

        Returns:
            The bytes that this freed.

        Raises:
            OSError: a file cannot be removed.
        """
        if self.folder is None:
            return 0
        freed = 0
        for path in (*self.entries(), *self.folder.glob("*.tmp")):
            freed += path.stat().st_size
            path.unlink()
        return freed

    def write(self, key: str, compiled: CompiledKernel) -> None:
        """Publish an entry whole; a folder that cannot be written to is left as it is."""
        if self.folder is None:
            return
        if not self.writable:
            if not self._told:
                log.warning("%s is read-only: what is compiled is not kept", self.folder)
            self._told = True
            return
        try:
            handle, temporary = tempfile.mkstemp(prefix=f"{key}.", suffix=".tmp", dir=self.folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_encode(compiled))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.folder / f"{key}{_SUFFIX}")
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            log.warning("cannot keep a cubin in %s: %s", self.folder, error)
            self.writable, self._told = False, True


def _distrust(status: os.stat_result) -> str | None:
    """Why a folder with this status must not hold code, or None."""
    if not stat.S_ISDIR(status.st_mode):
        return "is no folder"
    if status.st_uid != os.getuid():
        return "belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by other users (chmod 700 makes it usable)"
    return None


def _encode(compiled: CompiledKernel) -> bytes:
    header = asdict(replace(compiled, cubin=b""))
    del header["cubin"]
    body = json.dumps(header, sort_keys=True)
    digest = hashlib.sha256(body.encode() + compiled.cubin).hexdigest()
    return f"{digest} {body}\n".encode() + compiled.cubin


def _decode(data: bytes) -> CompiledKernel:
    line, newline, cubin = data.partition(b"\n")
    digest, space, body = line.partition(b" ")
    if not newline or not space or hashlib.sha256(body + cubin).hexdigest().encode() != digest:
        raise ValueError("its checksum differs")
    return CompiledKernel(cubin=cubin, **json.loads(body))


def cache_folder() -> Path:
    """Where cubins are kept: `cubins` in the user's cache folder (`XDG_CACHE_HOME` moves it)."""
    return Path(platformdirs.user_cache_dir("gtco", appauthor=False)) / "cubins"


def host_folder() -> Path:
    """Where kernels that were compiled for the CPU are kept, beside the cubins."""
    return cache_folder().parent / "host"


@cache
def user_cache() -> CubinCache:
    """The cache in the user's own folder."""
    return CubinCache(cache_folder())
