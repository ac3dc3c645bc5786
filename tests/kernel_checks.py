"""What the kernel tests of every family share: inputs, samples of schedules, the judgement."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import Sketch
from gtco.graph import Group
from gtco.interpreter import interpret
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import TARGETS, Target

Run = Callable[[KernelProgram, Group, Mapping[str, Tensor]], Mapping[str, Tensor]]

ARCHITECTURES = (TARGETS["sm_80"], TARGETS["sm_90a"])


def inputs_of(group: Group, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """Random values for everything the group reads; statistics are not negative."""
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    for name, spec in group.graph.inputs.items():
        if spec.dtype.is_floating_point:
            value = torch.randn(spec.sizes, generator=generator)
            value = (value.abs() if name == "stats" else value).to(spec.dtype)
        elif spec.dtype == torch.bool:
            value = torch.rand(spec.sizes, generator=generator) < 0.5
        else:
            value = torch.randint(-100, 100, spec.sizes, generator=generator).to(spec.dtype)
        values[name] = value.to(device)
    return values


def sample(sketch: Sketch, count: int, seed: int = 0) -> list[KernelProgram]:
    """The best default schedule's program and `count` random legal ones."""
    first = sketch.emit(next(iter(sketch.defaults())))
    legal = [program for _, program in itertools.islice(sketch.legal(), 1000)]
    return [first, *random.Random(seed).sample(legal, min(count, len(legal)))]


def compile_for_all(make: Callable[[Target], Sketch], count: int = 1) -> Iterator[str]:
    """Compile a sample for each architecture; yields what is wrong with each kernel."""
    for target in ARCHITECTURES:
        for program in sample(make(target), count):
            compiled = compile_uncached(program.code, program.name, program.arch)
            if compiled.spill_bytes > 64:
                yield f"{dict(program.schedule)} spills {compiled.spill_bytes} B on {target.arch}"


def wrong_outputs(
    program: KernelProgram, group: Group, values: Mapping[str, Tensor], run: Run
) -> list[str]:
    """What `program` gets wrong against fp64, in proportion to what torch eager gets wrong."""
    graph = group.graph
    args = [values[name] for name in graph.inputs]
    exact = interpret(graph, args, dtype=torch.float64)
    eager = interpret(graph, args)
    outputs = run(program, group, values)
    found = []
    for name, reference, torch_eager in zip(graph.outputs, exact, eager, strict=True):
        ours = outputs[name]
        where = f"%{name} with {dict(program.schedule)}"
        if not ours.dtype.is_floating_point:
            if not torch.equal(ours, torch_eager):
                found.append(f"{where}: {int((ours != torch_eager).sum())} elements differ")
            continue
        if not torch.equal(ours.isnan(), torch_eager.isnan()):
            found.append(f"{where}: NaN elsewhere than in torch")
            continue
        ours, reference, torch_eager = (
            x.double().nan_to_num() for x in (ours, reference, torch_eager)
        )
        error, allowed, size = (
            float(x.square().mean().sqrt())
            for x in (ours - reference, torch_eager - reference, reference)
        )
        if error > 3 * allowed + 1e-5 * size:
            found.append(f"{where}: RMSE {error:.2e}, torch's is {allowed:.2e}")
    return found
