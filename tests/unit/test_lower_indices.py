"""Elements picked by index, and put there: captured without ATen, also where indices count from the
end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gtco
from gtco.codegen.sketches.elementwise import Elementwise
from gtco.frontend.idle import drop_idle_checks
from gtco.frontend.torch_export import CaptureError
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import tile_groups
from tests.kernel_checks import inputs_of, sample
from tests.pass_checks import Function, captured, check, ops, random

ROWS, J = torch.tensor([[1, -2, 0], [3, 3, -4]]), torch.tensor([2, 0, -1])
FORMS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "embedding": lambda m, x: F.embedding(m.i % 4, x[0]),
    "index_select": lambda m, x: x.index_select(-1, m.j % 3),
    "gather": lambda m, x: x.gather(1, (m.i % 4)[:, :, None].expand(2, 3, 2)),
    "flip": lambda m, x: x.flip(0, -1),
    "rot90": lambda m, x: torch.rot90(x, 1, (1, 2)),
    "rows": lambda m, x: x[m.i],
    "one of each": lambda m, x: x[:, m.i, m.j],
    "three": lambda m, x: x[m.j, m.j, m.j],
    "a tensor of rank 0": lambda m, x: x[m.j[0]] + x[:, m.j[2]] * x[m.j[1].int(), :, None],
    "two of rank 0": lambda m, x: x[m.j[0], m.j[2]] + x[..., m.j[0].to(torch.int16)].sum(),
    "one of what is computed": lambda m, x: x[x[0].sum(-1).argmax()],
}


@pytest.mark.parametrize("form", FORMS)
def test_is_captured(form: str) -> None:
    x = random(4, 4, 5)
    graph, args = captured(FORMS[form], x, i=ROWS, j=J)
    assert "gather" in ops(graph)
    other = {"aten"} & set(ops(graph))
    assert not other or "remainder" in str(graph)
    check(lambda g, log: run_pipeline(g, log=log), graph, args)
    m = Function(FORMS[form], i=ROWS, j=J)
    torch.testing.assert_close(interpret(graph, args)[0], m(x))


def written(x: Tensor, *index: Any, accumulate: bool = False, values: Tensor) -> Tensor:
    return x.index_put(tuple(index), values, accumulate)


PLACES, TWICE = torch.tensor([4, -5, 1]), torch.tensor([2, 0, 2, -3, 2])
PLACED: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "rows": lambda m, x: written(x[0], m.i, values=x[1, :3]),
    "one row for several": lambda m, x: written(x[0], m.i, values=x[1, :1]),
    "a number": lambda m, x: written(x[0], m.i, values=x[1, 0, 0]),
    "pairs": lambda m, x: written(x, m.i * 0 + 1, m.i, values=x[0, :3].exp()),
    "a table of pairs": lambda m, x: written(x, -m.all[1:3, None], m.i, values=x[0, :2, :3, None]),
    "all of them": lambda m, x: written(x[0], m.all, values=x[1]),
    "by a mask": lambda m, x: written(x[1], m.mask, values=x[0, :3]),
    "by a mask of two dimensions": lambda m, x: written(x, m.wide, values=x[0, :4]),
    "every second": lambda m, x: _every(x, slice(1, None, 2)),
    "every third, from the end": lambda m, x: _every(x, slice(-4, -1, 3)),
    "in the middle": lambda m, x: _middle(x, m.i, x[:, :3] * 2),
    "added": lambda m, x: written(x[0], m.twice, accumulate=True, values=x[1]),
    "index_add": lambda m, x: x.index_add(1, m.twice.abs(), x, alpha=2),
    "index_copy": lambda m, x: x.index_copy(2, m.all[:3], x[..., [1, 0, 3]]),
    "scatter": lambda m, x: x.scatter(1, m.all[None, 1:4, None].expand(2, 3, 4), -x),
    "scatter_add": lambda m, x: x.scatter_add(1, m.twice.abs()[None, :, None].expand(2, 5, 4), x),
    "whole numbers": lambda m, x: written(x[0].long(), m.twice, accumulate=True, values=m.number),
}


def _every(x: Tensor, places: slice) -> Tensor:
    """As YOLO's heads of poses do with one of three numbers of each key point."""
    y = x.clone()
    y[:, places] = y[:, places].sigmoid()
    return y


