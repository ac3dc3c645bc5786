"""Attention on mma.sync whose operands TMA brings: legality, compilation, meaning on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gtco.codegen.program import TensorMapArgument
from gtco.codegen.sampler import Candidate, Sampler
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.attention import Attention
from gtco.cost_model.knowledge import Knowledge
from gtco.cost_model.record import TuningRecord, shipped_records
from gtco.cost_model.search import candidate_of, search_task
from gtco.cost_model.work import work_of
from gtco.ir.graph import Group
from gtco.passes.tasks import Task, workload_key
from gtco.runtime.host import run_on_host
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import TARGETS
from tests import attention_groups as groups
from tests.attention_tma import CASES, between_nan, schedule
from tests.kernel_checks import inputs_of, wrong_outputs

H100 = TARGETS["sm_90a"]


@pytest.mark.compiler
@pytest.mark.parametrize("case", CASES)
def test_the_answer_is_right_and_has_the_bits_of_cp_async(case: str) -> None:
    make, knobs = CASES[case]
    group = make()
    values = inputs_of(group)
    sketch = Attention(group, H100)
    program, copied = sketch.emit(knobs), sketch.emit({**knobs, "tma": 0})
    assert not wrong_outputs(program, group, values, run_on_host)
    expected = run_on_host(copied, group, values)
    for seed in (0, 1):
        found = run_on_host(program, group, values, seed)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.compiler
@pytest.mark.parametrize("kind", (torch.bool, torch.float16, torch.float32))
def test_rows_without_a_key_are_zeros_as_in_torch(kind: torch.dtype) -> None:
    group, values = groups.masked(kind)
    for warps_k, stages in ((1, 1), (4, 2)):
        program = Attention(group, H100).emit(schedule(16, 64, warps_k, stages))
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize("width", (16, 24, 64, 72))
def test_nothing_of_another_head_is_read(width: int) -> None:
    group, values = between_nan(width)
    program = Attention(group, H100).emit(schedule(16, 32, 1, 1))
    assert not wrong_outputs(program, group, values, run_on_host)
    (y,) = run_on_host(program, group, values).values()
    assert y[1, :, width : 2 * width].isfinite().all()
    assert y.isnan().sum() == y.numel() * 8 // 9


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("slot", "dimension", "size"),
    [
        *((slot, 1, 38) for slot in (1, 2)),  # a row of the next image is a key
        *((slot, 0, 32) for slot in (1, 2)),  # columns of the next head are this one's
    ],
)
def test_a_map_of_more_than_a_head_is_caught(slot: int, dimension: int, size: int) -> None:
    group, values = between_nan()
    program = Attention(group, H100).emit(schedule(16, 32, 1, 1))
    given = program.arguments[slot]
    assert isinstance(given, TensorMapArgument) and given.sizes[dimension] < size
    sizes = tuple(size if at == dimension else each for at, each in enumerate(given.sizes))
    arguments = list(program.arguments)
    arguments[slot] = replace(given, sizes=sizes)
    wrong = replace(program, arguments=tuple(arguments))
    try:
        assert wrong_outputs(wrong, group, values, run_on_host)
    except RuntimeError as error:
        assert "reads" in str(error)


MAPPED = {
    **{name: make for name, make in groups.CASES.items()},
    **{name: make for name, (make, _) in CASES.items()},
}


@pytest.mark.parametrize("case", MAPPED)
def test_compiles(case: str) -> None:
    sketch = Attention(MAPPED[case](), H100)
    chosen = random.Random(0)
    sampler = Sampler((sketch,), 0)
    some = [each.program for each in sampler.random(40) if each.program.schedule["tma"]]
    assert some
    for program in chosen.sample(some, min(3, len(some))):
        compiled = compile_uncached(program.code, program.name, program.arch)
        assert compiled.spill_bytes <= 64, dict(program.schedule)


def test_source(golden: Callable[[str, object], None]) -> None:
    sketch = Attention(groups.packed(197, 12, 64), H100)
    golden("attention_tma_vit.cu", sketch.emit(schedule(32, 208, 1, 1)).source)


@pytest.mark.parametrize(
    ("make", "arch", "reason"),
    [
        (lambda: groups.packed(50, 2, 64), "sm_80", "tensor maps are for sm_90a, not sm_80"),
        (lambda: groups.packed(50, 4, 36), "sm_90a", "operand q .* is not in runs of 16 bytes"),
        (
            lambda: groups.repeated_keys(3, 20, 30, 32),
            "sm_90a",
            "operand k .* repeats a row, which no tensor map describes",
        ),
    ],
)
def test_says_why_no_tma_brings_it(make: Callable[[], Group], arch: str, reason: str) -> None:
    sketch = Attention(make(), TARGETS[arch])
    with pytest.raises(Illegal, match=reason):
        sketch.emit(schedule(16, 32, 1, 1))
    sketch.emit({**schedule(16, 32, 1, 1), "tma": 0})
    drawn = Sampler((sketch,), 0).random(60)
    assert drawn and not any(each.program.schedule["tma"] for each in drawn)


def test_says_which_limit_broke() -> None:
    sketch = Attention(groups.cross((1,), 64, 1024, 72), H100)
    with pytest.raises(Illegal, match="4 warps that copy, and with TMA one thread asks for all"):
        sketch.emit({**schedule(16, 64, 1, 2), "copy_warps": 4})
    # Rows of 144 bytes take two atoms of 128: 262 KB, where `cp.async` has 156.
    sketch.emit({**schedule(16, 512, 8, 1), "tma": 0})
    with pytest.raises(Illegal, match="shared memory"):
        sketch.emit(schedule(16, 512, 8, 1))


def test_a_search_draws_it_and_the_defaults_are_what_they_were() -> None:
    sketch = Attention(groups.packed(197, 12, 64), H100)
    assert not any(each["tma"] for each in sketch.defaults())
    sampler = Sampler((sketch,), 0)
    by_tma = {each.program.schedule["tma"] for each in sampler.random(200)}
    assert by_tma == {0, 1}
    first = sampler.defaults(1)[0]
    beside = [each.program.schedule for each in sampler.neighbours(first)]
    assert {**first.program.schedule, "tma": 1} in beside


def test_the_draft_counts_no_copies_of_threads() -> None:
    sketch = Attention(groups.packed(197, 12, 64), H100)
    knobs = schedule(32, 208, 1, 1)
    mapped, copied = (
        work_of(Candidate(sketch, sketch.emit({**knobs, "tma": tma}))) for tma in (1, 0)
    )
    assert (mapped.block.copies, copied.block.copies) == (0, 56)
    assert mapped.block.fill_bytes == copied.block.fill_bytes


def test_a_record_from_before_the_knob_is_one_of_cp_async() -> None:
    group = groups.packed(197, 12, 64)
    task = Task(workload_key(group, H100), group, (group,))
    old = {name: value for name, value in schedule(32, 208, 1, 1).items() if name != "tma"}
    record = TuningRecord(task.key, "a card", "attention", Attention.version, old, 3.5)
    known = Knowledge("a card", shipped=[record])
    (found,) = known.best(task.key)
    assert found.schedule == {**old, "tma": 0} and found.run_us == 3.5
    assert known.record(task.key, "attention", {**old, "tma": 0}) == found
    made = candidate_of(task, found, H100)
    assert made is not None and made.program.schedule["tma"] == 0
    again = Knowledge("a card", own=[record])
    assert again.is_own(again.best(task.key)[0])
    proposed = search_task(task, H100, known).propose(16)
    assert made.key not in {each.key for each in proposed}, "it was measured"
    shipped = [each for each in shipped_records() if each.sketch == "attention"]
    before = [each for each in shipped if "tma" not in each.schedule]
    assert before
    for each in before:
        (found,) = Knowledge(each.device, shipped=[each]).best(each.workload)
        assert found.schedule == {**each.schedule, "tma": 0}
