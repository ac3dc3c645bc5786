"""Which schedules are fast: measure the tasks of whole models and write tuning records.

    python -m experiments.measure_schedules OUT.jsonl MODEL... [--best N] [--rest N] [--keep N]

MODEL is `module:function` as for the command line. The records of the fastest N schedules of each
task are written; `cost_model/records/` holds what ships with the package.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import gtco
from gtco.cost_model.measure import candidates, compile_candidates, measure_task
from gtco.locate import locate
from gtco.passes.tasks import Task, tasks
from gtco.target import target_of_capability


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--best", type=int, default=40, help="default schedules of each sketch")
    parser.add_argument("--rest", type=int, default=20, help="random schedules of each sketch")
    parser.add_argument("--keep", type=int, default=3, help="records kept of each task")
    options = parser.parse_args()
    target = target_of_capability(*torch.cuda.get_device_capability())
    found: dict[str, Task] = {}
    for model in options.models:
        located = locate(model)
        graph = gtco.capture(located.module, located.args, located.kwargs)
        for task in tasks(gtco.fuse(graph, target=target), target):
            found.setdefault(task.key, task)
    pools = {
        key: candidates(task.group, target, best=options.best, rest=options.rest, seed=0)
        for key, task in found.items()
    }
    started = time.time()
    errors = compile_candidates([each for pool in pools.values() for each in pool])
    count = sum(len(pool) for pool in pools.values())
    print(f"{len(found)} tasks, {count} programs compiled in {time.time() - started:.0f} s")
    with options.out.open("a") as lines:
        for key, task in found.items():
            if not pools[key]:
                continue
            started = time.time()
            records = measure_task(task, target, pools[key], errors)
            took = time.time() - started
            right = sorted(
                (r for r in records if r.run_us is not None), key=lambda record: record.run_us or 0
            )
            shown = right[: options.keep] + [
                r for r in right[options.keep :] if r.sketch == "library"
            ]
            print(
                f"{task.group} x{task.weight}: {len(right)} right, "
                f"{len(records) - len(right)} failed, {took:.1f} s"
            )
            for record in right[:4] + shown[-1:]:
                knobs = " ".join(f"{name}={value}" for name, value in record.schedule.items())
                print(f"    {record.run_us:8.2f} us  {record.sketch} {knobs}")
            lines.writelines(record.to_json() + "\n" for record in shown)
            lines.flush()


if __name__ == "__main__":
    main()
