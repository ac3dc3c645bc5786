"""Compile many kernels in worker processes.

NVRTC holds a lock, so threads gain nothing. A worker is a plain child process that speaks JSON
lines: `multiprocessing` would import the user's main script again in each, and pickle.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.nvrtc import (
    CompileError,
    CubinCache,
    cache_key,
    compile_uncached,
    user_cache,
)

_SERVE = "from gtco.runtime.compile_pool import serve; serve()"


@dataclass(frozen=True)
class CompileJob:
    """One kernel to compile: source, entry point, architecture."""

    code: str
    name: str
    arch: str


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
    limit = len(os.sched_getaffinity(0)) if workers is None else workers
    count = min(limit, len(missing))
    if count <= 1:
        results = [_compile_here(job) for job in missing]
    else:
        results = _compile_in_workers(missing, count)
    for job, result in zip(missing, results, strict=True):
        done[job] = result
        if isinstance(result, CompiledKernel):
            store.write(cache_key(job.code, job.name, job.arch), result)
    return [done[job] for job in jobs]


def _compile_here(job: CompileJob) -> CompiledKernel | CompileError:
    try:
        return compile_uncached(job.code, job.name, job.arch)
    except CompileError as error:
        return error


def _compile_in_workers(
    jobs: Sequence[CompileJob], count: int
) -> list[CompiledKernel | CompileError]:
    idle: SimpleQueue[_Worker] = SimpleQueue()
    workers = [_Worker() for _ in range(count)]
    for worker in workers:
        idle.put(worker)

    def run(job: CompileJob) -> CompiledKernel | CompileError:
        worker = idle.get()
        try:
            return worker.compile(job)
        finally:
            idle.put(worker)

    try:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(run, jobs))
    finally:
        for worker in workers:
            worker.close()


class _Worker:
    """A child process that compiles one job at a time; one that dies is started again."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def compile(self, job: CompileJob) -> CompiledKernel | CompileError:
        if self._process is None:
            self._process = _start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(asdict(job)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.close()
            code = process.returncode
            return CompileError(
                f"kernel {job.name}: the process that compiled it for {job.arch} died ({code})"
            )
        result: dict[str, Any] = json.loads(answer)
        if "error" in result:
            return CompileError(result["error"])
        cubin = base64.b64decode(result.pop("cubin"))
        return CompiledKernel(cubin=cubin, **result)

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # the worker ends at the end of its input
        self._process.wait()
        self._process.stdout.close()
        self._process = None


def _start() -> subprocess.Popen[str]:
    package_parent = str(Path(__file__).parents[2])
    paths = [package_parent, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )


def serve() -> None:
    """A worker's loop: a job a line on stdin, an answer a line on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    for line in sys.stdin:
        result = _compile_here(CompileJob(**json.loads(line)))
        if isinstance(result, CompileError):
            answer: dict[str, Any] = {"error": str(result)}
        else:
            answer = {**asdict(result), "cubin": base64.b64encode(result.cubin).decode()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
