"""Build TensorRT's engines of the tables' models ahead, several side by side.

    python -m experiments.engines FOLDER --tensorrt-python PATH [--rows vit_b16,unet] [--jobs 4]

Building is CPU work for the most part and takes minutes a model; the tables take the engines from
`--engines FOLDER` and time each alone. What cannot be built, or takes longer than `--patience`, is
noted there with its reason and not tried again. Each model has a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments import e2e, subgraphs
from experiments.suites.run import NO_GPU
from gtco.benchmarking.onnx_peer import export_onnx
from gtco.benchmarking.rounds import one_line
from gtco.benchmarking.tensorrt_peer import TensorRTRunner

ROWS = {row.name: row for row in (*e2e.ROWS, *subgraphs.ROWS)}


def build(name: str, folder: Path, python: Path, patience: float, quick: bool) -> str:
    """What came of building the engine of a row."""
    located = ROWS[name].cases(quick)[""]()
    with tempfile.TemporaryDirectory() as work, TensorRTRunner(python) as runner:
        file = Path(work) / "model.onnx"
        try:
            export_onnx(located.module, located.args, file)
            facts = runner.build(file, folder, patience)
        except Exception as error:
            return f"no engine: {one_line(error)}"
        built = f"built in {facts['build_s']:.0f} s" if facts["build_s"] else "was there"
        return f"{built}, {facts['engine_bytes'] / 1e6:.0f} MB, TensorRT {runner.version}"


def in_process(words: Sequence[str], name: str, quick: bool) -> str:
    """What a process of its own says at last."""
    run = subprocess.run(
        [sys.executable, "-m", "experiments.engines", *words, "--only", name],
        capture_output=True,
        text=True,
        env={**os.environ, **(NO_GPU if quick else {})},
    )
    lines = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines()
    return f"{name}: {lines[-1] if lines else f'its process ended with {run.returncode}'}"


def main(words: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tensorrt-python", type=Path, required=True)
    parser.add_argument("--rows", help=f"of {', '.join(ROWS)}; all by default")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--patience", type=float, default=400.0, help="seconds for a model")
    parser.add_argument("--quick", action="store_true", help="small relatives, on the CPU")
    parser.add_argument("--only", choices=ROWS, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.only:
        print(build(given.only, given.folder, given.tensorrt_python, given.patience, given.quick))
        return
    names = given.rows.split(",") if given.rows else list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows: there is no {', '.join(unknown)}; there are {', '.join(ROWS)}")
    with ThreadPoolExecutor(given.jobs) as pool:
        for said in pool.map(lambda name: in_process(words, name, given.quick), names):
            print(said, flush=True)


if __name__ == "__main__":
    main()
