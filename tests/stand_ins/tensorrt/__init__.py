"""A TensorRT that is none: its engines run in ONNX Runtime on the CPU, its CUDA in plain memory.

For tests of the runner. STAND_IN_TENSORRT says which version it is: what that version lacks is not
there. Importing it puts a driver of its own where `ctypes` would load CUDA's.
"""

from __future__ import annotations

import ctypes
import os
import time
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime

__version__ = os.environ.get("STAND_IN_TENSORRT", "8.5.3.1")
_VERSION = tuple(int(part) for part in __version__.split("."))
_MAGIC = b"an engine of " + __version__.encode() + b"\0"

# -- CUDA ------------------------------------------------------------------------------------------


class _Driver:
    """As much of CUDA's driver as the runner calls; a graph is what was enqueued meanwhile."""

    def __init__(self) -> None:
        self.buffers: dict[int, Any] = {}
        self.capturing: list[Any] | None = None
        self.graphs: list[list[Any]] = [[]]
        self.events: dict[int, float] = {}

    def do(self, work: Any) -> None:
        if self.capturing is None:
            work()
        else:
            self.capturing.append(work)

    def _ok(self, *args: Any) -> int:
        return 0

    cuInit = cuDeviceGet = cuDevicePrimaryCtxRetain = cuCtxSetCurrent = cuCtxSynchronize = _ok
    cuStreamCreate = cuStreamSynchronize = cuEventSynchronize = cuEventDestroy_v2 = _ok

    def cuMemAlloc_v2(self, out: Any, size: Any) -> int:
        buffer = ctypes.create_string_buffer(size.value)
        self.buffers[ctypes.addressof(buffer)] = buffer
        out._obj.value = ctypes.addressof(buffer)
        return 0

    def cuMemcpyHtoD_v2(self, to: Any, data: Any, size: Any) -> int:
        ctypes.memmove(to.value, data, size.value)
        return 0

    def cuMemcpyDtoH_v2(self, to: Any, source: Any, size: Any) -> int:
        ctypes.memmove(to, source.value, size.value)
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        taken = sum(len(each) for each in self.buffers.values())
        free._obj.value, total._obj.value = (1 << 30) - taken, 1 << 30
        return 0

    def cuStreamBeginCapture_v2(self, stream: Any, mode: Any) -> int:
        if os.environ.get("STAND_IN_NO_CAPTURE"):
            return 900
        self.capturing = []
        return 0

    def cuStreamEndCapture(self, stream: Any, out: Any) -> int:
        assert self.capturing is not None
        self.graphs.append(self.capturing)
        self.capturing = None
        out._obj.value = len(self.graphs) - 1
        return 0

    def cuGraphInstantiateWithFlags(self, out: Any, graph: Any, flags: Any) -> int:
        out._obj.value = graph.value
        return 0

    def cuGraphLaunch(self, graph: Any, stream: Any) -> int:
        for work in self.graphs[graph.value]:
            work()
        return 0

    def cuEventCreate(self, out: Any, flags: Any) -> int:
        out._obj.value = len(self.events) + 1
        self.events[out._obj.value] = 0.0
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        self.events[event.value] = time.perf_counter()
        return 0

    def cuEventElapsedTime(self, out: Any, begin: Any, end: Any) -> int:
        out._obj.value = (self.events[end.value] - self.events[begin.value]) * 1e3
        return 0

    def cuGetErrorName(self, status: Any, out: Any) -> int:
        out._obj.value = b"CUDA_ERROR_OF_THE_STAND_IN"
        return 0


_DRIVER = _Driver()
_load = ctypes.CDLL


def _cdll(name: str, *args: Any, **kwargs: Any) -> Any:
    return _DRIVER if name == "libcuda.so.1" else _load(name, *args, **kwargs)


ctypes.CDLL = _cdll  # type: ignore[assignment,misc]

# -- TensorRT --------------------------------------------------------------------------------------


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO = range(4)


class DataType(IntEnum):
    FLOAT, HALF, INT64, BOOL = range(4)


class TensorIOMode(IntEnum):
    NONE, INPUT, OUTPUT = range(3)


class MemoryPoolType(IntEnum):
    WORKSPACE = 0


class TacticSource(IntEnum):
    CUBLAS, CUBLAS_LT, CUDNN = range(3)


NetworkDefinitionCreationFlag = IntEnum(
    "NetworkDefinitionCreationFlag",
    {"EXPLICIT_BATCH": 0} if _VERSION < (10,) else {"EXPLICIT_BATCH": 0, "STRONGLY_TYPED": 1},
)
if _VERSION < (11,):
    BuilderFlag = IntEnum("BuilderFlag", {"FP16": 0, "TF32": 7})

_TYPES = {
    "tensor(float)": (DataType.FLOAT, np.float32),
    "tensor(float16)": (DataType.HALF, np.float16),
    "tensor(int64)": (DataType.INT64, np.int64),
    "tensor(bool)": (DataType.BOOL, np.bool_),
}


def _tensor(kind: int) -> Any:
    half = kind == onnx.TensorProto.FLOAT16
    return SimpleNamespace(dtype=DataType.HALF if half else DataType.FLOAT)


