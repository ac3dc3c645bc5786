"""Compiled device code and its cache, apart from the compiler: what runs it need not import NVRTC.

A cache entry is a JSON line, which holds its key, and the cubin. It is published by a rename, so a
reader sees a whole entry or none; one that is damaged, or another's, is reported, dropped and built
again.

This module must stay light to import (no torch): compile workers import it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import platformdirs

from gtco.runtime.cache_files import private_folder, publish
from gtco.runtime.inspection import inspect_cubin

log = logging.getLogger("gtco.codegen")

_SUFFIX = ".cubin"


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin and what the assembler said of it.

    Args:
        name: the entry point.
        arch: what it runs on, such as "sm_90a".
        cubin: loadable device code.
        registers: of a thread.
        smem_bytes: static shared memory of a block.
        spill_bytes: stored to local memory for want of registers, of a thread.
        local_bytes: stack frame of a thread.
        log: the compiler's messages.
    """

    name: str
    arch: str
    cubin: bytes
    registers: int
    smem_bytes: int
    spill_bytes: int
    local_bytes: int
    log: str

    @property
    def serialized(self) -> bool:
        """Whether the assembler lets no product on `wgmma` overlap another, since it cannot tell
        whose registers are under way."""
        return "wgmma" in self.log and "serialized" in self.log


# -- the cache -------------------------------------------------------------------------------------


class CubinCache:
    """Cubins by content in one folder; without a folder, nothing is kept.

    Args:
        folder: made with mode 0700 if missing, as are those above it. A folder that others could
            write to or replace is not used: a cubin is code that runs.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.writable = False
        self._told = False  # why nothing is kept, once
        if folder is None:
            return
        try:
            reason = private_folder(folder)
        except OSError as error:
            reason = str(error)
        if reason is not None:
            log.warning("no cubin cache: %s", reason)
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
            found = _decode(key, data)
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
            publish(self.folder / f"{key}{_SUFFIX}", _encode(key, compiled))
        except OSError as error:
            log.warning("cannot keep a cubin in %s: %s", self.folder, error)
            self.writable, self._told = False, True


def _encode(key: str, compiled: CompiledKernel) -> bytes:
    header = asdict(replace(compiled, cubin=b""))
    del header["cubin"]
    body = json.dumps({"key": key, **header}, sort_keys=True)
    digest = hashlib.sha256(body.encode() + compiled.cubin).hexdigest()
    return f"{digest} {body}\n".encode() + compiled.cubin


def _decode(key: str, data: bytes) -> CompiledKernel:
    """The entry `key`.

    Raises:
        ValueError, KeyError, TypeError: it is damaged, another's, or holds another kernel.
    """
    line, newline, cubin = data.partition(b"\n")
    digest, space, body = line.partition(b" ")
    if not newline or not space or hashlib.sha256(body + cubin).hexdigest().encode() != digest:
        raise ValueError("its checksum differs")
    header = json.loads(body)
    if header.pop("key", None) != key:
        raise ValueError("it is the entry of another kernel")
    compiled = CompiledKernel(cubin=cubin, **header)
    inspect_cubin(cubin, compiled.name)
    return compiled


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
