"""Which workloads are alike: a schedule that was good for one is worth trying on the other."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter


def likeness(first: str, second: str) -> float:
    """How alike two workloads are, from 0 to 1, the same.

    The share of operators that both have, times the ratio of the elements that they read.

    Args:
        first, second: from `gtco.passes.tasks.workload_key`.
    """
    if first == second:
        return 1.0
    (ops, size), (other_ops, other_size) = _summary(first), _summary(second)
    either = (ops | other_ops).total()
    shared = (ops & other_ops).total() / either if either else 1.0
    return shared * min(size, other_size) / max(size, other_size)


@functools.lru_cache(maxsize=1024)
def _summary(workload: str) -> tuple[Counter[str], int]:
    """The operators, and the elements of all tensors that are read."""
    content = json.loads(workload)
    specs = (re.search(r"\[(.*)\]", text) for text, _ in content["externals"])
    sizes = (math.prod(int(size) for size in spec[1].split(",") if size) for spec in specs if spec)
    return Counter(node[0] for node in content["nodes"]), max(1, sum(sizes))
