"""The page of `gtco report` in a real browser, as wide as a phone and as wide as a desk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gtco.benchmarking.build_facts import PREDICTED, planned_facts
from gtco.compiler import make_plan
from gtco.options import Options
from gtco.reporting.build import Answer, Build, Judged, LinearFacts
from gtco.reporting.page import page
from tests.browser import Tab, browser, find_browser

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")

SHOWN = """(() => {
  const kernel = document.getElementById('b0-launch-%d'), top = kernel.getBoundingClientRect().top;
  return kernel.open && top >= -1 && top < innerHeight;
})()"""
"""Whether the details of a launch are open, and their head in the window."""

SIZES = ((390, 844, True), (1280, 900, False))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Repeated layers, and two operators without a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*[Layer() for _ in range(5)]), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)).flip(1).logcumsumexp(0)


def full_build() -> Build:
    """One with all that a page can show."""
    torch.manual_seed(0)
    args = (torch.randn(24, 64).half(),)
    plan, captured = make_plan(Model().eval().half(), args, {}, Options(target="sm_90a"))
    build = planned_facts("a model with a long name", plan, captured, "1.2", {}, PREDICTED)
    right = Judged(True, 1e-4, 2e-4, 3e-4, "")
    wrong = Judged(False, 9e-1, 2e-4, 3.0, "RMSE 9.00e-01 against fp64, the limit is 2.00e-04")
    return replace(
        build,
        times={"back to back": 20.0, "synchronised p50": 40.0},
        launches=tuple(
            replace(each, measured_us=2.0 + at, error=wrong if at == 3 else right)
            for at, each in enumerate(build.launches)
        ),
        answers=(
            Answer("normal", "output", 1e-4, right),
            Answer("outliers", "output", 1e-4, wrong),
        ),
        reference="Each output was held against the model.",
        linears=tuple(
            LinearFacts(f"linear_{at}", f"layers.{at}.up", "f16[24,64] x f16[128,64]", 0.01, kept)
            for at, kept in enumerate(("", "over the budget of 5.0%"))
        ),
        hints=("the products of 11 launches are fp32, as the model has them",),
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The file of one build, and of two."""
    folder = tmp_path_factory.mktemp("pages")
    build = full_build()
    found = {"one": folder / "one.html", "two": folder / "two.html"}
    found["one"].write_text(page([build]), encoding="utf-8")
    found["two"].write_text(page([build, build]), encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    assert BROWSER is not None
    with browser(BROWSER, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize("size", SIZES, ids=["phone", "desk"])
def test_two_builds_are_told_apart_at_a_glance(
    tab: Tab, pages: dict[str, Path], size: tuple[int, int, bool]
) -> None:
    tab.open(pages["two"], *size)
    heads = "[...document.querySelectorAll('%s')].map(each => each.textContent)"
    assert tab.run(heads % ".sides th") == ["", "A", "B", "change"]
    assert [each[:3] for each in tab.run(heads % ".builds > section > h2:first-child")] == [
        "A: ",
        "B: ",
    ]
    hidden = """[...document.querySelectorAll('.sides td')]
      .filter(each => each.getBoundingClientRect().right > innerWidth).length"""
    assert tab.run(hidden) == 0


@pytest.mark.parametrize("size", SIZES, ids=["phone", "desk"])
@pytest.mark.parametrize("which", ["one", "two"])
def test_a_page_fits_and_asks_for_nothing(
    tab: Tab, pages: dict[str, Path], which: str, size: tuple[int, int, bool]
) -> None:
    tab.open(pages[which], *size)
    assert tab.run("document.documentElement.scrollWidth") <= size[0]
    outside = """[...document.querySelectorAll('body *')]
      .filter(each => !each.closest('.scroll, .graph, pre'))
      .filter(each => each.getBoundingClientRect().right > innerWidth + 1)
      .map(each => each.outerHTML.slice(0, 80))"""
    assert tab.run("innerWidth") == size[0] and tab.run(outside) == []
    tab.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert tab.run(outside) == []
    assert tab.run("parseFloat(getComputedStyle(document.body).fontSize)") >= 16
    small = """[...document.querySelectorAll('button, summary')]
      .filter(each => each.getBoundingClientRect().height < 36).length"""
    assert tab.run(small) == 0, "a finger hits a button and a kernel"
    asked = [
        what["request"]["url"] for name, what in tab.events if name == "Network.requestWillBeSent"
    ]
    assert asked == [pages[which].as_uri()]
    assert not [
        what for name, what in tab.events if name in ("Runtime.exceptionThrown", "Log.entryAdded")
    ]


@pytest.mark.parametrize("size", SIZES, ids=["phone", "desk"])
def test_the_graph_zooms(tab: Tab, pages: dict[str, Path], size: tuple[int, int, bool]) -> None:
    tab.open(pages["one"], *size)

    def width() -> float:
        found: float = tab.run("document.querySelector('.graph svg').getBoundingClientRect().width")
        return found

    room = tab.run("document.querySelector('.graph').clientWidth")
    before = width()
    tab.click("button[data-zoom=in]")
    assert width() == pytest.approx(1.3 * before, rel=0.01)
    tab.click("button[data-zoom=out]")
    assert width() == pytest.approx(before, rel=0.01)
    tab.click("button[data-zoom=fit]")
    assert width() == pytest.approx(room - 20, abs=2)
    tab.run("document.querySelector('.graph').focus()")
    tab.press("0")
    whole = width()
    tab.press("+")
    assert width() == pytest.approx(1.3 * whole, rel=0.01)
    if size[2]:
        tab.press("0")
        tab.pinch(".graph", 100, 200)
        assert width() == pytest.approx(2 * whole, rel=0.1)


@pytest.mark.parametrize("size", SIZES, ids=["phone", "desk"])
def test_a_box_and_the_timeline_lead_to_their_kernel(
    tab: Tab, pages: dict[str, Path], size: tuple[int, int, bool]
) -> None:
    tab.open(pages["one"], *size)
    tab.click(".graph svg a[href='#b0-launch-1']")
    tab.wait(SHOWN % 1)
    tab.run("document.querySelector('.line').focus()")
    tab.press("ArrowRight")
    caption = tab.run("document.querySelector('.line + p').textContent")
    assert caption.startswith("1. ") and caption.endswith(": 2.00 us")
    tab.press("Enter")
    tab.wait(SHOWN % 0)
    assert tab.run("document.querySelectorAll('.aten a').length") == 2
    tab.click(".aten a")
    tab.wait("document.querySelectorAll('details[open]').length == 3")


def test_texts_stay_in_their_boxes(tab: Tab, pages: dict[str, Path], tmp_path: Path) -> None:
    build = full_build()
    inputs = tuple(f"%an_input_of_a_long_name_{text}" for text in build.inputs)
    outputs = tuple((f"%an_output_of_a_long_name_{text}", at) for text, at in build.outputs)
    file = tmp_path / "long.html"
    file.write_text(page([replace(build, inputs=inputs, outputs=outputs)]), encoding="utf-8")
    tab.open(file, 1280, 900, False)
    wider = """[...document.querySelectorAll('.graph text')].filter(text => {
      const box = [...text.parentElement.querySelectorAll('.box')][0];
      return box && text.getBBox().width > box.getBBox().width;
    }).map(text => text.textContent)"""
    assert tab.run(wider) == []
    shapes = "[...document.querySelectorAll('.graph g > text')].map(each => each.textContent)"
    assert any(text.endswith("f16[24,64]") for text in tab.run(shapes))
