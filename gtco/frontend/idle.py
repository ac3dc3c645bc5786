"""Nodes of an exported program that compute nothing of the result from the inputs: checks of what
is constant, such as that the scale of a norm is positive."""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument


def idle_nodes(program: ExportedProgram) -> set[fx.Node]:
    """Calls that neither read an input nor are read by one that does, nor by a result."""
    nodes = program.graph.nodes
    given = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
    }
    lowered: set[fx.Node] = set()
    for node in nodes:
        if node.name in given or not lowered.isdisjoint(node.all_input_nodes):
            lowered.add(node)
    for node in reversed(nodes):
        if node.op == "output" or node in lowered:
            lowered.update(node.all_input_nodes)
    return {node for node in nodes if node.op == "call_function" and node not in lowered}


def drop_idle_checks(program: ExportedProgram) -> None:
    """Take assertions about constants, and what is computed for them alone, out of a program that
    torch has just exported: torch 2.11 cannot make them functional.

    What writes to a tensor stays, since somebody else may see it there.
    """
    idle = idle_nodes(program)
    for node in reversed(program.graph.nodes):
        check = node.target is torch.ops.aten._assert_scalar.default
        if node in idle and not node.users and (check or not writes(node)):
            program.graph.erase_node(node)
    program.graph_module.recompile()


def writes(node: fx.Node) -> bool:
    """Whether `node` changes a tensor that it reads."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable
