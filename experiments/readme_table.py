"""The results in the README and in docs/results.md, from `experiments/results/` and nothing else.

    python -m experiments.readme_table [--write]

Reads what `gtco bench --json` printed (`*.json`) and what `experiments.bench_models` wrote
(`*.jsonl`, one such object a line) and prints the whole table; --write puts it into
docs/results.md, a few of its rows into the README, bars of one case a model into docs/ratios.svg,
and bars of all into docs/all-ratios.svg. Of equal cases the last counts, in the order of file names
and lines. What `experiments.e2e` wrote (`*-e2e.jsonl`)
is tabled beside it once more, and beside TensorRT in docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from experiments import e2e
from experiments.publish import markdown
from experiments.suites import table as tables
from experiments.suites.run import finished
from gtco.benchmarking.contestants import TENSORRT

ROOT = Path(__file__).parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
CHART, WHOLE_CHART = ROOT / "docs" / "ratios.svg", ROOT / "docs" / "all-ratios.svg"
RESULTS = ROOT / "experiments" / "results"
BEGIN, END = "<!-- results: python -m experiments.readme_table --write -->\n", "<!-- /results -->\n"
TENSORRT_BEGIN = "<!-- beside TensorRT: python -m experiments.readme_table --write -->\n"
NOTHING = "No results are published in this version.\n"
HEADER = (
    "model",
    "precision",
    "gtco, us a call",
    "x floor",
    "synchronised",
    "eager in a CUDA graph",
    "Inductor's better mode",
    "launches",
    "generated",
    "GPU",
)
SUMMARY: Mapping[str, str] = {
    "vit:vit_b16": "ViT-B/16, 224 pixels",
    "vit:vit_h14": "ViT-H/14, 224 pixels",
    "convolutional:resnet50": "ResNet-50, 224 pixels",
    "autogtco:detr_e12": "DETR-E12, 800x1333 pixels",
    "convolutional:se_resnet9": "SE-ResNet9, batch 128",
}
"""Rows of the README, and what they are called there."""
CHARTED: Mapping[str, str] = {
    "transformers_zoo:clip": "CLIP, image encoder",
    "transformers_zoo:siglip": "SigLIP, image encoder",
    "transformers_zoo:dinov2": "DINOv2, 518 pixels",
    "transformers_zoo:dinov3": "DINOv3-B/16",
    "transformers_zoo:swin": "Swin-T",
    "transformers_zoo:segformer": "SegFormer-B0",
    "transformers_zoo:convnext": "ConvNeXt-T",
    "transformers_zoo:regnet": "RegNetY-4GF",
    "timm_zoo:maxvit_tiny_tf_224": "MaxViT-T",
    "timm_zoo:mixer_b16_224": "Mixer-B/16",
    "volumes:r2plus1d_18": "R(2+1)D-18, 16 frames",
    "volumes:scan_unet": "U-Net of volumes",
    "vit:vit_b16": "ViT-B/16",
    "vit:vit_b16_batch8": "ViT-B/16, batch 8",
    "vit:vit_b16_batch32": "ViT-B/16, batch 32",
    "vit:vit_l16": "ViT-L/16",
    "vit:vit_l16_batch8": "ViT-L/16, batch 8",
    "vit:vit_h14": "ViT-H/14",
    "autogtco:detr_e12": "DETR-E12",
    "transformers_zoo:rt_detr": "RT-DETR",
    "autogtco:setr_naive": "SETR-Naive",
    "autogtco:setr_naive_base": "SETR-Naive-Base",
    "autogtco:setr_pup": "SETR-PUP",
    "convolutional:resnet50": "ResNet-50",
    "convolutional:mobilenet_v2": "MobileNetV2",
    "convolutional:cvt_13": "CvT-13",
    "convolutional:unet": "U-Net",
    "convolutional:diffusion_block": "diffusion block",
    "convolutional:se_resnet9": "SE-ResNet9, batch 128",
}
"""The README's bars, and what they are called there; batch 1 unless they say so."""
WRONG = "answers wrong"
Result = Mapping[str, Any]


def results(folder: Path) -> list[Result]:
    """The benchmarks in `folder`, of each case the newest, and the newest days last.

    A run without torch.compile, beside TensorRT alone for example, stands for no case that has one
    with it.
    """
    cases: dict[tuple[str, str, str], Result] = {}
    for result in sorted(_read(folder), key=_date):
        case = result["model"], str(_precision(result)), _gpu(result)
        if _beside_inductor(result) or not _beside_inductor(cases.get(case, {})):
            cases[case] = result
    return sorted(cases.values(), key=_date)


def _beside_inductor(result: Result) -> bool:
    return any(name.startswith("inductor") for name in result.get("timings", ()))


