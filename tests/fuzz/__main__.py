"""`python -m tests.fuzz --count 10000 --seed S`: random models, torch's operator samples, or what
NNSmith makes.

Runs models S, S + 1, ... and prints each failure, shrunk, as a program. Ctrl-C stops it with a
summary that says how to go on. The exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from tests.fuzz import opinfo, smith
from tests.fuzz.generate import generate
from tests.fuzz.judge import TARGETS, Outcome, judge, operator_tables_kept
from tests.fuzz.program import Program, case_of
from tests.fuzz.shrink import shrunk


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=1000, help="how many models (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="the first model's seed (default 0)")
    parser.add_argument("--target", choices=TARGETS, help="also compile the models for this")
    parser.add_argument("--every", type=int, default=1, help="compile one model of this many only")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--opinfo", action="store_true", help="torch's operator samples instead")
    others.add_argument("--nnsmith", action="store_true", help="models of NNSmith's instead")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they are")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    options = parser.parse_args(argv)
    if options.target == "cuda" and not torch.cuda.is_available():
        parser.error("--target cuda needs a CUDA GPU")
    if options.nnsmith and not smith.INSTALLED:
        parser.error("--nnsmith needs the package nnsmith: pip install nnsmith")
    torch.set_num_threads(1)
    with operator_tables_kept():
        made = options.opinfo or options.nnsmith
        return _Run(options).report(_samples(options) if made else _programs(options))


Result = tuple[str, Outcome, Program | None]
"""The case's name, how it went, and its program, where it is one."""


def _programs(options: argparse.Namespace) -> Iterator[Result]:
    for index in range(options.count):
        target = options.target if index % options.every == 0 else None
        program = generate(options.seed + index, small=target is not None)
        outcome = judge(case_of(program), target)
        if outcome.failed and not options.no_shrink:
            program = shrunk(program, outcome, target)
        yield f"seed {options.seed + index}", outcome, program


def _samples(options: argparse.Namespace) -> Iterator[Result]:
    source = smith if options.nnsmith else opinfo
    for index, (name, case) in enumerate(source.cases(options.seed, options.count)):
        yield name, judge(case, options.target if index % options.every == 0 else None), None


class _Run:
    """Counts results and says what they were."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.odd: dict[str, str] = {}

    def report(self, results: Iterator[Result]) -> int:
        """Take results until they end, time is up or Ctrl-C; the exit code."""
        until = time.monotonic() + self.options.seconds
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("", total=self.options.count)
            try:
                for name, outcome, program in results:
                    self._take(name, outcome, program)
                    progress.update(bar, advance=1, description=f"{name} {dict(self.counts)}")
                    if time.monotonic() > until:
                        break
            except KeyboardInterrupt:
                pass
        self._summary()
        return 1 if self.failures else 0

    def _take(self, name: str, outcome: Outcome, program: Program | None) -> None:
        self.counts[outcome.kind] += 1
        if outcome.kind != "right":
            self.reasons[f"{outcome.kind} {outcome.stage}: {outcome.detail[:90]}"] += 1
        if not outcome.failed:
            if outcome.kind != "right":
                self.odd[name] = str(outcome)
            return
        source = program.source(self.options.target) if program else ""
        self.failures.append({"name": name, "outcome": str(outcome), "program": source})
        if not self.options.json:
            print(f"# {name}: {outcome}\n{source}\n", flush=True)

    def _summary(self) -> None:
        done = sum(self.counts.values())
        following = self.options.seed + done
        if self.options.json:
            print(
                json.dumps(
                    {
                        "seed": self.options.seed,
                        "models": done,
                        "next_seed": following,
                        "counts": self.counts,
                        "reasons": dict(self.reasons.most_common()),
                        "failures": self.failures,
                        "neither": self.odd,
                    },
                    indent=2,
                )
            )
            return
        for text, count in self.reasons.most_common(20):
            print(f"{count:5} {text}")
        print(f"{done} models: {dict(self.counts)}; go on with --seed {following}")


if __name__ == "__main__":
    sys.exit(main())
