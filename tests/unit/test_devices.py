"""Cards that differ: what the driver says makes the target, and whose records serve whom."""

from __future__ import annotations

import io
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gtco import compiler
from gtco.cli import show
from gtco.cli.demo import VisionTransformer, randomize
from gtco.cli.env import records_here
from gtco.codegen import DEVICE_HEADERS
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.constants import TABLES
from gtco.cost_model import knowledge as knowledge_module
from gtco.cost_model.database import Database
from gtco.cost_model.knowledge import (
    CHOSEN,
    MEANINGS,
    RAN_WITH,
    VERSIONS,
    Knowledge,
    Standing,
    ran_with,
    standing,
)
from gtco.cost_model.record import LIBRARY, PLAN, TuningRecord, shipped_records
from gtco.frontend.torch_export import Captured
from gtco.options import Options
from gtco.passes.legality import family
from gtco.passes.tasks import Task, workload_key
from gtco.runtime import nvrtc
from gtco.runtime.device import device_at, resolve_device
from gtco.runtime.plan import Launch, Plan
from gtco.selection import launches_of
from gtco.target import CARDS, HOST_DEVICE, TARGETS, Device, TargetError, find_target
from tests.cuda_stand_in import pretend
from tests.groups import norm_linear

H100, A100 = CARDS["sm_90a"], CARDS["sm_80"]
H200 = replace(H100, name="NVIDIA H200", dram_gbps=4917)
GH200 = replace(H200, name="NVIDIA GH200 144G HBM3e")  # of which no records ship
PCIE = Device("NVIDIA H100 PCIe", "sm_90a", 114, 50 << 20, 2039)
Pretend = Callable[[Device], None]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    return lambda card: pretend(monkeypatch, card)


# -- the card --------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", [H100, H200, PCIE, A100], ids=lambda card: card.name)
def test_the_driver_describes_the_card(card: Device, pretended: Pretend) -> None:
    pretended(card)
    assert device_at() == card
    assert resolve_device(None) == resolve_device(card.arch) == card
    other = "sm_80" if card.arch == "sm_90a" else "sm_90a"
    assert resolve_device(other) == CARDS[other]
    assert resolve_device("host") == HOST_DEVICE


def test_the_card_makes_the_target() -> None:
    assert H100.target == TARGETS["sm_90a"]
    for arch, card in CARDS.items():
        assert card.target is TARGETS[arch]
    few, usual = PCIE.target, TARGETS["sm_90a"]
    assert (few.sm_count, few.arch, few.smem_per_block) == (114, "sm_90a", usual.smem_per_block)
    assert few.matmul_tflops == pytest.approx(usual.matmul_tflops * 114 / 132)
    assert few.dram_gbps == pytest.approx(usual.dram_gbps * 2039 / 3352)
    assert H200.target.sm_count == 132 and H200.target.dram_gbps > 1.4 * usual.dram_gbps
    silent = replace(PCIE, l2_bytes=0, dram_gbps=0).target
    assert (silent.l2_bytes, silent.dram_gbps) == (usual.l2_bytes, usual.dram_gbps)


def test_a_card_with_a_table_of_its_own_plans_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert H100.target.constants.card == H200.target.constants.card == H100.name
    own = replace(H200.target.constants, version=2, card=H200.name)
    monkeypatch.setitem(TABLES, H200.name, own)  # type: ignore[arg-type]
    assert H200.target.constants is own
    assert PCIE.target.constants.card == H100.name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sm_100a", r"did you mean 'sm_100'\?"),
        ("SM90A", r"did you mean 'sm_90a'\?"),
        ("90", r"did you mean 'sm_90a'\?"),
        ("compute_80", r"did you mean 'sm_80'\?"),
        ("sm_110", "gtco has no kernels for the target 'sm_110' yet; it knows sm_80"),
        ("sm_103a", "gtco has no kernels for the target 'sm_103a' yet"),
        ("sm_75", "older than sm_80"),
        ("sm_9", "unknown target 'sm_9'; gtco knows"),
        ("hots", r"did you mean 'host'\?"),
        ("", "unknown target ''; gtco knows"),
    ],
)
def test_a_target_that_is_not_served_suggests_no_other(name: str, reason: str) -> None:
    with pytest.raises(TargetError, match=reason) as said:
        find_target(name)
    assert ("did you mean" in str(said.value)) == ("did you mean" in reason)


