"""What the kernel tests of every family share: inputs, samples of schedules, the judgement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from gtco.codegen.program import KernelProgram
from gtco.codegen.sampler import Sampler
from gtco.codegen.sketch import Illegal, Sketch
from gtco.cost_model.judge import Judge, random_values
from gtco.ir.graph import Group
from gtco.passes.dataflow import trace
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import TARGETS, Target

Run = Callable[[KernelProgram, Group, Mapping[str, Tensor]], Mapping[str, Tensor]]

ARCHITECTURES = (TARGETS["sm_80"], TARGETS["sm_90a"])


def inputs_of(group: Group, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """Random values for everything the group reads, negative integers among them."""
    return random_values(group, torch.device(device), seed, range(-100, 100))


def sample(sketch: Sketch, count: int, seed: int = 0) -> list[KernelProgram]:
    """The best default schedule's program and `count` random legal ones."""
    drawn = Sampler((sketch,), seed).random(count) if count else []
    return [next(defaults(sketch)), *(each.program for each in drawn)]


def defaults(sketch: Sketch) -> Iterator[KernelProgram]:
    """The programs of the default schedules that are legal."""
    for schedule in sketch.defaults():
        with suppress(Illegal):
            yield sketch.emit(schedule)


def first_default(sketch: Sketch, **changes: int) -> dict[str, int]:
    """The best default schedule with `changes`."""
    return {**next(iter(sketch.defaults())), **changes}


def compile_for_all(make: Callable[[Target], Sketch], count: int = 1) -> Iterator[str]:
    """Compile a sample for each architecture; yields what is wrong with each kernel."""
    for target in ARCHITECTURES:
        for program in sample(make(target), count):
            compiled = compile_uncached(program.code, program.name, program.arch)
            if compiled.spill_bytes > 64:
                yield f"{dict(program.schedule)} spills {compiled.spill_bytes} B on {target.arch}"


def wrong_outputs(
    program: KernelProgram,
    group: Group,
    values: Mapping[str, Tensor],
    run: Run,
    slack: float = 1e-5,
) -> list[str]:
    """What `program` gets wrong; hardly more than torch eager's own error is allowed, or `slack` of
    an output's size where so few elements are judged that eager's own is chance."""
    verdict = Judge(group, values, slack)(run(program, group, values))
    return [f"{verdict} with {dict(program.schedule)}"] if verdict else []


def wrong_statistics(group: Group, outputs: Mapping[str, Tensor]) -> list[str]:
    """Row statistics among `outputs` that are not those of the rounded values beside them.

    The judge would allow them: those of unrounded values are nearer to fp64.
    """
    graph, wrong = group.graph, []
    stored = {trace(graph, name).base: tensor for name, tensor in outputs.items()}
    for node in graph.nodes:
        if node.op == "row_stats" and (base := trace(graph, node.inputs[0]).base) in stored:
            rows = stored[base].double().reshape(graph.specs[node.inputs[0]].sizes)
            off = (outputs[node.values[0]] - node.definition.reference(rows)).abs()
            if not (off <= 1e-5 * rows.abs().amax()).all():  # NaN is wrong too
                wrong.append(f"%{node.name} is off by {float(off.max())}")
    return wrong
