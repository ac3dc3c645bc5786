"""Measure programs in processes that can die: right first, then how fast.

`measure` is a plain function of plain values, so any `concurrent.futures.Executor` can run it, one
on other machines too; each process that calls it keeps one worker process per GPU. A kernel that
hangs, crashes or loses the GPU's context costs its worker, which is replaced, and becomes a failure
with its reason.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from signal import SIGKILL, Signals
from typing import Any

import torch
from safetensors.torch import save as save_tensors

from gtco.codegen.program import KernelProgram
from gtco.ir.graph import Group
from gtco.runtime.child import Child, ChildDied, ChildHung
from gtco.runtime.compile_pool import encode_kernel
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.encoding import encode_graph, encode_program
from gtco.target import HOST

log = logging.getLogger("gtco.tune")

DEADLINE_S = 5.0
"""For one program: a thousand times what a slow one takes on a GPU."""
HOST_DEADLINE_S = 60.0
TASK_DEADLINE_S = 120.0
"""For a new task, on a new worker: importing torch, the context, references in fp64."""


class MeasureError(RuntimeError):
    """Nothing of a task can be measured; the message has the cause."""


@dataclass(frozen=True)
class Subject:
    """A task as a worker is told of it.

    Args:
        key: its workload key.
        group: what it computes, with its real constants: some are indices.
    """

    key: str
    group: Group

    @cached_property
    def graph(self) -> dict[str, Any]:
        """The group's graph as JSON values; constants lie in `tensors` under their names.

        Raises:
            EncodingError: the group has an attribute that cannot leave this process.
        """
        names = {name: name for name in self.group.graph.constants}
        found: dict[str, Any] = encode_graph(self.group.graph, names)
        return found

    @cached_property
    def tensors(self) -> bytes:
        """The constants as safetensors."""
        constants = self.group.graph.constants
        return save_tensors(
            {
                name: torch.empty_like(
                    each, device="cpu", memory_format=torch.contiguous_format
                ).copy_(each.detach())
                for name, each in constants.items()
            }
        )


@dataclass(frozen=True)
class Job:
    """One measurement to make.

    Args:
        subject: the task.
        program: what to run; None for the group's ATen calls.
        kernel: `program` compiled.
        final: take more times: the best programs are told apart by little.
        host: run the host build on the CPU.
        deadline_s: seconds after which the program counts as hanging.
    """

    subject: Subject
    program: KernelProgram | None
    kernel: CompiledKernel | None
    final: bool
    host: bool
    deadline_s: float


@dataclass(frozen=True)
class Measurement:
    """What came of a `Job`.

    Args:
        run_us: microseconds from start to start in a chain of twelve launches with weights of
            their own (on the host: of one launch), the median; None if it failed.
        spread_us: between the quartiles.
        error: why it failed, or "".
        seconds: of the worker's time, by phase: "start", "task", "load", "check" and "time".
    """

    run_us: float | None
    spread_us: float = 0.0
    error: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)


def measure(job: Job) -> Measurement:
    """Check and time one program on the next idle device of this machine.

    A worker that something else killed is no fault of the program, which is tried once more.

    Raises:
        CancelledError: `close_workers` came in between.
        MeasureError: the task itself cannot be made ready.
    """
    workers = _workers_of(job.host)
    worker = workers.get()
    try:
        try:
            return worker.measure(job)
        except _Killed:
            log.warning("a measuring process was killed; trying its program once more")
        try:
            return worker.measure(job)
        except _Killed:
            return Measurement(None, error="its process was killed twice")
    finally:
        workers.put(worker)


def start(host: bool) -> None:
    """Start the process of the next idle device ahead of its first program: that takes seconds."""
    workers = _workers_of(host)
    worker = workers.get()
    try:
        worker.start()
    finally:
        workers.put(worker)


def device_count(host: bool) -> int:
    """How many programs can be measured at the same time on this machine."""
    return 1 if host else torch.cuda.device_count()


def close_workers() -> None:
    """End this process's workers, whatever they do; a later `measure` starts new ones."""
    with _lock:
        for worker in _all:
            worker.close()
        _all.clear()
        _idle.clear()


