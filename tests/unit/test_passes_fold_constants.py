"""What is known at compile time is computed then, by meaning, by form and by what it refuses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.ir.aten import Slot
from gtco.ir.graph import GraphBuilder
from gtco.ir.interpreter import interpret
from gtco.ir.spec import TensorSpec
from gtco.passes.fold_constants import fold_constants
from gtco.passes.rewrite import Log
from tests.pass_checks import Golden, captured, check, ops, random, reasons


def test_fold_constants(golden: Golden) -> None:
    def function(c: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([c.token.expand(1, -1, -1), x], 1) + c.position * 2

    graph, args = captured(
        function, random(1, 3, 4), token=random(1, 1, 4), position=random(1, 4, 4, seed=1)
    )
    golden("passes/fold_constants.txt", check(fold_constants, graph, args))


def test_an_operator_without_a_kernel_of_16_bits_is_folded_in_fp32() -> None:
    """A CPU enlarges no position embedding of halves with antialiasing."""
    b = GraphBuilder()
    positions = torch.randn(1, 3, 4, 4).half()
    target = "aten._upsample_bicubic2d_aa.default"
    args = (Slot(0), (8, 8), False)
    y = b.add("aten", b.constant("positions", positions), target=target, args=args, kwargs=())
    x = b.input("x", TensorSpec((1, 3, 8, 8), torch.float16))
    result = fold_constants(b.build([b.add("add", x, y)]))
    assert ops(result) == {"add": 1}
    (made,) = result.constants.values()
    exact = F.interpolate(positions.float(), (8, 8), mode="bicubic", antialias=True)
    torch.testing.assert_close(made, exact.half())


def test_what_is_too_large_to_keep_is_computed_for_what_is_small() -> None:
    """Rows of a table, chosen by a one-hot matrix of 76 MiB as Gemma 4 chooses positions."""

    def function(c: nn.Module, x: Tensor) -> Tensor:
        chosen = F.one_hot(c.positions, 10000).to(x.dtype)
        return x + chosen @ c.table

    table = random(10000, 2).half()
    positions = torch.arange(0, 10000, 2)
    x = random(5000, 2).half()
    graph, args = captured(function, x, positions=positions, table=table)
    result = fold_constants(graph)
    assert ops(result) == {"add": 1}
    (made,) = result.constants.values()
    assert torch.equal(made, table[positions])
    assert torch.equal(interpret(result, args)[0], x + table[positions])


def test_fold_constants_refuses() -> None:
    def function(c: nn.Module, x: Tensor) -> Tensor:
        y = torch.cat([c.token, x], 1)
        return (y + c.position) * y + c.token.expand(40000, 1000, 4).sum()

    graph, _ = captured(
        function, random(1, 3, 4), token=random(1, 1, 4), position=random(1, 4, 4, seed=1)
    )
    log = Log()
    fold_constants(graph, log)
    assert "is read elsewhere without %position" in reasons(log)
    assert "its value would take 1220 MiB" in reasons(log)
    assert "a value that it is computed of would take 1220 MiB" in reasons(log)