def _read(folder: Path) -> Iterator[Result]:
    for path in sorted(folder.glob("*.json*")):
        text = path.read_text()
        whole = path.suffix == ".json"
        found = [json.loads(each) for each in ([text] if whole else text.splitlines())]
        yield from (
            each
            for each in found
            if "model" in each
            and ("timings" in each or "error" in each)
            and not each.get("rehearsal")
        )


def _name(result: Result) -> str:
    return str(result["model"]).rsplit(".", 1)[-1]


def _precision(result: Result) -> str:
    return result.get("options", {}).get("precision") or "the model's"


def _date(result: Result) -> str:
    """The day of the run; the first results say none."""
    return str(result["environment"].get("date", ""))


def _gpu(result: Result) -> str:
    return str(result["environment"]["gpus"][0]["name"])


def table(found: Sequence[Result]) -> str:
    """The whole Markdown table; one sentence if there is nothing to show."""
    if not found:
        return NOTHING
    return markdown(HEADER, map(row, found))


def row(result: Result) -> tuple[str, ...]:
    name = f"`{_name(result)}`"
    if "error" in result:
        return (name, _precision(result), f"failed: {result['error']}", *[""] * 6, _gpu(result))
    ours = result["timings"]["gtco"]
    share, floor_us = result["generated_share"], result.get("floor_us")
    return (
        name,
        _precision(result),
        f"{ours['back_to_back_us']:.0f}",
        f"{ours['back_to_back_us'] / floor_us:.1f}" if floor_us else "",
        f"{ours['single_us']['p50']:.0f}",
        _peer(result, "eager"),
        _peer(result, "inductor"),
        str(result["launches"]),
        "" if share is None else f"{share:.1%}",
        _gpu(result),
    )


def _best(result: Result, peer: str) -> str | None:
    """The peer key whose contestant was faster, of both memory layouts if both ran, and right if
    one was."""
    keys = [key for key in (peer, f"{peer}-channels-last") if key in result.get("best", {})]

    def rank(key: str) -> tuple[bool, float]:
        name = result["best"][key]
        return not _right(result, name), result["timings"][name]["back_to_back_us"]

    return min(keys, key=rank, default=None)


def _peer(result: Result, peer: str) -> str:
    """The time of whoever stands for `peer`, and how many times gtco's that is."""
    key = _best(result, peer)
    if key is None:
        return ""
    name = result["best"][key]
    ratio, spent = result["ratios"][key]["back_to_back"], result["timings"][name]
    said = [each for each in (name.removeprefix(peer).strip(", "),) if each]
    said += [] if _right(result, name) else [WRONG]
    return f"{spent['back_to_back_us']:.0f}, {ratio:.2f}x" + (
        f" ({', '.join(said)})" if said else ""
    )


def _right(result: Result, name: str) -> bool:
    return all(verdict["ok"] for verdict in result["verdicts"][name].values())


def summary(found: Sequence[Result]) -> str:
    """A few rows: gtco beside the better of Inductor's modes and layouts."""
    by_name = {_name(each): each for each in found if _ratio(each) is not None}
    rows = []
    for name, title in SUMMARY.items():
        if name in by_name:
            result = by_name[name]
            theirs = result["timings"][_inductor(result)]["back_to_back_us"]
            ours = result["timings"]["gtco"]["back_to_back_us"]
            cells = f"{ours:.0f} us", f"{theirs:.0f} us", f"**{_ratio(result):.2f}x**"
            rows.append((title, *cells, _gpu(result)))
    header = "model, fp16", "gtco", "torch.compile", "torch.compile / gtco", "GPU"
    return markdown(header, rows) if rows else NOTHING


def _inductor(result: Result) -> str | None:
    """The contestant that stands for Inductor: its better mode and layout of those that ran."""
    key = _best(result, "inductor")
    return None if key is None else result["best"][key]


def _ratio(result: Result) -> float | None:
    """How many times as long as gtco the better of Inductor's modes takes, if it is right."""
    name = _inductor(result)
    if name is None or not _right(result, name):
        return None
    rounds = [result["timings"][each]["rounds_us"] for each in ("gtco", name)]
    return statistics.median(b / a for a, b in zip(*rounds, strict=True))


def chart(found: Sequence[Result]) -> str:
    """Bars of `CHARTED`, the newest run of each, the largest ratio first."""
    newest = {_name(each): each for each in found}
    bars = [
        (ratio, f"{title} ({_card(newest[name])})")
        for name, title in CHARTED.items()
        if name in newest and (ratio := _ratio(newest[name])) is not None
    ]
    return _bars(sorted(bars, reverse=True))


