"""A whole small model through the host build, from capture to the answer."""

from __future__ import annotations

import pytest
import torch

import gtco
from gtco.check import judge
from gtco.ir.interpreter import ArgumentError, interpret
from gtco.runtime.host import HostCompilerError
from tests import models


@pytest.mark.compiler
def test_a_vit_of_two_layers_is_right() -> None:
    torch.manual_seed(0)
    model = models.vit(image=16, patch=4, width=64, depth=2, heads=4).half()
    image = torch.randn(1, 3, 16, 16).half()
    compiled = gtco.compile(model, (image,), target="host")
    assert {launch.source for launch in compiled.launches} == {"default"}
    graph = gtco.capture(model, (image,))
    for seed in (1, 2):
        fresh = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed)).half()
        (exact,) = interpret(graph, [fresh], dtype=torch.float64)
        with torch.no_grad():
            verdict = judge(compiled(fresh), model(fresh), exact, torch.float16)
        assert verdict.ok, str(verdict)
    with pytest.raises(ArgumentError, match=r"got f16\[1,3,8,8\]"):
        compiled(torch.randn(1, 3, 8, 8).half())


@pytest.mark.compiler
def test_what_no_sketch_takes_runs_in_aten() -> None:
    transposed = torch.nn.ConvTranspose3d(4, 8, 3, dilation=2)
    model = torch.nn.Sequential(transposed, torch.nn.ReLU()).half().eval()
    image = torch.randn(2, 4, 9, 9, 9).half()
    compiled = gtco.compile(model, (image,), target="host")
    assert compiled.launches[0].source == "fallback"
    torch.testing.assert_close(compiled(image), model(image), atol=2e-3, rtol=2e-3)


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gtco.runtime.host.find_compiler", lambda: None)
    with pytest.raises(HostCompilerError, match="ziglang"):
        gtco.compile(torch.nn.Linear(8, 8).half().eval(), (torch.ones(4, 8).half(),), target="host")


@pytest.mark.compiler
def test_tensors_at_odd_addresses_are_taken() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32).half().eval()
    odd = torch.randn(24 * 64 + 1).half()[1:].view(24, 64)
    model.weight.data = torch.randn(32 * 64 + 1).half()[1:].view(32, 64)
    assert odd.data_ptr() % 16 and model.weight.data_ptr() % 16
    compiled = gtco.compile(model, (odd,), target="host")
    torch.testing.assert_close(compiled(odd), model(odd), atol=2e-2, rtol=2e-3)
