"""Whole models of tokens through the host build: diffusion transformers, whose norms are shifted
and scaled by each input, and attention whose queries and keys are pooled beside a class token."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from experiments.models import dit
from experiments.models.transformers_zoo import randomize
from gtco.benchmarking.answers import cast_floats
from gtco.check import judge
from tests.groups import BF16, F16


class Pooled(nn.Module):
    """Attention as MViTv2 has it (Li et al., CVPR 2022): pooled queries and keys, relative
    positions of all but the class token, and the queries added to what is attended."""

    def __init__(self, side: int = 6, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.side, self.heads, head = side, heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.pools = nn.ModuleList(
            nn.Conv2d(head, head, 3, 1 if x == 0 else 2, 1, groups=head) for x in range(3)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(head) for _ in range(3))
        self.rows, self.columns = (
            nn.Parameter(torch.zeros(side, side // 2, head)) for _ in range(2)
        )

    def _pool(self, x: Tensor, number: int) -> Tensor:
        token, patches = x[:, :, :1], x[:, :, 1:]
        n, heads, _, head = x.shape
        image = patches.reshape(n * heads, self.side, self.side, head).permute(0, 3, 1, 2)
        pooled = self.pools[number](image).flatten(2).mT.unflatten(0, (n, heads))
        result: Tensor = self.norms[number](torch.cat((token, pooled), 2))
        return result

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k, v = (self._pool(each, number) for number, each in enumerate(made))
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        places = q[:, :, 1:].unflatten(2, (self.side, self.side))
        rows = torch.einsum("nhyxc,ykc->nhyxk", places, self.rows)
        columns = torch.einsum("nhyxc,xkc->nhyxk", places, self.columns)
        both = rows[..., :, None] + columns[..., None, :]
        scores[:, :, 1:, 1:] += both.flatten(4).flatten(2, 3)
        y = scores.softmax(-1) @ v
        y[:, :, 1:] += q[:, :, 1:]
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


def check(model: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> list[set[str]]:
    """The ops of each launch; the host build's answer is as near to fp64 as eager's."""
    model = model.eval()
    randomize(model)
    exact = copy.deepcopy(model).double()(*cast_floats(inputs, torch.float64))
    model = model.to(dtype)
    given = cast_floats(inputs, dtype)
    compiled = gtco.compile(model, given, target="host", fallback="error")
    with torch.no_grad():
        verdict = judge(compiled(*given), model(*given), exact, dtype)
    assert verdict.ok, verdict
    return [set(launch.ops) for launch in compiled.launches]


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_attention_of_pooled_queries(dtype: torch.dtype) -> None:
    launches = check(Pooled(), (torch.randn(2, 37, 32),), dtype)
    assert {"attention", "where", "add"} in launches, "the queries are added as it is stored"
    assert not any("softmax" in ops for ops in launches)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_diffusion_transformer(dtype: torch.dtype) -> None:
    model = dit.DiT(8, width=64, depth=2, heads=2)
    inputs = (torch.randn(2, 4, 8, 8), torch.tensor([3, 981]), torch.tensor([1000, 7]))
    launches = check(model, inputs, dtype)
    assert not any(ops == {"add"} for ops in launches), "1 + scale is in the bias of its linear"


@pytest.mark.compiler
def test_a_diffusion_transformer_of_two_streams() -> None:
    model = dit.MMDiT(8, width=64, depth=2)
    inputs = (
        torch.randn(2, 16, 8, 8), torch.tensor([3, 981]), torch.randn(2, 5, 4096),
        torch.randn(2, 2048),
    )  # fmt: skip
    check(model, inputs, F16)


class Shuffled(nn.Module):
    """A unit of ShuffleNet V2 (Ma et al., ECCV 2018): linears that read every other channel."""

    def __init__(self, width: int = 22) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(width, width, 1) for _ in range(2))
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            kept, y = x.chunk(2, 1)
            y = F.relu(self.last(self.depthwise(F.relu(self.first(y)))))
            x = torch.cat((kept, y), 1).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return x


@pytest.mark.compiler
def test_shuffled_channels() -> None:
    check(Shuffled(), (torch.randn(2, 44, 7, 7),), F16)
