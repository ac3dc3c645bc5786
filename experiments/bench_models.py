"""`gtco bench` for several models in one process: one JSON object a line.

    python -m experiments.bench_models OUT.jsonl CASE... [--rounds N] [--calls N]
                                       [--without CONTESTANT]

CASE is `MODEL[@PRECISION][:PEERS]`, with the model as for the command line and peers joined by
"+": `experiments.models.vit:vit_b16:eager+inductor`. A case that fails is written with its error.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from experiments.publish import provenance
from gtco.benchmarking.answers import parse_peers
from gtco.benchmarking.bench import bench
from gtco.benchmarking.contestants import PEERS
from gtco.locate import locate
from gtco.options import Options


def run(case: str, rounds: int, calls: int, without: Collection[str]) -> dict[str, Any]:
    parts = case.split(":")
    function, _, precision = parts[1].partition("@")
    name = f"{parts[0]}:{function}"
    options = Options.of(precision=precision or None)
    peers = parse_peers(parts[2].replace("+", ","), PEERS) if len(parts) > 2 else ()
    started = time.time()
    result = bench(
        locate(name),
        options,
        peers,
        without=without,
        rounds=rounds,
        calls=calls,
        tell=lambda line: print(f"{time.time() - started:.0f} s: {line}", file=sys.stderr),
    )
    return {
        "model": name,
        "options": dataclasses.asdict(options),
        **result.to_dict(),
        "seconds": time.time() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--without", action="append", default=[], help="a contestant (repeat)")
    given = parser.parse_args()
    here = provenance("bench_models")
    with given.out.open("a") as lines:
        for case in given.cases:
            try:
                found = run(case, given.rounds, given.calls, given.without)
            except Exception as error:
                found = {"model": case, "error": f"{type(error).__name__}: {error}"}
            lines.write(json.dumps({**found, **here}, default=str) + "\n")
            lines.flush()
            print(case, _summary(found), flush=True)
            gc.collect()
            torch.cuda.empty_cache()


def _summary(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])[:300]
    verdicts = found["verdicts"]["gtco"]
    words = [f"{'right' if all(v['ok'] for v in verdicts.values()) else 'WRONG'}"]
    for name, timing in found["timings"].items():
        single = timing["single_us"]["p50"]
        words.append(f"{name} {timing['back_to_back_us']:.1f} us ({single:.1f} synchronised)")
    words.append(f"{found['launches']} launches, {found['seconds']:.0f} s")
    words += [f"{peer} failed: {why}" for peer, why in found["failures"].items()]
    return "; ".join(words)


if __name__ == "__main__":
    main()
