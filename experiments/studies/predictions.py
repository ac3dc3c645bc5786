"""Which kernels of a model take longer than was predicted?

    python -m experiments.studies.predictions ROWS.jsonl MODEL [--count N]

ROWS.jsonl is what `experiments.bench_models` wrote on a GPU, MODEL the end of a model's name there.
The model is planned anew on this machine, which needs no GPU; kernels go by their names, so that a
commit that writes other kernels finds fewer of them. First come those that lose most: the time
beyond the prediction, times launches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.publish import markdown, microseconds
from gtco.compiler import make_plan
from gtco.ir.graph import Group
from gtco.locate import locate
from gtco.options import Options
from gtco.runtime.plan import Plan


def rows_of(seen: Mapping[str, Mapping[str, Any]], plan: Plan) -> list[tuple[str, ...]]:
    """A row for each kernel of `plan` that `seen` has, by what it loses."""
    first: dict[str, Any] = {}
    for launch in plan.launches:
        if launch.program is not None and launch.program.name in seen:
            first.setdefault(launch.program.name, launch)
    lost = {
        name: (seen[name]["mean_us"] - (launch.predicted_us or 0.0)) * seen[name]["launches"]
        for name, launch in first.items()
    }
    return [
        (
            f"{lost[name]:.1f}",
            f"{seen[name]['launches']:.0f}",
            microseconds(seen[name]["mean_us"]),
            microseconds(first[name].predicted_us),
            f"{first[name].program.sketch}, {first[name].source}",
            " ".join(f"{knob}={value}" for knob, value in first[name].program.schedule.items()),
            _work(first[name].group),
        )
        for name in sorted(first, key=lambda name: -lost[name])
    ]


def _work(group: Group) -> str:
    specs = group.graph.specs
    sizes = " ".join("x".join(map(str, specs[name].sizes)) for name in group.graph.inputs)
    made = " ".join("x".join(map(str, specs[name].sizes)) for name in group.graph.outputs)
    return f"{' '.join(node.op for node in group.compute)}: {sizes} -> {made}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path)
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=25)
    given = parser.parse_args()
    found = [json.loads(line) for line in given.rows.read_text().splitlines()]
    found = [row for row in found if row["model"].endswith(given.model) and "kernels" in row]
    if not found:
        raise SystemExit(f"{given.rows} has no row of a model that ends in {given.model!r}")
    row = found[-1]
    seen = {kernel["name"]: kernel for kernel in row["kernels"]}
    model = locate(row["model"])
    options = Options.of(target="sm_90a", precision=row["options"]["precision"])
    plan, _ = make_plan(model.module, model.args, model.kwargs, options)
    rows = rows_of(seen, plan)
    total = sum(kernel["mean_us"] * kernel["launches"] for kernel in seen.values())
    print(
        f"{row['model']}: {len(rows)} of {len(seen)} kernels are known by name; sum of all launches"
        f" {total:.0f} us measured, {sum(each.predicted_us or 0 for each in plan.launches):.0f} us"
        f" predicted of {len(plan.launches)} launches"
    )
    header = ("lost, us", "launches", "measured", "predicted", "sketch", "schedule", "work")
    print(markdown(header, rows[: given.count]), end="")


if __name__ == "__main__":
    main()
