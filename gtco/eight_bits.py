"""`gtco.calibrate`: what `precision="fp8"` and `"int8"` need to know of a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from gtco.calibration import TYPES, Calibration, CalibrationError
from gtco.calibrator import run
from gtco.compiler import capture_for
from gtco.models import accepted
from gtco.options import OptionError, Options
from gtco.passes import run_pipeline

Batch = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of one."""


def calibrate(
    model: Any,
    batches: Iterable[Batch],
    *,
    precision: str = "fp8",
    path: str | os.PathLike[str] | None = None,
) -> Calibration:
    """Run `model` on real inputs and keep what 8 bits need to know of it.

    Args:
        model: as for `gtco.compile`.
        batches: inputs of one shape, the more like those to come the better: a tensor, a tuple of
            positional arguments or a dict of keyword arguments each. Some dozens are enough. They
            run where they are, on the CPU or a GPU: each to see how large values are; the first 64,
            which are kept, once and more (for each GiB of second moments) to round weights by; the
            last few of these as often as the model has products, to measure what each costs.
        precision: "fp8", of linears, or "int8", of linears and convolutions.
        path: a file that keeps it, beside one of this name and `.safetensors` with tensors; the
            same call goes on where one that was interrupted ended.

    Returns:
        What to give `gtco.compile(..., precision=precision, calibration=...)`, on its own or as the
        path of the file.

    Raises:
        CalibrationError: there is no batch, nothing can be quantized, an input gives no finite
            value, or the file is of another model.
        CaptureError: the model cannot be captured.
        ArgumentError: a batch has another structure or shape than the first.
        OptionError: gtco calibrates for no such precision.
    """
    where = None if path is None else Path(path)
    return calibrate_calls(model, map(_call, batches), precision, where)


def calibrate_calls(
    model: Any, calls: Iterable[Call], precision: str, path: Path | None
) -> Calibration:
    """As `calibrate`, with the positional and the keyword arguments of each call."""
    if precision not in TYPES:
        raise OptionError(f"precision is one of {', '.join(TYPES)} here, not {precision!r}")
    iterator = iter(calls)
    first = next(iterator, None)
    if first is None:
        raise CalibrationError("no batch was given: pass some of the model's real inputs")
    module, args, kwargs = accepted(model, *first)
    captured = capture_for(module, args, kwargs, Options(precision=precision))
    tensors = (captured.flatten(*call) for call in chain((first,), iterator))
    return run(run_pipeline(captured.graph), tensors, precision, path)


def _call(batch: Batch) -> Call:
    """A batch as positional and keyword arguments."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    raise CalibrationError(
        f"a batch is a {type(batch).__name__}: pass a tensor, a tuple of positional arguments or a "
        "dict of keyword arguments"
    )
