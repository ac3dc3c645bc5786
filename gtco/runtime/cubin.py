"""Compiled device code, apart from the compiler: what runs it need not import NVRTC."""

from __future__ import annotations

from dataclasses import dataclass


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
