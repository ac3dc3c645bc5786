"""Sizes and positions that a forward writes out decide shapes, and are constants of the graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import fake_tensor

import gtco
from experiments.models.towers import Gridded
from gtco.frontend.literals import known_literals
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from tests.pass_checks import ops, random

GRID = ((1, 2, 6), (1, 4, 3))
"""Frames, rows and columns of patches, of two images."""
PATCHES = 24


class Written(nn.Module):
    """A function of patches, which may read a table of positions."""

    def __init__(self, function: Callable[[Written, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.table = nn.Parameter(random(12, 8, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def of_positions(model: Written, x: Tensor) -> Tensor:
    """Each patch has its place in its image: Qwen 3's tower."""
    grid = torch.tensor(GRID)
    lengths = grid[:, 0] * grid[:, 1] * grid[:, 2]
    begins = F.pad(lengths.cumsum(0)[:-1], (1, 0))
    place = torch.arange(len(x)) - torch.repeat_interleave(begins, lengths)
    return x + model.table[place]


def of_images(model: Written, x: Tensor) -> Tensor:
    """Images apart."""
    lengths = torch.tensor(GRID).prod(1)
    return torch.cat([part - part.mean(0) for part in x.split(lengths.tolist())])


def of_windows(model: Written, x: Tensor) -> Tensor:
    """Patches in the order of windows whose last ones are cut: Qwen 2.5's tower."""
    place = F.pad(torch.arange(PATCHES).reshape(4, 6), (0, 2, 0, 2), value=-100)
    place = place.reshape(2, 3, 2, 4).transpose(1, 2).reshape(-1)
    return x[place[place != -100]].cumsum(0)


def of_branches(model: Written, x: Tensor) -> Tensor:
    """The literal decides."""
    return x.relu() if torch.tensor([1, 2]).sum() > 2 else x.tanh()


def above_the_diagonal(model: Written, x: Tensor) -> Tensor:
    """Pairs of features, each once."""
    pairs = x.unsqueeze(1) * x.unsqueeze(2)
    return pairs[:, torch.ones(8, 8, dtype=torch.bool).triu(1)]


def flat_places(model: Written, x: Tensor) -> Tensor:
    """The places are computed of floats."""
    pairs = (x.unsqueeze(1) * x.unsqueeze(2)).reshape(PATCHES, 64)
    return pairs[:, torch.ones(8, 8).triu().view(64).nonzero()]


def off_the_diagonal(model: Written, x: Tensor) -> Tensor:
    pairs = x.unsqueeze(1) * x.unsqueeze(2)
    pairs[:, torch.eye(8) > 0] = torch.zeros((PATCHES, 8))
    return pairs[:, ~torch.eye(8, dtype=torch.bool)] + torch.zeros(8, 7).flatten().logical_not()


@pytest.mark.parametrize(
    "function",
    [of_positions, of_images, of_windows, of_branches, above_the_diagonal, flat_places,
     off_the_diagonal],
)  # fmt: skip
def test_values_of_literals_are_known(function: Callable[..., Tensor]) -> None:
    model = Written(function).eval()
    x = random(PATCHES, 8, dtype=torch.float32)
    graph = gtco.capture(model, (x,))
    assert "aten" not in ops(graph)
    torch.testing.assert_close(interpret(graph, (x,))[0], model(x))


def changing(model: Written, x: Tensor) -> Tensor:
    scale = torch.tensor([1, 2])
    first = scale * 3
    scale.add_(1)
    return x * first.sum() * scale.sum()


def counted(model: Written, x: Tensor) -> Tensor:
    """What is written to is no literal, where to is one: Kimi's tower."""
    begins = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 7, 6, 6]))
    return x.new_zeros(4, 8).index_add_(0, begins, x)


def test_literals_say_where_something_is_written() -> None:
    model = Written(counted).eval()
    x = random(PATCHES, 8, dtype=torch.float32)
    torch.testing.assert_close(interpret(gtco.capture(model, (x,)), (x,))[0], model(x))


def test_a_literal_that_changes_is_computed_as_written() -> None:
    model = Written(changing).eval()
    x = random(PATCHES, 8, dtype=torch.float32)
    torch.testing.assert_close(interpret(gtco.capture(model, (x,)), (x,))[0], model(x))


def test_a_torch_without_the_limit_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fake_tensor, "CONSTANT_NUMEL_LIMIT")
    with known_literals():
        assert not hasattr(fake_tensor, "CONSTANT_NUMEL_LIMIT")
    assert not hasattr(fake_tensor, "CONSTANT_NUMEL_LIMIT")


def test_places_of_a_mask_that_is_written_to_are_refused() -> None:
    def of_a_mask(model: Written, x: Tensor) -> Tensor:
        mask = torch.zeros(8, dtype=torch.bool)
        mask[2:5] = True
        return x[:, mask]

    with pytest.raises(gtco.CaptureError, match=r"index.*has a shape that depends on data"):
        gtco.capture(Written(of_a_mask).eval(), (random(PATCHES, 8, dtype=torch.float32),))


def test_random_numbers_are_no_literals() -> None:
    def drawn(model: Written, x: Tensor) -> Tensor:
        return x + torch.randint_like(torch.tensor([3, 4, 5, 6, 7, 8, 9, 10]), 99)

    model = Written(drawn).eval()
    graph = gtco.capture(model, (random(PATCHES, 8, dtype=torch.float32),))
    assert ops(graph)["aten"] == 1


def test_values_of_arguments_are_not_known() -> None:
    def of_an_argument(model: Written, x: Tensor) -> Tensor:
        return torch.cat([*x.split(x[0, :2].long().tolist())])

    with pytest.raises(gtco.CaptureError, match=r"write values that never change out in\W+forward"):
        gtco.capture(Written(of_an_argument).eval(), (random(PATCHES, 8, dtype=torch.float32),))


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 48}


@pytest.mark.parametrize(
    ("rows", "columns", "windows"), [(16, 24, 1), (12, 20, 3), (20, 20, 4), (24, 20, 4)]
)
@pytest.mark.parametrize(
    ("module", "model", "config", "changes"),
    [
        ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionConfig",
         {"depth": 2, "fullatt_block_indexes": [1]}),
        ("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig",
         {"depth": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}),
        ("glm4v", "Glm4vVisionModel", "Glm4vVisionConfig", {"depth": 1, "image_size": 112}),
    ],
    ids=["Qwen 2.5", "Qwen 3", "GLM-4.1"],
)  # fmt: skip
def test_towers_of_language_models_read_a_grid(
    module: str,
    model: str,
    config: str,
    changes: dict[str, Any],
    rows: int,
    columns: int,
    windows: int,
) -> None:
    """Windows of 4 x 4 merged patches: whole ones are one node a layer, those at borders others."""
    pytest.importorskip("transformers")
    library = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    torch.manual_seed(0)
    made = getattr(library, config)(**SMALL, **changes)
    tower = Gridded(getattr(library, model)(made), rows, columns).eval()
    elements = made.in_channels * made.temporal_patch_size * made.patch_size**2
    x = random(rows * columns, elements, dtype=torch.float32)
    graph = run_pipeline(gtco.capture(tower, (x,)))
    of_windows = windows - 1 if module == "qwen2_5_vl" else 0
    assert ops(graph)["attention"] == changes["depth"] + of_windows
    assert ops(graph)["rotate"] == changes["depth"]
    assert "aten" not in ops(graph)
    for found, wanted in zip(interpret(graph, (x,)), tower(x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
