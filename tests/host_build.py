"""Runs generated kernels on the CPU: the same source, with `codegen/host` for the device's PTX.

For correctness at small shapes, not for speed.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gtco.codegen.program import KernelProgram, Pointer, TensorMapArgument
from gtco.graph import Group
from gtco.runtime.nvrtc import DEVICE_HEADERS
from gtco.runtime.run import poisoned

HOST = DEVICE_HEADERS.parent / "host"
COMPILER = shutil.which("g++")


class HostError(RuntimeError):
    """The kernel broke a rule of the machine; names kernel, block and thread."""


_TEMPORARY = tempfile.TemporaryDirectory(prefix="gtco-host-")  # removed when we end


@cache
def _folder() -> Path:
    """The device headers with the host's ptx.cuh in place."""
    folder = Path(_TEMPORARY.name)
    for path in [*DEVICE_HEADERS.glob("*.cuh"), *HOST.glob("*.cuh"), *HOST.glob("*.h")]:
        shutil.copy(path, folder)
    return folder


def _library(program: KernelProgram) -> ctypes.CDLL:
    match = re.search(rf"{program.name}\(([^)]*)\)", program.code)
    assert match is not None
    kinds = [text.rsplit(" ", 1)[0] for text in re.split(r",\s+", match[1])]
    values = ", ".join(
        f"*static_cast<const gtco::ptx::TensorMap*>(arguments[{at}])"
        if "TensorMap" in kind
        else f"static_cast<{kind.replace('__restrict__', '')}>(arguments[{at}])"
        for at, kind in enumerate(kinds)
    )
    code = f"""{program.code}
extern "C" const char* launch(void** arguments, int x, int y, int z, int block, int cluster,
                              int smem_bytes, int order) {{
  host::kernel = [=] {{ {program.name}({values}); }};
  for (int i = 0; i < x * y * z; i += cluster) {{
    std::vector<Index> blocks;
    for (int j = i; j < i + cluster; ++j) blocks.push_back({{j % x, j / x % y, j / (x * y)}});
    host::error.clear();
    host::run_cluster(blocks, block, smem_bytes, order);
    if (!host::error.empty()) return host::error.c_str();
  }}
  return nullptr;
}}
"""
    name = hashlib.sha256(code.encode()).hexdigest()[:16]
    source, library = _folder() / f"{name}.cc", _folder() / f"{name}.so"
    if not library.exists():
        source.write_text(code)
        arch = 10 * int(program.arch[3:5])
        flags = [
            f"-D__CUDA_ARCH__={arch}",
            "-std=c++17",
            "-O1",
            "-fPIC",
            "-shared",
            "-w",
            f"-I{_folder()}",
        ]
        command = [str(COMPILER), *flags, str(source), "-o", str(library)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[:4000]
    return ctypes.CDLL(str(library))


def run_on_host(
    program: KernelProgram, group: Group, values: Mapping[str, Tensor], order: int = 0
) -> dict[str, Tensor]:
    """Each output of the group by name; what the kernel did not write is NaN.

    Args:
        program: made from `group`.
        group: its inputs and outputs.
        values: each input by name, on the CPU.
        order: 0 to 3: in which order threads and blocks run, and copies land.
    """
    graph = group.graph
    tensors = {**graph.constants, **values}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    for name in graph.outputs:
        tensors[name] = poisoned(graph.specs[name], torch.device("cpu"))
    maps = [
        _tensor_map(argument, tensors[argument.value])
        for argument in program.arguments
        if isinstance(argument, TensorMapArgument)
    ]
    waiting = iter(maps)
    pointers = [
        (tensors[argument.value] if isinstance(argument, Pointer) else next(waiting)).data_ptr()
        for argument in program.arguments
    ]
    array = (ctypes.c_void_p * len(pointers))(*pointers)
    x, y, z = program.cluster
    launch = _library(program).launch
    launch.restype = ctypes.c_char_p
    error = launch(array, *program.grid, program.block, x * y * z, program.smem_bytes, order)
    if error is not None:
        raise HostError(f"{program.name}, {error.decode()}")
    return {name: tensors[name] for name in graph.outputs}


def _tensor_map(argument: TensorMapArgument, tensor: Tensor) -> Tensor:
    """The host library's TensorMap, in memory that is aligned as it asks."""
    size = argument.dtype.itemsize
    packed = struct.pack(
        "<Q3q2q5i",
        tensor.data_ptr() + argument.offset * size,
        *argument.sizes,
        *(stride * size for stride in argument.strides),
        *argument.box,
        size,
        argument.swizzle_bytes,
    )
    whole = torch.zeros(128, dtype=torch.uint8)
    whole[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return whole
