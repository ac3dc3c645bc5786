"""Who takes part in a benchmark, and what making each of them ready costs."""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gtco.benchmarking.answers import Call, Inputs
from gtco.benchmarking.onnx_peer import BoundOnnxRuntime, OnnxRuntime, export_onnx
from gtco.benchmarking.tensorrt_peer import TensorRT, TensorRTPlace
from gtco.compiler import capture_for, fuse_known, plan_with, rewritten
from gtco.cost_model.knowledge import Knowledge
from gtco.locate import Located, UsageError
from gtco.options import Options
from gtco.runtime.captured import capture
from gtco.runtime.device import resolve_device
from gtco.runtime.module import CompiledModule

GTCO = "gtco"
UNTUNED = "gtco, nothing known"
EAGER_CALLS = "eager, call by call"
TORCHSCRIPT = "TorchScript"
TENSORRT = "TensorRT"
INDUCTOR_MODES = ("reduce-overhead", "max-autotune")
CHANNELS_LAST = ", channels last"
"""Behind the name of a contestant whose convolutions have their weights so: torch then keeps images
in that layout, which is the faster one of many models."""
PEERS: Mapping[str, tuple[str, ...]] = {
    "eager": ("eager",),
    "inductor": tuple(f"inductor {mode}" for mode in INDUCTOR_MODES),
    "eager-channels-last": (f"eager{CHANNELS_LAST}",),
    "inductor-channels-last": tuple(f"inductor {mode}{CHANNELS_LAST}" for mode in INDUCTOR_MODES),
    "eager-calls": (EAGER_CALLS,),
    "torchscript": (TORCHSCRIPT,),
    "onnxruntime": (OnnxRuntime.name,),
    "onnxruntime-cuda": ("onnxruntime (CUDA)",),
    "onnxruntime-tensorrt": ("onnxruntime (TensorRT)",),
    "tensorrt": (TENSORRT,),
    "untuned": (UNTUNED,),
}
"""What `--against` takes, and the contestants that each name stands for."""


class NoGpu(RuntimeError):
    """A GPU is needed and there is none."""


@dataclass(frozen=True)
class Cost:
    """What making a contestant ready took, its first calls included.

    Args:
        seconds: by the clock.
        memory_bytes: of the GPU's memory that it holds since; torch's run on the model's own
            weights, which are not in it. None on the CPU.
    """

    seconds: float
    memory_bytes: int | None


@dataclass(frozen=True)
class Setting:
    """What contestants are made of.

    Args:
        model: with its arguments, where they run.
        eager: the module in the precision that counts.
        options: gtco's.
        folder: takes their files.
        stack: closes what has to be closed.
        tensorrt: where TensorRT is, if it is anywhere.
    """

    model: Located
    eager: nn.Module
    options: Options
    folder: Path
    stack: ExitStack
    tensorrt: TensorRTPlace | None = None

    @property
    def inputs(self) -> Inputs:
        return self.model.args, self.model.kwargs

    @property
    def device(self) -> torch.device:
        tensors = tensors_of([*self.eager.parameters(), self.inputs])
        return tensors[0].device if tensors else torch.device("cpu")

    def need_gpu(self) -> None:
        """Refuse the CPU.

        Raises:
            NoGpu: the model is on it.
        """
        if self.device.type != "cuda":
            raise NoGpu("it runs on a CUDA GPU alone")


LAST_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Of weights of so many dimensions, with which torch's convolutions take their channels last."""


@contextmanager
def costs(found: dict[str, Cost], name: str) -> Iterator[None]:
    """Put what the block takes into `found`, unless it fails."""
    free = _free_bytes()
    begin = time.perf_counter()
    yield
    if free is not None:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    left = _free_bytes()
    found[name] = Cost(seconds, None if free is None or left is None else free - left)


def _free_bytes() -> int | None:
    if not torch.cuda.is_available():
        return None
    gc.collect()  # what an earlier contestant left in cycles is not this one's
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def prepare(name: str, setting: Setting) -> Call:
    """The contestant `name`, warmed up: some capture their own graphs in the first calls.

    Raises:
        Exception: it cannot run, of any type.
    """
    if name.endswith(CHANNELS_LAST):
        model = copy.deepcopy(setting.eager)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() in LAST_FORMATS:
                tensor.data = tensor.data.to(memory_format=LAST_FORMATS[tensor.dim()])
        setting = replace(setting, eager=model)
    call = MAKERS[name.removesuffix(CHANNELS_LAST)](setting)
    args, kwargs = setting.inputs
    for _ in range(3):
        call(*args, **kwargs)
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    return call


# -- gtco ------------------------------------------------------------------------------------------


