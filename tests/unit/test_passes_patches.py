"""Constant rows beside patches become rows of the product: meaning, form, refusals and rounding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.cli.demo import VisionTransformer
from gtco.compiler import make_plan
from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.options import Options
from gtco.passes import run_pipeline
from gtco.passes.canonicalize import canonicalize
from gtco.passes.convolutions import fold_convolutions
from gtco.passes.fold_constants import fold_constants
from gtco.passes.legality import explain
from gtco.passes.patches import copy_patches, pad_patches
from gtco.passes.quantized_pairs import multiply_pairs
from gtco.passes.rewrite import Log
from tests.pass_checks import Golden, captured, check, ops, random, reasons, rmse

Embedding = Callable[[nn.Module, Tensor], Tensor]


def patches(c: nn.Module, x: Tensor, *, bias: bool = True) -> Tensor:
    """(batch, 6, width) of images of 2 by 3 patches."""
    size = c.w.shape[-1]
    return F.conv2d(x, c.w, c.b if bias else None, size).flatten(2).mT


def with_class_row(c: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([c.first.expand(len(x), -1, -1), patches(c, x)], 1) + c.position


def with_two_rows(c: nn.Module, x: Tensor) -> Tensor:
    rows = [c.first.expand(len(x), -1, -1), c.second.expand(len(x), -1, -1), patches(c, x)]
    return torch.cat(rows, 1) + F.pad(c.position, (0, 0, 0, 1))


def with_a_row_behind(c: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([patches(c, x) + c.position[:, 1:], c.first.expand(len(x), -1, -1)], 1)


def without_additions(c: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([c.first.expand(len(x), -1, -1), patches(c, x, bias=False)], 1)


def with_two_additions(c: nn.Module, x: Tensor) -> Tensor:
    y = c.second[0, 0] + (patches(c, x) + c.position[0, 1:])
    return torch.cat([c.first.expand(len(x), -1, -1), y], 1)


def embedded(
    function: Embedding,
    batch: int = 1,
    patch: int = 4,
    *,
    dtype: torch.dtype = torch.float64,
    width: int = 8,
    prepared: bool = True,
) -> tuple[Graph, tuple[Tensor, ...]]:
    """The graph of an embedding, as the pass meets it if `prepared`; its argument."""
    scale = (3 * patch**2) ** -0.5
    graph, args = captured(
        function,
        random(batch, 3, 2 * patch, 3 * patch, dtype=dtype),
        w=(scale * random(width, 3, patch, patch)).to(dtype),
        b=random(width, dtype=dtype),
        first=random(1, 1, width, dtype=dtype, seed=1),
        second=random(1, 1, width, dtype=dtype, seed=2),
        position=random(1, 7, width, dtype=dtype, seed=3),
        items=random(batch, 1, width, dtype=dtype, seed=4),
    )
    if prepared:
        graph = fold_convolutions(fold_constants(canonicalize(graph)))
    return graph, args


EMBEDDINGS = (with_class_row, with_two_rows, with_a_row_behind, without_additions,
              with_two_additions)  # fmt: skip


@pytest.mark.parametrize("function", EMBEDDINGS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("patch", [3, 4, 14])
def test_rows_are_added_in_the_epilogue(function: Embedding, batch: int, patch: int) -> None:
    result = check(pad_patches, *embedded(function, batch, patch))
    assert ops(result) == {"pad": 1, "linear": 1, "add": 1}
    (addend,) = (t for name, t in result.constants.items() if name.endswith("_rows"))
    assert addend.shape == (1, 8 if function is with_two_rows else 7, 8)
    assert len(result.constants) == 2  # the weight, once


CONVERSIONS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "a cast": (lambda x: x.half(), ["cast"]),
    "scaled": (lambda x: (x / 255 * 2).half(), ["div", "mul", "cast"]),
    "rounded to 8 bits": (
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.02, 0, -128, 127).half(),
        ["quantize_int8", "cast", "mul", "cast"],
    ),
}
"""Of zeros they make zeros."""


@pytest.mark.parametrize("case", CONVERSIONS)
@pytest.mark.parametrize("patch", [3, 4])
def test_an_image_is_converted_on_the_way(patch: int, case: str) -> None:
    convert, conversion = CONVERSIONS[case]
    graph, args = captured(
        lambda c, x: with_class_row(c, convert(x)),
        random(2, 3, 2 * patch, 3 * patch, dtype=torch.float32),
        w=random(64, 3, patch, patch, dtype=torch.float16), b=random(64, dtype=torch.float16),
        first=random(1, 1, 64, dtype=torch.float16), position=random(1, 7, 64, dtype=torch.float16),
    )  # fmt: skip
    result = run_pipeline(multiply_pairs(graph))
    nodes = [node for node in result.nodes if not node.definition.is_view]
    way = ["pad", *conversion]
    assert [node.op for node in nodes[: len(way) + 1]] == [*way, "linear"]
    assert explain(result, nodes[: len(way)]) is None
    (exact,) = interpret(graph, args, dtype=torch.float64)
    (eager,) = interpret(graph, args)
    (actual,) = interpret(result, args)
    assert rmse(actual, exact) <= 1.5 * rmse(eager, exact)


def test_padded_patches(golden: Golden) -> None:
    graph, args = embedded(with_class_row, 2, 3)
    golden("passes/pad_patches.txt", check(pad_patches, graph, args))


@pytest.mark.parametrize("dtype, k", [(torch.float16, 592), (torch.float32, 588)])
def test_rows_are_whole_16_bytes(dtype: torch.dtype, k: int) -> None:
    graph, _ = embedded(with_class_row, 1, 14, dtype=dtype)
    (weight,) = (t for t in pad_patches(graph).constants.values() if t.dim() == 2)
    assert weight.shape == (8, k)
    assert not weight[:, 588:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("patch", [14, 16])
def test_is_about_as_near_to_the_truth_as_eager(dtype: torch.dtype, patch: int) -> None:
    graph, args = embedded(with_class_row, 2, patch, dtype=dtype, width=64, prepared=False)
    (exact,) = interpret(graph, args, dtype=torch.float64)
    (eager,) = interpret(graph, args)
    (actual,) = interpret(run_pipeline(graph), args)
    assert actual.dtype == dtype
    # node by node the sum of the constants is one rounding more; a kernel rounds no product
    assert rmse(actual, exact) <= 1.5 * rmse(eager, exact)


def test_the_product_keeps_its_module() -> None:
    model = VisionTransformer(patch=4, width=64, depth=1, heads=4, image=16, classes=10)
    graph = run_pipeline(gtco.capture(model.eval(), torch.zeros(1, 3, 16, 16)))
    first = next(node for node in graph.nodes if node.op == "linear")
    assert first.source == "patch_embed.proj"


def test_one_kernel_makes_the_embedding_and_its_statistics() -> None:
    graph, _ = captured(
        lambda c, x: F.linear(F.layer_norm(with_class_row(c, x), (64,), c.first[0, 0]), c.u),
        random(1, 3, 32, 48, dtype=torch.float16),
        w=random(64, 3, 16, 16, dtype=torch.float16), b=random(64, dtype=torch.float16),
        first=random(1, 1, 64, dtype=torch.float16), u=random(64, 64, dtype=torch.float16),
        position=random(1, 7, 64, dtype=torch.float16),
    )  # fmt: skip
    graph = run_pipeline(graph)
    pad, *product = [node for node in graph.nodes if not node.definition.is_view][:4]
    assert [node.op for node in (pad, *product)] == ["pad", "linear", "add", "row_stats"]
    assert explain(graph, product) is None
    assert "must be stored first" in str(explain(graph, [pad, *product]))


def read_twice(c: nn.Module, x: Tensor, *, what: str) -> Tensor:
    y = patches(c, x)
    added = y + c.position[:, 1:]
    whole = torch.cat([c.first, added], 1)
    return whole[:, :6] * {"linear": y, "sum": added}[what]


def image_read_twice(c: nn.Module, x: Tensor) -> Tensor:
    y = x.float()
    rows = F.conv2d(y, c.w.float(), c.b.float(), 4).flatten(2).mT
    return torch.cat([c.first.float(), rows], 1) * y.sum()


def planes(c: nn.Module, x: Tensor) -> Tensor:
    """(batch, 3, width) of the beginnings of an image's colours."""
    return F.linear(x.flatten(2)[..., :48], c.w.flatten(1))


