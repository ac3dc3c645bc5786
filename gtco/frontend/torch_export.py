"""nn.Module, ExportedProgram or GraphModule to a Graph, through `torch.export`.

    capture(model, (image,)) -> Captured(graph, in_spec, ..., out_spec)

The program is exported without Dynamo (`strict=False`), made functional, decomposed except for
what `lowering.TABLE` knows, and lowered node by node. What the table does not have becomes an
`aten` node. Parameters and buffers become constants that share the module's memory.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    InputSpec,
    OutputKind,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from gtco.frontend.complex_parts import Complex, is_complex, stored
from gtco.frontend.context import Context, Number, Unsupported, Value
from gtco.frontend.exporting import exported, quiet, reason_of, within
from gtco.frontend.idle import drop_idle_checks, idle_nodes
from gtco.frontend.literals import fold_literals
from gtco.frontend.lower_complex import ComplexLowerer
from gtco.frontend.lowering import KEPT_AS_ATEN, NAMED, TABLE
from gtco.frontend.refusals import (
    CaptureError,
    check_program,
    check_sizes,
    refuse_mutation,
    refuse_training,
    result_types,
    source,
    where,
)
from gtco.frontend.signature import NamedInputs, leaf_names, memory_order, misfit
from gtco.frontend.taken_apart import taken_apart
from gtco.ir.aten import Slot
from gtco.ir.autocast import autocast_here, no_autocast
from gtco.ir.graph import Graph, GraphBuilder
from gtco.ir.interpreter import ArgumentError
from gtco.ir.spec import TensorSpec

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Captured:
    """A graph and the signature of the module that it came from.

    Args:
        graph: the program.
        in_spec: pytree of (args, kwargs) as `capture` was given them.
        input_positions: for each graph input, its index among the flattened leaves of the call.
        input_literals: leaves that are no tensors, by index: they are baked in.
        out_spec: pytree of the result.
        output_template: for each flattened leaf of the result `Slot(index into graph.outputs)`,
            or the literal it always is.
    """

    graph: Graph
    in_spec: pytree.TreeSpec
    input_positions: tuple[int, ...]
    input_literals: Mapping[int, Any]
    out_spec: pytree.TreeSpec
    output_template: tuple[Any, ...]

    def flatten(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, ...]:
        """One tensor per graph input, as the caller has it, from the arguments of a call.

        Raises:
            ArgumentError: the arguments' structure differs from the captured one, or a leaf that
                was baked in has another value.
        """
        names = self.in_spec.child(1).context
        given = dict(kwargs or {})
        if set(given) == set(names):  # keywords come in any order
            given = {name: given[name] for name in names}
        leaves, spec = pytree.tree_flatten((tuple(args), given))
        if spec != self.in_spec:
            problem = misfit(self.in_spec, self._tensor_names(), args, given)
            raise ArgumentError(f"{problem}; call it the same way, or capture it again")
        for index, literal in self.input_literals.items():
            same = leaves[index] is literal or leaves[index] == literal
            if isinstance(leaves[index], Tensor) or not same:
                name = leaf_names(self.in_spec, self._tensor_names())[index]
                raise ArgumentError(
                    f"argument {name} was {literal!r} when the model was captured and is baked "
                    f"in; capture it again for another value"
                )
        tensors = tuple(leaves[index] for index in self.input_positions)
        for name, tensor in zip(self.graph.inputs, tensors, strict=True):
            if not isinstance(tensor, Tensor):
                raise ArgumentError(
                    f"argument {name} is a {type(tensor).__name__}, not a tensor; pass a tensor "
                    f"of {self.graph.given[name]}"
                )
        return tensors

    def _tensor_names(self) -> dict[int, str]:
        return dict(zip(self.input_positions, self.graph.inputs, strict=True))

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The args and kwargs of a call from one tensor per graph input: `flatten` undone."""
        leaves = dict(self.input_literals)
        leaves.update(zip(self.input_positions, tensors, strict=True))
        args, kwargs = pytree.tree_unflatten([leaves[i] for i in sorted(leaves)], self.in_spec)
        return args, kwargs

    def unflatten(self, outputs: Sequence[Tensor]) -> Any:
        """The model's own result structure from one tensor per graph output."""
        leaves = [outputs[x.index] if isinstance(x, Slot) else x for x in self.output_template]
        return pytree.tree_unflatten(leaves, self.out_spec)


