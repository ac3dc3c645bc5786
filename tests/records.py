"""Workload keys made by hand, for tests of what keeps records."""

from __future__ import annotations

import json


def key(name: str) -> str:
    """The workload of one operator, called `name`."""
    content = {
        "arch": "sm_90a",
        "externals": [["f16[1,8]", False]],
        "nodes": [[name, {}, ["f16[1,8]"], [[["x", 0], "(1:0, 8:1)"]]]],
        "outputs": [[["n", 0, 0], "(1:0, 8:1)"]],
    }
    return json.dumps(content, sort_keys=True, separators=(",", ":"))
