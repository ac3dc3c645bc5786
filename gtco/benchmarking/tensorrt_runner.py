"""TensorRT in an interpreter of its own: ONNX in, an engine, answers and times out.

    PYTHON tensorrt_runner.py

It is run by path, by whichever Python has TensorRT (8.5 to 11), and needs nothing else: no torch,
no numpy, no gtco. It reads one JSON object a line from standard input and answers each with one:

    (at the start)                                    {"tensorrt": "10.3.0"}
    {"do": "build", "onnx", "engine", "timing_cache",
     "tf32"}                                          {"inputs", "outputs", "build_s", ...}
    {"do": "run", "inputs", "outputs"}                {}
    {"do": "single"}                                  {"us", "host_us"}
    {"do": "back_to_back", "calls"}                   {"us"}

Tensors are in safetensors files. What fails is answered with {"error"}. CUDA is called through its
driver, since no version of TensorRT brings the same runtime.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

DTYPES = {
    "FLOAT": ("F32", 4),
    "HALF": ("F16", 2),
    "BF16": ("BF16", 2),
    "INT64": ("I64", 8),
    "INT32": ("I32", 4),
    "INT8": ("I8", 1),
    "UINT8": ("U8", 1),
    "BOOL": ("BOOL", 1),
}
"""TensorRT's types: their names in a safetensors file, and bytes."""
WORKSPACE_BYTES = 8 << 30
HIGHEST_LEVEL = 5
"""Of a builder's optimization levels."""
KEPT_MESSAGES = 5
TOLD_EACH_S = 5.0
"""How often what the builder is at goes to standard error; it says millions of things."""

# -- CUDA ------------------------------------------------------------------------------------------

Handle = ctypes.c_void_p


