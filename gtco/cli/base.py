"""What the commands share: consoles, flags made from `Options`, progress and JSON."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from gtco.cli.env import environment
from gtco.options import Options

out = Console(width=None if sys.stdout.isatty() else 120)  # tables keep their shape in a file
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]


_FLAGS: dict[str, Any] = {"calibration": str | None}
"""Types of flags whose fields take more than a command line can say."""


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` one flag for each field of `Options` instead of its parameter `options`."""
    fields = dataclasses.fields(Options)
    hints = get_type_hints(Options)
    descriptions = _field_descriptions()

    @functools.wraps(command)
    def with_flags(**given: Any) -> None:
        chosen = {field.name: given.pop(field.name) for field in fields}
        command(**given, options=Options.of(**chosen))

    own = inspect.signature(command, eval_str=True).parameters.values()
    flags = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[
                _FLAGS.get(field.name, hints[field.name]),
                typer.Option(help=descriptions[field.name]),
            ],
        )
        for field in fields
    ]
    parameters = [parameter for parameter in own if parameter.name != "options"]
    with_flags.__signature__ = inspect.Signature([*parameters, *flags])  # type: ignore[attr-defined]
    with_flags.__annotations__ = {each.name: each.annotation for each in [*parameters, *flags]}
    return with_flags


def _field_descriptions() -> dict[str, str]:
    """The `Args:` of the docstring of `Options`, so that a flag's help is written once."""
    described: dict[str, str] = {}
    name = ""
    names = {field.name for field in dataclasses.fields(Options)}
    for line in inspect.cleandoc(Options.__doc__ or "").splitlines():
        head, colon, rest = line.strip().partition(":")
        if colon and head in names:
            name, line = head, rest
        if name:
            described[name] = f"{described.get(name, '')} {line.strip()}".strip()
    return described


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that shows a line of progress on stderr."""
    if not err.is_terminal:
        yield lambda message: err.print(message, style=None, markup=False, highlight=False)
        return
    with err.status("") as status:
        yield lambda message: status.update(message)


printed_json = False
"""Whether this command has printed its object: there is one, whatever happens afterwards."""


def print_json(**payload: Any) -> None:
    """One JSON object on stdout: `payload`, the command and where it ran."""
    global printed_json
    printed_json = True
    payload["command"] = shlex.join(["gtco", *sys.argv[1:]])
    payload["environment"] = environment()
    sys.stdout.write(json.dumps(plain(payload), indent=2) + "\n")


def plain(value: Any) -> Any:
    """`value` with what JSON has no number for (NaN, infinity) as null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
