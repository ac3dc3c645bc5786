"""Run generated kernels on the CPU: the same CUDA source against `codegen/host`.

For correctness at small shapes, not for speed. A C++ compiler is needed: the system's, else the one
in the `ziglang` wheel. What it makes lives in a folder of this process and goes with it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gtco.codegen import DEVICE_HEADERS
from gtco.codegen.program import KernelProgram, TensorMapArgument
from gtco.graph import Group
from gtco.interpreter import interpret
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.plan import Plan
from gtco.runtime.poison import poisoned
from gtco.target import HOST

HOST_HEADERS = DEVICE_HEADERS.parent / "host"
_ERROR_LINES = 12


class HostError(RuntimeError):
    """A kernel broke a rule of the machine; names kernel, block and thread."""


class HostCompilerError(RuntimeError):
    """There is no C++ compiler, or it refuses a kernel."""


@cache
def find_compiler() -> tuple[str, ...] | None:
    """The command of a C++ compiler, or None."""
    for name in ("g++", "c++", "clang++"):
        if (path := shutil.which(name)) is not None:
            return (path,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    return None


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """The device's headers with the host's in place of those it knows; removed when we end."""
    folder = tempfile.TemporaryDirectory(prefix="gtco-host-")
    for source in (DEVICE_HEADERS, HOST_HEADERS):
        for path in (*source.glob("*.cuh"), *source.glob("*.h")):
            shutil.copy(path, folder.name)
    return folder


class HostKernel:
    """A generated kernel compiled for the CPU.

    Args:
        program: what to compile.
        library: what `build_host` made of it; None compiles it now.

    Raises:
        HostCompilerError: no compiler, or it refuses the source.
    """

    def __init__(self, program: KernelProgram, library: Path | None = None) -> None:
        self.name = program.name
        self._launch = ctypes.CDLL(str(library or _shared_object(program))).launch
        self._launch.restype = ctypes.c_char_p

    def __call__(
        self, program: KernelProgram, tensors: Mapping[str, Tensor], order: int = 0
    ) -> None:
        """Run every block.

        Args:
            program: with the source of this kernel and the arguments of this launch.
            tensors: the stored values that the arguments name, contiguous and on the CPU.
            order: 0 to 3: in which order threads and blocks run, and bulk copies land.

        Raises:
            HostError: the kernel breaks a rule or waits for ever.
        """
        memory = [
            _tensor_map(argument, tensors[argument.value])
            if isinstance(argument, TensorMapArgument)
            else tensors[argument.value]
            for argument in program.arguments
        ]
        array = (ctypes.c_void_p * len(memory))(*(each.data_ptr() for each in memory))
        x, y, z = program.cluster
        error = self._launch(
            array, *program.grid, program.block, x * y * z, program.smem_bytes, order
        )
        if error is not None:
            raise HostError(f"kernel {self.name}, {error.decode()}")


def build_host(program: KernelProgram) -> CompiledKernel:
    """`program` as a shared object in place of a cubin, to be loaded in another process.

    Raises:
        HostCompilerError: no compiler, or it refuses the source.
    """
    code = _shared_object(program).read_bytes()
    return CompiledKernel(program.name, HOST, code, 0, 0, 0, 0, "")


def compile_host(programs: Sequence[KernelProgram]) -> dict[str, HostKernel]:
    """The distinct kernels of `programs` by entry point, compiled in parallel.

    Raises:
        HostCompilerError: no compiler, or it refuses a source.
    """
    distinct = {program.name: program for program in programs}
    _folder()  # ahead of the threads: each would make one of its own
    workers = max(1, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(distinct, pool.map(HostKernel, distinct.values()), strict=True))


def run_on_host(
    program: KernelProgram, group: Group, values: Mapping[str, Tensor], order: int = 0
) -> dict[str, Tensor]:
    """Each output of `group` by name; what the kernel did not write is NaN.

    Args:
        program: made from `group`.
        group: its inputs and outputs.
        values: each input by name, on the CPU.
        order: as for `HostKernel`.
    """
    graph = group.graph
    tensors = {name: each.contiguous() for name, each in {**graph.constants, **values}.items()}
    for name in graph.outputs:
        tensors[name] = poisoned(graph.specs[name], torch.device("cpu"))
    HostKernel(program)(program, tensors, order)
    return {name: tensors[name] for name in graph.outputs}


class HostExecutable:
    """A plan that runs on the CPU, kernel by kernel.

    Args:
        plan: what to run.

    Raises:
        HostCompilerError: no compiler, or it refuses a kernel.
    """

    device = torch.device("cpu")
    uncaptured: tuple[str, ...] = ()

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        programs = [launch.program for launch in plan.launches if launch.program is not None]
        self._kernels = compile_host(programs)
        self._constants = {
            name: plan.graph.constants[name].detach().cpu().contiguous() for name in plan.constants
        }

    def __call__(self, inputs: Sequence[Tensor], *, static_outputs: bool) -> list[Tensor]:
        """Run on the CPU; outputs are always fresh tensors.

        Raises:
            HostError: a kernel breaks a rule or waits for ever.
        """
        plan = self.plan
        values = dict(self._constants)
        for name, tensor in zip(plan.graph.inputs, inputs, strict=True):
            values[name] = tensor.detach().contiguous()
        for launch in plan.launches:
            graph = launch.group.graph
            if launch.program is None:
                results = interpret(graph, [values[name] for name in graph.inputs])
                values.update(zip(graph.outputs, (x.contiguous() for x in results), strict=True))
                continue
            for name in graph.outputs:
                values[name] = poisoned(graph.specs[name], self.device)
            self._kernels[launch.program.name](launch.program, values)
        outputs = []
        for name in plan.graph.outputs:
            base, chain = plan.outputs[name]
            result = values[base]
            for node in chain:
                result = node.definition.reference(result, **node.attrs)
            outputs.append(result)
        return outputs


def _shared_object(program: KernelProgram) -> Path:
    compiler = find_compiler()
    if compiler is None:
        raise HostCompilerError(
            "running kernels on the CPU needs a C++ compiler: install g++ or clang++, or "
            "`pip install ziglang`"
        )
    folder = Path(_folder().name)
    code = program.code + _entry(program)
    name = hashlib.sha256(code.encode()).hexdigest()[:16]
    source, library = folder / f"{name}.cc", folder / f"{name}.so"
    if library.exists():
        return library
    source.write_text(code)
    made = Path(tempfile.mkstemp(dir=folder, suffix=".so")[1])
    arch = 10 * int(program.arch[3:5])
    flags = (f"-D__CUDA_ARCH__={arch}", "-std=c++17", "-O1", "-fPIC", "-shared", "-w")
    command = [*compiler, *flags, f"-I{folder}", str(source), "-o", str(made)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        lines = "\n".join(f"  {line}" for line in result.stderr.splitlines()[:_ERROR_LINES])
        raise HostCompilerError(f"{compiler[-1]} refuses kernel {program.name}:\n{lines}")
    return made.rename(library)


def _entry(program: KernelProgram) -> str:
    """A C function that runs the kernel over its grid, cluster by cluster."""
    match = re.search(rf"{program.name}\(([^)]*)\)", program.code)
    assert match is not None
    kinds = [text.rsplit(" ", 1)[0] for text in re.split(r",\s+", match[1])]
    values = ", ".join(
        f"*static_cast<const gtco::ptx::TensorMap*>(arguments[{at}])"
        if "TensorMap" in kind
        else f"static_cast<{kind.replace('__restrict__', '')}>(arguments[{at}])"
        for at, kind in enumerate(kinds)
    )
    return f"""
extern "C" const char* launch(void** arguments, int x, int y, int z, int block, int cluster,
                              int smem_bytes, int order) {{
  host::kernel = [=] {{ {program.name}({values}); }};
  host::error.clear();
  for (int i = 0; i < x * y * z && host::error.empty(); i += cluster) {{
    std::vector<Index> blocks;
    for (int j = i; j < i + cluster; ++j) blocks.push_back({{j % x, j / x % y, j / (x * y)}});
    host::run_cluster(blocks, block, smem_bytes, order);
  }}
  return host::error.empty() ? nullptr : host::error.c_str();
}}
"""


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
