"""Train the learned cost model that ships with the package, on all measured pools.

    python -m experiments.train_ranker POOL... OUT.ubj

POOL are folders of `experiments.measure_pools`, all of one architecture; OUT is
`cost_model/records/<arch>.ubj`. `experiments.replay_searches` says how well it ranks what it did
not see.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gtco.cost_model.pool import read_pool
from gtco.cost_model.ranker import train
from gtco.target import find_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pools", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    pool = [task for folder in options.pools for task in read_pool(folder)]
    (arch,) = {task.arch for task in pool}
    train([task.measured() for task in pool], find_target(arch)).save(options.out)
    programs = sum(len(task.entries) for task in pool)
    print(f"{options.out}: from {programs} programs of {len(pool)} tasks, {arch}")


if __name__ == "__main__":
    main()