def untuned(setting: Setting) -> Call:
    """gtco without a single record: its draft prices and the sketches' defaults alone."""
    options = setting.options
    device = resolve_device(options.target)
    nothing = Knowledge(device.name)
    captured = capture_for(setting.model.module, *setting.inputs, options)
    fused = fuse_known(nothing, rewritten(captured, options, device.target), device.target)
    compiled = CompiledModule(plan_with(nothing, fused, device.target, options), captured)
    compiled.prepare()
    return compiled


# -- torch -----------------------------------------------------------------------------------------


class GraphedEager:
    """Torch eager in a CUDA graph captured by hand, as careful as gtco is.

    A call takes any inputs and gives fresh tensors, as gtco's does: it copies the inputs in and
    clones the outputs, since torch's graphs stay where they were captured. Inductor stands as torch
    gives it, which hands out its graph's own memory.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model = model  # the graph reads its weights and keeps none of them alive
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, inputs)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # lets cuBLAS and cuDNN choose and allocate before the capture
                model(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(side)
        self.buffers = tensors_of((args, kwargs))
        self.graph = torch.cuda.CUDAGraph()

        def enqueue() -> None:
            self.outputs = model(*args, **kwargs)

        # Not by torch.cuda.graph: its one stream keeps a workspace of cuBLAS's that may be gone.
        torch.cuda.synchronize()
        capture(self.graph, side, enqueue)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = not kwargs and len(args) == len(self.buffers)  # as one would write it by hand
        self.copy_in(args if plain else tensors_of((args, kwargs)))
        self.graph.replay()
        return self.clone_out()

    def copy_in(self, given: Sequence[Tensor]) -> None:
        for mine, theirs in zip(self.buffers, given, strict=True):
            mine.copy_(theirs)

    def clone_out(self) -> Any:
        if isinstance(self.outputs, Tensor):
            return self.outputs.clone()
        return pytree.tree_map_only(Tensor, torch.clone, self.outputs)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of `tree`, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def graphed(setting: Setting) -> Call:
    """Eager in a CUDA graph."""
    setting.need_gpu()
    return GraphedEager(setting.eager, setting.inputs)


def scripted(setting: Setting) -> Call:
    """TorchScript, traced and frozen."""
    args, kwargs = setting.inputs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its age, and of values that tracing makes constant
        traced = torch.jit.trace(  # type: ignore[no-untyped-call]
            setting.eager, args, example_kwarg_inputs=kwargs or None, check_trace=False
        )
        call: Call = torch.jit.freeze(traced)
    return call


def inductor(setting: Setting, mode: str) -> Call:
    """`torch.compile` in one of its modes, which capture CUDA graphs.

    Of a copy: what a module keeps from a call, such as LeViT its biases, lies in the graph's memory
    then, and the next replay writes there.
    """
    setting.need_gpu()
    call: Call = torch.compile(copy.deepcopy(setting.eager), mode=mode)
    return call


# -- others, by ONNX -------------------------------------------------------------------------------


def onnx_runtime(setting: Setting, provider: str) -> Call:
    """ONNX Runtime on the GPU, or on the CPU beside gtco's host."""
    if provider != "CPU":
        setting.need_gpu()
    file = setting.model.onnx
    if file is None:
        file = setting.folder / "model.onnx"
        if not file.exists():
            export_onnx(setting.eager, setting.model.args, file)
    runtime: Call
    if provider == "CPU":
        runtime = OnnxRuntime(replace(setting.model, onnx=file))
    else:
        runtime = BoundOnnxRuntime(file, provider, setting.device)
    structure = pytree.tree_structure(setting.eager(*setting.model.args))  # a file has none

    def call(*args: Tensor) -> Any:
        return pytree.tree_unflatten(pytree.tree_leaves(runtime(*args)), structure)

    return call


def tensorrt(setting: Setting) -> Call:
    """TensorRT in the interpreter that has it."""
    if setting.tensorrt is None:
        raise UsageError("nobody said which Python has TensorRT: --tensorrt-python PATH")
    peer = TensorRT(setting.tensorrt, setting.eager, setting.model.args, setting.folder)
    setting.stack.callback(peer.close)
    return peer


MAKERS: Mapping[str, Callable[[Setting], Call]] = {
    UNTUNED: untuned,
    "eager": graphed,
    EAGER_CALLS: lambda setting: setting.eager,
    TORCHSCRIPT: scripted,
    **{f"inductor {mode}": partial(inductor, mode=mode) for mode in INDUCTOR_MODES},
    OnnxRuntime.name: partial(onnx_runtime, provider="CPU"),
    "onnxruntime (CUDA)": partial(onnx_runtime, provider="CUDA"),
    "onnxruntime (TensorRT)": partial(onnx_runtime, provider="TensorRT"),
    TENSORRT: tensorrt,
}
"""How each contestant is made, whatever the layout."""
