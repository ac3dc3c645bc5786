"""Find the model that a command line names: `module:function` or an .onnx file."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gtco.frontend.onnx import load_onnx
from gtco.frontend.onnx_inputs import ShapesError
from gtco.runtime.artifact import SUFFIX

Shapes = Mapping[str, Sequence[int]] | None


class UsageError(ValueError):
    """The command line does not say what can be done."""


class ModelError(RuntimeError):
    """The user's module or function was found and raised."""


@dataclass(frozen=True)
class Located:
    """A model and the arguments to call it with.

    Args:
        name: as the user gave it.
        module: the model.
        args: positional arguments.
        kwargs: keyword arguments.
        onnx: the file that it was read from, if it was.
    """

    name: str
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    onnx: Path | None = None

    def file_on(self, device: str) -> Located:
        """The same, with the model and arguments of an .onnx file on `device`.

        A function of the user's says itself where its model is.
        """
        if self.onnx is None:
            return self
        args = tuple(each.to(device) for each in self.args)
        return replace(self, module=self.module.to(device), args=args)


def artifact_path(name: str) -> Path | None:
    """The file if `name` is that of a saved artifact: `FILE.gtco`, or any file but an ONNX one."""
    path = Path(name)
    if path.suffix == SUFFIX or (path.is_file() and path.suffix != ".onnx"):
        return path
    return None


def locate(name: str, shapes: Mapping[str, Sequence[int]] | None = None) -> Located:
    """Import the module, call its function and take (module, args) or (module, args, kwargs).

    The current folder is importable. An .onnx file is called with inputs of its declared sizes;
    the function may return the path of one in place of the module, and no arguments then.

    Args:
        name: `module:function` or the path of an .onnx file.
        shapes: of an .onnx file's inputs with axes of no fixed size.

    Raises:
        UsageError: no such file, module or function, it returns something else, or `shapes` does
            not fit the file's inputs.
        ModelError: the user's code raised.
        OnnxError: the file cannot be read, is not supported, or has an input of no fixed size.
    """
    if Path(name).suffix == ".onnx":
        return _onnx(name, Path(name), shapes, None)
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name):
        raise UsageError(
            f"MODEL is an .onnx file, or module:function, such as my_package.models:vit, "
            f"not {name!r}"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _import(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value)]
        raise UsageError(
            f"{module_name} has no function {function_name!r}{_suggest(function_name, names)}"
        )
    try:
        result = function()
    except Exception as error:
        raise ModelError(f"{name} raised {type(error).__name__}: {error}") from error
    return _unpack(name, result, shapes)


def _onnx(name: str, path: Path, shapes: Shapes, args: Sequence[Any] | None) -> Located:
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}")
    try:
        model = load_onnx(path, shapes=shapes)
    except ShapesError as error:
        raise UsageError(f"--shape does not fit {name}: {error}") from error
    return Located(name, model, tuple(args) if args else model.example(), {}, path)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise ModelError(f"importing {name} failed: {error}") from error
        parent, _, last = missing.rpartition(".")
        paths = importlib.import_module(parent).__path__ if parent else [str(Path.cwd())]
        names = [found.name for found in pkgutil.iter_modules(paths)]
        raise UsageError(
            f"there is no module {missing!r} in {parent or 'the current folder'} "
            f"or installed{_suggest(last, names)}"
        ) from None
    except Exception as error:
        raise ModelError(f"importing {name} raised {type(error).__name__}: {error}") from error


def _suggest(wrong: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(wrong, list(known), 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _unpack(name: str, result: Any, shapes: Shapes) -> Located:
    if isinstance(result, tuple):  # an argument by itself stands for a tuple of one
        result = tuple((each,) if isinstance(each, torch.Tensor) else each for each in result)
    match result:
        case str() | Path():
            return _onnx(name, Path(result), shapes, None)
        case (str() | Path() as path, (tuple() | list()) as args):
            return _onnx(name, Path(path), shapes, args)
    if shapes:
        raise UsageError(f"--shape is for .onnx files; {name} makes its arguments itself")
    match result:
        case Located():
            return replace(result, name=name)
        case (torch.nn.Module() as module, (tuple() | list()) as args):
            return Located(name, module, tuple(args), {})
        case (torch.nn.Module() as module, (tuple() | list()) as args, dict() as kwargs):
            return Located(name, module, tuple(args), kwargs)
    shown = (
        f"({', '.join(type(item).__name__ for item in result)})"
        if isinstance(result, tuple)
        else type(result).__name__
    )
    raise UsageError(
        f"{name} returns {shown}; it has to return (module, args) or (module, args, kwargs), "
        "where args is a tuple, or the path of an .onnx file in place of the module"
    )
