"""`gtco cache info|clear|verify`: the compiled kernels in the user's cache folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gtco.cli.base import Json, out, print_json
from gtco.locate import UsageError
from gtco.runtime.cache_files import private_folder, seal_fault
from gtco.runtime.cubin import CubinCache, cache_folder, host_folder, user_cache

cache_app = typer.Typer(
    no_args_is_help=True, help="The compiled kernels in the user's cache folder."
)

Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]


class CacheError(RuntimeError):
    """The cache cannot be used, or holds damaged entries."""


@cache_app.command("info")
def info_command(*, as_json: Json = False) -> None:
    """How many kernels are kept, how large they are, and where."""
    cache = user_cache()
    cubins, builds = cache.entries(), _host_builds()
    if as_json:
        print_json(cubins=_facts(cache_folder(), cubins), host_builds=_facts(host_folder(), builds))
        return
    state = "" if cache.writable else " (not usable)" if cache.folder is None else " (read-only)"
    _say(f"{_counted('cubin', cubins)}, in {cache_folder()}{state}")
    _say(f"{_counted('host build', builds)}, in {host_folder()}")


@cache_app.command("clear")
def clear_command(*, yes: Yes = False, as_json: Json = False) -> None:
    """Remove every kernel; asks first. They are compiled again when they are needed."""
    cache = _usable()
    cubins, builds = cache.entries(), _host_builds()
    what = f"{_counted('cubin', cubins)}, and {_counted('host build', builds)}"
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("gtco cache clear asks before it removes; without a terminal, --yes")
        typer.confirm(f"Remove {what}, from {cache_folder().parent}?", abort=True, err=True)
    freed = cache.clear()
    for path in (*builds, *host_folder().glob("*.tmp")):
        freed += path.stat().st_size
        path.unlink()
    if as_json:
        print_json(cubins=len(cubins), host_builds=len(builds), bytes=freed)
    else:
        _say(f"removed {what}, from {cache_folder().parent}")


@cache_app.command("verify")
def verify_command(*, as_json: Json = False) -> None:
    """Check every kernel and remove damaged ones.

    The exit code is 1 if one was.
    Each is held against its checksum and against its name, a cubin also against its entry point.
    """
    cache = _usable()
    count = len(cache.entries()) + len(_host_builds())
    damaged = cache.verify()
    for path in _host_builds():
        if seal_fault(path) is not None:
            damaged.append(path)
            path.unlink()
    if as_json:
        print_json(entries=count, damaged=[path.name for path in damaged])
    else:
        _say(f"{count} entries in {cache_folder().parent}, {len(damaged)} of them damaged")
    if damaged:
        raise CacheError(
            f"{len(damaged)} damaged entries were dropped from {cache_folder().parent}; they are "
            f"compiled again when they are needed"
        )


def _usable() -> CubinCache:
    cache = user_cache()
    if cache.folder is None:
        raise CacheError(f"{cache_folder()} is not used; the warning above says why")
    if host_folder().exists() and (reason := private_folder(host_folder())) is not None:
        raise CacheError(f"{host_folder()} is not used: {reason}")
    return cache


def _host_builds() -> list[Path]:
    return sorted(host_folder().glob("*.so"))


def _facts(folder: Path, entries: Sequence[Path]) -> dict[str, str | int]:
    return {"folder": str(folder), "entries": len(entries), "bytes": _bytes(entries)}


def _counted(what: str, entries: Sequence[Path]) -> str:
    plural = "" if len(entries) == 1 else "s"
    return f"{len(entries)} {what}{plural} of {_bytes(entries) / 1e6:.1f} MB"


def _bytes(entries: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in entries)


def _say(line: str) -> None:
    out.print(line, markup=False, highlight=False, soft_wrap=True)
