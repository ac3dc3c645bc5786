"""Elements picked by index: captured without ATen, also where indices count from the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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
