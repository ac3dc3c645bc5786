"""What a user may choose: the keywords of `gtco.compile` and the flags of the command line."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

CHOICES = {
    "precision": (None, "fp16", "bf16", "tf32", "fp32", "fp8", "int8"),
    "fallback": ("warn", "error"),
}
"""What an option with a closed set of values may be."""


class OptionError(TypeError):
    """An option that does not exist, or a value that it does not take."""


@dataclass(frozen=True)
class Options:
    """How to compile.

    Args:
        precision: what matrix products compute in: "fp16", "bf16", "tf32", "fp32" (generated as
            three products of tf32, as accurate as torch's fp32), "fp8" (the linears that
            `calibration` and `error_budget` choose, the others in 16 bits), "int8" (the same of
            linears and convolutions); by default (None) the
            model stays as it is, with each product in the type of its operands. Input and output
            dtypes never change.
        target: architecture to compile for, such as "sm_90a"; "host" runs the kernels on the CPU,
            slowly, for correctness; by default (None) the GPU at hand.
        fallback: "warn" runs what has no kernel with ATen and says so; "error" refuses.
        cuda_graph: replay one CUDA graph per call; otherwise launch kernel by kernel.
        static_outputs: return the same output tensors from every call, overwritten by the next.
            Fresh or not, an output may be a strided part, three quarters at least, of the memory
            that it holds: one whose channels were padded has the strides of the padded image.
        calibration: for 8 bits, what `gtco.calibrate` returned, or the file that it wrote.
        error_budget: for 8 bits, the largest relative error of the outputs: products that
            would exceed it stay in 16 bits.
    """

    precision: str | None = None
    target: str | None = None
    fallback: str = "warn"
    cuda_graph: bool = True
    static_outputs: bool = False
    calibration: Any = None
    error_budget: float = 0.05

    @staticmethod
    def of(**given: Any) -> Options:
        """Options from keywords.

        Raises:
            OptionError: an unknown name (with the closest known one) or a value not on offer.
        """
        names = [field.name for field in fields(Options)]
        for name, value in given.items():
            if name not in names:
                raise OptionError(f"unknown option {name!r}{_suggest(name, names)}")
            if name in CHOICES:
                _check_choice(name, value)
            elif name == "target":
                if value is not None and not isinstance(value, str):
                    raise OptionError(f"target is an architecture's name, not {value!r}")
            elif name == "calibration":
                pass  # the compiler knows what it can be
            elif name == "error_budget":
                if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                    raise OptionError(f"error_budget is a share from 0 to 1, not {value!r}")
            elif not isinstance(value, bool):
                raise OptionError(f"{name} is True or False, not {value!r}")
        if isinstance(path := given.get("calibration"), os.PathLike):
            given["calibration"] = os.fspath(path)
        return Options(**given)

    def keywords(self) -> dict[str, Any]:
        """As `of` takes them; a calibration stays what it is."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def database_file(given: Any) -> Path | None:
    """The file that a user named as the database of tuning records; None if none was.

    Raises:
        OptionError: `given` is no path.
    """
    if given is not None and not isinstance(given, (str, os.PathLike)):
        raise OptionError(
            f"database is the path of a file, not {given!r:.80}; pass a str or a Path"
        )
    return None if given is None else Path(given)


def _check_choice(name: str, value: Any) -> None:
    choices = CHOICES[name]
    if value in choices:
        return
    words = [choice for choice in choices if choice is not None]
    close = difflib.get_close_matches(str(value), words, 1, 0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise OptionError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}{hint}")


def _suggest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
