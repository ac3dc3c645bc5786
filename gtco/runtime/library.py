"""Run a group by calling its operators in ATen, storing into given buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from gtco.ir.autocast import no_autocast
from gtco.ir.graph import Group, Node
from gtco.ir.spec import GraphError


def bind_library(
    group: Group, tensors: Mapping[str, Tensor], precision: str | None = None
) -> Callable[[int], None]:
    """A call that runs `group` from and into `tensors`, on torch's current stream.

    Args:
        group: what to compute.
        tensors: its inputs, constants and outputs by name; read now and used by each call.
        precision: `Options.precision`; what the group's own products say goes before it.

    Raises:
        GraphError: at a call, where an operator gives another shape than torch.export said.
    """
    graph = group.graph
    products = (node.attrs.get("products") for node in graph.nodes)
    precision = next(filter(None, products), precision)
    given = {name: tensors[name] for name in (*graph.inputs, *graph.constants)}
    outputs = {name: tensors[name] for name in graph.outputs}

    def run(stream: int) -> None:
        with no_autocast(), library_precision(precision):
            run_nodes()

    def run_nodes() -> None:
        values = dict(given)
        for node in graph.nodes:
            out = outputs.get(node.name)
            if out is not None and _stores_directly(node, values, out):
                values[node.name] = out
                continue
            result = node.definition.reference(
                *(values[name] for name in node.inputs), **node.attrs
            )
            results = result if isinstance(result, (tuple, list)) else (result,)
            values.update(zip(node.values, results, strict=True))
        for name, out in outputs.items():
            if values[name] is not out:
                if values[name].shape != out.shape:
                    raise GraphError(_unlike(group, name, values[name], out))
                out.copy_(values[name])

    return run


def _unlike(group: Group, name: str, result: Tensor, out: Tensor) -> str:
    node = group.graph.producers[name]
    return (
        f"%{name} ({node.attrs.get('target', node.op)}) has the shape {list(result.shape)}, where "
        f"torch.export said {list(out.shape)}: torch's operator and its own shape rule differ, so "
        f"write this step in another way, or update torch"
    )


def _stores_directly(node: Node, values: Mapping[str, Tensor], out: Tensor) -> bool:
    """Run a product or a convolution straight into `out`; False if `node` is something else."""
    inputs = [values[name] for name in node.inputs]
    if any(tensor.dtype != out.dtype for tensor in inputs):
        return False
    if node.op == "linear" and node.attrs.get("out_dtype") is None:
        x, w, *bias = inputs
        rows, result = _as_matrix(x), _as_matrix(out)
        if bias:
            torch.addmm(bias[0], rows, w.t(), out=result)
        else:
            torch.mm(rows, w.t(), out=result)
        return True
    if node.op == "matmul":
        torch.matmul(inputs[0], inputs[1], out=out)
        return True
    if (
        node.op in ("conv", "grouped_conv")
        and out.is_cuda
        and node.attrs["before"] == node.attrs["after"]
    ):
        # cuDNN reads and stores channels last where the strides say so: no copy around it.
        image, kernel = (tensor.movedim(-1, 1) for tensor in inputs)
        attrs = node.attrs
        torch.ops.aten.cudnn_convolution.out(
            image,
            kernel,
            attrs["before"],
            attrs["stride"],
            attrs["dilation"],
            attrs.get("groups", 1),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.allow_tf32,
            out=out.movedim(-1, 1),
        )
        return True
    return False


def _as_matrix(x: Tensor) -> Tensor:
    """`x` as rows of its last dimension, which may be empty: nothing can be left to torch."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@contextmanager
def library_precision(precision: str | None) -> Iterator[None]:
    """Let ATen's fp32 products use tf32 or not, as the option says; None changes nothing."""
    if precision not in ("tf32", "fp32"):
        yield
        return
    allowed = precision == "tf32"
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        with cudnn.flags(  # which sets all that it is not told, and turns cuDNN off
            enabled=cudnn.enabled,
            benchmark=cudnn.benchmark,
            benchmark_limit=cudnn.benchmark_limit,
            deterministic=cudnn.deterministic,
            allow_tf32=allowed,
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
