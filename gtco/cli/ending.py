"""How the command line ends: exit codes, and one message for whatever went wrong."""

from __future__ import annotations

import sys
from typing import NoReturn

import torch

from gtco.benchmarking.contestants import NoGpu
from gtco.cli import base
from gtco.cli.base import err, print_json
from gtco.locate import ModelError, UsageError
from gtco.options import OptionError
from gtco.target import TargetError

EXIT_CODES = {
    0: "done",
    1: "the work failed: a wrong answer, a model or file that cannot be used, a compile error",
    2: "wrong usage: an unknown command, model or option, or a GPU that is not there",
    130: "interrupted; what was measured and cached until then is kept",
}
"""What the process ends with."""


def exit_code(error: Exception) -> int:
    """2 for what the user asked wrongly, 1 for work that failed."""
    return 2 if isinstance(error, (UsageError, OptionError, TargetError, NoGpu)) else 1


def message(error: Exception) -> str:
    """One message for `error`; an error of no kind that gtco raises on purpose says so."""
    module = type(error).__module__
    ours = module.startswith("gtco") or isinstance(error, (torch.OutOfMemoryError, ModelError))
    kind = "" if ours else f"unexpected {type(error).__name__}: "
    hint = "" if ours else " (GTCO_DEBUG=1 shows where)"
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: {error.filename}: {error.strerror}"
    return f"error: {kind}{error}{hint}"


def end(kind: str, text: str, code: int, as_json: bool) -> NoReturn:
    """Say `text` on stderr, with JSON on stdout too, and exit with `code`."""
    err.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    if as_json and not base.printed_json:  # a result may be printed, and wrong
        error = {"kind": kind, "message": text.removeprefix("error: "), "exit_code": code}
        print_json(error=error)
    sys.exit(code)