def capture(
    model: nn.Module | ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Captured:
    """Capture `model` for the shapes, dtypes and devices of `args` and `kwargs`.

    Within `torch.autocast` a module is captured as it computes there; what an exported program
    computes is fixed.

    Args:
        model: a module in eval mode (a `GraphModule` is one), or an exported program, which
            brings its own example arguments.
        args: positional example arguments.
        kwargs: keyword example arguments.

    Raises:
        CaptureError: the model is in training mode, cannot be exported, mutates its inputs or
            buffers, or has shapes or dtypes that gtco does not support.
    """
    label = type(model.graph_module if isinstance(model, ExportedProgram) else model).__name__
    if isinstance(args, Tensor) or not isinstance(args, Sequence):
        raise CaptureError(
            f"{label}: args is a {type(args).__name__}; pass a tuple of arguments, such as (x,)"
        )
    regions = autocast_here()
    with torch.no_grad(), no_autocast(), quiet():
        if isinstance(model, ExportedProgram):
            program = model
        else:
            refuse_training(model, label)
            inside = within(regions, model)
            program = exported(inside, tuple(args), dict(kwargs or {}), label)
            drop_idle_checks(program)
            fold_literals(program)
        check_program(program, label)
        stated = result_types(program)
        try:
            program = program.run_decompositions(_decompositions())
        except Exception as error:
            raise CaptureError(
                f"{label}: its exported program cannot be made functional ({reason_of(error)}); "
                f"rewrite the operation that this names"
            ) from error
        check_sizes(program, label)  # a functional program has lost those of what is written to
        if result_types(program) != stated:
            raise CaptureError(
                f"{label}: torch makes a program functional whose results are of other types "
                f"({result_types(program)} for {stated}): it leaves autocast out around operators "
                f"that it takes apart, such as einsum; call torch.matmul there, or cast"
            )
        names = model.input_names if isinstance(model, NamedInputs) else ()
        captured = _Lowerer(program, label, names).run()
    if isinstance(model, ExportedProgram) and (args or kwargs):
        _check_examples(captured, args, kwargs or {}, label)
    return captured


def _check_examples(
    captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any], label: str
) -> None:
    """Refuse example arguments that are not those that a program was exported for."""
    try:
        tensors = captured.flatten(args, kwargs)
    except ArgumentError as error:
        raise CaptureError(f"{label}: {error}") from error
    for (name, spec), tensor in zip(captured.graph.given.items(), tensors, strict=True):
        if TensorSpec.of(tensor) != spec:
            raise CaptureError(
                f"{label}: the example argument {name} is {TensorSpec.of(tensor)}, and the "
                f"program was exported for {spec}; leave args out, or export it again for them"
            )


def _decompositions() -> Any:
    table = torch.export.default_decompositions()
    for overload in (*TABLE, *KEPT_AS_ATEN):
        table.pop(overload, None)  # type: ignore[no-untyped-call]
    table.update(taken_apart())  # type: ignore[no-untyped-call]
    return table


