"""The user's cache under faults: what is not whole, not its own or not private is never used."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gtco.runtime import cache_files, cubin, host
from gtco.runtime.cache_files import private_folder, publish, seal_fault, sealed
from gtco.runtime.cubin import CompiledKernel, CubinCache
from gtco.runtime.host import HostKernel
from gtco.runtime.nvrtc import compile_uncached
from tests.faults.kernels import Planted, run

SOURCE = """extern "C" __global__ void NAME(float* x) { x[threadIdx.x] = 1; }"""
ONE = Planted(
    "  ptx::griddepcontrol_wait();\n  y[thread] = x[thread];\n", "y[thread]", "y[-thread]", ""
)


@pytest.fixture(scope="module")
def kernels() -> tuple[CompiledKernel, CompiledKernel]:
    first, second = (
        compile_uncached(SOURCE.replace("NAME", name), name, "sm_80") for name in ("one", "two")
    )
    return first, second


@pytest.fixture
def cache(tmp_path: Path, kernels: tuple[CompiledKernel, CompiledKernel]) -> CubinCache:
    made = CubinCache(tmp_path / "cubins")
    for key, kernel in zip(("1" * 64, "2" * 64), kernels, strict=True):
        made.write(key, kernel)
    return made


# -- cubins ----------------------------------------------------------------------------------------


def test_an_entry_over_another_is_not_used(
    cache: CubinCache, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = cache.entries()
    shutil.copy(first, second)
    assert cache.read("2" * 64) is None
    assert "it is the entry of another kernel" in caplog.text
    assert cache.entries() == [first]


def test_verify_finds_entries_that_were_exchanged(cache: CubinCache, tmp_path: Path) -> None:
    first, second = cache.entries()
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    assert cache.verify() == [first, second]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"name": "other"}, "the cubin of other has no kernel of that name"),
        ({"cubin": b"\x7fELF\x02\x01"}, "the cubin of one is not whole"),
        ({"cubin": b""}, "is no code for a GPU|is not whole"),
    ],
)
def test_an_entry_that_is_whole_and_holds_no_such_kernel_is_not_used(
    cache: CubinCache,
    kernels: tuple[CompiledKernel, CompiledKernel],
    change: dict[str, object],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = cache.entries()[0]
    path.write_bytes(cubin._encode("1" * 64, replace(kernels[0], **change)))  # type: ignore[arg-type]
    assert cache.read("1" * 64) is None
    assert any(each in caplog.text for each in words.split("|"))


def test_an_entry_of_before_is_built_again(
    cache: CubinCache, kernels: tuple[CompiledKernel, CompiledKernel]
) -> None:
    path = cache.entries()[0]
    data = cubin._encode("1" * 64, kernels[0])
    path.write_bytes(data.replace(b'"key"', b'"old"'))
    assert cache.read("1" * 64) is None


# -- folders ---------------------------------------------------------------------------------------


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_folders_above_are_as_private(tmp_path: Path, no_umask: None) -> None:
    folder = tmp_path / "gtco" / "deep" / "cubins"
    assert CubinCache(folder).writable
    for each in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707])
def test_a_folder_that_others_could_exchange_is_not_used(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "shared" / "cubins"
    assert CubinCache(folder).folder == folder
    folder.parent.chmod(mode)
    assert CubinCache(folder).folder is None
    assert f"{folder.parent} can be written by other users" in caplog.text
    folder.parent.chmod(mode | stat.S_ISVTX)  # as /tmp: nobody renames what is another's
    assert CubinCache(folder).folder == folder


def test_a_file_in_place_of_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert CubinCache(tmp_path / "file").folder is None
    assert CubinCache(tmp_path / "file" / "cubins").folder is None


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("sync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("name"), rename(a, b)))
    publish(tmp_path / "a.so", b"code")
    assert order == ["sync", "name"]
    assert stat.S_IMODE((tmp_path / "a.so").stat().st_mode) == 0o600


# -- host builds -----------------------------------------------------------------------------------


def test_a_seal_knows_damage_and_other_names(tmp_path: Path) -> None:
    path, other = tmp_path / "a.so", tmp_path / "b.so"
    whole = sealed(path.name, bytes(1000))
    path.write_bytes(whole)
    assert seal_fault(path) is None
    other.write_bytes(whole)
    assert seal_fault(other) is not None
    for damaged in (b"", whole[:-1], whole[:500], whole[1:], b"x" + whole[1:], whole + b"\0"):
        path.write_bytes(damaged)
        assert seal_fault(path) is not None


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of host builds of its own, which has the machine that kernels run on."""
    folder = tmp_path / "host"
    assert private_folder(folder) is None
    shutil.copy(host._machine(), folder)
    monkeypatch.setattr(host, "_libraries", lambda: folder)
    host._machine.cache_clear()
    yield folder
    host._machine.cache_clear()


def kernel_file(folder: Path) -> Path:
    (found,) = (path for path in folder.glob("*.so") if not path.name.startswith("machine"))
    return found


@pytest.mark.compiler
@pytest.mark.parametrize("damage", ["torn", "empty", "flipped", "another's"])
def test_a_damaged_host_build_is_made_again(
    libraries: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    HostKernel(ONE.right)
    path = kernel_file(libraries)
    data = path.read_bytes()
    if damage == "another's":
        machine = next(libraries.glob("machine*.so"))
        damaged = machine.read_bytes()
    else:
        middle = len(data) // 2
        damaged = {
            "torn": data[:middle],
            "empty": b"",
            "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        }[damage]
    path.unlink()  # what is loaded stays as it is
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING, "gtco.codegen"):
        run(ONE.right, seed=0)
    assert "dropped the damaged host build" in caplog.text
    assert seal_fault(kernel_file(libraries)) is None
    assert not list(libraries.glob("*.tmp"))


@pytest.mark.compiler
def test_a_full_disk_costs_only_the_cache_of_host_builds(
    libraries: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, before = cache_files.publish, list(libraries.iterdir())

    def full(path: Path, data: bytes) -> None:
        if path.parent == libraries:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(host, "publish", full)
    run(ONE.right, seed=0)
    assert "cannot keep a host build" in caplog.text and "No space left" in caplog.text
    assert list(libraries.iterdir()) == before


@pytest.mark.compiler
def test_a_read_only_cache_of_host_builds_is_read(
    libraries: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(ONE.right, seed=0)
    before = {path: path.read_bytes() for path in libraries.iterdir()}

    def refuse(path: Path, data: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(host, "publish", refuse)
    host._machine.cache_clear()
    run(ONE.right, seed=0)
    assert {path: path.read_bytes() for path in libraries.iterdir()} == before
    assert not caplog.text
