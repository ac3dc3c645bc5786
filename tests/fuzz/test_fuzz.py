"""A share of what `python -m tests.fuzz` runs, and proof that its judge sees faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gtco import passes
from gtco.frontend import torch_export
from gtco.ir import graph, ops
from gtco.passes import attention, convolutions, horizontal, normalization
from gtco.runtime import inputs
from tests.elsewhere import run_elsewhere
from tests.faults.test_pass_faults import planted
from tests.fuzz import judge as judging
from tests.fuzz import opinfo, smith
from tests.fuzz.__main__ import main
from tests.fuzz.generate import generate
from tests.fuzz.judge import judge, operator_tables_kept
from tests.fuzz.program import Maker, Program, case_of
from tests.fuzz.shrink import shrunk

aten = torch.ops.aten

CHUNK = 10
"""Models of one test, so that the work spreads over processes."""


@pytest.fixture(autouse=True, scope="module")
def _operator_tables() -> Iterator[None]:
    with operator_tables_kept():
        yield


def run(seeds: range, target: str | None = None) -> None:
    for seed in seeds:
        program = generate(seed, small=target is not None)
        outcome = judge(case_of(program), target)
        if outcome.failed:
            smaller = shrunk(program, outcome, target)
            pytest.fail(f"seed {seed}: {outcome}\n{smaller.source(target)}", pytrace=False)


@pytest.mark.parametrize("first", range(0, 60, CHUNK))
def test_random_models(first: int) -> None:
    run(range(first, first + CHUNK))


def test_constants_on_another_device() -> None:
    """Rules compute with constants of a GPU as with those of the CPU."""
    for seed in range(2000, 2020):
        case = case_of(generate(seed))
        with torch.no_grad():
            try:
                captured = torch_export.capture(case.module, case.args).graph
            except torch_export.CaptureError:
                continue
            expected = str(passes.run_pipeline(captured))
            assert str(run_elsewhere(passes.run_pipeline, captured)) == expected, seed


@pytest.mark.compiler
def test_random_models_on_the_host_build() -> None:
    run(range(1000, 1000 + CHUNK), "host")


def test_operator_samples() -> None:
    for name, case in opinfo.cases(0, CHUNK):
        assert judge(case).kind == "right", name


@pytest.mark.skipif(not smith.INSTALLED, reason="needs NNSmith")
def test_models_of_nnsmith() -> None:
    for name, case in smith.cases(0, CHUNK):
        assert not judge(case).failed, name


def test_steps_of_nnsmith_are_replayed() -> None:
    part = nn.Linear(4, 3)
    steps = [(torch.relu, ["a"], ["b"], None), (part, ["b"], ["c"], None),
             (lambda x, y: [x + 1, y], ["c", "a"], ["d", "e"], None)]  # fmt: skip
    net = SimpleNamespace(input_map={"a": 0}, output_map={"d": 0, "e": 0}, instructions=steps)
    case = smith.case_of(net, (torch.randn(2, 4),))
    first, second = case.module(*case.args)
    assert torch.equal(first, part(case.args[0].relu()) + 1) and second is case.args[0]
    assert judge(case).kind == "right"
    assert case.exact is not None and case.exact()[0].dtype == torch.float64


@pytest.mark.skipif(smith.INSTALLED, reason="says what to do without NNSmith")
def test_without_nnsmith_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--nnsmith"])
    assert "pip install nnsmith" in capsys.readouterr().err


def test_a_seed_makes_one_program() -> None:
    for seed in range(20):
        assert generate(seed) == generate(seed)
    assert generate(1) != generate(2)


# -- faults --------------------------------------------------------------------------------------


def program(*lines: str, shape: tuple[int, ...] = (2, 6, 8), **weights: tuple[int, ...]) -> Program:
    """A program that returns `v0` of the last of `lines`, over one input `x`."""
    makers = {
        name: Maker(size, torch.float64, "normal", seed)
        for seed, (name, size) in enumerate(weights.items())
    }
    return Program({"x": Maker(shape, torch.float64, "normal", 7)}, makers, lines, ("v0",))


ATTENTION = "v0 = (x @ x.mT * 0.3).softmax(-1) @ x"
MASKED = "v0 = (x @ x.mT * 0.3 + m).softmax(-1) @ x"
TWO_MASKS = "v0 = (x @ x.mT * 0.3 + m + n).softmax(-1) @ x"
BY_HEAD = "v0 = (x @ x.mT * (9 * h.abs() + 1)).softmax(-1) @ x"
NORM = """v0 = (x - x.mean(-1, keepdim=True)) / torch.sqrt(\
x.var(-1, keepdim=True, unbiased=False) + 0.1)"""
MEAN_OF_ANOTHER = (
    "v1 = x - x.flip(0).mean(-1, keepdim=True)",
    "v0 = v1 * torch.rsqrt((v1 * v1).mean(-1, keepdim=True) + 0.1)",
)
LINEARS = ("v1, v2 = F.linear(x, a, b), F.linear(x, c, d)", "v0 = v1 @ v2.mT")
SQUARES = {"a": (8, 8), "b": (8,), "c": (8, 8), "d": (8,)}
CONV = "v0 = F.batch_norm(F.conv2d(x, w), m, s ** 2, g, b)"

FAULTS: dict[str, tuple[ModuleType, str, str, str, Program, str]] = {
    "a scale of the other sign": (
        attention, "fuse_attention", "= match.q, match.scale", "= match.q, -match.scale",
        program(ATTENTION), "wrong fused",
    ),
    "a mask that is left out": (
        attention, "fuse_attention",
        "if not match.masks:\n        return []", "if True:\n        return []",
        program(MASKED, m=(6, 6)), "wrong fused",
    ),
    "a second mask that is left out": (
        attention, "fuse_attention", "known_masks(edit, match.masks, scores",
        "known_masks(edit, match.masks[:1], scores",
        program(TWO_MASKS, m=(6, 6), n=(2, 6, 6)), "wrong fused",
    ),
    "what all heads are scaled by that is left out": (
        attention, "fuse_attention", "scale *= most", "scale *= 1.0",
        program(BY_HEAD, h=(2, 1, 1)), "wrong fused",
    ),
    "a rule that raises": (
        attention, "fuse_attention", "= match.q, match.scale", "= match.q, match.scales",
        program(ATTENTION), "crash fused: AssertionError: %matmul_1: softmax(q @ k.T",
    ),
    "a replacement of another shape": (
        attention, "fuse_attention", "    q, scale = match.q, match.scale\n",
        "    return match.softmax.inputs[0]\n",
        program(ATTENTION, shape=(2, 8, 6)), "crash fused: AssertionError: %matmul_1: softmax(q @",
    ),
    "epsilon left out": (
        normalization, "fuse_normalization", "eps=match[1]", "eps=0.0",
        program(NORM), "wrong fused",
    ),
    "a mean of another tensor taken for the norm's own": (
        normalization, "fuse_normalization", "if _row_mean(edit, mean) != x or",
        "if _row_mean(edit, mean) is None or",
        program(*MEAN_OF_ANOTHER), "wrong fused",
    ),
    "linears in another order than their readers": (
        horizontal, "join_siblings", "for node in linears], ", "for node in linears[::-1]], ",
        program(*LINEARS, **SQUARES), "wrong fused",
    ),
    "a variance without epsilon, folded into a convolution": (
        convolutions, "fold_convolutions", '(var + node.attrs["eps"])', "var",
        program(CONV, shape=(1, 2, 6, 6), w=(3, 2, 3, 3), m=(3,), s=(3,), g=(3,), b=(3,)),
        "wrong fused",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, old, new, model, expected = FAULTS[fault]
    assert judge(case_of(model)).kind == "right"
    wrong = getattr(planted(module, old, new), name)
    steps = [wrong if step.__name__ == name else step for step in passes.PIPELINE]
    assert steps != list(passes.PIPELINE)
    monkeypatch.setattr(passes, "PIPELINE", tuple(steps))
    assert str(judge(case_of(model))).startswith(expected)


@pytest.mark.compiler
def test_a_wrong_kernel_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = program("v0 = x.abs() - 2")
    model = replace(model, inputs={"x": replace(model.inputs["x"], dtype=torch.float32)})
    assert judge(case_of(model), "host").kind == "right"
    monkeypatch.setattr(ops, "OPS", {**ops.OPS, "sub": replace(ops.OPS["sub"], cuda="{1} - {0}")})
    monkeypatch.setattr(graph, "OPS", ops.OPS)
    assert str(judge(case_of(model), "host")).startswith("wrong host: output 0")


@pytest.mark.compiler
def test_a_wrong_conversion_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = program("v0 = x + 1")
    model = replace(model, inputs={"x": replace(model.inputs["x"], dtype=torch.float32)})
    assert judge(case_of(model), "host").kind == "right"
    monkeypatch.setattr(inputs.InputCheck, "_converted", lambda self, x: x.half().float())
    assert "inputs that a call converts" in str(judge(case_of(model), "host"))


@pytest.fixture
def sums_for_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {**torch_export.TABLE, aten.sub.Tensor: torch_export.TABLE[aten.add.Tensor]}
    monkeypatch.setattr(torch_export, "TABLE", table)


@pytest.mark.usefixtures("sums_for_differences")
def test_a_wrong_lowering_is_caught_and_shrunk() -> None:
    model = program("v1 = x.exp() + 1", "v2 = x.mT.relu()", "v3 = v1 - x", "v0 = v3 * 2")
    model = replace(model, outputs=("v2", "v0", "v1"))
    outcome = judge(case_of(model))
    assert (outcome.kind, outcome.stage) == ("wrong", "captured")
    smaller = shrunk(model, outcome)
    assert len(smaller.lines) == len(smaller.outputs) == 1 and " - " in smaller.lines[0]
    assert judge(case_of(smaller)).failed
    compile(smaller.source("host"), "printed", "exec")


@pytest.mark.usefixtures("sums_for_differences")
def test_a_failure_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    failing = next(
        seed
        for seed in range(100)
        if " - " in generate(seed).forward_source()
        and judge(case_of(generate(seed))).stage == "captured"
    )
    arguments = ["--seed", str(failing), "--count", "1"]
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert f"# seed {failing}: wrong captured" in text and "model = Model().eval()" in text
    assert main([*arguments, "--no-shrink", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"wrong": 1} and found["next_seed"] == failing + 1
    assert found["failures"][0]["name"] == f"seed {failing}"


@pytest.mark.usefixtures("sums_for_differences")
def test_an_answer_that_hangs_on_rounding_excuses_no_more_than_rounding() -> None:
    noise = program("v1 = x.exp() + 1e8", "v0 = (v1 - x.exp() - 1e8) * 1e8")
    assert judge(case_of(noise)).kind == "wrong"


def test_types_that_autocast_has_on_a_gpu_alone_are_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case: Any = None
    narrow, wide = [torch.ones(2, dtype=torch.bfloat16)], [torch.ones(2)]
    monkeypatch.setattr(judging, "_eager_on_gpu", lambda case: wide)
    assert "torch.float32[2], not torch.bfloat16[2]" in judging._other_types(case, wide, narrow)
    assert judging._other_types(case, narrow, narrow) == ""
    assert judging._other_types(case, [torch.ones(2).half()], narrow) == "", "neither's"
