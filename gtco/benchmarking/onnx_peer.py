"""ONNX Runtime beside gtco: an independent reading of the same .onnx file, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gtco.locate import Located, UsageError


class OnnxRuntime:
    """The .onnx file of `model` in ONNX Runtime's CPU provider.

    A call takes and gives what gtco's does; tensors of a GPU are copied to the CPU and back. It is
    an oracle for answers: its times are a CPU's.

    Args:
        model: from an .onnx file.

    Raises:
        UsageError: the model is from no .onnx file, or ONNX Runtime is not installed or refuses it.
    """

    name = "onnxruntime (CPU)"

    def __init__(self, model: Located) -> None:
        if model.onnx is None:
            raise UsageError(
                f"--against onnxruntime runs .onnx files, and {model.name} is none; use eager"
            )
        try:
            import onnxruntime
        except ImportError:
            raise UsageError(
                "--against onnxruntime needs the package onnxruntime: pip install onnxruntime"
            ) from None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # its warnings are about its own optimizer
        try:
            self._session = onnxruntime.InferenceSession(
                str(model.onnx), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its exception types are not public
            raise UsageError(f"ONNX Runtime refuses {model.onnx}: {error}") from error
        self._inputs = [each.name for each in self._session.get_inputs()]

    def __call__(self, *args: Tensor) -> Any:
        """The graph's output, or a tuple of them where it has several."""
        device = args[0].device if args else torch.device("cpu")
        given = {name: x.cpu().numpy() for name, x in zip(self._inputs, args, strict=True)}
        results = [torch.from_numpy(each).to(device) for each in self._session.run(None, given)]
        return results[0] if len(results) == 1 else tuple(results)
