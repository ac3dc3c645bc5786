"""What an ONNX operator's function is given: the node's attributes, opset and known inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gtco.frontend.onnx_sizes import TooLargeError, bounded
from gtco.frontend.refusals import CaptureError

CUT_OFF = "export the model without it, or cut it off with onnx.utils.extract_model"
"""What to do about a node that is not supported, where nothing nearer helps."""


class OnnxError(CaptureError):
    """An ONNX model that gtco cannot read or does not support: the message names the node."""


@contextmanager
def concrete() -> Iterator[None]:
    """Compute on real tensors, also while `torch.export` traces."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class Call:
    """One node of the graph as its function sees it.

    Args:
        op: the operator's name.
        function: what computes it.
        where: the node in words, for messages.
        opset: the version of the default operator set.
        attrs: the node's attributes; tensors as `Tensor`, graphs as `onnx_run.Body`.
        inputs: the names of the inputs; an omitted optional one is "".
        outputs: the names of the outputs; an omitted optional one is "".
    """

    def __init__(
        self,
        op: str,
        function: Op,
        where: str,
        opset: int,
        attrs: Mapping[str, Any],
        inputs: Sequence[str],
        outputs: Sequence[str],
    ) -> None:
        self.op, self.function, self.where, self.opset = op, function, where, opset
        self.attrs, self.inputs, self.outputs = attrs, inputs, outputs
        self.values: Sequence[Tensor | None] = ()
        self.of_weights = False
        self._read: set[str] = set()

    def run(
        self,
        arguments: Sequence[Tensor | None],
        values: Sequence[Tensor | None],
        of_weights: bool,
    ) -> tuple[Tensor | None, ...]:
        """Call the operator's function and refuse an attribute that it did not look at.

        Args:
            arguments: the inputs, None for an omitted one.
            values: the inputs that are known at compile time, None for the others.
            of_weights: whether no input of the model changes any of them.
        """
        self.values, self.of_weights = values, of_weights
        self._read.clear()
        with self.refusing(), bounded(arguments):
            result = self.function(self, *arguments)
        for name in self.attrs:
            if name not in self._read:
                raise self.refuse(f"attribute {name!r} is not supported")
        return result if isinstance(result, tuple) else (result,)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Turn what torch raises into a refusal of this node."""
        try:
            yield
        except CaptureError:
            raise
        except TooLargeError as error:
            raise self.refuse(str(error)) from error
        except Exception as error:
            line = str(error).partition("\n")[0]
            raise self.refuse(f"torch refuses it ({type(error).__name__}: {line})") from error

    def attr(self, name: str, default: Any = None) -> Any:
        """The attribute `name`, or `default`."""
        self._read.add(name)
        return self.attrs.get(name, default)

    def ignore(self, *names: str) -> None:
        """Say that these attributes do not change the result."""
        self._read.update(names)

    def has(self, index: int) -> bool:
        """Whether input `index` is given."""
        return index < len(self.inputs) and bool(self.inputs[index])

    def wants(self, index: int) -> bool:
        """Whether output `index` is used."""
        return index < len(self.outputs) and bool(self.outputs[index])

    def known(self, index: int) -> Tensor | None:
        """The value of input `index` on the CPU if it is known at compile time."""
        return self.values[index] if index < len(self.values) else None

    def constant(self, index: int) -> list[Any]:
        """The elements of input `index`, which has to be known at compile time."""
        value = self.known(index)
        if value is None:
            raise self.refuse(
                f"input {self.inputs[index]!r} decides a shape and is not known at compile time",
                "make it a constant of the model, or compute it from shapes",
            )
        with concrete():
            return list(value.reshape(-1).tolist())

    def ints(self, index: int, attribute: str | None = None) -> list[int] | None:
        """Integers from input `index` or, in older opsets, from `attribute`; None if omitted."""
        if attribute is not None and (given := self.attr(attribute)) is not None:
            return [int(item) for item in given]
        return [int(item) for item in self.constant(index)] if self.has(index) else None

    def axis(self, axis: int, rank: int) -> int:
        """`axis` counted from the front.

        Raises:
            OnnxError: it is out of range.
        """
        if not -rank <= axis < max(rank, 1):
            raise self.refuse(f"axis {axis} is out of range for {rank} dimensions")
        return axis % max(rank, 1)

    def axes(self, axes: Sequence[int], rank: int) -> list[int]:
        """`axes` counted from the front, each once."""
        found = [self.axis(axis, rank) for axis in axes]
        if len(set(found)) != len(found):
            raise self.refuse(f"axes {list(axes)} name a dimension twice")
        return found

    def refuse(self, reason: str, remedy: str = CUT_OFF) -> OnnxError:
        """The error that says why this node is not supported, and what to do about it."""
        return OnnxError(f"{self.where}: {reason}; {remedy}")


Op = Callable[..., Any]
"""`(call, *inputs) -> Tensor or tuple of them`; an omitted optional input is None."""


def plain(function: Callable[..., Tensor]) -> Op:
    """An operator without attributes that is one torch function."""
    return lambda call, *inputs: function(*inputs)
