"""`gtco report`: the page that it writes, what it takes, and its exit codes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gtco.codegen.program import KernelProgram
from gtco.runtime.host import HostKernel
from tests.command_line import Run

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@NO_GPU
def test_report_writes_a_page_of_one_build_or_two(run: Run, tmp_path: Path) -> None:
    outcome = run("report", "models_here:mlp", "--target", "sm_90a", "--json")
    assert outcome.code == 0, outcome.stderr
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "first.json").write_text(outcome.stdout)
    run("compile", "models_here:mlp", "--target", "sm_80", "-o", "mlp.gtco")
    both = run("report", "--compare", "first.json", "mlp.gtco", "-o", "both.html")
    assert both.code == 0 and "wrote both.html" in both.stderr, both.stderr
    text = (tmp_path / "both.html").read_text()
    assert "models_here:mlp on sm_90a" in text and "mlp.gtco on sm_80" in text
    assert run("report", "mlp.gtco").code == 0
    assert "predictions of the cost model" in (tmp_path / "report.html").read_text()


@pytest.mark.compiler
def test_report_fails_on_a_wrong_answer_and_writes_the_page(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = run("report", "models_here:mlp", "--target", "host")
    assert right.code == 0, right.stderr
    assert "wrong" not in words_of(tmp_path / "report.html")
    call = HostKernel.__call__

    def off(self: HostKernel, program: KernelProgram, tensors: Any, **how: Any) -> None:
        call(self, program, tensors, **how)
        tensors[program.arguments[-1].value].view(-1)[3] += 9

    monkeypatch.setattr(HostKernel, "__call__", off)
    wrong = run("report", "models_here:mlp", "--target", "host")
    assert wrong.code == 1 and "inputs is wrong: RMSE" in wrong.stderr, wrong.stderr
    assert "wrote report.html" in wrong.stderr and "wrong" in words_of(tmp_path / "report.html")


def words_of(page: Path) -> list[str]:
    """What the page at `page` says, without its style and script."""
    body = page.read_text().partition("<body>")[2].partition("<script>")[0]
    return re.sub(r"<[^>]*>", " ", body).split()


def test_report_says_what_it_takes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"build": 3}')
    for arguments, code, words in (
        ((), 2, "takes a MODEL, or --compare"),
        (("m:f", "--compare", "a.gtco", "b.gtco"), 2, "takes a MODEL, or --compare"),
        (("--compare", "m:f", "b.gtco"), 2, "--compare takes saved artifacts"),
        (("--compare", "bad.json", "bad.json"), 1, "bad.json is not what gtco report --json"),
        (("--compare", "none.json", "none.json"), 1, "none.json: No such file"),
        (("none.gtco", "--precision", "fp16"), 2, "compiled already"),
    ):
        refused = run("report", *arguments)
        assert refused.code == code and words in refused.stderr, refused.stderr
