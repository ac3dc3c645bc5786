"""The README's table of results, from `experiments/results/` and from nothing else.

    python -m experiments.readme_table [--write]

Reads what `gtco bench --json` printed (`*.json`) and what `experiments.bench_models` wrote
(`*.jsonl`, one such object a line) and prints a Markdown table; --write puts it into the README.
Of equal cases the last counts, in the order of file names and lines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.publish import markdown

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "experiments" / "results"
BEGIN, END = "<!-- results: python -m experiments.readme_table --write -->\n", "<!-- /results -->\n"
NOTHING = "No results are published in this version.\n"
HEADER = (
    "model",
    "precision",
    "gtco, us a call",
    "x floor",
    "waited for",
    "eager in a CUDA graph",
    "Inductor's better mode",
    "launches",
    "generated",
    "GPU",
)
Result = Mapping[str, Any]


def results(folder: Path) -> list[Result]:
    """The benchmarks in `folder`, each case once."""
    cases: dict[tuple[str, str, str], Result] = {}
    for result in _read(folder):
        cases[result["model"], str(_precision(result)), _gpu(result)] = result
    return list(cases.values())


def _read(folder: Path) -> Iterator[Result]:
    for path in sorted(folder.glob("*.json*")):
        text = path.read_text()
        whole = path.suffix == ".json"
        found = [json.loads(each) for each in ([text] if whole else text.splitlines())]
        yield from (
            each for each in found if "model" in each and ("timings" in each or "error" in each)
        )


def _precision(result: Result) -> str:
    return result.get("options", {}).get("precision") or "the model's"


def _gpu(result: Result) -> str:
    return str(result["environment"]["gpus"][0]["name"])


def table(found: list[Result]) -> str:
    """The Markdown table; one sentence if there is nothing to show."""
    if not found:
        return NOTHING
    return markdown(HEADER, map(row, found))


def row(result: Result) -> tuple[str, ...]:
    name = f"`{result['model'].rsplit('.', 1)[-1]}`"
    if "error" in result:
        return (name, _precision(result), f"failed: {result['error']}", *[""] * 6, _gpu(result))
    ours = result["timings"]["gtco"]
    share, floor_us = result["generated_share"], result.get("floor_us")
    return (
        name,
        _precision(result),
        f"{ours['back_to_back_us']:.0f}",
        f"{ours['back_to_back_us'] / floor_us:.1f}" if floor_us else "",
        f"{ours['single_us']['p50']:.0f}",
        _peer(result, "eager"),
        _peer(result, "inductor"),
        str(result["launches"]),
        "" if share is None else f"{share:.1%}",
        _gpu(result),
    )


def _peer(result: Result, peer: str) -> str:
    """A peer's time and how many times gtco's that is; which mode of Inductor, if there was one."""
    name = result["best"].get(peer)
    if name is None:
        return ""
    ratio, spent = result["ratios"][peer]["back_to_back"], result["timings"][name]
    mode = name.removeprefix(peer).strip(", ")
    return f"{spent['back_to_back_us']:.0f}, {ratio:.2f}x" + (f" ({mode})" if mode else "")


def updated(readme: str, section: str) -> str:
    """`readme` with `section` between its two markers."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + section + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into the README")
    section = table(results(RESULTS))
    if parser.parse_args().write:
        README.write_text(updated(README.read_text(), section))
    else:
        print(section, end="")


if __name__ == "__main__":
    main()