_lock = threading.Lock()
_all: list[_Worker] = []
_idle: dict[bool, SimpleQueue[_Worker]] = {}


def _workers_of(host: bool) -> SimpleQueue[_Worker]:
    """The idle workers of this process: one for each GPU, or one for the CPU."""
    with _lock:
        if host not in _idle:
            names = [HOST] if host else [f"cuda:{i}" for i in range(device_count(host))]
            workers = [_Worker(name) for name in names]
            _all.extend(workers)
            _idle[host] = SimpleQueue()
            for worker in workers:
                _idle[host].put(worker)
        return _idle[host]


class _Killed(Exception):
    """The worker got a SIGKILL that was not ours."""


class _Worker:
    """The process that measures on one device, started when needed."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._child: Child | None = None
        self._closed = False
        self._hopeless: dict[str, str] = {}  # tasks that cannot be made ready, and why

    def start(self) -> None:
        with suppress(ChildDied, ChildHung, CancelledError):  # the first program will say why
            if self._child is None:
                self._ask({"do": "start"}, TASK_DEADLINE_S)

    def measure(self, job: Job) -> Measurement:
        if job.subject.key in self._hopeless:  # asking again would cost a process each time
            raise MeasureError(self._hopeless[job.subject.key])
        message = {
            "do": "measure",
            "task": job.subject.key,
            "final": job.final,
            "program": None if job.program is None else encode_program(job.program),
            "source": "" if job.program is None else job.program.source,
            "binary": None if job.kernel is None else encode_kernel(job.kernel),
        }
        try:
            seconds: dict[str, float] = {}
            answer: dict[str, Any] = {"unknown": True}
            if self._child is not None:
                answer = self._ask(message, job.deadline_s)
            if "unknown" in answer:
                seconds = self._introduce(job.subject)
                answer = self._ask(message, job.deadline_s)
        except MeasureError as hopeless:
            self._hopeless[job.subject.key] = str(hopeless)
            raise
        except ChildHung:
            return Measurement(None, error=f"it hangs: no answer in {job.deadline_s:g} s")
        except ChildDied as death:
            if self._closed:
                raise CancelledError from None
            if death.code == -SIGKILL:
                raise _Killed from None
            return Measurement(None, error=f"it crashes: {_cause(death.code)}")
        if answer.get("fatal"):
            self.kill()
        seconds |= answer.get("seconds", {})
        if error := answer.get("error", ""):
            return Measurement(None, error=error, seconds=seconds)
        return Measurement(answer["run_us"], answer["spread_us"], "", seconds)

    def _introduce(self, subject: Subject) -> dict[str, float]:
        """Tell the worker of a task.

        Raises:
            MeasureError: it cannot be made ready.
        """
        handle, path = tempfile.mkstemp(prefix="gtco-", suffix=".safetensors")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(subject.tensors)
            message = {
                "do": "task",
                "task": subject.key,
                "graph": subject.graph,
                "constants": path,
            }
            answer = self._ask(message, TASK_DEADLINE_S)
        except ChildHung as error:
            raise MeasureError(f"{subject.group} was not made ready: {error}") from None
        except ChildDied as error:
            if error.code == -SIGKILL or self._closed:
                raise
            raise MeasureError(f"{subject.group} was not made ready: {error}") from None
        finally:
            Path(path).unlink(missing_ok=True)
        if "error" in answer:
            self.kill()
            raise MeasureError(f"{subject.group} cannot be measured: {answer['error']}")
        seconds: dict[str, float] = answer["seconds"]
        return seconds

    def _ask(self, message: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        if self._closed:
            raise CancelledError
        if self._child is None:
            self._child = Child(
                f"from gtco.cost_model.worker import serve; serve({self._device!r})"
            )
        try:
            return self._child.ask(message, deadline_s)
        except (ChildDied, ChildHung):
            self._child = None
            raise

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def close(self) -> None:
        """From any thread: end the process, and `measure` for good."""
        self._closed = True
        child = self._child
        if child is not None:
            child.process.kill()
            child.process.wait()


def _cause(code: int) -> str:
    if code < 0:
        return f"its process got {Signals(-code).name}"
    return f"its process ended with {code}"
