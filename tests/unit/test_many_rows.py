"""The comparison of GEMMs of many rows, but for the GPU's part of it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from experiments import many_rows
from experiments.many_rows import CUBLAS, PEAK_TFLOPS, SHAPES, Shape, alternated, row, searched
from gtco.codegen.sampler import Candidate
from gtco.cost_model.database import TuningRecord
from gtco.cost_model.measure import Subject
from gtco.cost_model.trials import Trials
from gtco.graph import Group
from gtco.runtime.host import find_compiler
from gtco.target import TARGETS

H100 = TARGETS["sm_90a"]
ONE = replace(H100, sm_count=1)
"""A chip that a tiny result fills."""
TINY = Shape("tiny", "projection", 70, 64, 64)


class Device:
    """In place of `Trials`: a program takes as long as its grid is large; split ones fail."""

    def run(
        self, subject: Subject, candidate: Candidate, *, final: bool = False
    ) -> Future[TuningRecord]:
        found: Future[TuningRecord] = Future()
        program = candidate.program
        failed = program.schedule.get("split", 1) > 1
        run_us = None if failed else float(program.grid[0] * program.grid[1])
        error = "it hangs" if failed else ""
        record = (subject.key, "imaginary", program.sketch, 1, dict(program.schedule))
        found.set_result(TuningRecord(*record, run_us, error, {}))
        return found


def test_the_shapes_are_those_of_the_fused_layers() -> None:
    assert len(SHAPES) == 12
    for shape in SHAPES:
        ops = [node.op for node in shape.group.compute]
        assert "linear" in ops and ("gelu" in ops) == (shape.name == "fc1")
        assert ("row_stats" in ops) == (shape.name in ("projection", "fc2"))
        assert shape.group.graph.specs[shape.group.graph.outputs[0]].sizes == (
            1,
            shape.rows,
            shape.columns,
        )
    assert SHAPES[2].tflops(21.6) == pytest.approx(344, abs=1)


def test_the_best_of_each_sketch_is_found_and_failures_are_told() -> None:
    (found,) = searched([SHAPES[1]], H100, Device(), 40).values()  # type: ignore[arg-type]
    assert list(found) == ["gemm_wgmma", "gemm_persistent"]
    for name, each in found.items():
        assert each.drawn == 40 and each.best is not None and each.best.sketch.name == name
    assert found["gemm_wgmma"].ran < 40 and found["gemm_wgmma"].errors == ("it hangs",)
    assert found["gemm_persistent"].ran == 40 and not found["gemm_persistent"].errors


def test_half_of_the_programs_are_defaults() -> None:
    sketch = many_rows.SKETCHES[1](SHAPES[0].group, H100)
    keys = [dict(each.program.schedule) for each in many_rows.drawn(sketch, 20)]
    assert len(keys) == 20
    assert keys[:10] == [dict(each) for each in sketch.defaults()][:10]


def test_clocks_take_turns_and_a_row_has_their_medians() -> None:
    order: list[str] = []

    def clock(name: str, us: float):
        def read() -> float:
            order.append(name)
            return us + (100.0 if len(order) == 1 else 0.0)

        return read

    times = alternated({"gemm_persistent": clock("gemm_persistent", 10.0), CUBLAS: clock("c", 5.0)})
    assert order[:4] == ["gemm_persistent", "c"] * 2
    (found,) = searched([SHAPES[2]], H100, Device(), 4).values()  # type: ignore[arg-type]
    made = row(SHAPES[2], found, times)
    assert made["run_us"] == {"gemm_persistent": 10.0, CUBLAS: 5.0}
    assert made["tflops"][CUBLAS] == pytest.approx(2 * made["tflops"]["gemm_persistent"])
    text = many_rows.table([made])
    share = made["tflops"][CUBLAS] / PEAK_TFLOPS
    assert f"| 5.00, {made['tflops'][CUBLAS]:.0f} ({share:.0%}) |" in text
    assert text.count("\n") == 3


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_a_search_runs_on_the_host() -> None:
    with Trials(host=True) as runner:
        (found,) = searched([TINY], ONE, runner, 2).values()
    assert all(each.ran == 2 and each.search_us for each in found.values()), found


def test_chains_have_weights_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of a chain but CUDA itself."""
    made: list[dict[str, torch.Tensor]] = []
    dependent: list[bool] = []

    class Bound:
        def __init__(self, kernel: object, program: object, tensors, *, dependent: bool) -> None:
            made.append(tensors)
            flags.append(dependent)

        def __call__(self, stream: int) -> None: ...

    class Chain:
        def __init__(self, launches) -> None:
            for each in launches:
                each(0)

        def times_us(self, repeat: int, replays: int) -> list[float]:
            return [3.0] * repeat

    flags = dependent
    monkeypatch.setattr(many_rows, "BoundLaunch", Bound)
    monkeypatch.setattr(many_rows, "Chain", Chain)
    monkeypatch.setattr(many_rows, "load_program", lambda program, device: None)
    group: Group = TINY.group
    sketch = many_rows.SKETCHES[1](group, ONE)
    program = many_rows.drawn(sketch, 2)[0].program
    cpu = torch.device("cpu", 0)
    assert many_rows.generated(program, group, cpu).time_us() == 3.0
    assert dependent == [False] + [True] * 11
    names = {argument.value for argument in program.arguments}
    assert all(names <= set(each) for each in made)
    assert len({each["w"].data_ptr() for each in made}) == 12
    assert len({each["x"].data_ptr() for each in made}) == 1
    assert many_rows.cublas(TINY, cpu).time_us() == 3.0
