"""`gtco calibrate`: batches of real inputs from files, and what they show of a model.

x.npy [64, 3, 224, 224], a model of [1, 3, 224, 224]  ->  64 batches
a.npz {x: [2, 8], mask: [2]}                          ->  one batch of the inputs x and mask
"""

from __future__ import annotations

import inspect
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gtco.calibration import Calibration, CalibrationError
from gtco.eight_bits import Call, calibrate_calls
from gtco.frontend.signature import NamedInputs
from gtco.locate import Located, UsageError
from gtco.options import Options

SUFFIXES = (".npy", ".npz", ".safetensors")

Batches = Annotated[
    list[Path],
    typer.Option(
        "--batches",
        metavar="FILE_OR_DIR",
        help="real inputs: .npy files of a model's only input, .npz or .safetensors files with an "
        "array for each input, or a folder of such files; may be given more than once",
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        "--precision",
        help='what to calibrate for: "fp8", of linears, or "int8", of linears and convolutions',
    ),
]
File = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="the calibration; continues one that is there already",
    ),
]


def files_of(places: Sequence[Path]) -> tuple[Path, ...]:
    """The files with batches at `places`, those of a folder by name.

    Raises:
        UsageError: there is no such file, or a folder has none.
    """
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            inside = sorted(each for each in place.iterdir() if each.suffix in SUFFIXES)
            if not inside:
                raise UsageError(f"--batches: the folder {place} has no {', '.join(SUFFIXES)} file")
            found += inside
        elif not place.is_file():
            raise UsageError(f"--batches: there is no file {place}")
        elif place.suffix not in SUFFIXES:
            raise UsageError(f"--batches takes {', '.join(SUFFIXES)} files, not {place}")
        else:
            found.append(place)
    return tuple(found)


def run(found: Located, files: Sequence[Path], precision: str, output: Path) -> Calibration:
    """Calibrate a located model, on the GPU where there is one, with a progress bar on stderr.

    Raises:
        UsageError: there is no folder for `output`.
        CalibrationError: a file does not fit the model, or as `gtco.calibrate` says.
    """
    if not output.parent.is_dir():
        raise UsageError(f"--output: there is no folder {output.parent}")
    if torch.cuda.is_available():
        found = found.file_on("cuda")
    inputs = _inputs(found)
    calls = (_call(found, batch) for file in files for batch in _batches(file, inputs))
    return calibrate_calls(found.module, calls, precision, output)


def show(out: Console, found: Calibration) -> None:
    """Print the error of each product, and how many fit the usual budget."""
    out.print(str(found), markup=False, highlight=False, soft_wrap=True)
    budget = Options().error_budget
    out.print(
        f"within an error of {budget:.0%} (--error-budget {budget:g}): "
        f"{len(found.chosen(budget))} of {len(found.layers)} in {found.precision}",
        highlight=False,
    )


def _inputs(found: Located) -> dict[str, Tensor]:
    """The example tensors by the names of the model's inputs."""
    given = dict(zip(_names(found), [*found.args, *found.kwargs.values()], strict=True))
    nested = [name for name, value in given.items() if isinstance(value, (tuple, list, dict))]
    if nested:
        raise UsageError(
            f"the argument {nested[0]} of {found.name} holds several tensors, which files of "
            "batches do not: call gtco.calibrate from Python"
        )
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def _names(found: Located) -> list[str]:
    """What to call the arguments of `found`, positional ones first."""
    if isinstance(found.module, NamedInputs):
        return list(found.module.input_names)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(found.module.forward).parameters.values()
    named = [each.name for each in parameters if each.kind in kinds][: len(found.args)]
    numbered = [f"input_{number}" for number in range(len(named), len(found.args))]
    return [*named, *numbered, *found.kwargs]


def _call(found: Located, batch: Mapping[str, Tensor]) -> Call:
    values = [*found.args, *found.kwargs.values()]
    filled = [batch.get(name, each) for name, each in zip(_names(found), values, strict=True)]
    count = len(found.args)
    return tuple(filled[:count]), dict(zip(found.kwargs, filled[count:], strict=True))


def _batches(file: Path, inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The batches in `file`, one array of each input for as many as its first axis holds."""
    try:
        arrays = _arrays(file)
    except (SafetensorError, zipfile.BadZipFile) as error:
        raise CalibrationError(f"{file} cannot be read: {error}") from error
    except (ValueError, EOFError) as error:  # numpy would have it unpickled
        raise CalibrationError(
            f"{file} is damaged, or holds Python objects, which are not read: save plain arrays"
        ) from error
    if file.suffix == ".npy":
        if len(inputs) != 1:
            raise CalibrationError(
                f"{file} holds one array, and the model takes {', '.join(inputs)}: pass .npz or "
                "safetensors files with these names"
            )
        arrays = {next(iter(inputs)): arrays[""]}
    if set(arrays) != set(inputs):
        raise CalibrationError(
            f"{file} holds {', '.join(arrays) or 'nothing'}, and the model takes "
            f"{', '.join(inputs)}: name its arrays after these"
        )
    counts = {name: _count(file, name, arrays[name], inputs[name]) for name in inputs}
    if len(set(counts.values())) != 1:
        shown = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise CalibrationError(f"{file} holds {shown}: as many batches of each are needed")
    for number in range(max(counts.values())):
        yield {
            name: _part(arrays[name], number, example).to(example)
            for name, example in inputs.items()
        }


def _arrays(file: Path) -> dict[str, Any]:
    """The arrays of `file` by name, "" for the only one of a .npy file; nothing is unpickled."""
    if file.suffix == ".npy":
        return {"": np.load(file, mmap_mode="r", allow_pickle=False)}
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as opened:
            return {name: opened[name] for name in opened.files}
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _count(file: Path, name: str, array: Any, example: Tensor) -> int:
    """How many batches of `example`'s sizes `array` holds along its first axis."""
    if isinstance(array, np.ndarray) and array.dtype.kind not in "biuf":
        raise CalibrationError(f"{file}: {name} is of {array.dtype}, which is no number")
    kinds = {_kind(_part(array, None, example).dtype), _kind(example.dtype)}
    if len(kinds) > 1:
        raise CalibrationError(
            f"{file}: {name} is of {array.dtype}, and the model takes {example.dtype}: prepare the "
            "inputs as for the model itself"
        )
    sizes, wanted = tuple(array.shape), tuple(example.shape)
    if sizes == wanted:
        return 1
    if len(sizes) == len(wanted) > 0 and sizes[1:] == wanted[1:]:
        count, rest = divmod(sizes[0], max(wanted[0], 1))
        if count and not rest:
            return int(count)
    raise CalibrationError(
        f"{file}: {name} is {list(sizes)}, and the model takes {list(wanted)}, or several of them "
        "one behind the other along the first axis"
    )


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype == torch.bool else "integer"


def _part(array: Any, number: int | None, example: Tensor) -> Tensor:
    """Batch `number` of `array`; none of it for its type alone."""
    step = example.shape[0] if example.dim() else 1
    if not example.dim():
        part = array
    else:
        start = 0 if number is None else number * step
        part = array[start : start + (0 if number is None else step)]
    if isinstance(part, Tensor):
        return part
    return torch.from_numpy(np.array(part, dtype=part.dtype.newbyteorder("="), order="C"))
