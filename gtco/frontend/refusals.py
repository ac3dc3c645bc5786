"""What a user's program may not hold, refused in the words of the program.

Each refusal names the model, the place (an argument, a node with its module, a part of the result),
the cause and what to do.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import traceback
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils import _pytree as pytree

from gtco.ir.spec import DTYPE_NAMES

aten = torch.ops.aten

PRODUCTS = frozenset(
    {
        aten.linear.default,
        aten.matmul.default,
        aten.mm.default,
        aten.bmm.default,
        aten.mv.default,
        aten.dot.default,
        aten.addmm.default,
        aten.addmv.default,
        aten.baddbmm.default,
        aten.convolution.default,
        *(getattr(aten, f"conv{rank}d").default for rank in (1, 2, 3)),
        *(getattr(aten, f"conv{rank}d").padding for rank in (1, 2, 3)),
        aten.conv_transpose1d.default,
        aten.conv_transpose2d.input,
        aten.conv_transpose3d.input,
    }
)
"""ATen's products, whose operands are of one type."""

NORMS = frozenset(
    {
        aten.layer_norm.default,
        aten.group_norm.default,
        aten.batch_norm.default,
        aten.instance_norm.default,
    }
)
"""ATen's norms, whose weights are of the type of what they scale, or of fp32."""

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (Tensor, int, float, str, type(None), *_SYMBOLS)
"""Leaves that an exported program can return."""
_TAKEN = (*_PLAIN, enum.Enum)
"""Leaves that it can take."""


_RESULT = OutputKind.USER_OUTPUT
_CONTAINERS = "tensors, numbers and strings, in tuples, lists, dicts or dataclasses"
ONE_TYPE = (
    "give the example arguments the type of the weights (x.half() for float16), or the model "
    'theirs (model.float(), fast with precision="fp16")'
)
"""What to do about operands of several types."""


class CaptureError(ValueError):
    """A model that gtco cannot capture: the message names the place, the cause and what to do."""


def check_arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], label: str
) -> None:
    """Refuse example arguments that do not fit the model's signature, and what is no tensor or
    constant among them."""
    _register_dataclasses((args, kwargs))
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # of a function in C
        return
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"{label}: the example arguments do not fit its forward{signature}: {error}; pass one "
            f"for each parameter, in args or by name in kwargs"
        ) from error
    for name, value in bound.arguments.items():
        for leaf in pytree.tree_leaves(value):
            if not isinstance(leaf, _TAKEN):
                array = hasattr(leaf, "__array_interface__")
                raise CaptureError(
                    f"{label}: the example argument {name} {'is' if leaf is value else 'holds'} a "
                    f"{type(leaf).__name__}, which no program takes; "
                    + ("convert it with torch.as_tensor" if array else f"pass {_CONTAINERS}")
                )


def check_result(result: Any, label: str) -> None:
    """Take dataclasses in the model's result, and refuse objects that no program returns."""
    _register_dataclasses(result)
    if (foreign := _foreign_result(result)) is not None:
        raise CaptureError(f"{label}: {foreign}")


def result_types(program: ExportedProgram) -> list[str]:
    """The types of the tensors that `program` returns, in order."""
    (results,) = program.graph.output_node().args
    kinds = (spec.kind for spec in program.graph_signature.output_specs)
    nodes = [node for node, kind in zip(results, kinds, strict=True) if kind is _RESULT]
    values = (node.meta["val"] for node in nodes if isinstance(node, fx.Node))
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)) for tensor in tensors]


def failed_in(model: nn.Module, error: BaseException) -> str:
    """The innermost part of `model` that was running when `error` was raised: its name and type.
    Empty for the model itself."""
    names = {id(module): name for name, module in model.named_modules() if name}
    place = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            place = f"{names[id(owner)]} ({type(owner).__name__})"
    return place


def refuse_training(model: nn.Module, label: str) -> None:
    """Refuse a model with a module that computes something else in training."""
    for name, module in model.named_modules():
        random = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        batch = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        if module.training and (random or batch):
            raise CaptureError(
                f"{label}: {name or 'the model'} ({type(module).__name__}) is in training mode, "
                f"where its result differs from inference; call model.eval() first"
            )


def _register_dataclasses(value: Any) -> None:
    """Make every dataclass in `value` known to torch's pytree, as
    `torch.export.register_dataclass` does: a compiled module returns it as the model does."""
    for leaf in pytree.tree_leaves(value):
        kind = type(leaf)
        if dataclasses.is_dataclass(kind) and kind not in pytree.SUPPORTED_NODES:
            name = f"{kind.__module__}.{kind.__qualname__}"
            torch.export.register_dataclass(kind, serialized_type_name=name)
            _register_dataclasses(leaf)


