"""Rewrites of the graph, in the order in which they run.

Each pass is a function `Graph -> Graph` whose module opens with what it does in printed form.
With `GTCO_DUMP=dir` the graph after each pass is written to `dir`, as `03-fuse_attention.txt`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from gtco.graph import Graph
from gtco.passes.attention import fuse_attention
from gtco.passes.canonicalize import canonicalize
from gtco.passes.convolutions import fold_convolutions
from gtco.passes.fold_constants import fold_constants
from gtco.passes.horizontal import join_siblings
from gtco.passes.normalization import fuse_normalization
from gtco.passes.rewrite import Log
from gtco.passes.slices import push_slices
from gtco.passes.split_norm import split_layer_norm


class Pass(Protocol):
    """Graph to graph; what it did and refused goes into the log."""

    __name__: str

    def __call__(self, graph: Graph, log: Log | None = None) -> Graph: ...


PIPELINE: tuple[Pass, ...] = (
    canonicalize,
    fold_constants,
    fold_convolutions,
    fuse_attention,
    fuse_normalization,
    join_siblings,
    push_slices,
    split_layer_norm,  # after join_siblings: Q, K and V are one reader of the norm by then
    fold_constants,
)


def run_pipeline(graph: Graph, dump: Path | None = None, log: Log | None = None) -> Graph:
    """Run every pass of `PIPELINE`, and verify the graph after each.

    Args:
        graph: as captured.
        dump: a folder for the graph after each pass; by default the one that the environment
            variable GTCO_DUMP names, if any.
        log: collects what was applied and refused.

    Raises:
        GraphError: a pass broke the graph.
    """
    folder = dump or (Path(os.environ["GTCO_DUMP"]) if os.environ.get("GTCO_DUMP") else None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "00-captured.txt").write_text(f"{graph}\n")
    for number, step in enumerate(PIPELINE, start=1):
        graph = step(graph, log)
        graph.verify()
        if folder is not None:
            (folder / f"{number:02}-{step.__name__}.txt").write_text(f"{graph}\n")
    return graph
