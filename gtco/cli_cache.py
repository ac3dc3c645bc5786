"""`gtco cache info|clear|verify`: the compiled kernels that are kept in the user's cache folder."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gtco.cli_base import Json, out, print_json
from gtco.locate import UsageError
from gtco.runtime.nvrtc import CubinCache, cache_folder, user_cache

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
    sizes = [path.stat().st_size for path in cache.entries()]
    if as_json:
        print_json(folder=str(cache_folder()), cubins=len(sizes), bytes=sum(sizes))
        return
    state = "" if cache.writable else " (not usable)" if cache.folder is None else " (read-only)"
    _say(f"{len(sizes)} cubins, {sum(sizes) / 1e6:.1f} MB, in {cache_folder()}{state}")


@cache_app.command("clear")
def clear_command(*, yes: Yes = False, as_json: Json = False) -> None:
    """Remove every kernel; asks first. They are compiled again when they are needed."""
    cache = _usable()
    count = len(cache.entries())
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("gtco cache clear asks before it removes; without a terminal, --yes")
        typer.confirm(f"Remove {count} cubins from {cache.folder}?", abort=True, err=True)
    freed = cache.clear()
    if as_json:
        print_json(folder=str(cache.folder), cubins=count, bytes=freed)
    else:
        _say(f"removed {count} cubins, {freed / 1e6:.1f} MB, from {cache.folder}")


@cache_app.command("verify")
def verify_command(*, as_json: Json = False) -> None:
    """Check every kernel's checksum and remove the damaged; the exit code is 1 if one was."""
    cache = _usable()
    count = len(cache.entries())
    damaged = cache.verify()
    if as_json:
        names = [path.name for path in damaged]
        print_json(folder=str(cache.folder), cubins=count, damaged=names)
    else:
        _say(f"{count} cubins in {cache.folder}, {len(damaged)} of them damaged")
    if damaged:
        raise CacheError(
            f"{len(damaged)} damaged cubins were dropped from {cache.folder}; they are compiled "
            f"again when they are needed"
        )


def _usable() -> CubinCache:
    cache = user_cache()
    if cache.folder is None:
        raise CacheError(f"{cache_folder()} is not used: gtco says why when it compiles")
    return cache


def _say(line: str) -> None:
    out.print(line, markup=False, highlight=False, soft_wrap=True)
