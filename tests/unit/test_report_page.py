"""The page of `gtco report`: whole, self-contained, and deaf to what model files say."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import gtco
from gtco.benchmarking.answers import INPUT_KINDS
from gtco.benchmarking.build_facts import (
    AGAINST_GRAPH,
    AGAINST_MODEL,
    PREDICTED,
    build_facts,
    planned_facts,
)
from gtco.compiler import make_plan
from gtco.locate import Located
from gtco.options import Options
from gtco.reporting.build import (
    Answer,
    Apart,
    Build,
    BuildError,
    Judged,
    Layers,
    LinearFacts,
)
from gtco.reporting.layered import GAP_X, draw
from gtco.reporting.page import page
from gtco.runtime.trace import device_spans

HOSTILE = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>\"&$body"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def build() -> Build:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(5)], nn.Linear(64, 10)).eval().half()
    args = (torch.randn(24, 64).half(),)
    plan, captured = make_plan(model, args, {}, Options(target="sm_90a"))
    return planned_facts("a model", plan, captured, "1.2", {}, PREDICTED)


def checked(build: Build) -> Build:
    error = Judged(True, 1e-4, 2e-4, 3e-4, "")
    launches = [
        replace(each, measured_us=2.0 + at, error=error) for at, each in enumerate(build.launches)
    ]
    wrong = Judged(False, None, 2e-4, None, "NaN where the reference has none")
    launches[3] = replace(launches[3], error=wrong)
    times = {"back to back": 20.0, "synchronised p50": 40.0}
    answers = (
        Answer("normal", "output", 1.5e-3, Judged(True, 2.5e-3, 4.5e-3, 6.5e-3, "")),
        Answer("outliers", "output", None, Judged(False, None, 4.5e-3, None, "NaN in 3 elements")),
    )
    judged = {"answers": answers, "reference": "Held against the model.", "hints": ("Use fp16.",)}
    return replace(build, device="NVIDIA H200", times=times, launches=tuple(launches), **judged)


class Parsed(HTMLParser):
    """Tags, ids, links and texts; unbalanced tags raise."""

    VOID = ("meta", "br", "wbr", "img", "input", "link", "hr", "rect", "path")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, name: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(name)) is not None]


def check_self_contained(html: str) -> Parsed:
    """One script, the template's; every link leads to a place in the page; nothing is fetched."""
    found = Parsed(html)
    assert len(set(found.all("id"))) == len(found.all("id"))
    assert {link for link in found.all("href")} <= {f"#{each}" for each in found.all("id")}
    assert not found.all("src") and "@import" not in html and "url(" not in html
    assert [tag for tag, _ in found.tags].count("script") == 1
    assert not [name for _, attrs in found.tags for name in attrs if name.startswith("on")]
    assert not {"img", "iframe", "object", "link", "base"} & {tag for tag, _ in found.tags}
    policy = next(value for value in found.all("content") if "default-src" in value)
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
    assert "script-src 'unsafe" not in policy
    return found


def test_a_page_has_everything_and_needs_nothing(build: Build) -> None:
    found = check_self_contained(page([build]))
    assert "predictions of the cost model" in found.text and "not checked" in found.text
    assert found.text.count("no kernel ran") == 2, "neither answers nor layers were checked"
    assert "gtco generated the kernel of every launch" in found.text
    assert len(build.layers) == 1
    (layers,) = build.layers
    assert f"x{layers.count}" in found.text
    shown = [at for at in range(len(build.launches)) if f"b0-launch-{at}" in found.all("id")]
    hidden = range(layers.start + layers.period, layers.start + layers.period * layers.count)
    assert shown == [at for at in range(len(build.launches)) if at not in hidden]
    for launch in build.launches:
        assert launch.name in found.text and launch.kernel in found.text
        assert all(f"{name}={value}" in found.text for name, value in launch.schedule.items())
        assert launch.source in found.text
    for kernel in build.kernels:
        assert kernel.code in found.text
    assert any(each.reason in found.text for each in build.apart)
    bars = [attrs for tag, attrs in found.tags if tag == "a" and attrs.get("tabindex") == "-1"]
    assert len(bars) == len(build.launches)


def test_a_page_says_what_was_measured_and_what_is_wrong(build: Build) -> None:
    found = check_self_contained(page([checked(build)]))
    assert "back to back, measured" in found.text and "time, measured" in found.text
    assert "NVIDIA H200" in found.text and "20.00 us" in found.text
    assert found.text.count("NaN where the reference has none") == 1
    assert "1.00e-04" in found.text


def test_a_page_judges_whole_answers(build: Build) -> None:
    text = check_self_contained(page([checked(build)])).text
    assert "Held against the model." in text and "Use fp16." in text
    for number in ("2.50e-03", "4.50e-03", "1.50e-03", "6.50e-03"):
        assert number in text
    assert "wrong NaN in 3 elements" in text
    wrong = checked(build).wrong
    assert len(wrong) == 2 and wrong[0].startswith("output for outliers inputs is wrong: NaN in 3")
    assert not build.wrong


