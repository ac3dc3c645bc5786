"""What the tests of passes share: graphs of functions, and a check that their meaning stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from gtco.frontend.torch_export import capture
from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.passes import Pass
from gtco.passes.rewrite import Log
from tests.elsewhere import run_elsewhere

Golden = Callable[[str, object], None]
COMPUTE = torch.float64


class Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor], **tensors: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self, *args)


def captured(
    function: Callable[..., Tensor], *args: Tensor, **tensors: Tensor
) -> tuple[Graph, tuple[Tensor, ...]]:
    """The graph of `function(constants, *args)`, and the arguments."""
    return capture(Function(function, **tensors).eval(), args).graph, args


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(step: Pass, graph: Graph, args: Sequence[Tensor], log: Log | None = None) -> Graph:
    """Run a pass; the result is well formed and means the same, wherever the constants are."""
    before = str(graph)
    result = step(graph, log)
    result.verify()
    assert str(graph) == before
    assert str(run_elsewhere(lambda given: step(given, log and Log()), graph)) == str(result)
    for a, b in zip(
        interpret(result, args, dtype=COMPUTE), interpret(graph, args, dtype=COMPUTE), strict=True
    ):
        assert_close(a, b, rtol=1e-6, atol=1e-6)
    return result


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes if not node.definition.is_view)


def reasons(log: Log) -> str:
    return "\n".join(map(str, log.refusals))


def rmse(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).square().mean().sqrt())
