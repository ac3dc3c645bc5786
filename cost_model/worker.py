"""The process that runs untrusted kernels: it may hang, crash or lose its GPU, and is replaced.

It speaks JSON lines (`gtco.runtime.child`); `gtco.cost_model.measure` is the other end. All that a
task needs (inputs, references, output buffers, twelve copies of its weights) is made once, so that
a program costs its module's load, one checked launch and two milliseconds of timing.

    {"do": "start"}  -> {}
    {"do": "task", "task": key, "graph": ..., "constants": file}  -> {}
    {"do": "measure", "task": key, "program": ..., "final": ...}  -> {"run_us": 4.1, "error": ""}
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors

from gtco.codegen.program import KernelProgram
from gtco.cost_model.benches import COPIES, Bench, HostBench
from gtco.ir.graph import Group
from gtco.runtime.child import serve as serve_child
from gtco.runtime.compile_pool import decode_kernel
from gtco.runtime.encoding import decode_graph, decode_program
from gtco.target import HOST

HELD_BYTES = 4 << 30
"""Of the tasks that a worker keeps ready; the one used longest ago makes room."""


class Worker:
    """Answers the messages of `gtco.cost_model.measure`.

    Args:
        device: "host", or a CUDA device such as "cuda:0".
        start_s: seconds that the process took to make the device ready.
    """

    def __init__(self, device: str, start_s: float) -> None:
        self._device = device
        self._start = {"start": start_s}  # told with the first task
        self._benches: OrderedDict[str, Bench] = OrderedDict()

    def answer(self, message: dict[str, Any]) -> Mapping[str, Any]:
        """The answer to one message.

        "fatal" in it says that this process can measure no more; "unknown" that it has to be
        told of the task first.
        """
        try:
            if message["do"] == "start":
                return self._load_libraries()
            if message["do"] == "task":
                return self._take(message)
            return self._measure(message)
        except Exception as error:  # whatever a bad program provokes is that program's failure
            text = f"{type(error).__name__}: {error}".strip()
            return {"error": text, "fatal": self._is_lost()}

    def _load_libraries(self) -> Mapping[str, Any]:
        """What the first task would wait seconds for: cuBLAS, and torch's kernels in fp64."""
        if self._device != HOST:
            for dtype in (torch.float16, torch.float32, torch.float64):
                some = torch.ones(8, 8, dtype=dtype, device=self._device)
                (some @ some + some).square().mean().item()
        return {}

    def _take(self, message: dict[str, Any]) -> Mapping[str, Any]:
        begin = time.perf_counter()
        parts = load_tensors(Path(message["constants"]).read_bytes())
        group = Group("task", decode_graph(message["graph"], parts))
        self._benches[message["task"]] = self._make(group)
        while len(self._benches) > 1 and sum(map(_held_bytes, self._benches.values())) > HELD_BYTES:
            self._benches.popitem(last=False)
        start, self._start = self._start, {}
        return {"seconds": {**start, "task": time.perf_counter() - begin}}

    def _make(self, group: Group) -> Bench:
        if self._device == HOST:
            return HostBench(group, torch.device("cpu"))
        from gtco.cost_model.benches_cuda import CudaBench  # needs the driver

        return CudaBench(group, torch.device(self._device))

    def _measure(self, message: dict[str, Any]) -> Mapping[str, Any]:
        bench = self._benches.get(message["task"])
        if bench is None:
            return {"unknown": True}
        self._benches.move_to_end(message["task"])
        seconds: dict[str, float] = {}
        program: KernelProgram | None = None
        with _timed(seconds, "load"):
            if message["program"] is None:
                launch = bench.library()
            else:
                data = message["program"]
                sources = {data["kernel"]: message["source"]}
                program = decode_program(data, sources, data["arch"])
                launch = bench.load(program, decode_kernel(message["binary"]))
        with _timed(seconds, "check"):
            error = bench.check(launch)
            if bench.operands.damaged():
                outside = "it wrote outside its outputs"
                return {"error": error or outside, "fatal": True, "seconds": seconds}
        if error:
            return {"error": error, "seconds": seconds}
        with _timed(seconds, "time"):
            bench.operands.poison()
            times = bench.times_us(program, final=message["final"])
            # Launched again and again, it must still be right: a semaphore may not be reset.
            error = bench.judge(bench.operands.tensors)
        if error:
            return {"error": f"launched again: {error}", "seconds": seconds}
        return {"run_us": statistics.median(times), "spread_us": _spread(times), "seconds": seconds}

    def _is_lost(self) -> bool:
        """Whether the CUDA context is lost; such errors never go away."""
        if self._device == HOST:
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False


def _held_bytes(bench: Bench) -> int:
    """About: the operands, the references in fp64, and the weights once a launch of a chain."""
    return bench.operands.nbytes * (COPIES + 4)


def _spread(times: list[float]) -> float:
    """The distance of the quartiles."""
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - begin


def serve(device: str) -> None:
    """A worker's loop; see `Worker`."""
    begin = time.perf_counter()
    torch.set_grad_enabled(False)
    if device == HOST:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(torch.device(device))
        torch.cuda.synchronize()
    serve_child(Worker(device, time.perf_counter() - begin).answer)
