"""DETR-E6's attention, encoder layer and decoder layer by themselves, beside every peer.

    python -m experiments.subgraphs OUT.jsonl [--quick] [--tensorrt-python PATH]

1050 tokens and 100 queries of width 256, 8 heads, fp16. OUT.png has bars of calls a second on a
logarithmic axis, as AutoGTCO's authors drew them. How a table is run: `experiments.suites.run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.publish import markdown
from experiments.suites import plots, table
from experiments.suites.row import Row
from experiments.suites.run import Suite, main
from gtco.benchmarking.contestants import TENSORRT, TORCHSCRIPT

ROWS = tuple(
    Row(name, title, "autogtco", convolves=False)
    for name, title in (
        ("detr_attention", "multi-head attention"),
        ("detr_encoder_layer", "encoder layer"),
        ("detr_decoder_layer", "decoder layer"),
    )
)
PUBLISHED = {
    "detr_attention": {"TensorRT": 2.47, "Ansor": 1.29},
    "detr_encoder_layer": {"TensorRT": 1.08, "Ansor": 1.17, "JIT": 2.47},
    "detr_decoder_layer": {"TensorRT": 4.19, "Ansor": 1.17, "JIT": 11.67},
}
"""How many times AutoGTCO's throughput is that of others, by its authors, on an RTX 2080 Ti."""


def report(results: Sequence[Mapping[str, Any]]) -> str:
    """The tables, and published ratios beside those here."""
    header = ("", *(f"{name} / AutoGTCO, published" for name in ("TensorRT", "Ansor", "JIT")))
    rows = []
    for each in results:
        published = PUBLISHED[each["row"]]
        cells = [
            f"{published[name]:.2f}" if name in published else table.DASH
            for name in ("TensorRT", "Ansor", "JIT")
        ]
        here = [table.ratio(each, name) for name in (TENSORRT, TORCHSCRIPT)]
        rows.append((each["title"], *cells, *here))
    header = (*header, "TensorRT / gtco, here", "TorchScript / gtco, here")
    published_too = markdown(header, rows)
    return f"{table.report(results)}\n## Beside what AutoGTCO published\n\n{published_too}"


SUITE = Suite("experiments.subgraphs", ROWS, report, plots.throughput, calls=300)

if __name__ == "__main__":
    main(SUITE)
