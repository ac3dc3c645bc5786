"""Lines of a JSONL file that are made to harm: each is refused by name, and costs no other line."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.cost_model.database import Database
from gtco.cost_model.knowledge import VERSIONS, Knowledge
from gtco.cost_model.record import LONGEST_LINE, PLAN, DatabaseError, TuningRecord, scan_jsonl
from gtco.ir.graph import FusedGraph
from gtco.passes.tasks import workload_key
from gtco.selection import select
from gtco.target import TARGETS
from tests.groups import GEMM_CASES

H100 = TARGETS["sm_90a"]
GROUP = GEMM_CASES["projection"]()
WORKLOAD = workload_key(GROUP, H100)
GOOD = TuningRecord(
    WORKLOAD, "a card", "gemm_mma", VERSIONS["gemm_mma"], {"stages": 2}, 3.0, work={"blocks": 8}
)
CONTENT = json.loads(WORKLOAD)
EVERY_KNOB = tuple(knob.name for knob in GemmMma(GROUP, H100).knobs())
DEEP = "[" * 100_000 + "]" * 100_000


def line(**changed: Any) -> str:
    return json.dumps({**json.loads(GOOD.to_json()), **changed})


def raw(field: str, text: str) -> str:
    """A line whose `field` is this JSON text, which Python would not write."""
    return line(**{field: "PLACE"}).replace('"PLACE"', text)


def without(field: str) -> str:
    return json.dumps({k: v for k, v in json.loads(GOOD.to_json()).items() if k != field})


def key(**changed: Any) -> str:
    return json.dumps({**CONTENT, **changed})


def workload(**changed: Any) -> str:
    return line(workload=key(**changed))


HOSTILE: dict[str, tuple[str | bytes, str]] = {
    # what the line is: it, and what the refusal says
    "empty": ("", "Expecting value"),
    "rubbish": ("rubbish", "Expecting value"),
    "cut": (GOOD.to_json()[:-9], "Invalid control character"),
    "two records": (GOOD.to_json() * 2, "Extra data"),
    "a list": ("[1, 2]", "a list is not an object"),
    "null": ("null", "None is not an object"),
    "a number": ("7", "7 is not an object"),
    "deep": (DEEP, "nested too deeply"),
    "deep field": (raw("work", DEEP), "nested too deeply"),
    "not UTF-8": (GOOD.to_json().encode().replace(b"a card", b"a \xff"), "utf-8"),
    "UTF-16": (GOOD.to_json().encode("utf-16"), "utf-8"),
    "long": ("x" * (3 * LONGEST_LINE + 5), "more than .* bytes"),
    "twice": (GOOD.to_json()[:-1] + ', "run_us": 1.0}', "'run_us' is there twice"),
    "knob twice": (raw("schedule", '{"stages": 2, "stages": 3}'), "'stages' is there twice"),
    "extra field": (line(colour="red"), "unknown field 'colour'"),
    "no workload": (without("workload"), "lacks workload"),
    "no device": (without("device"), "lacks device"),
    "no sketch": (without("sketch"), "lacks sketch"),
    "no version": (without("version"), "lacks version"),
    "no schedule": (without("schedule"), "lacks schedule"),
    "no time": (without("run_us"), "lacks run_us"),
    "time 0": (line(run_us=0), "run_us is 0: no time"),
    "time -0.0": (line(run_us=-0.0), "run_us is -0.0: no time"),
    "time below 0": (line(run_us=-3.0), "run_us is -3.0: no time"),
    "time NaN": (line(run_us=float("nan")), "NaN is no number"),
    "time infinite": (line(run_us=float("inf")), "Infinity is no number"),
    "time 1e999": (raw("run_us", "1e999"), "run_us is a number without bound: no time"),
    "time tiny": (line(run_us=1e-30), "run_us is 1e-30: no time"),
    "time of years": (line(run_us=1e17), "run_us is 1e.17: no time"),
    "time of 400 digits": (line(run_us=10**400), "run_us is a number of more than 18 digits"),
    "time of 5000 digits": (raw("run_us", "1" * 5000), "digits"),
    "time of text": (line(run_us="3.0"), "run_us is '3.0', not a number"),
    "time true": (line(run_us=True), "run_us is True, not a number"),
    "time in a list": (line(run_us=[3.0]), "run_us is a list"),
    "workload none": (line(workload=None), "workload is None, not text"),
    "workload an object": (line(workload=CONTENT), "workload is an object, not text"),
    "workload rubbish": (line(workload="rubbish"), "workload is no key of gtco's: Expecting"),
    "workload empty": (line(workload=""), "workload is no key"),
    "workload deep": (line(workload=DEEP), "workload is no key of gtco's: nested too deeply"),
    "workload without arch": (workload(arch=None), "names no architecture"),
    "workload without nodes": (workload(nodes=None), "no lists of"),
    "workload of odd nodes": (workload(nodes=[1]), "node 1"),
    "workload of short nodes": (workload(nodes=[["add"]]), "node a list"),
    "workload of no outputs": (workload(nodes=[["add", {}, [], []]]), "node a list"),
    "workload of odd specs": (workload(externals=[["f16[1,x]", False]]), "external a list"),
    "workload of odd externals": (workload(externals=[["f16[1]"]]), "external a list"),
    "workload of NaN": (workload(extra=float("nan")), "workload is no key of gtco's: NaN"),
    "device none": (line(device=None), "device is None, not text"),
    "device empty": (line(device=""), "which is no name"),
    "device of escapes": (line(device="\x1b[2J"), "which is no name"),
    "half a character": (line(device="\ud800"), "half a surrogate pair"),
    "device with NUL": (line(device="a\0b"), "device has a NUL"),
    "sketch a number": (line(sketch=3), "sketch is 3, not text"),
    "sketch of lines": (line(sketch="a\nb"), "which is no name"),
    "version of text": (line(version="1"), "version is '1', not a whole number"),
    "version true": (line(version=True), "version is True, not a whole number"),
    "version 1.0": (line(version=1.0), "version is 1.0, not a whole number"),
    "version none": (line(version=None), "version is None, not a whole number"),
    "version -1": (line(version=-1), "version is -1, not from 0"),
    "version huge": (line(version=10**30), "version is a number of more than 18 digits, not from"),
    "schedule a list": (line(schedule=[1, 2]), "schedule is a list, not an object"),
    "schedule of text": (line(schedule={"stages": "2"}), "schedule.stages is '2', not a whole"),
    "schedule 2.0": (line(schedule={"stages": 2.0}), "schedule.stages is 2.0, not a whole"),
    "schedule true": (line(schedule={"stages": True}), "schedule.stages is True"),
    "schedule NaN": (line(schedule={"stages": float("nan")}), "NaN is no number"),
    "schedule nested": (line(schedule={"stages": {"a": 1}}), "schedule.stages is an object"),
    "knob below 0": (line(schedule={"stages": -1}), "schedule.stages is -1, not from 0"),
    "knob huge": (line(schedule={"stages": 10**20}), "schedule.stages is a number of more"),
    "knob half a character": (line(schedule={"\ud800": 1}), "a name of schedule is no text"),
    "error a number": (line(error=5), "error is 5, not text"),
    "versions a list": (line(versions=["a"]), "versions is a list, not an object"),
    "versions of numbers": (line(versions={"nvrtc": 13}), "versions.nvrtc is 13, not text"),
    "work text": (line(work="none"), "work is 'none', not an object"),
    "work 1.5": (line(work={"blocks": 1.5}), "work.blocks is 1.5, not a whole number"),
    "work of no blocks": (line(work={"blocks": 0}), "work.blocks is 0, not at least 1"),
    "work below 0": (line(work={"read_bytes": -1}), "work.read_bytes is -1, not from 0"),
    "work huge": (line(work={"read_bytes": 2**63}), "work.read_bytes is a number of more"),
    "text": ('"a record"', "'a record' is not an object"),
    "a truth": ("true", "True is not an object"),
    "NaN": ("NaN", "NaN is no number"),
    "Python's own writing": (str(json.loads(GOOD.to_json())), "property name"),
    "a comment": (GOOD.to_json() + " // good", "Extra data"),
    "a comma at the end": (GOOD.to_json()[:-1] + ",}", "property name"),
    "a byte order mark": (b"\xef\xbb\xbf" + GOOD.to_json().encode(), "BOM"),
    "only NULs": (b"\0" * 64, "Expecting value"),
    "an empty object": ("{}", "lacks workload, device, sketch, version, schedule, run_us"),
    "fields in capitals": (GOOD.to_json().replace('"run_us"', '"RUN_US"'), "lacks run_us"),
    "a field of a class": (line(__class__="os"), "unknown field '__class__'"),
    "time an object": (line(run_us={"us": 3.0}), "run_us is an object"),
    "time just too short": (line(run_us=0.009), "run_us is 0.009: no time"),
    "time minus infinite": (line(run_us=float("-inf")), "-Infinity is no number"),
    "time false": (line(run_us=False), "run_us is False, not a number"),
    "workload NaN": (raw("workload", "NaN"), "NaN is no number"),
    "workload with NUL": (line(workload=WORKLOAD + "\0"), "workload has a NUL"),
    "workload of two keys": (line(workload=WORKLOAD * 2), "workload is no key of gtco's: Extra"),
    "workload a list": (line(workload="[]"), "names no architecture"),
    "workload of an odd architecture": (workload(arch=90), "names no architecture"),
    "workload of no lists": (workload(outputs={}), "no lists of"),
    "workload of nodes without specs": (workload(nodes=[["add", {}, [1], []]]), "node a list"),
    "workload of an operator 3": (workload(nodes=[[3, {}, ["f16[1]"], []]]), "node a list"),
    "workload of odd attributes": (workload(nodes=[["add", [], ["f16[1]"], []]]), "node a list"),
    "workload of sizes below 0": (workload(externals=[["f16[-1]", False]]), "external a list"),
    "workload of a spec of lines": (workload(externals=[["f16[1]\n", False]]), "external a list"),
    "device a list": (line(device=["a card"]), "device is a list, not text"),
    "device of two lines": (line(device="a\nb"), "which is no name"),
    "device that turns text around": (line(device="a\u202eb"), "which is no name"),
    "sketch none": (line(sketch=None), "sketch is None, not text"),
    "sketch empty": (line(sketch=""), "which is no name"),
    "schedule none": (line(schedule=None), "schedule is None, not an object"),
    "knob none": (line(schedule={"stages": None}), "schedule.stages is None, not a whole"),
    "error none": (line(error=None), "error is None, not text"),
    "error with NUL": (line(error="\0"), "error has a NUL"),
    "versions none": (line(versions=None), "versions is None, not an object"),
    "work of no threads": (line(work={"threads": 0}), "work.threads is 0, not at least 1"),
    "work true": (line(work={"blocks": True}), "work.blocks is True, not a whole number"),
}


def test_there_are_100_hostile_lines() -> None:
    assert len({text for text, _ in HOSTILE.values()}) >= 100


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_line_is_refused_by_name_and_costs_no_other(name: str, tmp_path: Path) -> None:
    text, cause = HOSTILE[name]
    path, good = tmp_path / "in.jsonl", GOOD.to_json().encode()
    hostile = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    path.write_bytes(b"\n".join((good, hostile.replace(b"\n", b" "), good, b"")))
    first, refused, second = scan_jsonl(path)
    assert first == second == GOOD
    assert isinstance(refused, DatabaseError)
    with pytest.raises(DatabaseError, match=rf"in\.jsonl:2: no tuning record: .*{cause}") as said:
        raise refused
    assert len(str(said.value)) < 400 + len(str(path))
    with Database(tmp_path / "tuning.sqlite") as database:
        with pytest.raises(DatabaseError, match=r"in\.jsonl:2: "):
            database.import_jsonl(path)
        assert list(database.records()) == [GOOD]
        assert database.verify() == []


HARMLESS = {
    "unknown sketch": {"sketch": "gemm_of_next_year"},
    "sketch of SQL": {"sketch": "'; DROP TABLE records; --"},
    "newer version": {"version": 99},
    "version 0": {"version": 0},
    "unknown knob": {"schedule": {"colour": 1}},
    "no knobs": {"schedule": {}},
    "knob out of range": {"schedule": {"stages": 2**31 - 1}},
    "another architecture": {"workload": key(arch="sm_1")},
    "no nodes": {"workload": key(nodes=[])},
    "a long name": {"device": "x" * 10_000},
    "a failure without a cause": {"run_us": None},
    "no work": {"work": {}},
    "unknown work": {"work": {"colour": 1}},
    "every knob 0": {"schedule": dict.fromkeys(EVERY_KNOB, 0)},
    "every knob 1": {"schedule": dict.fromkeys(EVERY_KNOB, 1)},
    "every knob at its largest": {"schedule": dict.fromkeys(EVERY_KNOB, 2**31 - 1)},
    "a thousand knobs": {"schedule": {f"knob {n}": n for n in range(1000)}},
    "a time and an error": {"error": "it failed", "run_us": 0.01},
    "an error of escapes": {"error": "\x1b[2J\n", "run_us": None},
    "a plan of a group": {"sketch": PLAN, "work": {}},
    "tensors of 10**30": {"workload": key(externals=[[f"f16[{10**30}]", False]])},
    "no externals": {"workload": key(externals=[])},
    "odd outputs": {"workload": key(outputs=[DEEP[:100], -1, None])},
    "odd operands": {"workload": key(nodes=[["add", {}, ["f16[1]"], [{"of": [-1]}, 9]]])},
    "an unknown operator": {"workload": key(nodes=[["x", {}, ["f16[1]"], []]])},
    "an unknown type": {"workload": key(externals=[["q3[1]", False]])},
}


@pytest.mark.parametrize("device", ["a card", "another"])
@pytest.mark.parametrize("name", HARMLESS)
def test_what_another_gtco_may_have_written_is_kept_and_decides_nothing(
    name: str, device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(line(**{"device": device, **HARMLESS[name]}) + "\n")
    with Database(tmp_path / "tuning.sqlite") as database:
        assert database.import_jsonl(path) == 1
        assert database.verify() == []
        (record,) = database.records()
    fused = FusedGraph(GROUP.graph, (GROUP,), (), 0)
    with caplog.at_level(logging.WARNING):
        (launch,) = select(fused, H100, Knowledge("a card", own=[record]))
    assert launch.source == "default"
    if name in ("unknown knob", "no knobs") and device == "a card":
        assert "is no longer legal" in caplog.text


def test_a_database_keeps_no_record_that_a_file_would_not_give(tmp_path: Path) -> None:
    with Database(tmp_path / "tuning.sqlite") as database:
        for changed in ({"run_us": 0.0}, {"run_us": float("nan")}, {"schedule": {"a": -1}}):
            with pytest.raises(DatabaseError, match=r"cannot keep records in .*(run_us|schedule)"):
                database.add([GOOD, replace(GOOD, **changed)])
        assert list(database.records()) == []
