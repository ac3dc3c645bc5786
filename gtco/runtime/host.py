"""Run generated kernels on the CPU: the same CUDA source against `codegen/host`.

For correctness at small shapes, not for speed. A C++ compiler is needed: the system's, else the one
in the `ziglang` wheel. Kernels are compiled with its thread sanitizer, so that every load and
store reports to the machine in `codegen/host`, which takes the place of the sanitizer's library: it
checks that each access lies in its tensor, and that barriers order it. What the compiler makes is
cached by content in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from gtco.codegen import DEVICE_HEADERS
from gtco.codegen.program import KernelProgram, TensorMapArgument, WindowBox
from gtco.ir.graph import Group
from gtco.ir.interpreter import interpret
from gtco.runtime.cache_files import publish, seal_fault, sealed
from gtco.runtime.cubin import CompiledKernel, CubinCache, host_folder
from gtco.runtime.plan import Launch, Plan, Visit
from gtco.runtime.poison import poisoned
from gtco.target import HOST

log = logging.getLogger("gtco.codegen")

HOST_HEADERS = DEVICE_HEADERS.parent / "host"
_ERROR_LINES = 12
# zig would add the sanitizer of undefined behaviour, gcc a note on every tensor map.
_FLAGS = ("-std=c++17", "-fPIC", "-fno-sanitize=undefined", "-w", "-Wno-psabi")
_WRAPPERS = ("ptx.cuh", "wgmma.cuh", "instructions.h")  # a line in them says nothing
_ONE_AT_A_TIME = Lock()  # there is one machine


class HostError(RuntimeError):
    """A kernel broke a rule of the machine; names kernel, block, thread and line."""


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


class HostKernel:
    """A generated kernel compiled for the CPU.

    Args:
        program: what to compile.
        library: what `build_host` made of it, in any folder; None compiles it now.

    Raises:
        HostCompilerError: no compiler, or it refuses the source.
    """

    def __init__(self, program: KernelProgram, library: Path | None = None) -> None:
        self.name = program.name
        self._library = library or _kernel_library(program)
        ctypes.CDLL(str(_machine()))  # found by its name, the library needs no folder beside it
        code = ctypes.CDLL(str(self._library))
        self._entry = code.enter
        self._launch = code.gtco_host_launch  # of the machine that it is linked to
        self._launch.restype = ctypes.c_char_p

    def __call__(
        self,
        program: KernelProgram,
        tensors: Mapping[str, Tensor],
        *,
        constants: Collection[str],
        outputs: Collection[str],
        seed: int = 0,
    ) -> None:
        """Run every block.

        Args:
            program: with the source of this kernel and the arguments of this launch.
            tensors: the stored values that the arguments name, contiguous and on the CPU.
            constants: of those, what no kernel ever writes.
            outputs: of those, what this kernel may write.
            seed: of the order in which threads and blocks run, and bulk copies land.

        Raises:
            HostError: the kernel breaks a rule or waits for ever.
        """
        names = list(dict.fromkeys(argument.value for argument in program.arguments))
        given = (_Tensor * len(names))(
            *(
                _Tensor(
                    name.encode(),
                    tensors[name].data_ptr(),
                    tensors[name].nbytes,
                    name in constants,
                    name in outputs,
                )
                for name in names
            )
        )
        maps = [
            _tensor_map(argument) if isinstance(argument, TensorMapArgument) else None
            for argument in program.arguments
        ]
        arguments = (_Argument * len(maps))(
            *(
                _Argument(
                    names.index(argument.value),
                    argument.origin,
                    None if each is None else each.data_ptr(),
                )
                for argument, each in zip(program.arguments, maps, strict=True)
            )
        )
        x, y, z = program.cluster
        with _ONE_AT_A_TIME:
            error = self._launch(
                self._entry,
                given,
                len(given),
                arguments,
                len(arguments),
                (ctypes.c_int * 3)(*program.grid),
                program.block,
                x * y * z,
                program.smem_bytes,
                seed,
            )
        if error is not None:
            raise HostError(f"kernel {self.name}, {_with_lines(self._library, error.decode())}")


def build_host(program: KernelProgram) -> CompiledKernel:
    """`program` as a shared object in place of a cubin, to be loaded in another process.

    Raises:
        HostCompilerError: no compiler, or it refuses the source.
    """
    code = _kernel_library(program).read_bytes()
    return CompiledKernel(program.name, HOST, code, 0, 0, 0, 0, "")


def compile_host(programs: Sequence[KernelProgram]) -> dict[str, HostKernel]:
    """The distinct kernels of `programs` by entry point, compiled in parallel.

    Raises:
        HostCompilerError: no compiler, or it refuses a source.
    """
    distinct = {program.name: program for program in programs}
    _machine()  # ahead of the threads: each would make one of its own
    workers = max(1, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(distinct, pool.map(HostKernel, distinct.values()), strict=True))


def run_on_host(
    program: KernelProgram, group: Group, values: Mapping[str, Tensor], seed: int = 0
) -> dict[str, Tensor]:
    """Each output of `group` by name; what the kernel did not write is NaN.

    Args:
        program: made from `group`.
        group: its inputs and outputs.
        values: each input by name, on the CPU.
        seed: as for `HostKernel`.
    """
    graph = group.graph
    tensors = {name: each.contiguous() for name, each in {**graph.constants, **values}.items()}
    for name in graph.outputs:
        tensors[name] = poisoned(graph.specs[name], torch.device("cpu"))
    HostKernel(program)(
        program, tensors, constants=graph.constants, outputs=graph.outputs, seed=seed
    )
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
            name: _aligned(plan.graph.constants[name].detach().cpu()) for name in plan.constants
        }

    def __call__(self, inputs: Sequence[Tensor], *, static_outputs: bool) -> list[Tensor]:
        """Run on the CPU; outputs are always fresh tensors.

        Raises:
            HostError: a kernel breaks a rule or waits for ever.
        """
        return self.walk(inputs, lambda launch, values, run: run())

    def walk(self, inputs: Sequence[Tensor], visit: Visit) -> list[Tensor]:
        """The same, with `visit` called for each launch.

        Raises:
            HostError: a kernel breaks a rule or waits for ever.
        """
        plan = self.plan
        values = dict(self._constants)
        for name, tensor in zip(plan.graph.inputs, inputs, strict=True):
            values[name] = _aligned(tensor.detach())
        for launch in plan.launches:
            visit(launch, values, partial(self._run, launch, values))
        outputs = []
        for name in plan.graph.outputs:
            base, chain = plan.outputs[name]
            result = values[base]
            for node in chain:
                result = node.definition.reference(result, **node.attrs)
            outputs.append(result)
        return outputs

    def _run(self, launch: Launch, values: dict[str, Tensor]) -> None:
        graph = launch.group.graph
        if launch.program is None:
            results = interpret(graph, [values[name] for name in graph.inputs])
            values.update(zip(graph.outputs, (x.contiguous() for x in results), strict=True))
            return
        for name in graph.outputs:
            values[name] = poisoned(graph.specs[name], self.device)
        self._kernels[launch.program.name](
            launch.program, values, constants=self.plan.constants, outputs=graph.outputs
        )


def _aligned(tensor: Tensor) -> Tensor:
    """`tensor`, contiguous and at an address from which kernels may copy 16 bytes at a time."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


