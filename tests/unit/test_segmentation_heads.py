"""Models that end in an awkward number of classes and a resize, whole, on the host."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.compiler import make_plan
from gtco.options import Options
from gtco.runtime.in_place import copied_outputs

SIZE = (1, 16, 6, 7)


def enlarged(y: Tensor, mode: str = "bilinear") -> Tensor:
    return F.interpolate(y, scale_factor=2, mode=mode)


class Segments(nn.Module):
    """A convolution, a 1x1 to `classes` and what `end` makes of it.

    Args:
        classes: how many.
        end: given the module and the scores, makes what is returned.
    """

    def __init__(
        self, classes: int, end: Callable[[Segments, Tensor], Tensor | tuple[Tensor, ...]]
    ):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(16, 16, 3, padding=1)
        self.scores = nn.Conv2d(16, classes, 1)
        self.again = nn.Conv2d(classes, 8, 1)
        self.end = end

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.end(self, self.scores(F.relu(self.body(x))))


ENDS: dict[str, Callable[[Segments, Tensor], Tensor | tuple[Tensor, ...]]] = {
    "bilinear": lambda m, y: enlarged(y),
    "nearest": lambda m, y: enlarged(y, "nearest"),
    "softmax": lambda m, y: enlarged(y).softmax(1),
    "argmax": lambda m, y: enlarged(y).argmax(1),
    "two": lambda m, y: (enlarged(y), enlarged(m.again(y), "nearest")),
    "read by a product": lambda m, y: (enlarged(y), m.again(y)),
    "twice": lambda m, y: (y, enlarged(y)),
    "scaled": lambda m, y: enlarged(y).sigmoid() * 2,
}
CASES = [
    (150, "bilinear", torch.float16),
    (150, "nearest", torch.float32),
    (21, "bilinear", torch.float16),
    (21, "read by a product", torch.float32),
    (21, "softmax", torch.float16),
    (19, "bilinear", torch.float32),
    (19, "two", torch.float16),
    (19, "argmax", torch.float32),
    (19, "twice", torch.float16),
    (19, "scaled", torch.float16),
    (5, "bilinear", torch.float16),
]


def results(answer: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return answer if isinstance(answer, tuple) else (answer,)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("classes", "end", "dtype"), CASES, ids=[f"{n}-{end}" for n, end, _ in CASES]
)
def test_answers_on_the_host(classes: int, end: str, dtype: torch.dtype) -> None:
    """What no kernel stores is NaN there, and every answer is kept until the last."""
    model = Segments(classes, ENDS[end]).eval()
    exact = copy.deepcopy(model).double()
    model.to(dtype)
    given = [
        torch.randn(SIZE, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1, 2)
    ]
    with torch.no_grad():
        compiled = gtco.compile(model, (given[0],), target="host", fallback="error")
        answers = [results(compiled(x)) for x in given]
        for x, found in zip(given, answers, strict=True):
            for one, right in zip(found, results(exact(x.double())), strict=True):
                assert one.shape == right.shape
                if one.is_floating_point():
                    torch.testing.assert_close(one.double(), right, rtol=1e-2, atol=5e-3)
                else:
                    assert (one == right).float().mean() > 0.99


@pytest.mark.parametrize("classes", [150, 21, 19, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_an_h100_stores_is_handed_out_without_a_copy(classes: int, dtype: torch.dtype) -> None:
    model = Segments(classes, ENDS["two"]).eval().to(dtype)
    x = torch.zeros(SIZE, dtype=dtype)
    plan, _ = make_plan(model, (x,), None, Options(target="sm_90a"))
    specs = plan.graph.specs
    stored = {
        base: torch.empty(specs[base].sizes, dtype=specs[base].dtype)
        for base, _ in plan.outputs.values()
    }

    assert copied_outputs(plan, stored) == {}
    (first, chain), _ = plan.outputs.values()
    width = {150: 160, 21: 24, 19: 24, 5: 5}[classes]
    assert specs[first].sizes == (1, 12, 14, width)
    assert ("slice" in [node.op for node in chain]) == (width != classes)
