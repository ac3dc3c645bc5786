"""Compile many kernels in worker processes.

NVRTC holds a lock, so threads gain nothing: each thread of the pool asks a process of its own.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any, Self

from gtco.runtime.child import Child, ChildDied, ChildHung
from gtco.runtime.child import serve as serve_child
from gtco.runtime.cubin import CompiledKernel, CubinCache, user_cache
from gtco.runtime.nvrtc import CompileError, cache_key, compile_uncached

DEADLINE_S = 120.0
"""The longest that the assembler may think about one kernel; most take a tenth of a second."""
_SERVE = "from gtco.runtime.compile_pool import serve; serve()"


@dataclass(frozen=True)
class CompileJob:
    """One kernel to compile: source, entry point, architecture."""

    code: str
    name: str
    arch: str


class CompilerLost(CompileError):
    """The process that compiled a kernel died."""


def compile_many(
    jobs: Sequence[CompileJob], workers: int | None = None, cache: CubinCache | None = None
) -> list[CompiledKernel | CompileError]:
    """Compile `jobs`, equal ones once, in at most `workers` processes.

    Args:
        jobs: what to compile.
        workers: processes; as many as there are processors by default.
        cache: where cubins are kept; the user's cache by default.

    Returns:
        In the order of `jobs`, the kernel or the error of each.
    """
    store = user_cache() if cache is None else cache
    done: dict[CompileJob, CompiledKernel | CompileError] = {}
    missing: list[CompileJob] = []
    for job in dict.fromkeys(jobs):
        found = store.read(cache_key(job.code, job.name, job.arch))
        if found is None:
            missing.append(job)
        else:
            done[job] = found
    count = min(_processors() if workers is None else workers, len(missing))
    if count <= 1:
        for job in missing:
            result = _compile_here(job)
            if isinstance(result, CompiledKernel):
                store.write(cache_key(job.code, job.name, job.arch), result)
            done[job] = result
        return [done[job] for job in jobs]
    with CompilePool(count, store) as pool:
        futures = {job: pool.submit(job) for job in missing}
        for job, future in futures.items():
            try:
                done[job] = future.result()
            except CompileError as error:
                done[job] = error
    return [done[job] for job in jobs]


class CompilePool:
    """Processes that compile in the background; a context manager.

    Args:
        workers: processes, each started with its first job; by default as many as there are
            processors but one, which is left to the caller.
        cache: where cubins are kept; the user's cache by default.
        deadline_s: seconds after which a compilation is given up.
    """

    def __init__(
        self,
        workers: int | None = None,
        cache: CubinCache | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        count = max(1, _processors() - 1) if workers is None else workers
        self._cache = user_cache() if cache is None else cache
        self._threads = ThreadPoolExecutor(count, "compile")
        self._workers = [_Worker(deadline_s) for _ in range(count)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._closing = False
        for worker in self._workers:
            self._idle.put(worker)

    def submit(self, job: CompileJob) -> Future[CompiledKernel]:
        """The kernel of `job`, from the cache or compiled; the future may raise `CompileError`."""
        return self._threads.submit(self._compile, job)

    def _compile(self, job: CompileJob) -> CompiledKernel:
        key = cache_key(job.code, job.name, job.arch)
        found = self._cache.read(key)
        if found is not None:
            return found
        worker = self._idle.get()
        try:
            result = worker.compile(job)
            if isinstance(result, CompilerLost) and not self._closing:
                result = worker.compile(job)  # most likely something else killed it
        finally:
            self._idle.put(worker)
        if isinstance(result, CompileError):
            raise result
        self._cache.write(key, result)
        return result

    def close(self) -> None:
        """Drop what was not begun and end the processes; none outlives this call."""
        self._closing = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.interrupt()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _compile_here(job: CompileJob) -> CompiledKernel | CompileError:
    try:
        return compile_uncached(job.code, job.name, job.arch)
    except CompileError as error:
        return error


class _Worker:
    """A child process that compiles one job at a time; one that dies is started again."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._child: Child | None = None

    def compile(self, job: CompileJob) -> CompiledKernel | CompileError:
        if self._child is None:
            self._child = Child(_SERVE)
        try:
            result = self._child.ask(asdict(job), self._deadline_s)
        except (ChildDied, ChildHung) as failure:
            self._child = None
            kind = CompilerLost if isinstance(failure, ChildDied) else CompileError
            return kind(f"kernel {job.name}: the process that compiled it for {job.arch} {failure}")
        if "error" in result:
            return CompileError(result["error"])
        return decode_kernel(result)

    def interrupt(self) -> None:
        """From another thread: let `compile` fail now."""
        child = self._child
        if child is not None:
            child.process.kill()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def encode_kernel(kernel: CompiledKernel) -> dict[str, Any]:
    """`kernel` as JSON values."""
    return {**asdict(kernel), "cubin": base64.b64encode(kernel.cubin).decode()}


def decode_kernel(data: Mapping[str, Any]) -> CompiledKernel:
    """The kernel that `encode_kernel` wrote."""
    return CompiledKernel(**{**data, "cubin": base64.b64decode(data["cubin"])})


def serve() -> None:
    """A worker's loop: a job a line on stdin, an answer a line on stdout."""
    serve_child(_answer)


def _answer(job: dict[str, Any]) -> Mapping[str, Any]:
    result = _compile_here(CompileJob(**job))
    if isinstance(result, CompileError):
        return {"error": str(result)}
    return encode_kernel(result)
