"""What a user may hand in as a model with its example arguments, and what is said to the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from gtco.frontend.onnx import OnnxModel, load_onnx
from gtco.frontend.refusals import CaptureError
from gtco.runtime.artifact import SUFFIX
from gtco.runtime.module import CompiledModule


def accepted(
    model: Any, args: Any, kwargs: Any, shapes: Any = None
) -> tuple[torch.nn.Module | ExportedProgram, tuple[Any, ...], dict[str, Any]]:
    """The module or program to capture, and its example arguments.

    Args:
        model: as for `gtco.compile`; the path of an .onnx file is read.
        args: likewise.
        kwargs: likewise.
        shapes: likewise.

    Raises:
        CaptureError: one of them is of no kind that can be captured.
        OnnxError: the .onnx file cannot be read or is not supported.
    """
    args = (args,) if isinstance(args, Tensor) else args
    if not isinstance(args, Sequence) or isinstance(args, (str, bytes)):
        raise CaptureError(f"args is a {type(args).__name__}; pass a tuple of arguments: (x,)")
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise CaptureError(
            f"kwargs is a {type(kwargs).__name__} that does not map names to arguments; pass a "
            f'dict such as {{"mask": mask}}'
        )
    if isinstance(model, (str, os.PathLike)):
        model = _read(Path(model), shapes)
        if kwargs:
            names = " ".join(f"{name}," for name in model.input_names)
            raise CaptureError(
                f"kwargs: an .onnx model takes its inputs by position; pass args=({names})"
            )
        shapes = None
        args = args or model.example()
        model.to(next((each.device for each in args if isinstance(each, Tensor)), "cpu"))
    if shapes is not None:
        raise CaptureError(
            "shapes are those of an .onnx file's inputs; those of a module are its example "
            "arguments: pass args and leave shapes out"
        )
    _check_model(model)
    return model, tuple(args), dict(kwargs)


def _read(path: Path, shapes: Any) -> OnnxModel:
    if path.suffix == SUFFIX:
        raise CaptureError(f"model is {path}, a compiled artifact; use gtco.load({str(path)!r})")
    if path.suffix != ".onnx":
        raise CaptureError(
            f"model is the path {path}, which is no .onnx file; load the model and pass the module"
        )
    if not path.is_file():
        raise CaptureError(f"model: there is no file {path}; check the path, from {Path.cwd()}")
    if shapes is not None and not (
        isinstance(shapes, Mapping) and all(isinstance(each, Sequence) for each in shapes.values())
    ):
        raise CaptureError(f'shapes is {shapes!r:.80}; pass a dict: {{"x": (1, 3, 224, 224)}}')
    return load_onnx(path, shapes=shapes)


def _check_model(model: Any) -> None:
    if isinstance(model, CompiledModule):
        raise CaptureError("model is compiled already; pass the module that it was made from")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError("model is TorchScript; pass the nn.Module that it was made from")
    if isinstance(model, torch.nn.Module):
        for name, part in model.named_modules():
            if isinstance(part, CompiledModule):
                raise CaptureError(
                    f"the model's {name} is compiled already; put the module that it was made "
                    f"from in its place"
                )
        return
    if isinstance(model, ExportedProgram):
        return
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        name = model.__name__
        what, step = f"the class {name}", f"pass an instance: {name}(...).eval()"
    elif callable(model):
        what = f"the function {getattr(model, '__name__', model)}"
        step = 'call it in the forward of an nn.Module, or use torch.compile(f, backend="gtco")'
    elif isinstance(model, Mapping):
        what, step = f"a {type(model).__name__}", "load the weights into a module, and pass that"
    else:
        what = f"a {type(model).__name__}"
        step = "pass an nn.Module, an ExportedProgram, a GraphModule or the path of an .onnx file"
    raise CaptureError(f"model is {what}, not a model; {step}")