def _foreign_result(result: Any) -> str | None:
    """The first leaf of a model's result that no program returns, and what to do about it."""
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        if isinstance(leaf, _PLAIN):
            continue
        place = f" at result{pytree.keystr(path)}" if path else ""
        what = f"the model returns a {type(leaf).__name__}{place}"
        if "cache" in type(leaf).__name__.lower():
            return (
                f"{what}, which holds state between calls; leave it out of the result "
                f"(use_cache=False in kwargs, where forward takes that)"
            )
        return f"{what}; return {_CONTAINERS}"
    return None


def check_program(program: ExportedProgram, label: str) -> None:
    """Refuse what no lowering could express, in the words of the user's program."""
    for spec in program.graph_signature.output_specs:
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            refuse_mutation(spec.kind, str(spec.target), label)
    for node in program.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if isinstance(value, Tensor):
                _check_tensor(node, value, label)
        _check_operands(node, label)
        if _is_training_op(node):
            raise CaptureError(
                f"{label}: {where(node)} runs {node.target} in training mode; call model.eval() "
                f"before exporting"
            )


def refuse_mutation(kind: OutputKind, target: str, label: str) -> NoReturn:
    """Refuse a model that writes to a buffer or an input of its own."""
    what = "buffer" if kind is OutputKind.BUFFER_MUTATION else "input"
    raise CaptureError(
        f"{label}: the model writes to its {what} {target!r} in place; return the new value "
        f"instead (work on a copy: x = x.clone())"
    )


def check_sizes(program: ExportedProgram, label: str) -> None:
    """Refuse a tensor whose sizes torch does not know, or not any more.

    Raises:
        CaptureError: naming the node.
    """
    for node in program.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor):
                _check_sizes(node, value, label)


def _what(node: fx.Node) -> str:
    return f"argument {node.name}" if node.op == "placeholder" else where(node)


def _check_sizes(node: fx.Node, value: Tensor, label: str) -> None:
    what = _what(node)
    if not all(map(is_concrete_int, value.shape)):  # one that asserts have settled is known too
        if node.op == "placeholder":
            raise CaptureError(
                f"{label}: {what} has dynamic shape {tuple(value.shape)}, which is not supported "
                f"yet; export it with fixed shapes, once per shape you need"
            )
        raise CaptureError(
            f"{label}: {what} ({node.target}) has a shape that depends on data, "
            f"{tuple(value.shape)}; compute it from shapes, write values that never change out in "
            f"forward (torch.tensor([...])), or leave it outside the model"
        )


def _check_tensor(node: fx.Node, value: Tensor, label: str) -> None:
    what = _what(node)
    _check_sizes(node, value, label)
    if value.is_complex():
        return  # within a model, two real tensors (lower_complex.py)
    if value.dtype not in DTYPE_NAMES:
        raise CaptureError(
            f"{label}: {what} is {value.dtype}, which gtco does not support; cast it inside the "
            f"model or leave that part outside the model"
        )


def _check_operands(node: fx.Node, label: str) -> None:
    """Refuse operands of several types where eager does; meta tensors let some of them pass."""
    if node.target not in PRODUCTS | NORMS:
        return
    operands = [each.meta.get("val") for each in node.all_input_nodes]
    dtypes = list(dict.fromkeys(each.dtype for each in operands if isinstance(each, Tensor)))
    if node.target in NORMS and all(dtype == torch.float32 for dtype in dtypes[1:]):
        return
    if len(dtypes) > 1:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CaptureError(
            f"{label}: {where(node)} ({node.target}) has operands of {names}, which torch itself "
            f"refuses; {ONE_TYPE}"
        )


def _is_training_op(node: fx.Node) -> bool:
    if node.target is aten.dropout.default:
        return bool(node.args[2]) and float(node.args[1]) > 0  # type: ignore[arg-type]
    # Without running statistics nothing is written, and evaluation would do the same.
    return node.target is aten.batch_norm.default and bool(node.args[5] and node.args[3])


def source(node: fx.Node) -> str:
    """The path of the user's module, without torch's call counts: `blocks.0.attn`."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).split("@")[0].removeprefix("L['self'].") if stack else ""


def where(node: fx.Node) -> str:
    """The node and the user's module, for a message."""
    path = source(node)
    return f"node {node.name}" + (f" of module {path}" if path else "")
