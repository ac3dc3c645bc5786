"""Arguments of a call beside those that a model was captured with, in the user's words, and how
they lie in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


class NamedInputs:
    """A module whose forward takes tensors by position, as `*args`, and that has names for them.

    Args:
        input_names: one each, of letters, digits and underscores.
    """

    input_names: tuple[str, ...]


def leaf_names(in_spec: pytree.TreeSpec, tensors: Mapping[int, str]) -> tuple[str, ...]:
    """What to call each flattened leaf of (args, kwargs).

    Args:
        in_spec: their structure.
        tensors: the graph's name for each leaf that is a tensor.
    """
    places = zip(_places(in_spec, tensors), _arguments(in_spec), strict=True)
    paths = [path for place, spec in places for path in _paths(spec, place)]
    return tuple(tensors.get(leaf, path) for leaf, path in enumerate(paths))


def misfit(
    in_spec: pytree.TreeSpec,
    tensors: Mapping[int, str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str:
    """Why `args` and `kwargs` have another structure than `in_spec`; names the argument."""
    count, keywords = in_spec.child(0).num_children, list(in_spec.child(1).context)
    places = _places(in_spec, tensors)
    positional = places[:count]
    takes = (
        f"the model was captured with ({', '.join([*positional, *(f'{k}=' for k in keywords)])})"
    )
    for name in positional[len(args) :]:
        if name in kwargs:
            return f"argument {name} has to stand by position, not by name: {takes}"
        return f"argument {name} is missing: {takes}"
    for name in kwargs:
        if name not in keywords:
            by_position = f"argument {name} has to stand by position, not by name"
            unknown = f"there is no argument {name}"
            return f"{by_position if name in positional else unknown}: {takes}"
    for name in keywords:
        if name not in kwargs:
            by_name = f"argument {name} has to stand by name" if len(args) > count else ""
            return f"{by_name or f'argument {name} is missing'}: {takes}"
    if len(args) > count:
        return f"{len(args)} arguments by position are {len(args) - count} too many: {takes}"
    given = [*args, *(kwargs[name] for name in keywords)]
    for place, spec, value in zip(places, _arguments(in_spec), given, strict=True):
        found = pytree.tree_structure(value)
        if found != spec:
            path, found, spec = _apart(found, spec)
            what = f"argument {place} {f'has at {path}' if path else 'is'} {_shape(found)}"
            return f"{what}, and {'had' if path else 'was'} {_shape(spec)} when captured"
    return f"the arguments are nested in another way: {takes}"


def _arguments(in_spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    return [child for part in in_spec.children() for child in part.children()]


def _places(in_spec: pytree.TreeSpec, tensors: Mapping[int, str]) -> list[str]:
    """The name of each whole argument: the graph's for a tensor, else its number or keyword."""
    names, leaf = [], 0
    for position, spec in enumerate(in_spec.child(0).children()):
        name = tensors.get(leaf) if spec.is_leaf() else None
        names.append(name or f"number {position + 1}")
        leaf += spec.num_leaves
    return [*names, *in_spec.child(1).context]


def _apart(
    found: pytree.TreeSpec, spec: pytree.TreeSpec, path: str = ""
) -> tuple[str, pytree.TreeSpec, pytree.TreeSpec]:
    """Where the two first differ: the path to it, and what each has there."""
    alike = (found.type, found.context, found.num_children) == (
        spec.type, spec.context, spec.num_children,
    )  # fmt: skip
    if alike:
        for key, a, b in zip(_keys(spec), found.children(), spec.children(), strict=True):
            if a != b:
                return _apart(a, b, f"{path}[{key!r}]")
    return path, found, spec


def _keys(spec: pytree.TreeSpec) -> Sequence[Any]:
    keys: Sequence[Any] = spec.context if spec.type is dict else range(spec.num_children)
    return keys


def _paths(spec: pytree.TreeSpec, path: str) -> Iterator[str]:
    if spec.is_leaf():
        yield path
        return
    for key, child in zip(_keys(spec), spec.children(), strict=True):
        yield from _paths(child, f"{path}[{key!r}]")


def _shape(spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return "one value"
    if spec.type is dict:
        return f"a dict of {', '.join(map(repr, spec.context)) or 'nothing'}"
    return f"a {spec.type.__name__} of {spec.num_children}"


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The permutation that makes `tensor` contiguous; that of no change, if there is no other."""
    unchanged = tuple(range(tensor.dim()))
    strides = tensor.stride()
    channels_last = (*unchanged[:1], *unchanged[2:], *unchanged[1:2])
    by_stride = tuple(sorted(unchanged, key=lambda dim: -strides[dim]))
    # Strides of dimensions of one element say nothing, so the usual orders come first.
    orders = (unchanged, channels_last, by_stride)
    return next((each for each in orders if tensor.permute(each).is_contiguous()), unchanged)
