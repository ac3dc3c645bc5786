"""How many sums of e4m3 may be left to the tensor cores: what more of K costs and brings.

    python -m experiments.studies.fp8_promotion OUT.json [--programs N] [--quick]

Of each linear of ViT-L/16 and ViT-H/14 the first N defaults run with sums that are promoted to
fp32 every 128, 256, 512, 1024 and 4096 of K, at both depths. The error of each is that of its fp32
result against fp64, in relation to the result's size; what e4m3 itself loses is not in it. Times
are of chains, in interleaved runs. With --quick small ones run on the CPU, in the host build, whose
sums lose nothing: a rehearsal that claims no times and no errors.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.op_rivals import SEED, alternated, generated, said
from experiments.publish import markdown, microseconds, provenance, publish
from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.gemm import FP8, PROMOTED_ATOMS
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.cost_model.judge import random_values
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.runtime.device import resolve_device
from gtco.runtime.host import run_on_host
from gtco.runtime.run import run_group
from gtco.target import HOST, Target
from tests.faults.templates import planted

ATOMS = (1, 2, 4, 8, 32)
"""Of 128 of K, whose sums the tensor cores add up."""
SCALE = 2.0**-17
LINEARS: Mapping[str, tuple[int, int, int]] = {
    "L, QKV": (197, 1024, 3072),
    "L, projection": (197, 1024, 1024),
    "L, FC1": (197, 1024, 4096),
    "L, FC2": (197, 4096, 1024),
    "H, QKV": (257, 1280, 3840),
    "H, FC2": (257, 5120, 1280),
}
"""Name to rows, K and columns."""


def group_of(rows: int, k: int, columns: int) -> Group:
    """A product whose sums are its result, scaled down."""
    b = GraphBuilder()
    generator = torch.Generator().manual_seed(SEED)
    weights = (torch.randn(columns, k, generator=generator) * 64).to(FP8)
    x = b.input("x", TensorSpec((1, rows, k), FP8))
    y = b.add("linear", x, b.constant("w", weights), out_dtype=torch.float32)
    return Group("fp8_sums", b.build([b.add("mul", y, b.constant("scale", torch.tensor([SCALE])))]))


def promoting(program: KernelProgram, atoms: int) -> KernelProgram:
    """`program` with sums promoted every `atoms` of 128 of K."""
    said_by = "PROMOTED_ATOMS = {};"
    return planted(program, said_by.format(PROMOTED_ATOMS), said_by.format(atoms))


def error_of(result: Mapping[str, Tensor], group: Group, values: Mapping[str, Tensor]) -> float:
    """In relation to the exact sums."""
    (name,) = group.graph.outputs
    exact = values["x"].double() @ values["w"].double().T * SCALE
    return float((result[name].double() - exact).norm() / exact.norm())


def row(name: str, target: Target, device: torch.device, programs: int, quick: bool) -> Any:
    """The result of one linear, ready for JSON."""
    sizes = (19, 656, 64) if quick else LINEARS[name]
    group = group_of(*sizes)
    sketch = GemmWgmma(group, target)
    clocks: dict[str, Any] = {}
    found: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    values = dict(random_values(group, device, SEED))  # and activations as behind GELU
    drawn = torch.randn(values["x"].shape, generator=torch.Generator().manual_seed(SEED))
    values["x"] = torch.nn.functional.gelu(drawn * 32).to(device).to(FP8)
    for schedule, depth, atoms in itertools.product(
        itertools.islice(sketch.defaults(), programs), (0, 1), ATOMS
    ):
        label = f"{dict(schedule)}, depth {depth}, {atoms}"
        try:
            program = promoting(sketch.emit({**schedule, "depth": depth}), atoms)
            ran = (run_on_host if quick else run_group)(program, group, values)
            found.append({"schedule": dict(schedule), "depth": depth, "atoms": atoms,
                          "label": label, "error": error_of(ran, group, values)})  # fmt: skip
            if not quick:
                (maker,) = generated(program, group, device).values()
                clocks[label] = maker().time_us
        except Illegal as refusal:
            errors[label] = str(refusal)
        except Exception as failure:  # a program that fails or is too far off spoils no other
            errors[label] = said(failure)
    rounds_us = alternated(clocks)
    for each in found:
        rounds = rounds_us.get(each.pop("label"))
        each["us"] = statistics.median(rounds) if rounds else None
    return {"linear": name, "programs": found, "errors": errors}


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line for each depth and interval of a linear: its best program."""
    cells = []
    for each, depth, atoms in itertools.product(rows, (0, 1), ATOMS):
        ran = [one for one in each["programs"] if (one["depth"], one["atoms"]) == (depth, atoms)]
        if ran:
            best = min(ran, key=lambda one: one["us"] or 0.0)
            cells.append((
                each["linear"], str(depth), str(128 * atoms), microseconds(best["us"]),
                f"{best['error']:.1e}",
            ))  # fmt: skip
    return markdown(("linear", "depth", "promoted every", "best, us", "error of its sums"), cells)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--programs", type=int, default=6, help="of each linear")
    parser.add_argument("--quick", action="store_true", help="a rehearsal on the CPU, no times")
    given = parser.parse_args()
    device = resolve_device(HOST if given.quick else None)
    begun = time.monotonic()
    torch_device = torch.device("cpu") if given.quick else torch.device("cuda", 0)
    names = list(LINEARS)[:1] if given.quick else LINEARS
    rows = [row(each, device.target, torch_device, given.programs, given.quick) for each in names]
    found = {"device": device.name, "seconds": time.monotonic() - begun, "rows": rows}
    result = {"experiment": "fp8_promotion", **provenance("studies.fp8_promotion"), **found}
    publish(given.out, result, table(rows), lambda: None)


if __name__ == "__main__":
    main()
