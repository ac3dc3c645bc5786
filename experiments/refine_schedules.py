"""Which of each task's fastest schedules is best in the whole graph, and not in a chain of copies.

    python -m experiments.refine_schedules OUT.jsonl MODEL [--top N] [--db PATH]

A kernel's neighbours differ from it: whether the next one's prologue finds room beside it, and what
it leaves in L2, no chain of copies shows. So the tasks of the model's plan, the dearest first, try
each of their N fastest schedules on record, and the whole graph's replay decides. The records of
the winners are written, one a task: what ships with the package.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from gtco import compiler
from gtco.cost_model.database import TuningRecord
from gtco.cost_model.knowledge import Knowledge
from gtco.locate import locate
from gtco.options import Options
from gtco.passes import run_pipeline
from gtco.passes.tasks import tasks
from gtco.replay import fastest
from gtco.runtime.plan import Plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("model")
    parser.add_argument("--top", type=int, default=4, help="schedules of a task that are tried")
    parser.add_argument("--db", type=Path, help="database of tuning records")
    given = parser.parse_args()
    options = Options.of(static_outputs=True)
    target = compiler.resolve_target(None)
    device = torch.cuda.get_device_name()
    known = compiler.known_on(device, given.db)
    located = locate(given.model)
    captured = compiler.capture_for(located.module, located.args, located.kwargs, options)
    (fused,) = compiler.fuse_with(known, run_pipeline(captured.graph), target)
    ranked = {
        task.key: known.best(task.key)[: given.top]
        for task in sorted(
            tasks(fused, target),
            key=lambda task: -task.weight * sum(r.run_us or 0.0 for r in known.best(task.key)[:1]),
        )
    }
    chosen = {key: records[0] for key, records in ranked.items() if records}

    def plan_of(choices: dict[str, TuningRecord]) -> Plan:
        return compiler.plan_with(Knowledge(device, (), choices.values()), fused, target, options)

    for key, records in ranked.items():
        others = [{**chosen, key: record} for record in records[1:]]
        if not others:
            continue
        _, times = fastest([plan_of(each) for each in (chosen, *others)], captured)
        winner = min(range(len(times)), key=times.__getitem__)
        record = records[winner]
        chosen[key] = record
        shown = " ".join(f"{us:.1f}" for us in times)
        print(f"{shown} us: number {winner}, {record.sketch} {dict(record.schedule)}", flush=True)
    given.out.write_text("".join(record.to_json() + "\n" for record in chosen.values()))


if __name__ == "__main__":
    main()
