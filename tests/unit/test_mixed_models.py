"""Models of several precisions: regions of autocast within and around them, inputs of another
type, islands of fp32."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import gtco
from gtco.check import judge


class Region(nn.Module):
    def __init__(self, product: str) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = x @ x.mT
            with torch.autocast("cpu", enabled=False):
                weights = torch.softmax(scores.float(), -1)
            if self.product == "matmul":
                return torch.matmul(weights, x)
            return torch.einsum("bij,bjk->bik", weights, x)


def test_a_region_with_an_island_is_captured() -> None:
    x = torch.randn(2, 4, 4)
    model = Region("matmul").eval()
    (answer,) = gtco.interpret(gtco.capture(model, (x,)), (x,))
    assert answer.dtype == torch.bfloat16
    torch.testing.assert_close(answer, model(x), atol=2e-2, rtol=2e-2)


def test_a_region_that_torch_loses_is_refused() -> None:
    with pytest.raises(gtco.CaptureError, match=r"\['f32'\] for \['bf16'\].*einsum"):
        gtco.capture(Region("einsum").eval(), (torch.randn(2, 4, 4),))


class Block(nn.Module):
    """What autocast runs in 16 bits, in fp32 and in the widest type of its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.first(self.norm(x)))
        scores = torch.softmax(y @ y.mT, -1)
        return torch.cat([self.second(scores @ y), x], -1)


def block() -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    return Block().eval(), torch.randn(2, 5, 32)


class Regions(nn.Module):
    """Regions one in another, entered by a part of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.block(x)
            with torch.autocast("cpu", enabled=False):
                exact = self.head(y)
            return self.head(y), exact


def test_regions_have_the_values_and_types_of_eager() -> None:
    torch.manual_seed(0)
    model, x = Regions().eval(), torch.randn(2, 5, 32)
    found = gtco.interpret(gtco.capture(model, (x,)), (x,))
    for answer, right in zip(found, model(x), strict=True):
        assert answer.dtype == right.dtype
        torch.testing.assert_close(answer, right, rtol=0, atol=0)


@pytest.mark.compiler
@pytest.mark.parametrize("traced", [False, True])
def test_a_model_is_compiled_as_it_computes_in_the_region_around(traced: bool) -> None:
    model, x = block()
    module = fx.symbolic_trace(model).eval() if traced else model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        right = model(x)
        compiled = gtco.compile(module, (x,), target="host")
        inside = compiled(x)
    assert [name.removeprefix("%") for name in compiled.graph.graph.inputs] == ["x"]
    assert inside.dtype == right.dtype
    torch.testing.assert_close(inside, right, rtol=2e-2, atol=2e-2)
    wide = model(x)
    assert not torch.equal(right, wide), "autocast made no difference"
    assert torch.equal(compiled(x), inside), "what was compiled stays"


@pytest.mark.compiler
def test_what_was_compiled_outside_ignores_a_region() -> None:
    model, x = block()
    compiled = gtco.compile(model, (x,), target="host", precision="fp32")
    graph = gtco.capture(model, (x,))
    right = compiled(x), gtco.interpret(gtco.fuse(graph), (x,))[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(x), right[0])
        assert torch.equal(gtco.interpret(gtco.fuse(graph), (x,))[0], right[1])


class Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(16, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first @ self.second


def test_passes_ignore_a_region() -> None:
    graph = gtco.capture(Folded().eval(), (torch.randn(16, 16),))
    right = list(gtco.fuse(graph).graph.constants.values())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = list(gtco.fuse(graph).graph.constants.values())
    assert len(right) == 1 and torch.equal(found[0], right[0])


@pytest.mark.compiler
def test_torch_compile_knows_regions_apart() -> None:
    model, x = block()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="gtco", options={"target": "host"})
    with torch.no_grad():
        for enabled in (True, False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                right, found = model(x), compiled(x)
            assert found.dtype == right.dtype
            slack = 2e-2 if enabled else 1e-5
            torch.testing.assert_close(found, right, rtol=slack, atol=slack)


@pytest.mark.compiler
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_of_another_type_are_converted(
    given: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = block()
    compiled = gtco.compile(model, (x,), target="host", precision="fp16")
    other = x.to(given)
    with caplog.at_level(logging.WARNING, "gtco.runtime"):
        assert torch.equal(compiled(other), compiled(other.float()))
        compiled(other)
    (told,) = [each for each in caplog.records if each.name == "gtco.runtime"]
    assert "argument x" in told.getMessage() and "converts" in told.getMessage()


@pytest.mark.compiler
def test_only_floats_are_converted() -> None:
    model, x = block()
    compiled = gtco.compile(model, (x,), target="host", precision="fp16")
    for other in (x.long(), x > 0, x[:, :4].half()):
        with pytest.raises(gtco.ArgumentError, match="argument x"):
            compiled(other)
    with pytest.raises(gtco.ArgumentError, match="requires grad"):
        compiled(x.half().requires_grad_())


class RootMeanSquare(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class WideNorm(nn.LayerNorm):
    """As CLIP's: the norm in fp32, whatever the model's type."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), (32,), self.weight.float(), self.bias.float()).to(x.dtype)


class Islands(nn.Module):
    """A 16-bit block whose norm, softmax, residual or head is in fp32."""

    def __init__(self, norm: nn.Module, *, residual: bool = False, head: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = norm, nn.Linear(32, 96), nn.Linear(32, 32)
        self.head = nn.Linear(32, 8)
        self.residual, self.wide_head = residual, head

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT).float() * 0.25
        y = torch.softmax(scores, -1).to(v.dtype) @ v
        y = self.out(y.transpose(1, 2).flatten(2))
        y = (x.float() + y.float()).to(x.dtype) if self.residual else x + y
        if self.wide_head:
            return F.linear(y.float(), self.head.weight.float(), self.head.bias.float())
        return self.head(y)


ISLANDS = {
    "root mean square": lambda: Islands(RootMeanSquare(32)),
    "norm": lambda: Islands(WideNorm(32)),
    "residual": lambda: Islands(nn.LayerNorm(32), residual=True),
    "head": lambda: Islands(nn.LayerNorm(32), head=True),
}


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ISLANDS)
def test_islands_of_fp32_are_generated(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = ISLANDS[case]().to(dtype).eval()
    x = torch.randn(2, 7, 32).to(dtype)
    compiled = gtco.compile(model, (x,), target="host", fallback="error")
    with torch.no_grad():
        eager, exact = model(x), copy.deepcopy(model).double()(x.double())
    found = compiled(x)
    assert found.dtype == eager.dtype
    verdict = judge(found.to(dtype), eager.to(dtype), exact, dtype)
    assert verdict.ok, verdict
