"""`gtco.calibrate`: what `precision="fp8"` needs to know of a model, from batches of its inputs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from gtco.calibration import Calibration, CalibrationError, run
from gtco.compiler import capture_for
from gtco.models import accepted
from gtco.options import Options
from gtco.passes import run_pipeline

Batch = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of one."""


def calibrate(
    model: Any, batches: Iterable[Batch], *, path: str | os.PathLike[str] | None = None
) -> Calibration:
    """Run `model` on real inputs and keep what fp8 needs to know of it.

    Args:
        model: as for `gtco.compile`.
        batches: inputs of one shape, the more like those to come the better: a tensor, a tuple of
            positional arguments or a dict of keyword arguments each. Some dozens are enough. They
            run where they are, on the CPU or a GPU: each to see how large values are; the first 64,
            which are kept, once and more (for each GiB of second moments) to round weights by; the
            last few of these as often as the model has linears, to measure what each costs.
        path: a file that keeps it, beside one of this name and `.safetensors` with weights in fp8;
            the same call goes on where one that was interrupted ended.

    Returns:
        What to give `gtco.compile(..., precision="fp8", calibration=...)`, on its own or as the
        path of the file.

    Raises:
        CalibrationError: there is no batch, nothing can be quantized, an input gives no finite
            value, or the file is of another model.
        CaptureError: the model cannot be captured.
        ArgumentError: a batch has another structure or shape than the first.
    """
    return calibrate_calls(model, map(_call, batches), None if path is None else Path(path))


def calibrate_calls(model: Any, calls: Iterable[Call], path: Path | None) -> Calibration:
    """As `calibrate`, with the positional and the keyword arguments of each call."""
    iterator = iter(calls)
    first = next(iterator, None)
    if first is None:
        raise CalibrationError("no batch was given: pass some of the model's real inputs")
    module, args, kwargs = accepted(model, *first)
    captured = capture_for(module, args, kwargs, Options(precision="fp8"))
    tensors = (captured.flatten(*call) for call in chain((first,), iterator))
    return run(run_pipeline(captured.graph), tensors, path)


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
