"""Which compiler the host build takes, what it keeps, and what it says when one is missing."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from gtco.codegen.program import KernelProgram
from gtco.runtime import host
from gtco.runtime.host import HostCompilerError, HostError, HostKernel, find_compiler
from tests.faults.kernels import Planted, run

ONE = Planted(
    "  ptx::griddepcontrol_wait();\n  y[thread] = x[thread];\n", "y[thread]", "y[-thread]", ""
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    find_compiler.cache_clear()
    yield
    find_compiler.cache_clear()


@pytest.mark.parametrize(
    ("installed", "wheel", "expected"),
    [
        (("g++", "clang++"), True, ("/bin/g++",)),
        (("c++", "clang++"), True, ("/bin/c++",)),
        (("clang++",), False, ("/bin/clang++",)),
        ((), True, (sys.executable, "-m", "ziglang", "c++")),
        ((), False, None),
    ],
)
def test_the_systems_compiler_else_the_wheels(
    installed: tuple[str, ...],
    wheel: bool,
    expected: tuple[str, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def which(name: str) -> str | None:
        return f"/bin/{name}" if name in installed else None

    monkeypatch.setattr(host, "shutil", SimpleNamespace(which=which))
    found = object() if wheel else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    assert find_compiler() == expected


@pytest.mark.compiler
def test_what_the_compiler_made_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_libraries", lambda: tmp_path)
    host._machine.cache_clear()
    HostKernel(ONE.right)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert [name.split("-")[0] for name in made] == [ONE.right.name, "machine"]

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("compiles again")

    monkeypatch.setattr(subprocess, "run", refuse)
    HostKernel(ONE.right)
    with pytest.raises(AssertionError, match="compiles again"):
        HostKernel(ONE.wrong)
    host._machine.cache_clear()


@pytest.mark.compiler
def test_a_kernel_that_does_not_compile_is_named() -> None:
    program: KernelProgram = dataclasses.replace(
        ONE.right, source=ONE.right.source.replace("griddepcontrol_wait", "no_such_instruction")
    )
    with pytest.raises(
        HostCompilerError, match=rf"(?s)refuses {program.name}:.*no_such_instruction"
    ):
        HostKernel(program)


def test_a_kernel_brings_no_header_of_the_system() -> None:
    """Those of the C++ library were most of the time that a kernel takes to compile."""
    folder = Path(host._headers().name)
    left, seen = [path.name for path in folder.glob("*.cuh")], set[str]()
    while left:
        seen.add(name := left.pop())
        included = re.findall(r"^#include (.*)", (folder / name).read_text(), re.MULTILINE)
        assert not [each for each in included if each.startswith("<")], name
        left += {each.strip('"') for each in included} - seen
    assert "functions.h" in seen and "machine.h" not in seen


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("names", "operands"),
    [
        (
            "acos acosh asin asinh atan atanh cbrt ceil cos cosh erf erfc exp exp2 expm1 fabs "
            "floor lgamma log log10 log1p log2 logb nearbyint rint round rsqrt sin sinh sqrt tan "
            "tanh tgamma trunc",
            1,
        ),
        ("atan2 copysign fdim fmax fmin fmod hypot nextafter pow remainder", 2),
        ("fma", 3),
    ],
)
def test_functions_of_floats_are_not_computed_in_double(names: str, operands: int) -> None:
    """A `float` variant and overload and one for `double`, as in CUDA."""
    checks = "".join(
        f"  static_assert(sizeof({name}({', '.join([value] * operands)})) == sizeof({value}));\n"
        for name in names.split()
        for name, value in ((name, "1.0f"), (name, "1.0"), (f"{name}f", "1.0f"))
    )
    assert checks.count("static_assert") == 3 * len(names.split())
    HostKernel(Planted(checks + ONE.body, ONE.old, ONE.new, "").right)
    wrong = checks.replace("sizeof(1.0f)", "sizeof(1.0)", 1)
    with pytest.raises(HostCompilerError, match="static assertion failed"):
        HostKernel(Planted(wrong + ONE.body, ONE.old, ONE.new, "").right)


@pytest.mark.compiler
def test_without_addr2line_it_says_what_would_know(monkeypatch: pytest.MonkeyPatch) -> None:
    HostKernel(ONE.wrong)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "addr2line" else which(name))
    with pytest.raises(HostError, match=r"thread \d+, an unknown line .*: writes byte -\d+ of %y"):
        run(ONE.wrong, seed=0)


def test_threads_share_one_folder_of_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_copy(source: Path, target: str) -> None:
        time.sleep(0.002)  # long enough for every thread to be in it, without the lock
        shutil.copyfile(source, Path(target, source.name))

    monkeypatch.setattr(host, "shutil", SimpleNamespace(copy=slow_copy))
    host._copied_headers.cache_clear()
    with ThreadPoolExecutor(8) as threads:
        names = set(threads.map(lambda _: host._headers().name, range(8)))
    assert len(names) == 1 and Path(names.pop()).is_dir()
