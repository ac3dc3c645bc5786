"""Everything about one compilation as files: `gtco inspect MODEL --dump DIR` and `GTCO_DUMP=DIR`.

00-captured.txt ... NN-fused.txt   the graph as captured, after each pass, and its groups
gtco_gemm_ab12.cu, .cubin, .log    each kernel's source, code and what the assembler said
kernels.txt                        registers, shared memory and spills of each kernel
captured.safetensors, repro.py     the captured model with its weights, and what runs it again
calibration.json                   of fp8, unless it was given as a file
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gtco.frontend.torch_export import Captured
from gtco.passes import PIPELINE
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.encoding import EncodingError, decode_graph, encode_graph
from gtco.runtime.infos import kernel_infos
from gtco.runtime.plan import Plan
from gtco.runtime.signature_encoding import decode_signature, encode_signature

log = logging.getLogger("gtco.codegen")

CAPTURED = "captured.safetensors"
REPRO = "repro.py"
CALIBRATION = "calibration.json"

_numbers = itertools.count(1)


def environment_folder() -> Path | None:
    """Where `GTCO_DUMP` wants the next compilation: its folder, then `2`, `3`, ... in it."""
    text = os.environ.get("GTCO_DUMP")
    if not text:
        return None
    number = next(_numbers)
    return Path(text) if number == 1 else Path(text) / str(number)


def write_plan(folder: Path, plan: Plan) -> None:
    """Write the groups and the kernels' sources; the passes write their own graphs.

    Raises:
        OSError: the folder takes no files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{len(PIPELINE) + 1:02}-fused.txt").write_text(f"{plan.fused.text(fold=False)}\n")
    for launch in plan.launches:
        if launch.program is not None:
            (folder / f"{launch.program.name}.cu").write_text(launch.program.code)


def write_repro(folder: Path, plan: Plan, captured: Captured) -> None:
    """Write the captured model and the script that runs it; warn if no file can hold the model.

    Raises:
        OSError: the folder takes no files.
    """
    try:
        _write_captured(folder / CAPTURED, captured)
    except EncodingError as error:
        log.warning("no %s in %s: %s", REPRO, folder, error)
        return
    known = plan.options.calibration
    if known is not None and not isinstance(known, str):
        known.save(folder / CALIBRATION)
    (folder / REPRO).write_text(_repro(plan))


def write_kernels(folder: Path, plan: Plan, kernels: Mapping[str, CompiledKernel]) -> None:
    """Write the plan's cubins, the assembler's messages and the table of what they need.

    Raises:
        OSError: the folder takes no files.
    """
    groups: dict[str, list[str]] = {}
    for launch in plan.launches:
        if launch.program is not None:
            groups.setdefault(launch.program.name, []).append(launch.group.name)
    lines = []
    for info in kernel_infos(plan, kernels):
        kernel = kernels[info.name]
        (folder / f"{info.name}.cubin").write_bytes(kernel.cubin)
        (folder / f"{info.name}.log").write_text(kernel.log)
        lines.append(
            f"{info.name} ({kernel.arch}): {info.registers} registers, {info.smem_bytes} bytes of "
            f"shared memory, {info.spill_bytes} bytes spilled, {info.cubin_bytes} bytes of code\n"
            f"  {', '.join(groups[info.name])}\n"
        )
    (folder / "kernels.txt").write_text("".join(lines))


# -- the repro -------------------------------------------------------------------------------------


def _write_captured(path: Path, captured: Captured) -> None:
    """The captured graph, its weights (equal ones once) and its signature; nothing is pickled."""
    parts: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in captured.graph.constants.items():
        names[name] = part = parts.setdefault(id(tensor), name)
        if part not in tensors:
            tensors[part] = tensor.detach().to("cpu", copy=True).contiguous()
    content = {
        "graph": encode_graph(captured.graph, names),
        "signature": encode_signature(captured),
    }
    save_file(tensors, path, {"captured": json.dumps(content)})


def read_captured(path: str | os.PathLike[str]) -> Captured:
    """The captured model that a dump holds, on the CPU.

    Raises:
        OSError, SafetensorError: it cannot be read.
        EncodingError: its contents are not those of a dump.
    """
    with safe_open(os.fspath(path), framework="pt") as file:
        content = json.loads((file.metadata() or {})["captured"])
        # copies: the file may change while it is mapped, and kernels want aligned weights
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    captured = decode_signature(content["signature"])
    return replace(captured, graph=decode_graph(content["graph"], tensors))


def _repro(plan: Plan) -> str:
    options = plan.options.keywords() | {"target": plan.options.target or plan.target.arch}
    given = {key: repr(value) for key, value in options.items()}
    if not isinstance(options["calibration"], (str, NoneType)):
        given["calibration"] = f"Path(__file__).with_name({CALIBRATION!r})"
    text = _REPRO.replace("CAPTURED", repr(CAPTURED)).replace("GROUPS", str(len(plan.launches)))
    return text.replace("OPTIONS", ", ".join(f"{key}={value}" for key, value in given.items()))


_REPRO = '''"""Compile the model beside this file again, run its groups one by one, and judge each.

    python repro.py [TARGET] [GROUP]     TARGET "host" needs no GPU; GROUP is a name in *-fused.txt

The model has GROUPS groups. The exit code is 1 if one of them is wrong.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import NoneType

from gtco.benchmarking.compare import check_groups, random_inputs
from gtco.compiler import compile_captured
from gtco.reporting.dump import read_captured
from gtco.options import Options

options = Options.of(OPTIONS)
if len(sys.argv) > 1:
    options = replace(options, target=sys.argv[1])

captured = read_captured(Path(__file__).with_name(CAPTURED))
compiled = compile_captured(captured, options)
inputs = random_inputs(captured, compiled.prepare().device, seed=0)
checks = [
    check
    for check in check_groups(compiled, inputs)
    if len(sys.argv) < 3 or check.group == sys.argv[2]
]
if not checks:
    sys.exit(f"the model has no group {sys.argv[2]!r}")
for check in checks:
    print(check)
sys.exit(any(not check.verdict.ok for check in checks))
'''
