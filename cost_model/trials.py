"""One trial after another, in the background: compile in processes, measure in workers, record.

What is compiled next overlaps with what is measured now: `run` gives a future at once.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from concurrent.futures import (
    CancelledError,
    Executor,
    Future,
    InvalidStateError,
    ThreadPoolExecutor,
)
from functools import partial
from typing import Self

import torch

from gtco.codegen.program import KernelProgram
from gtco.codegen.sampler import Candidate
from gtco.cost_model.knowledge import CHAIN, FINAL, HOST_CLOCK
from gtco.cost_model.measure import (
    DEADLINE_S,
    HOST_DEADLINE_S,
    Job,
    MeasureError,
    Measurement,
    Subject,
    close_workers,
    device_count,
    measure,
    start,
)
from gtco.cost_model.record import LIBRARY, TuningRecord
from gtco.cost_model.work import work_of
from gtco.runtime.compile_pool import CompileJob, CompilePool
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.device import device_at
from gtco.runtime.encoding import EncodingError
from gtco.runtime.host import HostCompilerError, build_host, find_compiler
from gtco.runtime.nvrtc import CompileError, cache_key, nvrtc_version
from gtco.target import HOST_DEVICE

LIBRARY_PATIENCE = 6
"""Deadlines that ATen calls have: the first one loads libraries of gigabytes."""


class Trials:
    """Compiles and measures programs; a context manager.

    Args:
        host: measure the host build on the CPU instead of the GPUs here.
        executor: runs `gtco.cost_model.measure.measure`; by default a thread for each GPU here.
            It is the caller's to shut down.
        deadline_s: seconds after which a program counts as hanging.

    Attributes:
        device: the records' device: the GPU's name, or "host".
        seconds: of compiling ("wait" is the time from `run` to the finished kernel) and of the
            workers' time by phase, summed over all trials.

    Raises:
        HostCompilerError: for the host, without a C++ compiler.
    """

    def __init__(
        self,
        *,
        host: bool = False,
        executor: Executor | None = None,
        deadline_s: float | None = None,
    ) -> None:
        if host and find_compiler() is None:
            raise HostCompilerError("measuring on the CPU needs a C++ compiler, such as g++")
        self.host = host
        card = HOST_DEVICE if host else device_at()
        self.device = card.name
        self.seconds: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._deadline_s = deadline_s or (HOST_DEADLINE_S if host else DEADLINE_S)
        self._own = ThreadPoolExecutor(device_count(host), "measure") if executor is None else None
        self._executor = executor or self._own
        self._compilers = (
            ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) - 1), "compile")
            if host
            else CompilePool()
        )
        if self._own is not None:
            for _ in range(device_count(host)):
                self._own.submit(start, host)
        self._versions = {"torch": str(torch.__version__)}
        if not host:
            self._versions["nvrtc"] = nvrtc_version()
            self._versions["sm_count"] = str(card.sm_count)

    def run(
        self, subject: Subject, candidate: Candidate | None, *, final: bool = False
    ) -> Future[TuningRecord]:
        """Compile, check and time one program.

        Args:
            subject: the task.
            candidate: of the task; None for its ATen calls.
            final: take more times: the best programs are told apart by little.

        Returns:
            The record, a failure's too. The future is cancelled where `close` came first, and
            raises `MeasureError` where nothing of the task can be measured.
        """
        found: Future[TuningRecord] = Future()
        if candidate is None:
            self._measure(found, subject, None, None, final)
            return found
        built = self._build(candidate.program)
        built.add_done_callback(partial(self._built, found, subject, candidate, final))
        return found

    def close(self) -> None:
        """Drop what is under way and end every process; none outlives this call."""
        self._compilers_close()
        if self._own is not None:
            self._own.shutdown(wait=False, cancel_futures=True)
        close_workers()
        if self._own is not None:
            self._own.shutdown(wait=True)

    def _compilers_close(self) -> None:
        if isinstance(self._compilers, CompilePool):
            self._compilers.close()
        else:
            self._compilers.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self, program: KernelProgram) -> Future[CompiledKernel]:
        if isinstance(self._compilers, CompilePool):
            return self._compilers.submit(CompileJob(program.code, program.name, program.arch))
        return self._compilers.submit(build_host, program)

    def _built(
        self,
        found: Future[TuningRecord],
        subject: Subject,
        candidate: Candidate,
        final: bool,
        built: Future[CompiledKernel],
    ) -> None:
        try:
            kernel = built.result()
        except (CompileError, HostCompilerError) as error:
            failure = Measurement(None, error=f"it does not compile: {error}")
            _settle(found, self._record(subject, candidate, final, failure))
        except CancelledError:
            found.cancel()
        except Exception as error:
            _settle(found, error)
        else:
            if not found.cancelled():
                self._measure(found, subject, candidate, kernel, final)

    def _measure(
        self,
        found: Future[TuningRecord],
        subject: Subject,
        candidate: Candidate | None,
        kernel: CompiledKernel | None,
        final: bool,
    ) -> None:
        program = None if candidate is None else candidate.program
        patience = LIBRARY_PATIENCE if program is None else 1
        deadline_s = self._deadline_s * patience
        job = Job(subject, program, kernel, final, self.host, deadline_s)

        def done(measured: Future[Measurement]) -> None:
            try:
                result = measured.result()
            except CancelledError:
                found.cancel()
            except EncodingError as error:
                _settle(found, MeasureError(f"{subject.group} cannot be sent: {error}"))
            except Exception as error:
                _settle(found, error)
            else:
                _settle(found, self._record(subject, candidate, final, result))

        try:
            assert self._executor is not None
            self._executor.submit(measure, job).add_done_callback(done)
        except RuntimeError:  # `close` was faster
            found.cancel()

    def _record(
        self, subject: Subject, candidate: Candidate | None, final: bool, result: Measurement
    ) -> TuningRecord:
        with self._lock:
            self.seconds.update(result.seconds)
        timed = HOST_CLOCK if self.host else FINAL if final else CHAIN
        versions = {**self._versions, "timed": timed, "spread_us": f"{result.spread_us:.3g}"}
        if candidate is not None and not self.host:
            program = candidate.program
            versions["code"] = cache_key(program.code, program.name, program.arch)[:16]
        if candidate is None:
            return TuningRecord(
                subject.key, self.device, LIBRARY, 1, {}, result.run_us, result.error, versions
            )
        return TuningRecord(
            subject.key,
            self.device,
            candidate.sketch.name,
            candidate.sketch.version,
            dict(candidate.program.schedule),
            result.run_us,
            result.error,
            versions,
            work_of(candidate).numbers(),
        )


def _settle(found: Future[TuningRecord], result: TuningRecord | Exception) -> None:
    """Give a future its result, unless its owner no longer waits."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, Exception):
            found.set_exception(result)
        else:
            found.set_result(result)
