"""Programs that hang, crash, corrupt, lie or do not compile cost the tuner no more than themselves.

The host build stands in for the device: the same worker, the same protocol, the same judge.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator

import pytest

from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate, Sampler
from gtco.cost_model import measure
from gtco.cost_model.measure import MeasureError, Subject
from gtco.cost_model.record import TuningRecord
from gtco.cost_model.trials import Trials
from gtco.passes.legality import family
from gtco.passes.tasks import workload_key
from gtco.runtime.compile_pool import CompileJob, CompilePool
from gtco.runtime.nvrtc import CompileError, CubinCache
from gtco.target import TARGETS
from tests import tile_groups

pytestmark = pytest.mark.compiler

H100 = TARGETS["sm_90a"]
GROUP = tile_groups.gelu_bias(4, 8)
SUBJECT = Subject(workload_key(GROUP, H100), GROUP)
FIRST = "blockIdx.x == 0 && threadIdx.x == 0"

QUIET = """struct Quiet {
    __attribute__((no_sanitize("thread"), noinline)) static int add(const void* at, int by) {
      return *(volatile unsigned char*)at += by;
    }
    __attribute__((no_sanitize("thread"), noinline)) static int count(int by) {
      static int all = 0;
      return all += by;
    }
  };
  """
"""Accesses that the host's machine does not check, as a GPU checks none."""
LEAVE = "{ ptx::griddepcontrol_wait(); return; }"

FAULTS = {
    "it hangs": ("volatile int forever = 1; while (forever) {}", r"it hangs: no answer in 5 s"),
    "it crashes": (f"{QUIET} Quiet::add((void*)8, 1);", r"it crashes: its process got SIGSEGV"),
    "it ends the process": ("void exit(int); exit(3);", r"it crashes: its process ended with 3"),
    "it breaks a rule of the machine": ("return;", r"HostError: .*without griddepcontrol.wait"),
    "it writes ahead of its output": (
        f"if ({FIRST}) ((volatile unsigned char*)out0)[-100] ^= 1;",
        r"HostError: .*byte -100 of %gelu",
    ),
    "it changes its input": (
        f"{QUIET} if ({FIRST}) Quiet::add((char*)in0 + 1, 1);",
        r"wrong answer",
    ),
    "it does not compile": ("nothing;", r"it does not compile: .*gtco_elementwise"),
    "it stores nothing, quickly": (LEAVE, r"wrong answer: %\w+ has an RMSE of nan"),
    "it is right but once": (
        f"{QUIET} if (Quiet::count({FIRST}) > 1) {LEAVE}",
        r"launched again: wrong answer",
    ),
}


def good() -> Candidate:
    return Sampler(derive(GROUP, family(GROUP), H100).sketches, 0).defaults(1)[0]


def with_fault(statement: str) -> Candidate:
    """The default program with a statement at the start of its kernel."""
    candidate = good()
    head, brace, body = candidate.program.source.rpartition(") {\n")
    assert "ENTRY_POINT(" in head
    source = f"{head}{brace}  {statement}\n{body}"
    return Candidate(candidate.sketch, dataclasses.replace(candidate.program, source=source))


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials(host=True, deadline_s=5) as runner:
        yield runner


def run(trials: Trials, candidate: Candidate | None) -> TuningRecord:
    return trials.run(SUBJECT, candidate).result(timeout=120)


def test_a_right_program_and_the_library_are_timed(trials: Trials) -> None:
    ours, library = run(trials, good()), run(trials, None)
    for record in (ours, library):
        assert record.run_us is not None and record.run_us > 0 and not record.error
        assert (record.device, record.versions["timed"]) == ("host", "host clock")
    assert ours.work and ours.schedule == good().program.schedule
    assert {"load", "check", "time"} <= set(trials.seconds)


def test_a_worker_starts_ahead_of_its_first_program() -> None:
    measure.close_workers()
    with Trials(host=True) as runner:
        assert runner._own is not None
        runner._own.submit(lambda: None).result(timeout=120)  # one thread: the start came before
        (worker,) = measure._all
        assert worker._child is not None
        started = worker._child.process.pid
        assert run(runner, good()).run_us is not None
        assert worker._child.process.pid == started


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_program_is_a_record_and_the_next_one_is_measured(trials: Trials, fault: str) -> None:
    statement, error = FAULTS[fault]
    bad = trials.run(SUBJECT, with_fault(statement))
    after = trials.run(SUBJECT, good())
    record = bad.result(timeout=120)
    assert record.run_us is None
    assert re.search(error, record.error), record.error
    assert record.schedule == good().program.schedule  # so it is never tried again
    assert after.result(timeout=120).run_us is not None


def test_a_killed_worker_is_replaced_and_its_program_tried_again(
    trials: Trials, caplog: pytest.LogCaptureFixture
) -> None:
    run(trials, good())
    (worker,) = measure._all
    assert worker._child is not None
    worker._child.process.kill()
    with caplog.at_level(logging.WARNING, "gtco.tune"):
        assert run(trials, good()).run_us is not None
    assert "was killed" in caplog.text


def test_what_kills_its_process_twice_is_a_failure(trials: Trials) -> None:
    record = run(trials, with_fault("int raise(int) noexcept; raise(9);"))
    assert record.run_us is None and record.error == "its process was killed twice"


def test_a_task_that_cannot_be_made_ready_is_named_and_costs_one_process(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject("another task", GROUP)
    graph = subject.graph
    monkeypatch.setitem(subject.__dict__, "graph", {**graph, "outputs": ["gone"]})
    with pytest.raises(MeasureError, match=r"case: .*gelu.* cannot be measured: .*gone"):
        trials.run(subject, good()).result(timeout=120)
    with monkeypatch.context() as patch:
        patch.setattr(measure, "Child", None)  # a process each time it is asked would be a waste
        with pytest.raises(MeasureError, match="gone"):
            trials.run(subject, good()).result(timeout=120)
    assert run(trials, good()).run_us is not None


def test_closing_cancels_what_is_under_way() -> None:
    with Trials(host=True) as runner:
        runner.run(SUBJECT, None).result(timeout=120)  # the worker is up
        hangs = "volatile int forever = 1; while (forever) {}"
        futures = [runner.run(SUBJECT, each) for each in (with_fault(hangs), good())]
    assert all(future.cancelled() for future in futures)


SOURCE = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] = 1; }'


def test_kernels_compile_without_a_cache() -> None:
    with CompilePool(1, CubinCache(None)) as pool:
        assert pool.submit(CompileJob(SOURCE, "k", "sm_80")).result(timeout=120).cubin
        broken = pool.submit(CompileJob(SOURCE.replace("1;", "y;"), "k", "sm_80"))
        with pytest.raises(CompileError, match="does not compile for sm_80"):
            broken.result(timeout=120)


def test_a_compiler_that_is_killed_is_asked_again() -> None:
    with CompilePool(1, CubinCache(None)) as pool:
        job = CompileJob(SOURCE, "k", "sm_80")
        pool.submit(job).result(timeout=120)
        (worker,) = pool._workers
        worker.interrupt()
        assert pool.submit(job).result(timeout=120).cubin
