"""What a kernel is bound to: the operators it computes, and which of their values each argument is.

Its digest is part of the kernel's name, so that a plan from a file can be held against the code
that comes with it: after any change of the plan no kernel has the name that follows from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from gtco.codegen.program import Argument
from gtco.ir.graph import Graph


class Binding:
    """A group's operators by position, without a name of a value or a weight's contents.

    Args:
        graph: of the group.
    """

    def __init__(self, graph: Graph) -> None:
        made = (value for node in graph.nodes for value in node.values)
        values = (*graph.inputs, *graph.constants, *made)
        self._position = {name: at for at, name in enumerate(values)}
        lines = [f"{len(graph.inputs)} inputs"]
        lines += [str(graph.specs[name]) for name in (*graph.inputs, *graph.constants)]
        for node in graph.nodes:
            operands = [self._position[name] for name in node.inputs]
            results = ", ".join(map(str, node.outputs))
            lines.append(f"{node.op} {operands} {sorted(node.attrs.items())!r} {results}")
        lines.append(f"{[self._position[name] for name in graph.outputs]}")
        self._text = "\n".join(lines)

    def digest(self, arguments: Iterable[Argument]) -> str:
        """Equal for launches that do the same work with the same arguments.

        Args:
            arguments: of a kernel that computes the group.
        """
        order = [self._position.get(argument.value, -1) for argument in arguments]
        return hashlib.sha256(f"{self._text}\n{order}".encode()).hexdigest()[:16]
