"""Rewrites of the graph, in the order in which they run, and fusion.

Each pass is a function `Graph -> Graph` whose module opens with what it does in printed form;
`rewrite` applies the rules of most of them. `whole_pixels`, `whole_means` and `expand_attention`
follow them, for a target.
`legality` says which nodes may share a kernel,
`fusion` chooses the groups, and `tasks` are the distinct ones of them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from gtco.ir.autocast import no_autocast
from gtco.ir.graph import Graph
from gtco.passes.attention import fuse_attention
from gtco.passes.bordered_sums import border_addends
from gtco.passes.box_means import mean_of_boxes
from gtco.passes.box_moments import moments_of_boxes
from gtco.passes.branches import merge_branches
from gtco.passes.canonicalize import canonicalize
from gtco.passes.channels import pad_channels
from gtco.passes.convolutions import fold_convolutions
from gtco.passes.factors import join_factors
from gtco.passes.fold_constants import fold_constants
from gtco.passes.gated import pair_gates
from gtco.passes.horizontal import join_siblings
from gtco.passes.layout import channels_last, pack_few_channels
from gtco.passes.long_reductions import split_long_reductions
from gtco.passes.normalization import fuse_normalization
from gtco.passes.pads import join_borders
from gtco.passes.patches import pad_patches
from gtco.passes.pulled import pull_pointwise
from gtco.passes.read_channels import order_read_channels
from gtco.passes.rejoined import rejoin_parts
from gtco.passes.rewrite import Log
from gtco.passes.rolls import move_rolls
from gtco.passes.rotary import fuse_rotary
from gtco.passes.rounded_rows import round_rows
from gtco.passes.rows_to_groups import rows_to_groups
from gtco.passes.sampling import sum_samples
from gtco.passes.slices import push_slices
from gtco.passes.split_group_norm import split_group_norm
from gtco.passes.split_norm import split_norms
from gtco.passes.stored_columns import order_stored_columns
from gtco.passes.taps_as_columns import columns_of_taps
from gtco.passes.turned_constants import turn_constants
from gtco.passes.twins import compute_twins_once
from gtco.passes.upsampling import convolve_before_enlarging
from gtco.passes.windows import join_windows

_log = logging.getLogger("gtco.fusion")


class Pass(Protocol):
    """Graph to graph; what it did and refused goes into the log."""

    __name__: str

    def __call__(self, graph: Graph, log: Log | None = None) -> Graph: ...


PIPELINE: tuple[Pass, ...] = (
    canonicalize,
    fold_constants,
    rows_to_groups,  # ahead of channels_last, which moves the views of an image's channels
    merge_branches,  # ahead of fold_convolutions, which rounds weights
    fold_convolutions,
    convolve_before_enlarging,  # behind what folds into weights
    channels_last,
    pad_channels,
    pack_few_channels,  # behind pad_channels: what a product makes is padded without a copy
    pad_patches,
    join_borders,  # behind what takes joined zeros for the border of a convolution
    rejoin_parts,
    fuse_attention,
    join_windows,
    fuse_normalization,
    fuse_rotary,
    sum_samples,
    join_siblings,
    compute_twins_once,
    push_slices,
    columns_of_taps,  # behind push_slices, which would cut its products again
    pair_gates,  # behind push_slices, which would move its slice; ahead of sums of the weights
    split_norms,  # after join_siblings: Q, K and V are one reader of the norm by then
    move_rolls,  # behind split_norms, which leaves the norms ahead of rolls as they are
    split_group_norm,
    moments_of_boxes,
    mean_of_boxes,  # ahead of split_long_reductions, which would cut the same means
    split_long_reductions,
    join_factors,
    pull_pointwise,  # behind push_slices, which moves slices the other way
    order_stored_columns,  # behind pull_pointwise, which brings views together
    order_read_channels,  # likewise
    round_rows,  # behind pull_pointwise, which moves permutes the other way
    border_addends,  # behind fuse_attention, which gives masks rows of whole copies
    fold_constants,
    turn_constants,
)


@no_autocast()  # for what is computed of constants
def run_pipeline(graph: Graph, dump: Path | None = None, log: Log | None = None) -> Graph:
    """Run every pass of `PIPELINE`, and verify the graph after each.

    Args:
        graph: as captured.
        dump: a folder for the graph after each pass, as `04-fuse_attention.txt`.
        log: collects what was applied and refused.

    Raises:
        GraphError: a pass broke the graph.
    """
    log = Log() if log is None else log
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        (dump / "00-captured.txt").write_text(f"{graph}\n")
    for number, step in enumerate(PIPELINE, start=1):
        before = len(graph.nodes)
        graph = step(graph, log)
        graph.verify()
        _log.debug("%s: %d nodes became %d", step.__name__, before, len(graph.nodes))
        if dump is not None:
            (dump / f"{number:02}-{step.__name__}.txt").write_text(f"{graph}\n")
    for rule, count in log.applied.items():
        _log.debug("applied %d times: %s", count, rule)
    return graph
