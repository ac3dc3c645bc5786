"""A smaller program that fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.judge import Outcome, judge
from tests.fuzz.program import Program, case_of


def shrunk(program: Program, outcome: Outcome, target: str | None = None) -> Program:
    """`program` reduced to what fails like `outcome`: at the same stage, and a crash with the same
    kind of exception."""

    def like(other: Outcome) -> bool:
        same = (other.kind, other.stage) == (outcome.kind, outcome.stage)
        return same and (other.kind == "wrong" or other.detail[:30] == outcome.detail[:30])

    def fails(candidate: Program) -> bool:
        try:
            case = case_of(candidate)
        except (SyntaxError, RuntimeError):
            return False
        return like(judge(case, target))

    return shrink(program, fails)


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Drop outputs, lines, inputs and weights for as long as `fails` stays true.

    Args:
        fails: whether a program shows the failure; one that does not run does not.
    """
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            if fails(candidate):
                program, smaller = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    if len(program.outputs) > 1:
        for name in dict.fromkeys(program.outputs):
            yield replace(program, outputs=(name,))
        for index in range(len(program.outputs)):
            rest = program.outputs[:index] + program.outputs[index + 1 :]
            yield replace(program, outputs=rest)
    for line in reversed(program.lines):  # return earlier, with what the line makes
        made = re.findall(r"\bv\d+\b", line.partition(" = ")[0]) if " = " in line else []
        if made and tuple(made) != program.outputs:
            cut = program.lines[: program.lines.index(line) + 1]
            if len(cut) < len(program.lines):
                yield replace(program, lines=cut, outputs=tuple(made))
    for index in reversed(range(len(program.lines))):
        yield replace(program, lines=program.lines[:index] + program.lines[index + 1 :])
    text = "\n".join((*program.lines, *program.outputs))
    for table in ("inputs", "weights"):
        makers = getattr(program, table)
        unused = [name for name in makers if not re.search(rf"\b{name}\b", text)]
        if unused and (table == "weights" or len(makers) > len(unused)):
            kept = {name: maker for name, maker in makers.items() if name not in unused}
            yield replace(program, **{table: kept})
    for index, line in enumerate(program.lines):  # read an input in place of a value
        for name in dict.fromkeys(re.findall(r"\bv\d+\b", line.partition(" = ")[2])):
            for given in program.inputs:
                other = (
                    line.partition(" = ")[0]
                    + " = "
                    + re.sub(rf"\b{name}\b", given, line.partition(" = ")[2])
                )
                lines = (*program.lines[:index], other, *program.lines[index + 1 :])
                yield replace(program, lines=lines)