class Missing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).digamma()
        return self.second(x).logcumsumexp(0).digamma()


def test_a_page_names_what_aten_runs_and_what_to_do() -> None:
    args = (torch.randn(24, 64).half(),)
    plan, captured = make_plan(Missing().eval().half(), args, {}, Options(target="sm_90a"))
    build = planned_facts("missing", plan, captured, "1.2", {}, PREDICTED)
    aten = [at for at, each in enumerate(build.launches) if each.kernel == "aten"]
    assert len(aten) == 3
    found = check_self_contained(page([build]))
    assert "2 x aten.digamma.default, 1 x aten.logcumsumexp.default" in found.text
    assert "gtco has no kernel that computes this; leave it to ATen, or write it" in found.text
    links = found.all("href")
    assert all(links.count(f"#b0-launch-{at}") > 2 for at in aten), "drawing, timeline, and why"


def test_two_builds_stand_side_by_side(build: Build) -> None:
    found = check_self_contained(page([build, checked(build)]))
    assert "Side by side" in found.text and "no clock in common" in found.text
    assert {"b0-launch-0", "b1-launch-0"} <= set(found.all("id"))
    faster = replace(checked(build), times={"back to back": 10.0, "synchronised p50": 40.0})
    text = check_self_contained(page([checked(build), faster])).text
    assert "-50.0%" in text and "no clock in common" not in text


def hostile(build: Build) -> Build:
    """Every text of the build is an attack."""

    def spoiled(value: object) -> object:
        if isinstance(value, str):
            return HOSTILE
        if isinstance(value, dict):
            return {f"{HOSTILE}{key}": spoiled(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [spoiled(each) for each in value]
        return value

    content = build.to_dict()
    plain = {key: spoiled(each) for key, each in content.items()}
    for name in ("launches", "kernels", "apart", "answers"):
        plain[name] = [{key: spoiled(each) for key, each in row.items()} for row in content[name]]
    for row, own in zip(plain["launches"], content["launches"], strict=True):
        row["error"] = own["error"] and {key: spoiled(x) for key, x in own["error"].items()}
    for row, own in zip(plain["answers"], content["answers"], strict=True):
        row["judged"] = {key: spoiled(x) for key, x in own["judged"].items()}
    linear = LinearFacts(HOSTILE, HOSTILE, HOSTILE, 0.5, HOSTILE)
    plain["linears"] = [asdict(linear)]
    plain["times"] = {HOSTILE: 3.0}
    plain["layers"] = content["layers"]
    return Build.of(json.loads(json.dumps(plain)))


def test_no_text_of_a_model_becomes_markup(build: Build) -> None:
    bad = hostile(checked(build))
    clean = Parsed(page([checked(build), checked(build)]))
    found = check_self_contained(page([bad, bad]))
    assert HOSTILE in found.text
    assert {tag for tag, _ in found.tags} <= {tag for tag, _ in clean.tags}
    script = re.findall(r"<script>(.*?)</script>", page([bad]), re.DOTALL)
    assert script == re.findall(r"<script>(.*?)</script>", page([build]), re.DOTALL)


def test_a_build_survives_json_and_refuses_what_is_none(build: Build) -> None:
    content = json.loads(json.dumps(checked(build).to_dict()))
    assert Build.of(content) == checked(build)
    with pytest.raises(BuildError, match="no build of format"):
        Build.of({**content, "format": 99})
    with pytest.raises(BuildError, match="does not have the fields"):
        Build.of({key: each for key, each in content.items() if key != "clock"})
    with pytest.raises(BuildError, match=r"build.launches\[0\].floor_us is 'quick'"):
        first = {**content["launches"][0], "floor_us": "quick"}
        Build.of({**content, "launches": [first, *content["launches"][1:]]})
    with pytest.raises(BuildError, match=r"build\.floor_us is nan"):
        Build.of({**content, "floor_us": float("nan")})
    with pytest.raises(BuildError, match="the layers end at launch"):
        replace(build, layers=(Layers(0, 3, 50),))
    with pytest.raises(BuildError, match="names no launch"):
        replace(build, apart=(Apart(0, 999, "", ""),))
    with pytest.raises(BuildError, match="reads what nothing made"):
        launches = (replace(build.launches[0], reads=(5,)), *build.launches[1:])
        replace(build, launches=launches)


@pytest.mark.compiler
def test_on_the_host_each_group_is_checked(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).eval().half()
    args = (torch.randn(24, 64).half(),)
    plan, captured = make_plan(model, args, {}, Options(target="host"))
    build = build_facts("small", plan, captured, "1.2", source=Located("small", model, args, {}))
    assert [each.inputs for each in build.answers] == list(INPUT_KINDS)
    assert all(each.judged.ok and each.judged.limit for each in build.answers)
    assert build.reference == AGAINST_MODEL and "right" in page([build])
    assert build_facts("small", plan, captured, "1.2").reference == AGAINST_GRAPH
    assert all(each.error is not None and each.error.ok for each in build.launches)
    assert not build.times and not build.is_measured and "on the CPU" in build.clock
    check_self_contained(page([build]))


@pytest.mark.compiler
def test_a_wrong_model_is_found_and_one_that_torch_cannot_run_is_not_judged() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).eval().half()
    args = (torch.randn(24, 64).half(),)
    plan, captured = make_plan(model, args, {}, Options(target="host"))
    other = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).eval().half()
    build = build_facts("x", plan, captured, "1.2", source=Located("x", other, args, {}))
    assert len(build.wrong) == len(INPUT_KINDS) and "the limit is" in build.wrong[0]
    narrow = nn.Sequential(nn.Linear(32, 64)).eval().half()
    build = build_facts("x", plan, captured, "1.2", source=Located("x", narrow, args, {}))
    assert not build.answers and "torch cannot run the model itself" in build.reference
    text = check_self_contained(page([build])).text
    assert "were not judged" in text and "not checked" in text


