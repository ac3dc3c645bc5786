"""The inputs of an ONNX model: what it declares, the sizes to compile for, and what is given.

x: float [batch, 3, 224, 224], shapes={"x": (1, 3, 224, 224)} -> x: float [1, 3, 224, 224]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx
import torch
from torch import Tensor

from gtco.frontend.onnx_call import OnnxError
from gtco.frontend.onnx_shapes import DTYPES, FLOAT8_AND_STRINGS
from gtco.frontend.onnx_sizes import TooLargeError, check_size


class ShapesError(OnnxError):
    """The sizes given for inputs do not fit the model: it may be sound, the asking is not."""


UNKNOWN = -1
"""The size that some exporters, such as Paddle's, write where they know none."""
NO_NAMES = ("", "?", "-1", "None")
"""What some write for the name of every such axis; the same name would be the same size."""


@dataclass(frozen=True)
class Input:
    """An input as the graph declares it; a dimension without a fixed size is its name or None."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str | None, ...] | None

    def __str__(self) -> str:
        sizes = "..." if self.shape is None else ", ".join(_shown(size) for size in self.shape)
        return f"{self.name!r}: {self.dtype} [{sizes}]"

    @property
    def free(self) -> list[str]:
        """Its axes without a fixed size, in words."""
        if self.shape is None:
            return ["all of its axes"]
        return [
            f"axis {axis}" + (f" ({size})" if size else "")
            for axis, size in enumerate(self.shape)
            if not isinstance(size, int)
        ]


def _shown(size: int | str | None) -> str:
    return "?" if size is None else str(size)


def declared_inputs(graph: onnx.GraphProto, initializers: Mapping[str, Any]) -> tuple[Input, ...]:
    """The inputs of `graph` that are no initializers.

    Raises:
        OnnxError: an input is no tensor, of a type that gtco has not, or larger than memory.
    """
    return tuple(_sized(_input(value)) for value in graph.input if value.name not in initializers)


def _sized(declared: Input) -> Input:
    """The same, if there can be such a tensor.

    Raises:
        OnnxError: a size below 0, or more than memory holds.
    """
    fixed = [size for size in declared.shape or () if isinstance(size, int)]
    if any(size < 0 for size in fixed):
        raise OnnxError(
            f"input {declared} has a size below 0; a size that may vary is declared by a name"
        )
    try:
        check_size(fixed, declared.dtype.itemsize)
    except TooLargeError as error:
        raise OnnxError(f"input {declared}: {error}") from error
    return declared


def _input(value: onnx.ValueInfoProto) -> Input:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        raise OnnxError(
            f"input {value.name!r} is a {kind}, which is not supported; export the model with an "
            f"input for each tensor"
        )
    tensor = value.type.tensor_type
    if tensor.elem_type not in DTYPES:
        name = onnx.TensorProto.DataType.Name(tensor.elem_type)
        raise OnnxError(f"input {value.name!r} is of type {name}, which {FLOAT8_AND_STRINGS}")
    shape = None
    if tensor.HasField("shape"):
        shape = tuple(_dimension(dimension) for dimension in tensor.shape.dim)
    return Input(value.name, DTYPES[tensor.elem_type], shape)


def _dimension(dimension: onnx.TensorShapeProto.Dimension) -> int | str | None:
    size = dimension.dim_value if dimension.HasField("dim_value") else UNKNOWN
    name = dimension.dim_param
    return (None if name in NO_NAMES else name) if size == UNKNOWN else int(size)


def with_shapes(inputs: Sequence[Input], shapes: Mapping[str, Sequence[int]]) -> tuple[Input, ...]:
    """`inputs` with the sizes of `shapes`, by input; one axis name is one size everywhere.

    Raises:
        ShapesError: a name is no input's, a shape does not fit what the model declares, or is of a
            tensor larger than memory.
    """
    unknown = sorted(set(shapes) - {declared.name for declared in inputs})
    if unknown:
        raise ShapesError(
            f"shapes names {', '.join(map(repr, unknown))}, but the model's inputs are "
            f"{'; '.join(map(str, inputs))}"
        )
    sizes: dict[str, int] = {}
    for declared in inputs:
        if declared.name not in shapes:
            continue
        shape = tuple(shapes[declared.name])
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape)
        if not whole or not _fits(declared, shape, sizes):
            raise ShapesError(
                f"shapes gives input {declared} the sizes {list(shape)}, which do not fit: give "
                f"a whole number for each axis, the declared one where it is fixed, and one size "
                f"to all axes of one name"
            )
    sized = tuple(
        replace(declared, shape=tuple(shapes[declared.name]))
        if declared.name in shapes
        else replace(declared, shape=_bound(declared.shape, sizes))
        for declared in inputs
    )
    try:
        return tuple(_sized(each) for each in sized)
    except OnnxError as error:
        raise ShapesError(f"shapes: {error}") from error


def _fits(declared: Input, shape: Sequence[int], sizes: dict[str, int]) -> bool:
    """Whether `shape` is one of the declared; `sizes` learns what the names of axes stand for."""
    if declared.shape is None:
        return True
    if len(declared.shape) != len(shape):
        return False
    for size, given in zip(declared.shape, shape, strict=True):
        expected = sizes.setdefault(size, given) if isinstance(size, str) else size
        if expected not in (None, given):
            return False
    return True


def _bound(
    shape: tuple[int | str | None, ...] | None, sizes: Mapping[str, int]
) -> tuple[int | str | None, ...] | None:
    if shape is None:
        return None
    return tuple(sizes.get(size, size) if isinstance(size, str) else size for size in shape)


def example_inputs(inputs: Sequence[Input]) -> tuple[Tensor, ...]:
    """Tensors of the declared shapes: random floats, zeros for the rest.

    Raises:
        OnnxError: inputs have axes without a fixed size.
    """
    free = [declared for declared in inputs if declared.free]
    if free:
        listed = "; ".join(f"{declared}: {', '.join(declared.free)}" for declared in free)
        first = free[0]
        sizes = [size if isinstance(size, int) else 1 for size in first.shape or (1, 3, 224, 224)]
        by_x = "x".join(map(str, sizes))
        raise OnnxError(
            f"inputs of the model have axes of no fixed size ({listed}); say which sizes to "
            f"compile for with shapes={{{first.name!r}: {tuple(sizes)}}} (on a command line "
            f"--shape {first.name}={by_x}), pass example arguments of these sizes "
            f"(gtco.compile(path, (x,))), or export the model with fixed sizes"
        )
    generator = torch.Generator().manual_seed(0)
    made = []
    for declared in inputs:
        shape = [size for size in declared.shape or () if isinstance(size, int)]
        if declared.dtype.is_floating_point:
            made.append(torch.randn(shape, generator=generator).to(declared.dtype))
        else:
            made.append(torch.zeros(shape, dtype=declared.dtype))
    return tuple(made)


def check_inputs(inputs: Sequence[Input], args: Sequence[Any]) -> None:
    """Compare the arguments of a call with the declared inputs.

    Raises:
        OnnxError: their number, a shape or a dtype differs.
    """
    if len(args) != len(inputs):
        raise OnnxError(
            f"the model has {len(inputs)} inputs ({'; '.join(map(str, inputs))}), "
            f"but {len(args)} were given"
        )
    sizes: dict[str, int] = {}
    for declared, x in zip(inputs, args, strict=True):
        fits = isinstance(x, Tensor) and x.dtype == declared.dtype
        if not (fits and _fits(declared, x.shape, sizes)):
            shown = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise OnnxError(f"input {declared} was given a {shown}")
