"""What a call of a compiled module is given, held against what it was compiled for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gtco.frontend.torch_export import Captured
from gtco.ir.interpreter import ArgumentError
from gtco.ir.spec import TensorSpec
from gtco.runtime.plan import Plan, PlanError


class InputCheck:
    """What one input must be.

    Args:
        name: of the argument, for messages.
        spec: its shape and dtype.
    """

    def __init__(self, name: str, spec: TensorSpec) -> None:
        self.name = name
        self.spec = spec
        self._shape = torch.Size(spec.sizes)
        self._dtype = spec.dtype

    def __call__(self, tensor: Any, device: torch.device, grad_enabled: bool) -> None:
        """Accept `tensor` (any strides).

        Raises:
            ArgumentError: naming the argument, what was expected and what was given.
        """
        if (
            isinstance(tensor, Tensor)
            and tensor.shape == self._shape
            and tensor.dtype == self._dtype
            and tensor.device == device
            and not (grad_enabled and tensor.requires_grad)
        ):
            return
        if not isinstance(tensor, Tensor):
            raise ArgumentError(
                f"argument {self.name}: expected a tensor, got a {type(tensor).__name__}"
            )
        if tensor.shape != self._shape or tensor.dtype != self._dtype:
            raise ArgumentError(
                f"argument {self.name}: expected {self.spec}, got {TensorSpec.of(tensor)}; a "
                f"compiled module takes one shape and dtype, so convert the tensor or compile "
                f"again for it"
            )
        if tensor.device != device:
            raise ArgumentError(
                f"argument {self.name}: expected a tensor on {device}, got one on {tensor.device}; "
                f"move it with .to({str(device)!r})"
            )
        raise ArgumentError(
            f"argument {self.name} requires grad, and a compiled module is for inference: call it "
            f"under torch.no_grad(), or pass {self.name}.detach()"
        )


def check_signature(plan: Plan, captured: Captured) -> None:
    """Refuse a rewritten graph whose inputs or outputs are not the captured ones in order.

    Raises:
        PlanError: naming both.
    """
    for kind in ("inputs", "outputs"):
        specs = [
            [graph.specs[name] for name in getattr(graph, kind)]
            for graph in (plan.graph, captured.graph)
        ]
        if specs[0] != specs[1]:
            raise PlanError(f"the passes changed the model's {kind}: {specs[1]} became {specs[0]}")