READ_MEMORY = frozenset(
    (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
)
"""Operators whose result depends on how their first operand lies in memory."""


TAKE_NUMBERS = frozenset((aten.select.int,))
"""Operators whose lowering takes a number that is read out of a tensor."""


class _Lowerer:
    """Walks one decomposed program; `values` maps its nodes to ours."""

    def __init__(self, program: ExportedProgram, label: str, names: Sequence[str]) -> None:
        self.program = program
        self.label = label
        self.names = names
        self.builder = GraphBuilder()
        self.context = Context(self.builder)
        self.complex = ComplexLowerer(
            self.context, lambda target, *args, **kwargs: self._lowered(target, list(args), kwargs)
        )
        self.values: dict[str, Any] = {}
        self.constants: dict[tuple[Any, ...], Value | Complex] = {}

    def run(self) -> Captured:
        positions, literals = self._inputs()
        idle = idle_nodes(self.program)
        for node in self.program.graph.nodes:
            if node in idle:
                continue
            if node.op == "call_function":
                self.values[node.name] = self._call(node)
            elif node.op not in ("placeholder", "output"):  # steps that an operator of torch runs
                user = next(iter(node.users), node)
                raise CaptureError(
                    f"{self.label}: {where(user)} ({user.target}) chooses or repeats steps, which "
                    f"gtco does not capture; write a choice by values as torch.where, a fixed "
                    f"number of steps as a loop of Python, or leave it outside the model"
                )
        outputs, template = self._outputs()
        self._drop_unused_constants(outputs)
        spec = self.program.call_spec
        assert spec.in_spec is not None and spec.out_spec is not None
        return Captured(
            self.builder.build(outputs), spec.in_spec, positions, literals, spec.out_spec, template
        )

    # -- signature ---------------------------------------------------------------------------

    def _inputs(self) -> tuple[tuple[int, ...], dict[int, Any]]:
        positions: list[int] = []
        literals: dict[int, Any] = {}
        leaf = 0
        fakes = {n.name: n.meta.get("val") for n in self.program.graph.nodes}
        for spec in self.program.graph_signature.input_specs:
            name = getattr(spec.arg, "name", "")
            if spec.kind is not InputKind.USER_INPUT:
                self.values[name] = self._stored(spec)
                continue
            if isinstance(spec.arg, TensorArgument):
                hint = self.names[leaf] if self.names else name
                self.values[name] = self._input(hint, fakes[name])
                positions.append(leaf)
            elif isinstance(spec.arg, ConstantArgument):
                literals[leaf] = self.values[name] = spec.arg.value
            else:
                raise CaptureError(
                    f"{self.label}: argument {name} is a {type(spec.arg).__name__}; pass tensors, "
                    f"or Python numbers, strings and None"
                )
            leaf += 1
        return tuple(positions), literals

    def _input(self, hint: str, example: Tensor) -> Value:
        """An argument that lies in memory as its example does.

        x: f32[1,3,8,8], channels_last -> permute(x: f32[1,8,8,3] of [0, 2, 3, 1])
        """
        if example.is_complex():
            raise CaptureError(
                f"{self.label}: argument {hint} is {example.dtype}, which no kernel takes; pass "
                f"torch.view_as_real(x), and call torch.view_as_complex within the model"
            )
        order = memory_order(example)
        if order == tuple(range(example.dim())):
            return Value(self.builder.input(hint, TensorSpec.of(example)))
        name = self.builder.input(hint, TensorSpec.of(example.permute(order)), order)
        return self.context.permute(Value(name), (order.index(dim) for dim in range(len(order))))

    def _stored(self, spec: InputSpec) -> Value | Complex:
        """The constant of a parameter, a buffer or a lifted tensor; tied ones are one."""
        target = str(spec.target)
        tensor = self.program.state_dict.get(target, self.program.constants.get(target))
        if not isinstance(tensor, Tensor):
            raise CaptureError(
                f"{self.label}: {target} is a {spec.kind.name.lower()}, not a tensor; gtco cannot "
                f"run it; leave that part outside the model"
            )
        key = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if key not in self.constants:
            constant = stored if tensor.is_complex() else Context.constant
            self.constants[key] = constant(self.context, target, tensor)
        return self.constants[key]

    def _outputs(self) -> tuple[list[str], tuple[Any, ...]]:
        names: list[str] = []
        template: list[Any] = []
        for spec in self.program.graph_signature.output_specs:
            if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
                refuse_mutation(spec.kind, str(spec.target), self.label)
            if isinstance(spec.arg, ConstantArgument):
                template.append(spec.arg.value)
                continue
            value = self.values[spec.arg.name]
            if isinstance(value, Number):
                raise CaptureError(
                    f"{self.label}: the model returns a number that is read out of a tensor "
                    f"({spec.arg.name}); return the tensor"
                )
            if isinstance(value, Complex):
                raise CaptureError(
                    f"{self.label}: the model returns complex numbers ({spec.arg.name}); return "
                    f"torch.view_as_real of them"
                )
            template.append(Slot(len(names)))
            names.append(value.name)
        return names, tuple(template)

    def _drop_unused_constants(self, outputs: list[str]) -> None:
        read = {name for node in self.builder.nodes for name in node.inputs}.union(outputs)
        for name in [name for name in self.builder.constants if name not in read]:
            del self.builder.constants[name], self.builder.specs[name]

    # -- nodes -------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> Any:
        args, kwargs = self._resolve(node.args), self._resolve(dict(node.kwargs))
        target = node.target
        if target is operator.getitem:
            return args[0][args[1]]
        if isinstance(target, OpOverload) and not target._schema.returns:
            return None  # an assertion, which the exporter proved or the shapes imply
        self._refuse_numbers(node, args, kwargs)
        if not isinstance(target, OpOverload):
            raise CaptureError(
                f"{self.label}: {where(node)} calls {target}, which is no ATen operator (control "
                f"flow or autocast inside the model?); move it outside the model"
            )
        self.context.source = source(node)
        self.context.device = _device(node)
        self.context.used_outputs = _used_outputs(node)
        if target in READ_MEMORY:
            self._refuse_strided(node)
        before = len(self.builder.nodes)
        try:
            if is_complex((args, kwargs, node.meta["val"])):
                return self.complex.call(target, args, kwargs, node.meta["val"])
            return self._lowered(target, args, kwargs, node.meta["val"])
        except CaptureError:
            raise
        except Unsupported as error:
            raise CaptureError(
                f"{self.label}: {where(node)} ({target}) {error}, or leave it outside the model"
            ) from error
        except Exception as error:
            del self.builder.nodes[before:]
            if (known := self._without_elements(node)) is not None:
                return known
            raise CaptureError(
                f"{self.label}: {where(node)} ({target}) cannot be lowered ({reason_of(error)}); "
                f"leave it outside the model, or report it with this message"
            ) from error

    def _lowered(
        self, target: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], made: Any = None
    ) -> Any:
        """A call by the table, or as an `aten` node: where there is no lowering, or where it gives
        something else than `made`, an example."""
        lowering = TABLE.get(target) or NAMED.get(str(target))
        before = len(self.builder.nodes)
        lowered = None if lowering is None else lowering(self.context, *args, **kwargs)
        if lowered is None or (made is not None and not self._is_of(lowered, made)):
            del self.builder.nodes[before:]
            return self._fallback(target, args, kwargs)
        return lowered

    def _without_elements(self, node: fx.Node) -> Any:
        """The results of `node`, if they have no element and so nothing to compute. Operators that
        run on empty tensors do not always have a shape rule that does."""
        values = node.meta["val"]
        several = isinstance(values, (list, tuple))
        tensors = values if several else (values,)
        if not all(isinstance(each, Tensor) and each.numel() == 0 for each in tensors):
            return None
        made = [
            self.context.constant(node.name, torch.empty(each.shape, dtype=each.dtype))
            for each in tensors
        ]
        return tuple(made) if several else made[0]

    def _refuse_numbers(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Refuse to compute with a number that is read out of a tensor; it may be an index.

        Eager takes a uint8 index for a mask, which torch.export does not.
        """
        leaves = pytree.tree_leaves((args, kwargs))
        dtypes = {self.context.dtype(leaf.value) for leaf in leaves if isinstance(leaf, Number)}
        if dtypes and (node.target not in TAKE_NUMBERS or torch.uint8 in dtypes):
            raise CaptureError(
                f"{self.label}: {where(node)} ({node.target}) depends on a number that is read "
                f"out of a tensor (.item(), or int(), float() or bool() of it); compute with the "
                f"tensor itself, or index with one of int64"
            )

    def _refuse_strided(self, node: fx.Node) -> None:
        """Values lie contiguous in gtco, so what reads their memory must mean that layout."""
        read = node.args[0].meta["val"]  # type: ignore[union-attr]
        if not read.is_contiguous() or read.untyped_storage().nbytes() != read.nbytes:
            raise CaptureError(
                f"{self.label}: {where(node)} ({node.target}) reads the memory of a view or of a "
                f"tensor that is not contiguous; call .contiguous() on that tensor, or index it"
            )

    def _is_of(self, lowered: Any, expected: Any) -> bool:
        """Whether a lowering gave what the operator gives, shape by shape and dtype by dtype; where
        its ops promote otherwise than the operator, the operator itself stands."""
        if isinstance(lowered, tuple):
            return all(map(self._is_of, lowered, expected))
        return not isinstance(lowered, Value) or self.context.spec(lowered) == TensorSpec.of(
            expected
        )

    def _resolve(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.values[argument.name]
        if isinstance(argument, (list, tuple)):
            return [self._resolve(item) for item in argument]
        if isinstance(argument, dict):
            return {key: self._resolve(item) for key, item in argument.items()}
        return argument

    def _fallback(self, target: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An `aten` node; without tensor inputs the result is known now."""
        inputs: list[str] = []

        def slot(argument: Any) -> Any:
            if isinstance(argument, Value):
                if argument.name not in inputs:
                    inputs.append(argument.name)
                return Slot(inputs.index(argument.name))
            return tuple(map(slot, argument)) if isinstance(argument, list) else argument

        attrs = {
            "target": str(target),
            "args": slot(args),
            "kwargs": tuple((key, slot(item)) for key, item in kwargs.items()),
        }
        name = target._schema.name.split("::")[-1]
        if not inputs and torch.Tag.nondeterministic_seeded not in target.tags:
            result = target(*args, **kwargs)
            if isinstance(result, Tensor):
                return self.context.constant(name, result)
            return tuple(self.context.constant(name, tensor) for tensor in result)
        values = self.builder.node("aten", inputs, attrs, hint=name, source=self.context.source)
        many = len(target._schema.returns) > 1 or "[]" in str(target._schema.returns[0].type)
        return tuple(map(Value, values)) if many else Value(values[0])


def _device(node: fx.Node) -> torch.device:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (list, tuple)) else value
    return first.device if isinstance(first, Tensor) else torch.device("cpu")


def _used_outputs(node: fx.Node) -> frozenset[int]:
    return frozenset(
        int(user.args[1]) if user.target is operator.getitem else 0  # type: ignore[arg-type]
        for user in node.users
    )