# -- a whole model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vit() -> Captured:
    """ViT-B/16, of which an H100 knows every workload and the plan."""
    model = VisionTransformer(patch=16, width=768, depth=12, heads=12)
    randomize(model, seed=0)
    image = torch.randn(1, 3, 224, 224).half()
    return compiler.capture_for(model.eval().half(), (image,), None, Options())


def code_of(plan: Plan) -> list[tuple[str, object, int]]:
    programs = [launch.program for launch in plan.launches]
    return [(each.source, each.grid, each.smem_bytes) for each in programs if each is not None]


def test_another_card_runs_a_vit_with_what_an_h100_knows(
    vit: Captured,
    pretended: Pretend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    pretended(H100)
    there = compiler.plan_captured(vit, Options())
    pretended(GH200)
    with caplog.at_level(logging.INFO):
        here = compiler.plan_captured(vit, Options())
    for what in ("the plan that was fastest", "knobs of the whole plan"):
        assert f"{what}, from {H100.name}" in caplog.text
    assert Counter(launch.source for launch in there.launches) == {"record": 63}
    assert Counter(launch.source for launch in here.launches) == {f"from {H100.name}": 63}
    assert code_of(here) == code_of(there) and len(code_of(here)) == 63
    times = {launch.predicted_us for launch in there.launches}
    assert not times & {launch.predicted_us for launch in here.launches}, "a schedule, and no time"


def test_a_smaller_card_takes_the_schedules_and_plans_for_its_own_size(
    vit: Captured, pretended: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    pretended(PCIE)
    plan = compiler.plan_captured(vit, Options())
    assert plan.target.sm_count == 114
    sources = Counter(launch.source for launch in plan.launches)
    assert sources[f"from {H100.name}"] == len(plan.launches)


def test_a_new_version_of_one_sketch_costs_no_schedule_and_no_plan_without_it(
    vit: Captured, pretended: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    pretended(H100)
    before = compiler.plan_captured(vit, Options())
    for name in ("gemm_persistent", "attention_projection"):  # not in this plan
        monkeypatch.setitem(VERSIONS, name, VERSIONS[name] + 1)
    knowledge_module._shipped.cache_clear()
    unmoved = compiler.plan_captured(vit, Options())
    assert [each.source for each in unmoved.launches] == ["record"] * 63
    assert code_of(unmoved) == code_of(before)
    monkeypatch.setitem(VERSIONS, "gemm_wgmma", VERSIONS["gemm_wgmma"] + 1)
    bumped = compiler.plan_captured(vit, Options())
    assert code_of(bumped) == code_of(before)
    for launch in bumped.launches:
        changed = launch.program is not None and launch.program.sketch == "gemm_wgmma"
        assert launch.source == ("from older code" if changed else "record")


def test_an_edit_of_a_device_header_costs_no_schedule(
    vit: Captured, pretended: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    pretended(H100)

    def planned() -> tuple[set[str], set[str], list[tuple[str, object, int]]]:
        plan = compiler.plan_captured(vit, Options())
        programs = [each.program for each in plan.launches if each.program is not None]
        keys = {nvrtc.cache_key(each.code, each.name, each.arch) for each in programs}
        return keys, {launch.source for launch in plan.launches}, code_of(plan)

    keys, sources, code = planned()
    headers = tmp_path / "device"
    shutil.copytree(DEVICE_HEADERS, headers)
    with (headers / "ptx.cuh").open("a") as header:
        header.write("#define EDITED\n")
    monkeypatch.setattr(nvrtc, "DEVICE_HEADERS", headers)
    nvrtc._headers_digest.cache_clear()
    try:
        others, same, unmoved = planned()
    finally:
        monkeypatch.undo()
        nvrtc._headers_digest.cache_clear()
    assert same == sources == {"record"} and unmoved == code
    assert len(others) == len(keys) and not others & keys, "every kernel is compiled again"


# -- single records --------------------------------------------------------------------------------

GROUP = norm_linear(197, 768, 2304, torch.float16)
KEY = workload_key(GROUP, TARGETS["sm_90a"])
SCHEDULES = [schedule for schedule, _ in GemmMma(GROUP, TARGETS["sm_90a"]).legal()][:4]


def record(
    card: Device, number: int = 0, run_us: float | None = 3.0, **changed: object
) -> TuningRecord:
    made = TuningRecord(
        KEY,
        card.name,
        "gemm_mma",
        VERSIONS["gemm_mma"],
        SCHEDULES[number],
        run_us,
        versions={"sm_count": str(card.sm_count)},
    )
    return replace(made, **changed)


def launched(card: Device, *records: TuningRecord, own: tuple[TuningRecord, ...] = ()) -> Launch:
    task = Task(KEY, GROUP, (GROUP,))
    (launch,) = launches_of(task, card.target, Knowledge.on(card, records, own))
    assert launch.family == family(GROUP)
    return launch


def schedule_of(launch: Launch) -> int:
    assert launch.program is not None
    return SCHEDULES.index(launch.program.schedule)


def test_a_record_is_own_kin_or_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERSIONS, "gemm_mma", 7)
    monkeypatch.setitem(MEANINGS, "gemm_mma", 5)
    worth = [
        (record(H100, version=7), Standing.OWN),
        (record(H100, version=6), Standing.KIN),
        (record(H100, version=5), Standing.KIN),
        (record(H100, version=4), Standing.STALE),
        (record(H100, version=8), Standing.STALE),
        (record(H200, version=7), Standing.KIN),
        (record(H200, version=4), Standing.STALE),
        (record(H100, version=7, sketch="gone"), Standing.STALE),
        (record(H100, version=1, sketch=LIBRARY), Standing.OWN),
        (record(H200, version=1, sketch=LIBRARY), Standing.KIN),
    ]
    for made, expected in worth:
        assert standing(made, H100.name) is expected


def test_a_plan_is_own_while_the_sketches_that_it_ran_with_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = record(H100, sketch=PLAN, version=VERSIONS[PLAN], work={"d": 1})
    plan = replace(plan, versions={RAN_WITH: ran_with(["gemm_mma", "rowwise"])})
    assert standing(plan, H100.name) is Standing.OWN
    assert standing(replace(plan, versions={}), H100.name) is Standing.KIN, "nothing says so"
    monkeypatch.setitem(VERSIONS, "gemm_wgmma", 99)
    assert standing(plan, H100.name) is Standing.OWN
    monkeypatch.setitem(VERSIONS, "rowwise", 99)
    assert standing(plan, H100.name) is Standing.KIN


def test_every_sketch_says_since_when_its_knobs_mean_the_same() -> None:
    for name, version in VERSIONS.items():
        assert 1 <= MEANINGS[name] <= version
    for made in shipped_records():  # the times of some are of older code
        assert standing(made, made.device) is not Standing.STALE


def test_own_records_win_whatever_kin_took() -> None:
    launch = launched(H200, record(H100, 0, 1.0), record(H200, 1, 9.0))
    assert (launch.source, launch.predicted_us, schedule_of(launch)) == ("record", 9.0, 1)
    tuned = launched(H200, record(H100, 0, 1.0), own=(record(H200, 2, 9.0),))
    assert (tuned.source, tuned.predicted_us, schedule_of(tuned)) == ("tuned here", 9.0, 2)


def test_the_nearest_kin_serves_and_its_times_are_compared_with_no_others() -> None:
    far = Device("a small one", "sm_90a", 66, 0, 0)
    records = [record(far, 0, 1.0), record(PCIE, 1, 5.0), record(PCIE, 2, 4.0)]
    launch = launched(H200, *records)
    assert (launch.source, schedule_of(launch)) == (f"from {PCIE.name}", 2)
    assert launch.predicted_us not in (1.0, 4.0, 5.0)
    marked = replace(records[1], versions={**records[1].versions, **CHOSEN})
    assert schedule_of(launched(H200, records[0], marked, records[2])) == 1
    assert launched(far, *records[1:]).source == f"from {PCIE.name}"
    nearer = record(H100, 3, 8.0, versions={})  # whose size is known by its name
    assert launched(H200, *records, nearer).source == f"from {H100.name}"


def test_what_failed_here_is_not_taken_from_kin() -> None:
    failed = record(H200, 2, None, error="illegal access")
    launch = launched(H200, record(PCIE, 1, 5.0), record(PCIE, 2, 4.0), failed)
    assert (launch.source, schedule_of(launch)) == (f"from {PCIE.name}", 1)


def test_no_schedule_comes_from_another_architecture_or_the_host_or_goes_there() -> None:
    other = record(A100, workload=KEY.replace("sm_90a", "sm_80"))
    assert launched(H200, other, record(HOST_DEVICE)).source == "default"
    assert launched(HOST_DEVICE, record(H100)).source == "default"
    assert launched(HOST_DEVICE, record(HOST_DEVICE)).source == "record"


def test_older_code_ranks_by_its_time_until_the_sketch_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = [record(H100, 0, 2.0), record(H100, 1, 3.0)]
    library = record(H100, sketch=LIBRARY, version=1, schedule={}, run_us=2.5)
    monkeypatch.setitem(VERSIONS, "gemm_mma", VERSIONS["gemm_mma"] + 1)
    launch = launched(H100, *old, library)
    assert (launch.source, schedule_of(launch)) == ("from older code", 0)
    assert launch.predicted_us not in (2.0, 2.5, 3.0)
    assert launched(H100, *old, replace(library, run_us=1.0)).program is None
    again = record(H100, 2, 2.2)
    assert schedule_of(launched(H100, *old, library, again)) == 2
    monkeypatch.setitem(MEANINGS, "gemm_mma", VERSIONS["gemm_mma"])
    assert launched(H100, *old).source == "default"


def test_a_library_that_was_faster_on_kin_runs_here_too() -> None:
    library = record(H100, sketch=LIBRARY, version=1, schedule={}, run_us=2.0)
    launch = launched(H200, record(H100), library)
    assert (launch.program, launch.source) == (None, f"from {H100.name}")
    alone = launched(H200, library)
    assert alone.source == "default", "no kernel was tried beside it"
    own = record(H200, sketch=LIBRARY, version=1, schedule={}, run_us=1.0)
    assert launched(H200, record(H100), own).source == f"from {H100.name}"


def test_env_says_how_much_is_known(
    pretended: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with Database() as database:
        database.add([record(H200), record(H200, 1, version=0)])
        database.add([record(A100, workload=KEY.replace("sm_90a", "sm_80"))])
        database.add([record(H200, sketch=LIBRARY, version=1, schedule={})])
    shipped = [made for made in shipped_records() if made.device == H200.name]
    timed = sum(standing(made, H200.name) is Standing.OWN for made in shipped)
    own, kin = 2 + timed, len(shipped_records()) - timed
    pretended(H200)
    (row,) = records_here()
    assert row == {
        "gpu": H200.name,
        "own": own,
        "kin": kin,
        "stale": 1,
        "library_times": 1 + sum(made.sketch == LIBRARY for made in shipped),
        "kin_devices": [H100.name],
    }
    told = io.StringIO()
    facts = {"packages": {}, "gpus": [], "cache": {"folder": "", "used": True, "writable": True}}
    facts.update(dict.fromkeys(("python", "platform", "nvrtc", "cuda", "driver"), "x"))
    show.environment(Console(file=told, width=200), facts, [row])
    assert (
        f"{own} own, {kin} of other cards of its architecture ({H100.name}: schedules"
        in told.getvalue()
    )
    pretended(H100)
    (row,) = records_here()
    timed = sum(standing(made, H100.name) is Standing.OWN for made in shipped_records())
    every = len(shipped_records()) + 2
    assert (row["own"], row["kin"], row["kin_devices"]) == (timed, every - timed, [H200.name])


def test_a_search_begins_with_what_kin_knows() -> None:
    known = Knowledge.on(H200, [record(H100), record(H200, 1)], [])
    assert [each.device for each in known.others] == [H100.name]
    assert known.records(KEY) == (record(H200, 1),)
    assert knowledge_module.is_of_arch(known.others[0], "sm_90a")
