"""Sizes and positions that a forward writes out itself are known while it is captured.

    grid = torch.tensor([[1, 32, 48]])
    rows = torch.repeat_interleave(grid[:, 1], grid[:, 0])      # as long as a value of the grid

Shapes and branches may depend on what is computed of them. While torch exports, it keeps the values
of constants of one element; `known_literals` lets it keep more. The exported program has no values,
and making it functional traces it anew, so `fold_literals` makes constants of them first.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gtco.frontend.idle import writes

MOST_ELEMENTS = 1 << 16
"""Of a tensor of sizes or positions."""


@contextmanager
def known_literals() -> Iterator[None]:
    """Within it torch knows the values of what is computed of tensors that a forward writes out.

    The limit is no public name of torch's: where there is none, nothing changes.
    """
    before = getattr(fake_tensor, _LIMIT, None)
    if before is None:
        yield
        return
    setattr(fake_tensor, _LIMIT, MOST_ELEMENTS)
    try:
        yield
    finally:
        setattr(fake_tensor, _LIMIT, before)


_LIMIT = "CONSTANT_NUMEL_LIMIT"


class WrittenOut(TorchFunctionMode):
    """Within it `torch.arange` of whole numbers, ones, zeros and the identity are written out, so
    that their values are known too: for models that select by masks of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = not kwargs.keys() - {"dtype", "device"}
        sizes = args[0] if args and isinstance(args[0], (tuple, list)) else args
        if not (args and plain and all(isinstance(each, int) for each in sizes)):
            return func(*args, **kwargs)
        if func is torch.arange:
            numbers = range(*args)
            if len(numbers) <= MOST_ELEMENTS:
                return torch.tensor([*numbers], **{"dtype": torch.int64, **kwargs})
        if func in _FILLED and min(sizes, default=0) >= 0:
            whole = (max(sizes),) * 2 if func is torch.eye else sizes
            if math.prod(whole) <= MOST_ELEMENTS:
                dtype = torch.get_default_dtype()
                return torch.tensor(_FILLED[func](*sizes), **{"dtype": dtype, **kwargs})
        return func(*args, **kwargs)


def _filled(number: float, *sizes: int) -> Any:
    """Lists in lists: to make a tensor first would be traced."""
    nested: Any = number
    for size in reversed(sizes):
        nested = [nested] * size
    return nested


def _eye(rows: int, columns: int | None = None) -> Any:
    return [[float(row == column) for column in range(columns or rows)] for row in range(rows)]


_FILLED: Mapping[Any, Callable[..., Any]] = {
    torch.ones: partial(_filled, 1.0),
    torch.zeros: partial(_filled, 0.0),
    torch.eye: _eye,
}


def has_unknown_sizes(program: ExportedProgram) -> bool:
    """Whether a shape depends on values that torch does not know."""
    made = pytree.tree_leaves([node.meta.get("val") for node in program.graph.nodes])
    tensors = (each for each in made if isinstance(each, Tensor))
    return any(not isinstance(size, int) for each in tensors for size in each.shape)


def fold_literals(program: ExportedProgram) -> None:
    """Make constants of the whole numbers that `program` computes of its own literals alone, in
    place, unless it writes to one of them; and of masks that it selects by, the places."""
    known = _known(program, _is_small) or _known(program, _is_whole)
    _select_by_places(program, known)
    folded = [node for node in known if node.op == "call_function"]
    for node in folded:
        if _is_whole(known[node]) and not all(_is_whole(known.get(user)) for user in node.users):
            constant = _constant(program, f"{node.name}_known", known[node], node.meta["val"])
            node.replace_all_uses_with(constant)
    for node in reversed(folded):
        for user in [*node.users]:
            if user.target in _LOOKED_AT and not user.users:
                program.graph.erase_node(user)
        if not node.users:
            program.graph.erase_node(node)
    program.graph_module.recompile()


_LOOKED_AT = (torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten.item.default)
"""Operators that compute nothing of a tensor whose values are known."""


_SELECTING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
)


def _select_by_places(program: ExportedProgram, known: Mapping[fx.Node, Any]) -> None:
    """x[:, mask] -> x[:, rows, columns], where the values of the mask are known."""
    for node in program.graph.nodes:
        if node.target not in _SELECTING:
            continue
        image, given, *rest = node.args
        indices: list[fx.Node | None] = []
        for index in given:
            mask = known.get(index)
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                indices.append(index)
                continue
            for places in mask.nonzero(as_tuple=True):
                fake = index.meta["val"].fake_mode.from_tensor(places, static_shapes=True)
                name = f"{index.name}_places_{len(program.constants)}"
                indices.append(_constant(program, name, places, fake))
        node.args = (image, indices, *rest)


def _known(program: ExportedProgram, of: Callable[[Any], bool]) -> dict[fx.Node, Any]:
    """What is computed of literals alone, by node, in order, of what `of` says; nothing if one of
    them changes, or if there are none."""
    known: dict[fx.Node, Any] = {}
    literals = {
        spec.arg.name: program.constants[str(spec.target)]
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR and str(spec.target) in program.constants
    }
    if not any(map(of, literals.values())):
        return {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and of(literals.get(node.name)):
            known[node] = literals[node.name]
        if node.op != "call_function" or node.target in _LOOKED_AT:
            continue
        target = node.target
        if writes(node) and target is not _DETACH:
            if not known.keys().isdisjoint(_written(node)):
                return {}
            continue
        if not all(each in known for each in node.all_input_nodes) or not _is_function(target):
            continue
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
        made = target(*args, **kwargs)
        if all(map(of, made if isinstance(made, (tuple, list)) else (made,))):
            known[node] = made
    return known


_DETACH = torch.ops.aten.detach_.default


def _written(node: fx.Node) -> set[fx.Node]:
    """What a call of an operator writes to."""
    assert isinstance(node.target, OpOverload)
    found: set[fx.Node] = set()
    for at, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
            found.update(each for each in pytree.tree_leaves(given) if isinstance(each, fx.Node))
    return found


def _is_function(target: Any) -> bool:
    """Whether a call gives the same for the same."""
    if target is operator.getitem:
        return True
    return (
        isinstance(target, OpOverload)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and bool(target._schema.returns)
    )


def _is_small(value: Any) -> bool:
    """Whether `value` is a small tensor of real numbers."""
    return isinstance(value, Tensor) and value.numel() <= MOST_ELEMENTS and not value.is_complex()


def _is_whole(value: Any) -> bool:
    """Whether `value` is a small tensor of whole numbers or truth values."""
    return _is_small(value) and not value.is_floating_point()


def _constant(program: ExportedProgram, target: str, value: Tensor, fake: Any) -> fx.Node:
    """A new constant of `program`, which it traces as `fake`."""
    with program.graph.inserting_before(next(iter(program.graph.nodes))):
        constant: fx.Node = program.graph.placeholder(f"c_{target}")
    constant.meta = {"val": fake}
    spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(constant.name), target)
    program.graph_signature.input_specs.insert(0, spec)
    program.constants[target] = value
    return constant
