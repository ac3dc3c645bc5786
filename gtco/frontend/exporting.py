"""torch.export of a module: its refusals in words, its noise kept away, autocast around it kept."""

from __future__ import annotations

import functools
import io
import logging
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

import torch
from torch import nn
from torch.export import ExportedProgram

from gtco.frontend.literals import WrittenOut, has_unknown_sizes, known_literals
from gtco.frontend.refusals import (
    ONE_TYPE,
    CaptureError,
    check_arguments,
    check_result,
    failed_in,
)


def exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], label: str
) -> ExportedProgram:
    """What torch.export makes of `model`.

    Raises:
        CaptureError: it refuses the model or the arguments.
    """
    check_arguments(model, args, kwargs, label)
    hook = model.register_forward_hook(lambda module, inputs, result: check_result(result, label))
    try:
        return _with_values(model, args, kwargs)
    except CaptureError:
        raise  # of an ONNX model that says what it does not support, or of a result
    except Exception as error:
        reason, data_dependent = reason_of(error), _data_dependent(error)
        cause = (
            "a shape or a branch depends on tensor values (data-dependent)"
            if data_dependent
            else f"torch.export refuses {failed_in(model, error) or 'it'}"
        )
        step = (
            "check the example arguments, then make torch.export.export(model, args, kwargs, "
            "strict=False) succeed"
        )
        if data_dependent:
            step = (
                "compute it from shapes, write values that never change out in forward "
                "(torch.tensor([...])), or use torch.where instead of the branch"
            )
        elif re.search("dtype|scalar type|Input type|Type promoting", reason):
            step = ONE_TYPE
        raise CaptureError(f"{label} cannot be captured: {cause}: {reason}; {step}") from error
    finally:
        hook.remove()


def _with_values(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ExportedProgram:
    """The program of `model`, once more with the values of ranges, ones and zeros where those of
    other literals do not decide all shapes and branches."""
    program, refusal = None, None
    with known_literals(), _attributes_kept(model):
        try:
            program = torch.export.export(model, args, kwargs, strict=False)
        except Exception as error:
            if not _data_dependent(error):
                raise
            refusal = error
        if program is None or has_unknown_sizes(program):
            with suppress(Exception), _unheard(), WrittenOut():
                return torch.export.export(model, args, kwargs, strict=False)
    if program is None:
        assert refusal is not None
        raise refusal
    return program


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """The attributes of `model` and its parts are afterwards what they were, hooks included: a
    forward that keeps what it computes (anchors of the last shape, tables of positions) keeps
    torch.export's fake tensors, with which the next call of the model would fail."""
    before = [(part, dict(vars(part))) for part in model.modules()]
    inside = [
        (held, held.copy())
        for _, attributes in before
        for held in attributes.values()
        if type(held) in (dict, OrderedDict, list, set)
    ]
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)
        for held, content in inside:
            held.clear()
            held.extend(content) if isinstance(held, list) else held.update(content)


@contextmanager
def _unheard() -> Iterator[None]:
    """Without what a model prints, which it has printed before."""
    nowhere = io.StringIO()
    with redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _data_dependent(error: Exception) -> bool:
    return "data-dependent" in str(error).lower() or "DataDependent" in reason_of(error)


def within(regions: Sequence[tuple[str, torch.dtype]], model: nn.Module) -> nn.Module:
    """`model` as it is in the autocast `regions`: torch.export keeps those that a forward enters,
    and loses those around it."""
    if not regions:
        return model

    @functools.wraps(model.forward)
    def entering(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for device, dtype in regions:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            return model(*args, **kwargs)

    around = nn.Module()
    around.add_module("model", model)
    around.forward = entering  # with the signature of the model's own
    return around.eval()


_TORCH_LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
_TORCH_WARNINGS = (
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning),
    (r"The tensor attributes? .*_flat_weights.* assigned during export", UserWarning),
)


class _WithoutPrograms(io.TextIOBase):
    """A stream without the half-made program that torch.export prints, thousands of lines, while it
    handles the error that carries it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._left_out = False

    def write(self, text: str) -> int:
        program = getattr(sys.exc_info()[1], "partial_fx_graph", None)
        ends = self._left_out and text == "\n"
        self._left_out = program is not None and text == str(program)
        return len(text) if ends or self._left_out else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says of its own insides: a deprecated class that its copies of programs
    still use, the weights that its recurrent layers assign, and programs and tracebacks in its log
    and on stderr where `CaptureError` has the message."""
    loggers = [logging.getLogger(name) for name in _TORCH_LOGS]
    before = [each.disabled for each in loggers]
    try:
        with warnings.catch_warnings():
            for message, category in _TORCH_WARNINGS:
                warnings.filterwarnings("ignore", message, category)
            for each in loggers:
                each.disabled = True
            with redirect_stderr(_WithoutPrograms(sys.stderr)):
                yield
    finally:
        for each, was_off in zip(loggers, before, strict=True):
            each.disabled = was_off


def reason_of(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