class OnnxParser:
    def __init__(self, network: Any, log: ILogger) -> None:
        self.network = network
        self.errors: list[str] = []

    def parse_from_file(self, path: str) -> bool:
        model = onnx.load(path)
        if any(node.op_type == os.environ.get("STAND_IN_REFUSES") for node in model.graph.node):
            self.errors.append(f"no importer for {os.environ['STAND_IN_REFUSES']}")
        self.network.model = model.SerializeToString()
        given = [_tensor(each.type.tensor_type.elem_type) for each in model.graph.input]
        made = [_tensor(each.data_type) for each in model.graph.initializer]
        layer = SimpleNamespace(num_outputs=len(made), get_output=made.__getitem__)
        self.network.num_inputs, self.network.get_input = len(given), given.__getitem__
        self.network.num_layers, self.network.get_layer = 1, [layer].__getitem__
        return not self.errors

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    def get_error(self, index: int) -> str:
        return self.errors[index]


class _Config:
    def __init__(self) -> None:
        self.asked: list[str] = []
        if _VERSION >= (8, 6):
            self.builder_optimization_level = 3

    def set_flag(self, flag: IntEnum) -> None:
        self.asked.append(flag.name)

    def clear_flag(self, flag: IntEnum) -> None:
        self.asked.append(f"no {flag.name}")

    def set_memory_pool_limit(self, pool: Any, size: int) -> None: ...

    def set_tactic_sources(self, sources: int) -> None:
        self.asked.append(f"tactics {sources}")

    def create_timing_cache(self, data: bytes) -> Any:
        return SimpleNamespace(serialize=lambda: data + b"timed ")

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> None:
        self.cache = cache

    def get_timing_cache(self) -> Any:
        return self.cache


class Builder:
    def __init__(self, log: ILogger) -> None:
        self.log = log

    def create_network(self, flags: int) -> Any:
        assert flags == (2 if _VERSION >= (10,) else 1)
        return SimpleNamespace()

    def create_builder_config(self) -> _Config:
        return _Config()

    def build_serialized_network(self, network: Any, config: _Config) -> bytes | None:
        for layer in ("conv_0", "conv_1"):
            self.log.log(ILogger.INFO, f"timing the tactics of {layer}")
        time.sleep(float(os.environ.get("STAND_IN_SECONDS", "0")))
        if os.environ.get("STAND_IN_BUILDS_NOTHING"):
            self.log.log(ILogger.ERROR, "Could not find any implementation for node Foreign")
            return None
        level = getattr(config, "builder_optimization_level", "none")
        print("this is no reply")  # as libraries do
        asked = ",".join(config.asked)
        return _MAGIC + f"level {level}, {asked}".encode() + b"\0" + network.model


class _Engine:
    def __init__(self, model: bytes) -> None:
        self.session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        self.all = [*outputs, *inputs]  # in no order that anyone may rely on
        self.inputs = {each.name for each in inputs}
        if _VERSION < (10,):
            self.num_bindings = len(self.all)
            self.get_binding_name = lambda index: self.all[index].name
            self.get_binding_shape = lambda index: self.all[index].shape
            self.binding_is_input = lambda index: self.all[index].name in self.inputs
            self.get_binding_dtype = lambda index: _TYPES[self.all[index].type][0]
        else:
            named = {each.name: each for each in self.all}
            self.num_io_tensors = len(self.all)
            self.get_tensor_name = lambda index: self.all[index].name
            self.get_tensor_shape = lambda name: named[name].shape
            self.get_tensor_dtype = lambda name: _TYPES[named[name].type][0]
            self.get_tensor_mode = lambda name: (
                TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT
            )

    def create_execution_context(self) -> Any:
        return _Numbered(self) if _VERSION < (10,) else _Named(self)

    def run(self, addresses: dict[str, int]) -> None:
        arrays = {}
        for each in self.all:
            kind = _TYPES[each.type][1]
            size = int(np.prod(each.shape)) * np.dtype(kind).itemsize
            raw = (ctypes.c_char * size).from_address(addresses[each.name])
            arrays[each.name] = np.frombuffer(raw, kind).reshape(each.shape)
        given = {name: arrays[name] for name in self.inputs}
        names = [each.name for each in self.all if each.name not in self.inputs]
        for name, value in zip(names, self.session.run(names, given), strict=True):
            arrays[name][...] = value


class _Numbered:
    def __init__(self, engine: _Engine) -> None:
        self.engine = engine

    def execute_async_v2(self, bindings: list[int], stream: int) -> bool:
        names = [each.name for each in self.engine.all]
        _DRIVER.do(lambda: self.engine.run(dict(zip(names, bindings, strict=True))))
        return True


class _Named:
    def __init__(self, engine: _Engine) -> None:
        self.engine = engine
        self.addresses: dict[str, int] = {}

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        _DRIVER.do(lambda: self.engine.run(self.addresses))
        return True


class Runtime:
    def __init__(self, log: ILogger) -> None: ...

    def deserialize_cuda_engine(self, data: bytes) -> _Engine | None:
        if not data.startswith(_MAGIC):
            return None
        return _Engine(data[len(_MAGIC) :].split(b"\0", 1)[1])
