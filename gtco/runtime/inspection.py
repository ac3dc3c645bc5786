"""What a cubin says of its kernel, read from the ELF file itself: neither driver nor GPU is needed.

The sections and attributes are those that `cuobjdump -elf` names; they are the same from CUDA 11
to 13.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_CUDA = 190  # the machine of an ELF file, EM_CUDA
_SYSTEM_SMEM_BYTES = 1024
"""Of a block, on sm_90 and newer: the section counts them, the limit of a block does not."""
_SIZED = 4  # EIFMT_SVAL: attributes with so many bytes behind them
_MAX_THREADS = 0x05  # EIATTR_MAX_THREADS: of __launch_bounds__
_PARAMETER = 0x17  # EIATTR_KPARAM_INFO
_REGISTERS = 0x2F  # EIATTR_REGCOUNT


class CubinError(ValueError):
    """Bytes that are no cubin, or a cubin without the kernel."""


@dataclass(frozen=True)
class KernelFacts:
    """One kernel as its cubin describes it.

    Args:
        capability: what it runs on, such as (9, 0).
        parameters: bytes of each, in order.
        max_threads: of a block; None without launch bounds.
        smem_bytes: static shared memory of a block.
        registers: of a thread.
    """

    capability: tuple[int, int]
    parameters: tuple[int, ...]
    max_threads: int | None
    smem_bytes: int
    registers: int


@dataclass(frozen=True)
class _Section:
    nbytes: int
    data: bytes


def inspect_cubin(cubin: bytes, name: str) -> KernelFacts:
    """What `cubin` says of its kernel `name`.

    Raises:
        CubinError: it is no cubin, is cut short, or has no such kernel.
    """
    try:
        return _inspect(cubin, name)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise CubinError(f"the cubin of {name} is not whole") from error


def _inspect(cubin: bytes, name: str) -> KernelFacts:
    if cubin[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", cubin, 18)[0] != _CUDA:
        raise CubinError(f"the cubin of {name} is no code for a GPU")
    (flags,) = struct.unpack_from("<I", cubin, 48)
    capability = divmod(flags >> 8 & 0xFF, 10)
    sections = _sections(cubin)
    about, symbols = sections.get(f".nv.info.{name}"), _symbols(sections)
    if f".text.{name}" not in sections or about is None or name not in symbols:
        raise CubinError(f"the cubin of {name} has no kernel of that name")
    threads: int | None = None
    parameters: dict[int, int] = {}
    for kind, value in _attributes(about.data):
        if kind == _MAX_THREADS:
            x, y, z = struct.unpack("<III", value)
            threads = x * y * z
        elif kind == _PARAMETER:
            _, ordinal, _, layout = struct.unpack("<IHHI", value)
            parameters[ordinal] = layout >> 18
    if sorted(parameters) != list(range(len(parameters))):
        raise CubinError(f"the cubin of {name} describes the parameters {sorted(parameters)}")
    registers = {
        symbol: count
        for kind, value in _attributes(sections[".nv.info"].data if ".nv.info" in sections else b"")
        if kind == _REGISTERS
        for symbol, count in [struct.unpack("<II", value)]
    }
    shared = sections.get(f".nv.shared.{name}")
    smem_bytes = 0 if shared is None else shared.nbytes
    if shared is not None and capability >= (9, 0):
        smem_bytes -= _SYSTEM_SMEM_BYTES
    return KernelFacts(
        capability,
        tuple(parameters[ordinal] for ordinal in sorted(parameters)),
        threads,
        smem_bytes,
        registers.get(symbols[name], 0),
    )


def _sections(data: bytes) -> dict[str, _Section]:
    (begin,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, begin + size * i) for i in range(count)]
    names = _content(data, headers[names_at])
    return {
        _text(names, header[0]): _Section(header[5], _content(data, header)) for header in headers
    }


def _content(data: bytes, header: tuple[int, ...]) -> bytes:
    _, kind, _, _, begin, nbytes, *_ = header
    if kind in (0, 8):  # SHT_NULL, SHT_NOBITS: nothing of it is in the file
        return b""
    if begin + nbytes > len(data):
        raise IndexError("a section reaches beyond the file")
    return data[begin : begin + nbytes]


def _symbols(sections: Mapping[str, _Section]) -> dict[str, int]:
    """Index of each symbol that a section defines."""
    if ".symtab" not in sections or ".strtab" not in sections:
        return {}
    found = {}
    rows = struct.iter_unpack("<IBBHQQ", sections[".symtab"].data)
    for index, (name, _, _, section, _, _) in enumerate(rows):
        if section:
            found[_text(sections[".strtab"].data, name)] = index
    return found


def _text(names: bytes, begin: int) -> str:
    end = names.find(b"\0", begin)
    if end < 0:
        raise IndexError("a name reaches beyond its table")
    return names[begin:end].decode()


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and value of those that have a value of their own length."""
    at = 0
    while at < len(data):
        form, kind, nbytes = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield kind, data[at : at + nbytes]
            at += nbytes
