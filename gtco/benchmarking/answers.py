"""What answers are judged by: inputs to try, references, and the precision that counts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gtco.check import Precision
from gtco.frontend.torch_export import Captured, capture
from gtco.ir.graph import FusedGraph, Graph
from gtco.ir.interpreter import interpret
from gtco.ir.spec import TensorSpec
from gtco.locate import Located, UsageError
from gtco.passes.precision import lower_precision, lower_products
from gtco.runtime.plan import Plan

Call = Callable[..., Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""The args and kwargs of a call."""

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def parse_peers(against: str, known: Iterable[str]) -> tuple[str, ...]:
    """The peers named in a comma-separated list.

    Raises:
        UsageError: one that is not `known`.
    """
    peers = tuple(known)
    names = tuple(name.strip() for name in against.split(",") if name.strip())
    for name in names:
        if name not in peers:
            raise UsageError(f"--against takes {', '.join(peers)}; it does not know {name!r}")
    return tuple(dict.fromkeys(names))


# -- inputs --------------------------------------------------------------------------------------

INPUT_KINDS = ("normal", "large mean", "outliers")


def fresh_inputs(like: Inputs, kind: str, seed: int) -> Inputs:
    """Random arguments of the shapes, dtypes, devices and order in memory of `like`.

    Args:
        kind: "normal" floats, those around a mean of 8, or those with one in 1000 times 30;
            integers stay within the range of the given ones.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(leaf: Tensor) -> Tensor:
        if leaf.dtype == torch.bool:
            return leaf  # a mask: random ones would mask whole rows
        if not leaf.is_floating_point():
            low, high = (int(leaf.min()), int(leaf.max())) if leaf.numel() else (0, 0)
            drawn = torch.randint(low, high + 1, leaf.shape, generator=generator)
            return torch.empty_like(leaf).copy_(drawn)
        values = torch.randn(leaf.shape, generator=generator)
        if kind == "large mean":
            values += 8
        elif kind == "outliers":
            values[torch.rand(leaf.shape, generator=generator) < 1e-3] *= 30
        return torch.empty_like(leaf).copy_(values)

    inputs: Inputs = pytree.tree_map_only(Tensor, draw, like)
    return inputs


def example_inputs(captured: Captured, device: torch.device) -> Inputs:
    """Arguments of the right structure, shapes, dtypes and order in memory: zeros, and masks that
    let all pass."""

    def example(name: str, spec: TensorSpec) -> Tensor:
        made = torch.full(spec.sizes, spec.dtype == torch.bool, dtype=spec.dtype, device=device)
        return captured.graph.as_given(name, made)

    return captured.arguments([example(*each) for each in captured.graph.inputs.items()])


def poison(tree: Any) -> None:
    """Overwrite an answer, so that memory which the next call forgets to write is seen."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            leaf.fill_(float("nan") if leaf.is_floating_point() else 1)


# -- references ----------------------------------------------------------------------------------


