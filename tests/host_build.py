"""Runs generated kernels on the CPU: the same source, with `tests/host/ptx.cuh` for the device's.

For correctness at small shapes; it knows the instructions of sm_80 and neither clusters nor TMA.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gtco.codegen.program import KernelProgram, Pointer
from gtco.graph import Group
from gtco.runtime.nvrtc import DEVICE_HEADERS
from gtco.runtime.run import poisoned

HOST = Path(__file__).parent / "host"
COMPILER = shutil.which("g++")


_TEMPORARY = tempfile.TemporaryDirectory(prefix="gtco-host-")  # removed when we end


@cache
def _folder() -> Path:
    """The device headers with the host's ptx.cuh in place."""
    folder = Path(_TEMPORARY.name)
    for path in [*DEVICE_HEADERS.glob("*.cuh"), *HOST.iterdir()]:
        shutil.copy(path, folder)
    return folder


def _library(program: KernelProgram) -> ctypes.CDLL:
    match = re.search(rf"{program.name}\(([^)]*)\)", program.code)
    assert match is not None
    kinds = [text.rsplit(" ", 1)[0] for text in match[1].split(", ")]
    casts = ", ".join(
        f"static_cast<{kind.replace('__restrict__', '')}>(arguments[{at}])"
        for at, kind in enumerate(kinds)
    )
    code = f"""{program.code}
extern "C" void launch(void** arguments, int x, int y, int z, int block, int order) {{
  host::kernel = [=] {{ {program.name}({casts}); }};
  for (int i = 0; i < x * y * z; ++i) {{
    blockIdx = {{i % x, i / x % y, i / (x * y)}};
    for (unsigned char& byte : gtco::smem) byte = 0xff;  // NaN wherever nobody wrote
    host::run_block(block, order);
  }}
}}
"""
    name = hashlib.sha256(code.encode()).hexdigest()[:16]
    source, library = _folder() / f"{name}.cc", _folder() / f"{name}.so"
    if not library.exists():
        source.write_text(code)
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w", f"-I{_folder()}"]
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
        order: 0 or 1, in which order threads run between barriers.
    """
    graph = group.graph
    tensors = {**graph.constants, **values}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    for name in graph.outputs:
        tensors[name] = poisoned(graph.specs[name], torch.device("cpu"))
    pointers = [tensors[a.value].data_ptr() for a in program.arguments if isinstance(a, Pointer)]
    library = _library(program)
    array = (ctypes.c_void_p * len(pointers))(*pointers)
    library.launch(array, *program.grid, program.block, order)
    return {name: tensors[name] for name in graph.outputs}