def _middle(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, index] = values
    return y


def _apart(x: Tensor, index: Tensor) -> Tensor:
    y = torch.zeros(5, 5, 5, dtype=x.dtype)
    y[index, :, index] = x[0, :3]
    return y


def tensors() -> dict[str, Tensor]:
    wide = torch.tensor([[True, False, True, False, False], [False, True, False, False, True]])
    return {
        "i": PLACES, "twice": TWICE, "mask": wide.any(0) & (torch.arange(5) != 2), "wide": wide,
        "all": torch.tensor([3, 1, 0, 4, 2]), "number": torch.tensor(7),
    }  # fmt: skip


@pytest.mark.parametrize("form", PLACED)
def test_places_that_are_known_are_gathered_from(form: str) -> None:
    x, function = random(2, 5, 4), PLACED[form]
    graph, args = captured(function, x, **tensors())
    left = {str(node.attrs["target"]) for node in graph.nodes if node.op == "aten"}
    assert left <= {"aten.remainder.Scalar"} and "gather" in ops(graph), left
    check(lambda g, log: run_pipeline(g, log=log), graph, args)
    found, right = interpret(graph, args)[0], function(Function(function, **tensors()), x)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def _behind(x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    y = x.clone()
    y[:, mask] = number
    return y


def _diagonal(x: Tensor, *dims: int, number: float | None = None) -> Tensor:
    y = x.clone()
    line = y.diagonal(*dims)
    line.copy_(line * 2 + 1) if number is None else line.fill_(number)
    return y


MASKED: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "a number": lambda m, x: written(x, x > 0, values=x.new_tensor(0.5)),
    "the first dimensions": lambda m, x: written(x, x[..., 0] > 0, values=x.new_tensor([0.5])),
    "the last": lambda m, x: _behind(x, x[0] < 0, x[0, 0, 0] * 2),
    "the middle": lambda m, x: _behind(x, m.mask, x.new_tensor(-1)),
    "a diagonal": lambda m, x: _diagonal(x, 0, 1, 2, number=3),
    "one above": lambda m, x: _diagonal(x, 1, -2, -1),
    "two below": lambda m, x: _diagonal(x, -2, 1, 2),
    "of other dimensions": lambda m, x: _diagonal(x, -1, 2, 0),
}


@pytest.mark.parametrize("form", MASKED)
def test_places_of_a_mask_take_a_number_without_aten(form: str) -> None:
    x, function = random(2, 5, 4), MASKED[form]
    graph, args = captured(function, x, **tensors())
    assert "aten" not in ops(graph)
    check(lambda g, log: run_pipeline(g, log=log), graph, args)
    right = function(Function(function, **tensors()), x)
    torch.testing.assert_close(interpret(graph, args)[0], right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "form",
    [
        lambda m, x: written(x[0], m.twice, values=x[1]),  # several to one place
        lambda m, x: _apart(x, m.i),
        lambda m, x: written(x[0], m.twice * 0, accumulate=True, values=x[1]),  # too many
        lambda m, x: written(x[0], x[1].argmax(1)[:1], values=x[1, :1]),  # unknown
        lambda m, x: written(x[0], x[1] > 0, accumulate=True, values=x.new_tensor(1)),
        lambda m, x: x.scatter(1, torch.stack([m.all, m.all.flip(0)])[..., None], -x),
    ],
)
def test_other_places_stay_atens(form: Callable[[Function, Tensor], Tensor]) -> None:
    graph, _ = captured(form, random(2, 5, 5), **tensors())
    assert {"index_put", "scatter"} & {
        str(node.attrs["target"]).split(".")[1] for node in graph.nodes if node.op == "aten"
    }