class InPrecision(nn.Module):
    """A model that computes in `dtype` between inputs and outputs of other float types."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        first = next((p.dtype for p in model.parameters() if p.is_floating_point()), dtype)
        self.outside = first
        self.dtype = dtype
        self.model = copy.deepcopy(model).to(dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner_args, inner_kwargs = cast_floats((args, kwargs), self.dtype)
        return cast_floats(self.model(*inner_args, **inner_kwargs), self.outside)


def in_precision(model: nn.Module, precision: str | None) -> nn.Module:
    """`model` as torch would run it in `precision`; itself where that changes no dtype."""
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if precision in ("fp8", "int8") and torch.float32 in floats:
        precision = "fp16"  # which is what torch has
    dtype = DTYPES.get(precision or "")
    return model if dtype is None or floats <= {dtype} else InPrecision(model, dtype)


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with every floating-point tensor in `dtype`."""

    def cast(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float else leaf

    return pytree.tree_map(cast, tree)


def exact_answer(module: nn.Module, inputs: Inputs) -> Any:
    """The module's answer in fp64, or in fp32 where one of its operators has no fp64."""

    def run(dtype: torch.dtype) -> Any:
        args, kwargs = cast_floats(inputs, dtype)
        return copy.deepcopy(module).to(dtype)(*args, **kwargs)

    try:
        return run(torch.float64)
    except RuntimeError:
        return run(torch.float32)


@dataclass(frozen=True)
class References:
    """What the judge holds an answer against.

    Args:
        eager: the model in torch, in the tested precision, which peers run too.
        judged: what its answer in that precision is, given args and kwargs.
        exact: the answer in fp64, given args and kwargs.
    """

    eager: nn.Module
    judged: Callable[[Inputs], Any]
    exact: Callable[[Inputs], Any]


def references(model: Located, precision: str | None) -> References:
    """The references of `model` compiled with `precision`.

    An .onnx file says the dtype of each of its values, so that its module takes no others: its
    captured graph stands in for it. In tf32 that is also what is judged by, its operands rounded to
    the nearest: of a convolution cuDNN may choose a kernel of fp32 where it is allowed tf32, and be
    several times as accurate as tf32 can be.
    """
    if model.onnx is None and precision != "tf32":
        eager = in_precision(model.module, precision)
        return References(eager, _call_of(eager), partial(exact_answer, model.module))
    captured = capture(model.module, model.args, model.kwargs)
    eager = judged = model.module
    exact: Callable[[Inputs], Any] = Interpreted(captured).exact
    if model.onnx is None:
        exact = partial(exact_answer, model.module)
    if precision == "tf32":
        judged = Interpreted(captured, lower_products(captured.graph, precision))
    elif precision in ("fp16", "bf16"):
        eager = judged = Interpreted(captured, lower_precision(captured.graph, DTYPES[precision]))
    return References(eager, _call_of(judged), exact)


def own_references(graph: Interpreted) -> References:
    """Those of a captured graph whose model is not there."""
    return References(graph, _call_of(graph), graph.exact)


def _call_of(module: nn.Module) -> Callable[[Inputs], Any]:
    def call(inputs: Inputs) -> Any:
        args, kwargs = inputs
        return module(*args, **kwargs)

    return call


class Interpreted(nn.Module):
    """A captured graph that torch runs operator by operator; what it multiplies in tf32 is
    rounded."""

    def __init__(self, captured: Captured, graph: Graph | FusedGraph | None = None) -> None:
        super().__init__()
        self.captured = captured
        self.graph = captured.graph if graph is None else graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.captured.flatten(args, kwargs)
        return self.captured.unflatten(interpret(self.graph, tensors, rounded=True))

    def exact(self, inputs: Inputs) -> Any:
        """The answer in fp64, or in fp32 where one of its operators has no fp64."""
        args, kwargs = inputs
        tensors = self.captured.flatten(args, kwargs)
        return self.captured.unflatten(interpret_exactly(self.graph, tensors))


def interpret_exactly(graph: Graph | FusedGraph, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`interpret` in fp64, or in fp32 where one of the operators has no fp64."""
    try:
        return interpret(graph, tensors, dtype=torch.float64)
    except RuntimeError:
        return interpret(graph, tensors, dtype=torch.float32)


# -- precisions ----------------------------------------------------------------------------------


def compute_precision(model: Located, precision: str | None) -> Precision:
    """The key of `gtco.check.BOUNDS` for what the compiled module computes in."""
    if precision is not None:
        return DTYPES.get(precision, precision)
    leaves = [*model.module.parameters(), *pytree.tree_leaves((model.args, model.kwargs))]
    floats = [x.dtype for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    narrow = [dtype for dtype in floats if dtype in (torch.float16, torch.bfloat16)]
    return narrow[0] if narrow else torch.float32


def plan_precision(plan: Plan) -> Precision:
    """The key of `gtco.check.BOUNDS` for what a plan computes in."""
    if plan.options.precision in ("tf32", "fp8", "int8"):
        return plan.options.precision
    return graph_precision(plan.graph)


def graph_precision(graph: Graph) -> torch.dtype:
    """The narrowest floating-point type in `graph`."""
    dtypes = {spec.dtype for spec in graph.specs.values()}
    narrow = [dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes]
    return narrow[0] if narrow else torch.float32