REFUSED: dict[str, tuple[Embedding, str]] = {
    "the product is read elsewhere": (partial(read_twice, what="linear"), "is also read by"),
    "the sum is read elsewhere": (partial(read_twice, what="sum"), "is also read by"),
    "columns": (
        lambda c, x: torch.cat([c.position[:, 1:].expand(len(x), -1, -1), patches(c, x)], 2),
        "does not join rows",
    ),
    "the batch": (
        lambda c, x: torch.cat([c.position[:, 1:], patches(c, x)], 0),
        "does not join rows",
    ),
    "items differ": (
        lambda c, x: torch.cat([c.items, patches(c, x)], 1),
        "differ from one item of the batch to another",
    ),
    "added items differ": (
        lambda c, x: torch.cat([c.first.expand(len(x), -1, -1), patches(c, x) + c.items], 1),
        "differ from one item of the batch to another",
    ),
    "plain rows": (
        lambda c, x: torch.cat([c.first.expand(len(x), -1, -1), planes(c, x)], 1),
        "reads plain rows",
    ),
    "computed": (
        lambda c, x: torch.cat([c.first.expand(len(x), -1, -1), patches(c, x + 1)], 1),
        "is computed",
    ),
    "the converted image is read elsewhere": (image_read_twice, "is computed"),
    "a wider constant": (
        lambda c, x: torch.cat([c.first.expand(len(x), -1, -1).double(), patches(c, x)], 1),
        "is broadcast or converted",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    function, reason = REFUSED[case]
    dtype = torch.float32 if case == "a wider constant" else torch.float64
    batch = 1 if case.endswith("read elsewhere") else 2
    graph, args = embedded(function, batch, dtype=dtype)
    log = Log()
    assert str(check(pad_patches, graph, args, log)) == str(graph)
    assert reason in reasons(log)


@pytest.mark.parametrize(
    "function",
    [
        lambda c, x: torch.cat([c.first, y := patches(c, x), y], 1),
        lambda c, x: torch.cat([c.first, patches(c, x).relu()], 1),
        lambda c, x: torch.cat([c.first, patches(c, x).double()], 1),
    ],
    ids=["twice", "of another function", "converted"],
)
def test_leaves_other_concats(function: Embedding) -> None:
    graph, args = embedded(function, dtype=torch.float32)
    assert str(check(pad_patches, graph, args)) == str(graph)


# -- without constant rows beside them -------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of any size are large."""
    monkeypatch.setattr(sys.modules[copy_patches.__module__], "LEAST_FLOPS", 0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("patch", "op"), [(14, "pad"), (16, "copy")])
def test_a_large_product_reads_a_copy(batch: int, patch: int, op: str) -> None:
    graph, args = embedded(patches, batch, patch, dtype=torch.float16)
    result = copy_patches(graph)
    assert ops(result) == {op: 1, "linear": 1}
    (exact,) = interpret(graph, args, dtype=torch.float64)
    (found,) = interpret(result, args, dtype=torch.float64)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("patch", "op"), [(14, "pad"), (16, "cast")])
def test_a_copy_converts_an_image(patch: int, op: str) -> None:
    graph, args = captured(
        lambda c, x: patches(c, x.half()),
        random(1, 3, 2 * patch, 3 * patch, dtype=torch.float32),
        w=random(64, 3, patch, patch, dtype=torch.float16), b=random(64, dtype=torch.float16),
    )  # fmt: skip
    result = copy_patches(run_pipeline(graph))
    first, *others = [node.op for node in result.nodes if not node.definition.is_view]
    assert [first, *others] == list(dict.fromkeys([op, "cast", "linear"]))
    (exact,) = interpret(graph, args, dtype=torch.float64)
    (found,) = interpret(result, args, dtype=torch.float64)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("function", "patch"),
    [(patches, 8), (lambda c, x: patches(c, x + 1), 16)],
    ids=["few columns", "of what a kernel stores"],
)
def test_other_products_read_patches_where_they_are(function: Embedding, patch: int) -> None:
    graph, _ = embedded(function, 1, patch, dtype=torch.float16)
    assert str(copy_patches(graph)) == str(graph)


def test_a_small_product_reads_patches_where_they_are() -> None:
    graph, _ = embedded(patches, 1, 16, dtype=torch.float16)
    assert str(copy_patches(graph)) == str(graph)


@pytest.mark.parametrize(("target", "copied"), [("sm_90a", True), ("sm_80", False)])
def test_a_plan_copies_patches_for_wgmma(target: str, copied: bool) -> None:
    model = nn.Conv2d(3, 768, 16, 16).half().eval()
    x = torch.zeros(1, 3, 256, 256).half()
    plan, _ = make_plan(model, (x,), None, Options.of(target=target))
    kernels = [launch.program and launch.program.sketch for launch in plan.launches]
    assert (kernels == ["elementwise", "gemm_wgmma"]) == copied