# -- compiling -------------------------------------------------------------------------------------


def _command() -> tuple[str, ...]:
    compiler = find_compiler()
    if compiler is None:
        raise HostCompilerError(
            "running kernels on the CPU needs a C++ compiler: install g++ or clang++, or "
            "`pip install ziglang`"
        )
    return compiler


@cache
def _version(compiler: tuple[str, ...]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout


_HEADERS_LOCK = threading.Lock()
"""`cache` alone would let two threads make a folder each, and the one that is not kept is removed
under its reader."""


def _headers() -> tempfile.TemporaryDirectory[str]:
    """The device's headers with the host's in place of those it knows; removed when we end."""
    with _HEADERS_LOCK:
        return _copied_headers()


@cache
def _copied_headers() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="gtco-host-")
    for source in (DEVICE_HEADERS, HOST_HEADERS):
        for path in source.iterdir():
            if path.suffix in (".cuh", ".h", ".cc"):
                shutil.copy(path, folder.name)
    return folder


@cache
def _headers_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(_headers().name).iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def _libraries() -> Path:
    """Where shared objects are kept: the user's cache, or a folder that goes with this process."""
    return CubinCache(host_folder()).folder or Path(_headers().name)


def _build(
    name: str, sources: Mapping[str, str], flags: Sequence[str], link: Sequence[str]
) -> Path:
    """A shared object of `sources` (text by file name), compiled with `flags`, from the cache.

    Raises:
        HostCompilerError: no compiler, or it refuses the source.
    """
    compiler = _command()
    parts = (
        *compiler,
        _version(compiler),
        _headers_digest(),
        *flags,
        *_FLAGS,
        *link,
        *sources.values(),
    )
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    library = _libraries() / f"{name}-{key}.so"
    if _is_whole(library):
        return library
    with tempfile.TemporaryDirectory(prefix="gtco-host-") as folder:
        for file, text in sources.items():
            Path(folder, file).write_text(text)
        objects = [f"{file}.o" for file in sources]
        for file, made in zip(sources, objects, strict=True):
            source = (f"-I{_headers().name}", "-x", "c++", "-c", file)
            _compile([*compiler, *flags, *_FLAGS, *source, "-o", made], folder, name)
        soname = f"-Wl,-soname,{library.name}"
        _compile([*compiler, "-shared", *objects, soname, *link, "-o", "made.so"], folder, name)
        return _keep(library, sealed(library.name, Path(folder, "made.so").read_bytes()))