@pytest.mark.compiler
def test_pillars_are_written_to_a_canvas_by_a_kernel() -> None:
    """Of a detector of points (PointPillars, Lang et al., CVPR 2019)."""

    def canvas(m: Function, x: Tensor) -> Tensor:
        return _middle(x.new_zeros(1, 24, 3), m.twice[:2] * 7 + 3, x.relu()[None])

    model, x = Function(canvas, twice=TWICE), random(2, 3, dtype=torch.float32)
    compiled = gtco.compile(model.eval(), (x,), target="host", fallback="error")
    assert torch.equal(compiled(x), model(x))


def test_indices_that_stand_apart_stay_atens() -> None:
    graph, _ = captured(lambda m, x: x[m.j, :, m.j], random(3, 3, 3), j=J)
    assert "aten" in ops(graph)


@pytest.mark.parametrize(
    "form, words",
    [
        (lambda m, x: x * m.j[0].item(), r"node mul \(aten.mul.Tensor\) depends on a number"),
        (lambda m, x: x.to(torch.int64) % (m.j[0] + 3).item(), "depends on a number"),
        (lambda m, x: x[m.j[0].to(torch.uint8)], "index with one of int64"),
        (lambda m, x: (x, x.mean().item()), "returns a number.*return the tensor"),
    ],
)
def test_numbers_that_are_read_out_of_tensors_are_refused(form: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        captured(form, random(3, 3), j=J)


@pytest.mark.compiler
def test_an_index_that_is_not_there_gives_nan() -> None:
    group = tile_groups.embedding(5, 8, 4)
    values = inputs_of(group)
    values["index"] = torch.tensor([1, 5, -6, -5])
    values["table"] = values["table"].abs()
    for program in sample(Elementwise(group, TARGETS["sm_90a"]), 2):
        (y,) = run_on_host(program, group, values).values()
        assert torch.equal(y[[0, 3]], values["table"][[1, 0]])
        assert y[1:3].isnan().all()


def test_a_check_of_what_is_constant_is_left_out() -> None:
    def checked(m: Function, x: Tensor) -> Tensor:
        sizes = torch.empty((2,), dtype=torch.long)
        sizes[0], sizes[1] = x.shape
        torch._check((sizes.prod() == x.numel()).item())
        return x.relu()

    graph, _ = captured(checked, random(2, 3))
    assert [node.op for node in graph.nodes] == ["relu"]


def test_a_check_of_all_of_a_constant_is_gone_before_torch_makes_the_program_functional() -> None:
    """torch 2.11 cannot."""

    def checked(m: Function, x: Tensor) -> Tensor:
        sizes = torch.tensor(x.shape)
        torch._check_tensor_all_with(ValueError, sizes.prod() == x.numel(), lambda: "apart")
        return x.relu()

    program = torch.export.export(Function(checked), (random(2, 3),), strict=False)
    drop_idle_checks(program)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "aten.relu.default" in called
    assert not called & {"aten._assert_scalar.default", "aten.item.default", "aten.prod.default"}
    graph, _ = captured(checked, random(2, 3))
    assert [node.op for node in graph.nodes] == ["relu"]


def test_what_is_written_to_a_constant_stays() -> None:
    def written(m: Function, x: Tensor) -> Tensor:
        table = torch.zeros(3)
        table[1].fill_(2.0)
        torch._check((table.sum() == 2).item())
        return x + table

    graph, args = captured(written, random(2, 3))
    check(lambda g, log: run_pipeline(g, log=log), graph, args)
    (y,) = interpret(graph, args)
    assert torch.equal(y, args[0] + torch.tensor([0.0, 2.0, 0.0]))


def test_what_nobody_reads_may_read_an_input_and_a_constant() -> None:
    def unread(m: Function, x: Tensor) -> Tensor:
        x * torch.arange(3).cos()
        return x.relu()

    graph, args = captured(unread, random(2, 3))
    check(lambda g, log: run_pipeline(g, log=log), graph, args)


def test_a_check_of_an_input_is_refused() -> None:
    def checked(m: Function, x: Tensor) -> Tensor:
        torch._check((x.sum() > 0).item())
        return x.relu()

    with pytest.raises(CaptureError, match="depends on a number"):
        captured(checked, random(2, 3))