def whole_chart(found: Sequence[Result]) -> str:
    """Bars of every case that has a ratio, by card."""
    bars = [(ratio, each) for each in found if (ratio := _ratio(each)) is not None]
    bars.sort(key=lambda bar: (_gpu(bar[1]), -bar[0], _name(bar[1])))
    return _bars(
        [
            (
                ratio,
                f"{_name(each)} ({_precision(each)}, {_card(each)})".replace("the model's, ", ""),
            )
            for ratio, each in bars
        ]
    )


def _card(result: Result) -> str:
    return _gpu(result).removeprefix("NVIDIA ").split()[0]


def _bars(bars: Sequence[tuple[float, str]]) -> str:
    """Horizontal bars as SVG: how many times as long as gtco Inductor takes, and of what."""
    height, left, scale = 16, 230, 90
    lines = []
    for index, (ratio, label) in enumerate(bars):
        y = 34 + index * height
        lines.append(
            f'<text x="{left - 6}" y="{y + 11}" text-anchor="end">{escape(label)}</text>'
            f'<rect x="{left}" y="{y}" width="{ratio * scale:.1f}" height="{height - 4}"/>'
            f'<text x="{left + ratio * scale + 5:.1f}" y="{y + 11}">{ratio:.2f}x</text>'
        )
    bottom = 34 + len(bars) * height
    width = left + scale * max((ratio for ratio, _ in bars), default=1) + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {bottom + 8}" '
        f'font-family="sans-serif" font-size="11">\n'
        f"<style>text {{ fill: #555 }} rect {{ fill: #4a7ebb }} line {{ stroke: #888 }}"
        f" @media (prefers-color-scheme: dark) {{ text {{ fill: #bbb }} }}</style>\n"
        f'<text x="4" y="14">How many times as long as gtco torch.compile takes, its better mode '
        f"and layout (1x: the same)</text>\n"
        + "\n".join(lines)
        + f'\n<line x1="{left + scale}" y1="28" x2="{left + scale}" y2="{bottom}" '
        f'stroke-dasharray="3 3"/>\n</svg>\n'
    )


def whole_models(folder: Path) -> dict[Path, list[dict[str, Any]]]:
    """What each file of `experiments.e2e` holds, in the table's order."""
    files = sorted(folder.glob("*-e2e.jsonl"))
    there = {path: finished(path) for path in files}
    return {
        path: [rows[row.name] for row in e2e.ROWS if row.name in rows]
        for path, rows in there.items()
    }


def beside_tensorrt(found: Sequence[Result]) -> str:
    """Rows in which TensorRT took part: microseconds, the ratio, and what AutoGTCO published."""
    columns = ("gtco untuned", "gtco tuned", "TensorRT")
    peers = ("Inductor reduce-overhead", "eager in a CUDA graph")
    published = "TensorRT 7 / AutoGTCO, published"
    header = ("model", "GPU", *columns, "TensorRT / gtco", published, *peers)
    rows, said = [], []
    for each in found:
        source, verdicts = each["published"], each["verdicts"].get(TENSORRT, {})
        rows.append(
            (
                each["title"],
                _card(each),
                *(tables.cell(each, column) for column in columns),
                tables.ratio(each, TENSORRT),
                f"{source['tensorrt'] / source['autogtco']:.2f}" if source else tables.DASH,
                *(tables.cell(each, column) for column in peers),
            )
        )
        if TENSORRT in each["failures"]:
            said.append(f"- {each['title']}: {each['failures'][TENSORRT]}\n")
        if wrong := [kind for kind, verdict in verdicts.items() if not verdict["ok"]]:
            said.append(f"- {each['title']}: answers wrong for inputs of: {', '.join(wrong)}\n")
    return markdown(header, rows) + ("\nTensorRT's dashes:\n\n" + "".join(said) if said else "")


def updated(text: str, section: str, begin: str = BEGIN) -> str:
    """`text` with `section` between its two markers."""
    before, rest = text.split(begin)
    return before + begin + section + END + rest.split(END, 1)[1]


def pages(found: Sequence[Result]) -> dict[Path, str]:
    """Each file that shows results, as it has to be."""
    whole = whole_models(RESULTS)
    page = updated(PAGE.read_text(), table(found))
    return {
        README: updated(README.read_text(), summary(found)),
        PAGE: updated(page, beside_tensorrt([*chain(*whole.values())]), TENSORRT_BEGIN),
        CHART: chart(found),
        WHOLE_CHART: whole_chart(found),
        **{path.with_suffix(".md"): e2e.report(rows) for path, rows in whole.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put them into their files")
    found = results(RESULTS)
    if parser.parse_args().write:
        for path, text in pages(found).items():
            path.write_text(text)
    else:
        print(table(found), end="")


if __name__ == "__main__":
    main()
