"""`python -m tests.fuzz --count 10000 --seed S`: random models, or torch's operator samples.

Runs models S, S + 1, ... and prints each failure, shrunk, as a program. `--seed` of the next model
resumes a run. The exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.progress import Progress

from tests.fuzz.generate import generate
from tests.fuzz.judge import Case, Outcome, judge
from tests.fuzz.program import Program
from tests.fuzz.shrink import shrink

HOST_EVERY = 0.02


def case_of(program: Program) -> Case:
    """The program as a case, judged against itself in fp64."""
    return Case(
        program.module(),
        program.args(),
        lambda: program.module(exact=True)(*program.args(exact=True)),
    )


def run_program(program: Program, targets: tuple[str, ...] = ()) -> Outcome:
    return judge(case_of(program), targets)


def failing(program: Program, outcome: Outcome, targets: tuple[str, ...]) -> Program:
    """`program` shrunk to what fails like `outcome`."""

    def fails(candidate: Program) -> bool:
        try:
            other = run_program(candidate, targets)
        except Exception:  # a program that is none
            return False
        same = (other.kind, other.stage) == (outcome.kind, outcome.stage)
        return same and other.detail[:30] == outcome.detail[:30] if other.kind == "crash" else same

    return shrink(program, fails)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="how many models")
    parser.add_argument("--seed", type=int, default=0, help="the first model's seed")
    parser.add_argument(
        "--host-share", type=float, default=HOST_EVERY, help="part that the host build runs too"
    )
    parser.add_argument("--gpu", type=int, default=0, help="models compiled for the GPU at hand")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--opinfo", action="store_true", help="torch's operator samples instead")
    parser.add_argument("--nnsmith", action="store_true", help="NNSmith's models instead")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they are")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.gpu and not torch.cuda.is_available():
        parser.error("--gpu needs a CUDA GPU")
    if options.opinfo or options.nnsmith:
        from tests.fuzz import nnsmith, opinfo

        named = (opinfo if options.opinfo else nnsmith).cases(options.count, options.seed)
        return _report(_judged(named), options.count if options.nnsmith else None, options.seconds)
    return _report(_programs(options), options.count, options.seconds)


def _programs(options: argparse.Namespace) -> Iterator[tuple[str, Outcome, Callable[[], str]]]:
    step = round(1 / options.host_share) if options.host_share else 0
    for index in range(options.count):
        seed = options.seed + index
        on_host = bool(step) and index % step == 0
        on_gpu = index * options.gpu // options.count != (index + 1) * options.gpu // options.count
        targets = ("host",) * on_host + ("gpu",) * on_gpu
        program = generate(seed, small=bool(targets))
        outcome = run_program(program, targets)

        def shown(
            program: Program = program,
            outcome: Outcome = outcome,
            targets: tuple[str, ...] = targets,
        ) -> str:
            if not options.no_shrink:
                program = failing(program, outcome, targets)
            return f"# {run_program(program, targets)}\n{program.source()}"

        yield f"seed {seed}", outcome, shown


def _judged(
    cases: Iterator[tuple[str, Case]],
) -> Iterator[tuple[str, Outcome, Callable[[], str]]]:
    for name, case in cases:
        yield name, judge(case), lambda case=case: f"{case.args}"  # type: ignore[misc]


def _report(
    results: Iterator[tuple[str, Outcome, Callable[[], str]]], total: int | None, seconds: float
) -> int:
    console = Console(stderr=True)
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    started = time.monotonic()
    last = ""
    with Progress(console=console) as progress:
        bar = progress.add_task("models", total=total)
        for last, outcome, shown in results:
            counts[outcome.kind] += 1
            if outcome.kind in ("refused", "unstable"):
                refusals[f"{outcome.kind}: {outcome.detail[:90]}"] += 1
            if outcome.failed:
                print(f"{last}: {outcome}\n{shown()}\n", flush=True)
            progress.update(bar, advance=1, description=f"{last} {dict(counts)}")
            if time.monotonic() - started > seconds:
                break
    for text, count in refusals.most_common(20):
        print(f"{count:5} {text}")
    print(f"{sum(counts.values())} models, the last {last}: {dict(counts)}")
    return 1 if counts["wrong"] or counts["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
