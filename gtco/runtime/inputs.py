"""What a call of a compiled module is given, held against what it was compiled for."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from gtco.frontend.torch_export import Captured
from gtco.ir.graph import Graph
from gtco.ir.interpreter import ArgumentError
from gtco.ir.spec import TensorSpec
from gtco.runtime.plan import Plan, PlanError

log = logging.getLogger("gtco.runtime")


class InputCheck:
    """What one input must be.

    Args:
        name: of the argument, for messages.
        spec: its shape and dtype.
        order: of its dimensions in memory, if it is another.
    """

    def __init__(self, name: str, spec: TensorSpec, order: tuple[int, ...] | None = None) -> None:
        self.name = name
        self.spec = spec
        self._shape = torch.Size(spec.sizes)
        self._dtype = spec.dtype
        self._order = order
        self._told = False

    def __call__(self, tensor: Any, device: torch.device, grad_enabled: bool) -> Tensor:
        """`tensor` (any strides), converted if it holds floats of another type, with its
        dimensions as they lie in memory.

        Raises:
            ArgumentError: naming the argument, what was expected and what was given.
        """
        plain = (
            isinstance(tensor, Tensor)
            and tensor.shape == self._shape
            and tensor.dtype == self._dtype
            and tensor.device == device
            and not (grad_enabled and tensor.requires_grad)
        )
        if not plain:
            tensor = self._accepted(tensor, device, grad_enabled)
        result: Tensor = tensor if self._order is None else tensor.permute(self._order)
        return result

    def _accepted(self, tensor: Any, device: torch.device, grad_enabled: bool) -> Tensor:
        """What is not as expected, converted, if it holds floats of another type."""
        if not isinstance(tensor, Tensor):
            raise ArgumentError(
                f"argument {self.name}: expected a tensor, got a {type(tensor).__name__}"
            )
        floats = tensor.is_floating_point() and self._dtype.is_floating_point
        if tensor.shape != self._shape or (tensor.dtype != self._dtype and not floats):
            raise ArgumentError(
                f"argument {self.name}: expected {self.spec}, got {TensorSpec.of(tensor)}; a "
                f"compiled module takes one shape and converts nothing but floats to floats, so "
                f"convert the tensor or compile again for it"
            )
        if tensor.device != device:
            raise ArgumentError(
                f"argument {self.name}: expected a tensor on {device}, got one on {tensor.device}; "
                f"move it with .to({str(device)!r})"
            )
        if grad_enabled and tensor.requires_grad:
            raise ArgumentError(
                f"argument {self.name} requires grad, and a compiled module is for inference: call "
                f"it under torch.no_grad(), or pass {self.name}.detach()"
            )
        return self._converted(tensor)

    def _converted(self, tensor: Tensor) -> Tensor:
        if not self._told:
            self._told = True
            log.warning(
                "argument %s is %s, and the model was compiled for %s: each call converts it with "
                "one more kernel; pass it as %s, or compile for what you have",
                self.name,
                TensorSpec.of(tensor),
                self.spec,
                self._dtype,
            )
        return tensor.to(self._dtype)


def input_checks(graph: Graph) -> tuple[InputCheck, ...]:
    """What each input of `graph` must be."""
    return tuple(
        InputCheck(name, spec, graph.orders.get(name)) for name, spec in graph.given.items()
    )


def check_signature(plan: Plan, captured: Captured) -> None:
    """Refuse a rewritten graph whose inputs or outputs are not the captured ones in order.

    Raises:
        PlanError: naming both.
    """
    if plan.graph.orders != captured.graph.orders:
        raise PlanError("the passes changed the order of the dimensions of the model's inputs")
    for kind in ("inputs", "outputs"):
        specs = [
            [graph.specs[name] for name in getattr(graph, kind)]
            for graph in (plan.graph, captured.graph)
        ]
        if specs[0] != specs[1]:
            raise PlanError(f"the passes changed the model's {kind}: {specs[1]} became {specs[0]}")
