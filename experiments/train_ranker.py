"""Train the learned cost model that ships with the package, on pools and on tuning records.

    python -m experiments.train_ranker POOL... OUT.ubj [--records FILE.jsonl...]

OUT is `cost_model/records/<arch>.ubj`. POOL are folders of `experiments.measure_pools`, all of one
architecture; FILE is what `gtco db export` wrote of a tuner's database, for the families whose
tasks are too small for a pool; programs of two files are not compared, since kernels may have
changed between them. `experiments.replay_searches` says how well such a model ranks what
it did not see.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gtco.cost_model.pool import read_pool
from gtco.cost_model.ranker import by_workload, train
from gtco.cost_model.record import read_jsonl
from gtco.target import find_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pools", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    parser.add_argument("--records", type=Path, nargs="+", default=[])
    options = parser.parse_args()
    pool = [task for folder in options.pools for task in read_pool(folder)]
    (arch,) = {task.arch for task in pool}
    groups = [task.measured() for task in pool]
    for file in options.records:
        groups += by_workload(read_jsonl(file))
    train(groups, find_target(arch)).save(options.out)
    programs = sum(map(len, groups))
    print(f"{options.out}: from {programs} programs of {len(groups)} tasks, {arch}")


if __name__ == "__main__":
    main()
