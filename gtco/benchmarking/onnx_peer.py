"""ONNX Runtime beside gtco, on the CPU or a GPU, and the .onnx files that other compilers read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gtco.benchmarking.onnx_fold import fold_constants
from gtco.locate import Located, UsageError

OPSET = 16
"""The newest that TensorRT 8.5 reads. In 17 layer norm is one operator, for which torch's exporter
mixes up the types of some half-precision models."""
PROVIDERS: Mapping[str, str] = {
    "CPU": "CPUExecutionProvider",
    "CUDA": "CUDAExecutionProvider",
    "TensorRT": "TensorrtExecutionProvider",
}
"""ONNX Runtime's backends, by the names that contestants have."""


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
        self._session = open_session(model.onnx, "CPU", {})
        self._inputs = [each.name for each in self._session.get_inputs()]

    def __call__(self, *args: Tensor) -> Any:
        """The graph's output, or a tuple of them where it has several."""
        device = args[0].device if args else torch.device("cpu")
        given = {name: x.cpu().numpy() for name, x in zip(self._inputs, args, strict=True)}
        results = [torch.from_numpy(each).to(device) for each in self._session.run(None, given)]
        return results[0] if len(results) == 1 else tuple(results)


class BoundOnnxRuntime:
    """An .onnx file in one of ONNX Runtime's providers, which reads and writes torch's tensors.

    Each call gives fresh tensors. On a GPU it runs on a stream of its own and is not waited for.

    Args:
        file: its inputs and outputs have fixed sizes.
        provider: a key of `PROVIDERS`.
        device: where the inputs will be.

    Raises:
        UsageError: ONNX Runtime or the provider is not installed, or refuses the file.
    """

    def __init__(self, file: Path, provider: str, device: torch.device) -> None:
        import onnxruntime

        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._run = onnxruntime.RunOptions()
        settings: dict[str, str] = {}
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            settings["user_compute_stream"] = str(self._stream.cuda_stream)
            self._run.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if provider == "TensorRT":
            settings["trt_fp16_enable"] = "1"
        self._session = open_session(file, provider, settings)
        self._outputs = [
            (each.name, tuple(each.shape), _dtype(each.type))
            for each in self._session.get_outputs()
        ]
        self._inputs = [each.name for each in self._session.get_inputs()]

    def __call__(self, *args: Tensor) -> Any:
        """The graph's output, or a tuple of them where it has several."""
        given = [each.contiguous() for each in args]
        outputs = [
            torch.empty(shape, dtype=dtype, device=self._device)
            for _, shape, dtype in self._outputs
        ]
        binding = self._session.io_binding()
        for name, x in zip(self._inputs, given, strict=True):
            binding.bind_input(name, *_place(x))
        for (name, _, _), x in zip(self._outputs, outputs, strict=True):
            binding.bind_output(name, *_place(x))
        if self._stream is None:
            self._session.run_with_iobinding(binding, self._run)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            self._session.run_with_iobinding(binding, self._run)
            torch.cuda.current_stream().wait_stream(self._stream)
            for x in (*given, *outputs):
                x.record_stream(self._stream)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def open_session(file: Path, provider: str, settings: Mapping[str, str]) -> Any:
    """A session of ONNX Runtime that nothing but `provider` and the CPU takes part in.

    Args:
        file: the model.
        provider: a key of `PROVIDERS`.
        settings: of the provider.

    Raises:
        UsageError: as for the classes above.
    """
    try:
        import onnxruntime
    except ImportError:
        raise UsageError(
            "--against onnxruntime needs the package onnxruntime: pip install onnxruntime"
        ) from None
    known = onnxruntime.get_available_providers()
    if PROVIDERS[provider] not in known:
        raise UsageError(
            f"this ONNX Runtime has no {PROVIDERS[provider]} (it has {', '.join(known)}): "
            "pip install onnxruntime-gpu"
        )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # its warnings are about its own optimizer
    chosen = [(PROVIDERS[provider], dict(settings))]
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=chosen)
    except Exception as error:  # its exception types are not public
        raise UsageError(f"ONNX Runtime refuses {file}: {error}") from error
    if PROVIDERS[provider] not in session.get_providers():
        raise UsageError(f"ONNX Runtime cannot load {PROVIDERS[provider]} and would use the CPU")
    return session


_TYPES: Mapping[str, torch.dtype] = {
    "tensor(float16)": torch.float16,
    "tensor(float)": torch.float32,
    "tensor(double)": torch.float64,
    "tensor(int32)": torch.int32,
    "tensor(int64)": torch.int64,
    "tensor(bool)": torch.bool,
}


def _dtype(name: str) -> torch.dtype:
    if name not in _TYPES:
        raise UsageError(f"an output is a {name}, which numpy has no type for")
    return _TYPES[name]


def _place(x: Tensor) -> tuple[str, int, Any, tuple[int, ...], int]:
    kind = torch.empty(0, dtype=x.dtype).numpy().dtype.type
    return x.device.type, x.device.index or 0, kind, tuple(x.shape), x.data_ptr()


class _TypedMasks(TorchFunctionMode):
    """Attention's masks of truths as sums in the type of the queries.

    torch's exporter adds float32 to half precision there, so that such attention would run in
    float32, and looks for NaN behind each softmax. Rows of which nothing is seen are 0, as torch's.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {**dict(zip(_ATTENTION, args, strict=False)), **(kwargs or {})}
        mask = given.get("attn_mask")
        if func is not F.scaled_dot_product_attention or mask is None or mask.dtype != torch.bool:
            return func(*args, **(kwargs or {}))
        shown, hidden = (torch.full((), x, dtype=given["query"].dtype) for x in (0, -math.inf))
        given["attn_mask"] = torch.where(mask, shown.to(mask.device), hidden.to(mask.device))
        y = func(**given)
        return torch.where(mask.any(-1, keepdim=True), y, torch.zeros_like(y))


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Positional arguments of torch's attention."""


def export_onnx(module: nn.Module, args: tuple[Any, ...], file: Path) -> None:
    """Write `module` as ONNX, traced: TensorRT 8 reads no file of torch's newer exporter.

    What it computes of constants alone is in the file as a constant.

    Args:
        module: in eval mode.
        args: tensors; in the file they are input_0, input_1 and so on, of fixed sizes.
        file: to write.

    Raises:
        UsageError: an argument is no tensor.
        RuntimeError: torch cannot export it (of several types).
    """
    if not all(isinstance(each, Tensor) for each in args):
        raise UsageError("only models of positional tensors are exported to ONNX here")
    names = [f"input_{index}" for index in range(len(args))]
    with warnings.catch_warnings(), torch.no_grad(), _TypedMasks():
        warnings.simplefilter("ignore")  # of tracing, and of this exporter's age
        torch.onnx.export(
            module, args, file, dynamo=False, opset_version=OPSET, input_names=names, verbose=False
        )
    model = onnx.load(file, load_external_data=False)  # where it is too large for one file
    fold_constants(model)
    onnx.save(model, file)