class Cuda:
    """The calls of CUDA's driver that are needed, on the first GPU and a stream of their own."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        device, context, self.stream = ctypes.c_int(), Handle(), Handle()
        self("cuInit", ctypes.c_uint(0))
        self("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        self("cuStreamCreate", ctypes.byref(self.stream), ctypes.c_uint(1))

    def __call__(self, function: str, *args: Any) -> None:
        status = getattr(self._driver, function)(*args)
        if status:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
            raise RuntimeError(f"{function}: {(name.value or b'').decode()} ({status})")

    def wait(self) -> None:
        self("cuStreamSynchronize", self.stream)

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        return address.value

    def upload(self, address: int, data: bytes) -> None:
        size = ctypes.c_size_t(len(data))
        self("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_char_p(data), size)
        self("cuCtxSynchronize")  # our stream does not wait for the copy by itself

    def download(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data.raw

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def captured(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """One launch of a CUDA graph of what `enqueue` does."""
        graph, ready = Handle(), Handle()
        self("cuStreamBeginCapture_v2", self.stream, ctypes.c_int(2))  # relaxed
        try:
            enqueue()
        finally:
            self("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        flags = ctypes.c_ulonglong(0)
        self("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, flags)
        return lambda: self("cuGraphLaunch", ready, self.stream)

    def timed_us(self, call: Callable[[], None], calls: int) -> float:
        """Microseconds of each of `calls` calls in a row."""
        begin, end = Handle(), Handle()
        for event in (begin, end):
            self("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        self.wait()
        self("cuEventRecord", begin, self.stream)
        for _ in range(calls):
            call()
        self("cuEventRecord", end, self.stream)
        self("cuEventSynchronize", end)
        spent_ms = ctypes.c_float()
        self("cuEventElapsedTime", ctypes.byref(spent_ms), begin, end)
        for event in (begin, end):
            self("cuEventDestroy_v2", event)
        return spent_ms.value * 1e3 / calls


# -- files -----------------------------------------------------------------------------------------


def read_tensors(path: str) -> dict[str, bytes]:
    """The bytes of each tensor of a safetensors file."""
    with open(path, "rb") as file:
        data = file.read()
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    places = {name: each["data_offsets"] for name, each in header.items() if name[:2] != "__"}
    return {name: body[begin:end] for name, (begin, end) in places.items()}


def write_tensors(path: str, tensors: list[tuple[dict[str, Any], bytes]]) -> None:
    """A safetensors file of (name, type and shape; bytes) each."""
    header, at = {}, 0
    for spec, data in tensors:
        places = [at, at + len(data)]
        header[spec["name"]] = {
            "dtype": spec["dtype"],
            "shape": spec["shape"],
            "data_offsets": places,
        }
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data for _, data in tensors))


def read_or_empty(path: str | None) -> bytes:
    if path is None or not os.path.exists(path):
        return b""
    with open(path, "rb") as file:
        return file.read()


def write_whole(path: str, data: bytes) -> None:
    """Others may write the same file at the same time."""
    part = f"{path}.{os.getpid()}"
    with open(part, "wb") as file:
        file.write(data)
    os.replace(part, path)


# -- TensorRT --------------------------------------------------------------------------------------


def import_tensorrt() -> Any:
    """The module; what its libraries look for by name alone is loaded ahead."""
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcudart.so.11.0")  # 8.5's
    import tensorrt

    return tensorrt


def cudnn_works() -> bool:
    """TensorRT 8 may have been packed with an empty cuDNN, of which no tactic must be tried."""
    with contextlib.suppress(OSError, AttributeError):
        return int(ctypes.CDLL("libcudnn.so.8").cudnnGetVersion()) > 0
    return False


class Runner:
    """One engine, its buffers and its CUDA graph.

    Args:
        trt: the module tensorrt.
    """

    def __init__(self, trt: Any) -> None:
        self._trt = trt
        self.version = tuple(int(part) for part in trt.__version__.split(".")[:2])
        self._messages: list[str] = []
        self._log = self._logger()
        self._cuda = Cuda()
        self._buffers: list[tuple[dict[str, Any], int, int]] = []
        self._call: Callable[[], None] = lambda: None

    def _logger(self) -> Any:
        trt, messages = self._trt, self._messages

        class Log(trt.ILogger):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)
                self._told = 0.0

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                    messages.append(message)
                if time.monotonic() - self._told > TOLD_EACH_S:
                    self._told = time.monotonic()
                    print(message, file=sys.stderr, flush=True)

        return Log()

    def _failed(self, what: str) -> RuntimeError:
        said = "; ".join(dict.fromkeys(self._messages[-KEPT_MESSAGES:])) or "no reason was given"
        return RuntimeError(f"{what}: {said}")

    # -- building -------------------------------------------------------------------------------

    def build(
        self,
        onnx: str,
        engine: str | None = None,
        timing_cache: str | None = None,
        tf32: bool = False,
    ) -> dict[str, Any]:
        """Make the engine of `onnx` ready; `engine` is read if it is there, else written."""
        free = self._cuda.free_bytes()
        kept, build_s = read_or_empty(engine), 0.0
        if not kept:
            began = time.time()
            kept = self._built(onnx, timing_cache, tf32)
            build_s = time.time() - began
            if engine is not None:
                write_whole(engine, kept)
        self._runtime = self._trt.Runtime(self._log)  # outlives its engine
        self._engine = self._runtime.deserialize_cuda_engine(kept)
        if self._engine is None:
            raise self._failed("the engine cannot be read")
        self._context = self._engine.create_execution_context()
        self._place()
        for _ in range(3):
            self._enqueue()
        self._cuda.wait()
        self._call, graph = self._enqueue, True
        try:
            self._call = self._cuda.captured(self._enqueue)
        except RuntimeError:
            graph = False
        self._call()
        self._cuda.wait()
        specs = [spec for spec, _, _ in self._buffers]
        return {
            "inputs": [spec for spec in specs if spec["is_input"]],
            "outputs": [spec for spec in specs if not spec["is_input"]],
            "build_s": build_s,
            "engine_bytes": len(kept),
            "memory_bytes": free - self._cuda.free_bytes(),
            "cuda_graph": graph,
        }

    def _built(self, onnx: str, timing_cache: str | None, tf32: bool) -> bytes:
        trt = self._trt
        builder, flags = trt.Builder(self._log), trt.NetworkDefinitionCreationFlag
        typed = self.version >= (10, 0)  # the types in the file count, and no flag of precision
        flag = getattr(flags, "STRONGLY_TYPED" if typed else "EXPLICIT_BATCH", None)
        network = builder.create_network(0 if flag is None else 1 << int(flag))
        parser = trt.OnnxParser(network, self._log)
        if not parser.parse_from_file(onnx):
            errors = [str(parser.get_error(index)) for index in range(parser.num_errors)]
            raise RuntimeError("the ONNX file is not taken: " + "; ".join(errors[:KEPT_MESSAGES]))
        config = builder.create_builder_config()
        allowed: Any = getattr(trt, "BuilderFlag", None)
        if not typed and self._has_half(network):
            config.set_flag(allowed.FP16)
        if not tf32 and hasattr(allowed, "TF32"):  # which is on by itself
            config.clear_flag(allowed.TF32)
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
        if hasattr(config, "builder_optimization_level"):
            config.builder_optimization_level = HIGHEST_LEVEL
        if self.version < (10, 0) and not cudnn_works():
            sources = trt.TacticSource.__members__.items()
            config.set_tactic_sources(sum(1 << int(value) for n, value in sources if n != "CUDNN"))
        cache = config.create_timing_cache(read_or_empty(timing_cache))
        config.set_timing_cache(cache, False)
        blob = builder.build_serialized_network(network, config)
        if blob is None:
            raise self._failed("no engine could be built")
        if timing_cache is not None:
            write_whole(timing_cache, bytes(config.get_timing_cache().serialize()))
        return bytes(blob)

    def _has_half(self, network: Any) -> bool:
        found = [network.get_input(index) for index in range(network.num_inputs)]
        for layer in (network.get_layer(index) for index in range(network.num_layers)):
            found += [layer.get_output(index) for index in range(layer.num_outputs)]
        return any(x is not None and x.dtype == self._trt.DataType.HALF for x in found)

    # -- running --------------------------------------------------------------------------------

    def _place(self) -> None:
        """A buffer for each input and output; TensorRT 8 numbers them, later ones name them."""
        engine, context, trt = self._engine, self._context, self._trt
        numbered = hasattr(context, "execute_async_v2")
        count = engine.num_bindings if numbered else engine.num_io_tensors
        for index in range(count):
            if numbered:
                name, shape = engine.get_binding_name(index), engine.get_binding_shape(index)
                is_input, kind = engine.binding_is_input(index), engine.get_binding_dtype(index)
            else:
                name = engine.get_tensor_name(index)
                shape, kind = engine.get_tensor_shape(name), engine.get_tensor_dtype(name)
                is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            dtype, size = DTYPES[kind.name]
            sizes = [int(extent) for extent in shape]
            for extent in sizes:
                size *= extent
            address = self._cuda.allocate(size)
            spec = {"name": name, "dtype": dtype, "shape": sizes, "is_input": bool(is_input)}
            self._buffers.append((spec, address, size))
            if not numbered:
                context.set_tensor_address(name, address)

    def _enqueue(self) -> None:
        stream = self._cuda.stream.value
        if hasattr(self._context, "execute_async_v2"):
            addresses = [address for _, address, _ in self._buffers]
            done = self._context.execute_async_v2(addresses, stream)
        else:
            done = self._context.execute_async_v3(stream)
        if not done:
            raise self._failed("the engine did not run")

    def run(self, inputs: str, outputs: str | None = None) -> dict[str, Any]:
        """Copy the tensors of the file `inputs` in, run once, write those of `outputs`."""
        given = read_tensors(inputs)
        for spec, address, size in self._buffers:
            if spec["is_input"]:
                if len(given[spec["name"]]) != size:
                    raise RuntimeError(f"{spec['name']} has not {size} bytes")
                self._cuda.upload(address, given[spec["name"]])
        self._call()
        self._cuda.wait()
        if outputs is not None:
            found = [each for each in self._buffers if not each[0]["is_input"]]
            write_tensors(
                outputs, [(spec, self._cuda.download(at, size)) for spec, at, size in found]
            )
        return {}

    def single(self) -> dict[str, Any]:
        """Microseconds of one call that is waited for, and until the call returned."""
        self._cuda.wait()
        begin = time.perf_counter()
        self._call()
        returned = time.perf_counter()
        self._cuda.wait()
        return {"us": (time.perf_counter() - begin) * 1e6, "host_us": (returned - begin) * 1e6}

    def back_to_back(self, calls: int) -> dict[str, Any]:
        """Microseconds of a call among many that are not waited for."""
        return {"us": self._cuda.timed_us(self._call, calls)}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no reply

    def reply(**content: Any) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    try:
        trt = import_tensorrt()
        runner = Runner(trt)
    except Exception as error:
        reply(error=f"{type(error).__name__}: {error}")
        return
    reply(tensorrt=trt.__version__)
    does: dict[str, Callable[..., dict[str, Any]]] = {
        "build": runner.build,
        "run": runner.run,
        "single": runner.single,
        "back_to_back": runner.back_to_back,
    }
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            reply(**does[asked.pop("do")](**asked))
        except Exception as error:
            reply(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