def test_a_drawing_has_no_overlap_and_edges_run_down() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 7, 20):
        pairs = torch.randint(0, count, (2 * count, 2), generator=generator).tolist()
        edges = sorted({(a, b) for a, b in pairs if a < b})
        sizes = [(100.0 + 10 * (at % 3), 30.0 + 20 * (at % 2)) for at in range(count)]
        drawing = draw(sizes, edges)
        boxes = [(*corner, *size) for corner, size in zip(drawing.corners, sizes, strict=True)]
        for at, (x, y, width, height) in enumerate(boxes):
            assert x >= -1e-6 and x + width <= drawing.width + 1e-6
            assert y >= 0 and y + height <= drawing.height + 1e-6
            for left, top, wide, high in boxes[:at]:
                apart_x = x + width <= left - GAP_X + 1e-6 or left + wide <= x - GAP_X + 1e-6
                assert apart_x or y + height <= top or top + high <= y
        for (start, end), path in zip(edges, drawing.paths, strict=True):
            x, y, width, height = boxes[start]
            assert path[0] == pytest.approx((x + width / 2, y + height))
            x, y, width, _ = boxes[end]
            assert path[-1] == pytest.approx((x + width / 2, y))
            assert [y for _, y in path] == sorted(y for _, y in path)


def event(
    cat: str, ts: float, dur: float = 0.0, correlation: int = 0, name: str = ""
) -> dict[str, object]:
    args = {"correlation": correlation}
    return {"cat": cat, "ts": ts, "dur": dur, "name": name, "args": args}


def test_times_of_launches_are_those_of_the_kernels_that_each_enqueued() -> None:
    events = [
        event("user_annotation", 10, 5, name="a: x"),
        event("user_annotation", 20, 5, name="b: y"),
        event("user_annotation", 30, 5, name="c: z"),
        event("user_annotation", 0, 50, name="something else"),
        event("cuda_driver", 11, correlation=1),
        event("cuda_runtime", 21, correlation=2),
        event("cuda_runtime", 22, correlation=3),
        event("cuda_runtime", 40, correlation=4),  # outside of all ranges
        event("kernel", 23, 2.5, 1),  # runs while the host is in another range
        event("kernel", 26, 1.0, 2),
        event("gpu_memcpy", 28, 0.5, 3),
        event("kernel", 60, 9.0, 4),
    ]
    assert device_spans(events, ["a: x", "b: y", "c: z"]) == (2.5, 1.5, None)
    assert device_spans(events, ["b: y", "a: x", "c: z"]) == (None, None, None)


def test_an_fp8_build_shows_the_error_of_each_linear() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer()).eval().half()
    args = (torch.randn(24, 64).half(),)
    known = gtco.calibrate(model, [args])
    options = {"target": "sm_90a", "precision": "fp8", "calibration": known}

    def build(budget: float) -> Build:
        plan, captured = make_plan(model, args, {}, Options(**options, error_budget=budget))
        return planned_facts("a model", plan, captured, "1.2", {}, PREDICTED)

    found = build(0.012)
    by_name = {each.name: each for each in known.layers}
    chosen = {each.name for each in known.chosen(0.012)}
    assert 0 < len(chosen) < len(found.linears) == 4
    for each in found.linears:
        assert (each.layer, each.error) == (by_name[each.name].source, by_name[each.name].error)
        assert (not each.kept) == (each.name in chosen)
        assert each.shape in ("f16[24,64] x f16[128,64]", "f16[24,128] x f16[64,128]")
    text = Parsed(page([found])).text
    assert "Errors of 8 bits by linear" in text and "16 bits: over the budget of 1.2%" in text
    assert found.options["calibration"] == "of 4 linears"
    assert Build.of(json.loads(json.dumps(found.to_dict()))) == found
    assert not any(each.kept for each in build(1.0).linears)