def _is_whole(library: Path) -> bool:
    """Whether a shared object is there and as it was made; a damaged one is dropped."""
    try:
        fault = seal_fault(library)
    except OSError:
        return False
    if fault is not None:
        log.warning("dropped the damaged host build %s: %s", library, fault)
        library.unlink(missing_ok=True)
    return fault is None


def _keep(library: Path, data: bytes) -> Path:
    """Where a shared object now is: in the cache, or where that is full, as long as we run."""
    try:
        publish(library, data)
    except OSError as error:
        log.warning("cannot keep a host build in %s: %s", library.parent, error)
        library = Path(_headers().name, library.name)
        publish(library, data)
    return library


def _compile(command: Sequence[str], folder: str, name: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if result.returncode != 0:
        lines = "\n".join(f"  {line}" for line in result.stderr.splitlines()[:_ERROR_LINES])
        raise HostCompilerError(f"the C++ compiler refuses {name}:\n{lines}")


@cache
def _machine() -> Path:
    """The machine that runs kernels, as a shared object."""
    sources = {path.name: path.read_text() for path in sorted(HOST_HEADERS.glob("*.cc"))}
    return _build("machine", sources, ("-O2", "-U_FORTIFY_SOURCE"), ())


def _kernel_library(program: KernelProgram) -> Path:
    machine = _machine()
    flags = (
        "-O1",
        "-g1",
        "-fsanitize=thread",
        "-fno-exceptions",
        f"-D__CUDA_ARCH__={10 * int(program.arch[3:].rstrip('a'))}",
    )
    # Without C++'s library, which no kernel calls: reading it is most of the time to link one.
    link = (str(machine), "-Wl,-rpath,$ORIGIN", "-nodefaultlibs", "-lm", "-lc", "-lgcc")
    file = f"{program.name}.cu"
    return _build(program.name, {file: program.code + _entry(program)}, flags, link)


def _entry(program: KernelProgram) -> str:
    """A C function that runs one thread of the kernel."""
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
extern "C" __attribute__((no_sanitize("thread"))) void enter(void** arguments) {{
  {program.name}({values});
}}
"""


def _with_lines(library: Path, error: str) -> str:
    """`error` with its `<pc ...>` replaced by source lines, innermost first."""
    places = sorted(set(re.findall(r"<pc (\w+)>", error)))
    tool = shutil.which("addr2line")
    if tool is None:
        return re.sub(r"<pc \w+>", "an unknown line (addr2line of binutils would know)", error)
    command = [tool, "-a", "-i", "-e", str(library), *places]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("0x"):
            frames = lines.setdefault(f"{int(line, 16):x}", [])
        else:
            frames.append(Path(line.split(" ")[0]).name)
    for place, frames in lines.items():
        shown = [each for each in frames if not each.startswith(_WRAPPERS)]
        error = error.replace(f"<pc {place}>", " < ".join(shown or frames))
    return error


class _Tensor(ctypes.Structure):
    """machine.cc's TensorGiven."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("constant", ctypes.c_int),
        ("output", ctypes.c_int),
    )


class _Argument(ctypes.Structure):
    """machine.cc's ArgumentGiven."""

    _fields_ = (("tensor", ctypes.c_int), ("origin", ctypes.c_int64), ("map", ctypes.c_void_p))


def _window_bytes(window: WindowBox | None) -> tuple[int, ...]:
    """Whether there is one, and its lower and upper corners and strides, width first: an image is a
    volume of one frame."""
    if window is None:
        return (0,) * 10
    flat = (0,) * (3 - len(window.stride))
    steps = (*window.stride, *(1 for _ in flat))
    return (1, *window.lower, *flat, *window.upper, *flat, *steps)


def _tensor_map(argument: TensorMapArgument) -> Tensor:
    """The host library's TensorMap, in memory that is aligned as it asks; its base is an offset."""
    size, missing = argument.dtype.itemsize, 5 - len(argument.sizes)
    packed = struct.pack(
        "<Q5q4q5i3i11b",
        argument.offset * size,
        *(*argument.sizes, *[1] * missing),
        *(*(stride * size for stride in argument.strides), *[0] * missing),
        *(*argument.box, *[1] * (5 - len(argument.box))),
        size,
        argument.swizzle_bytes,
        len(argument.sizes),
        *_window_bytes(argument.window),
        argument.dtype == torch.float32,
    )
    whole = torch.zeros(128, dtype=torch.uint8)
    whole[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return whole
