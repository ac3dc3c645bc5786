"""The numbers in the sentences of docs/results.md are those of the result files that they name."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from typing import Any

from experiments.readme_table import END, PAGE, README, RESULTS, results, table
from gtco.target import TARGETS


def read(name: str) -> Any:
    """What a file holds, which says how it was made."""
    found = json.loads((RESULTS / name).read_text())
    assert found["command"] and found["environment"], name
    return found


def runs(model: str) -> list[dict[str, float]]:
    """Microseconds of everyone, of each run of a model that the H100's file holds."""
    lines = map(json.loads, (RESULTS / "h100-vit.jsonl").read_text().splitlines())
    return [
        {name: spent["back_to_back_us"] for name, spent in line["timings"].items()}
        for line in lines
        if line["model"] == f"experiments.models.vit:{model}" and "timings" in line
    ]


MODES = "inductor max-autotune", "inductor reduce-overhead"


def both_modes(batch: int) -> str:
    """Of the last run in which both took part."""
    last = [each for each in runs(f"vit_b16_batch{batch}") if set(MODES) <= each.keys()][-1]
    return ", ".join(f"{last[mode]:.0f}" for mode in MODES)


def spread(values: list[float], digits: int = 0) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def over_library(model: str, kind: str) -> list[float]:
    """The fastest generated kernel's time over the library's, of a model's operators."""
    rows = read("h100-op_table.json")["rows"]
    found = []
    for row in rows:
        if row["model"] == model and row["kind"] == kind:
            us = dict(row["run_us"])
            us.pop("Triton", None)
            library = us.pop("cuBLAS" if kind == "gemm" else "SDPA")
            found.append(min(us.values()) / library)
    return found


def claims() -> Iterator[str]:
    """Every piece of a sentence that has numbers of a measurement in it."""
    card = TARGETS["sm_90a"]
    yield f"at {card.dram_gbps / 1000:.2f} TB/s"
    yield f"at {card.matmul_tflops:.0f} TFLOP/s"
    two, four, sixteen, more = (both_modes(batch) for batch in (2, 4, 16, 32))
    slow, quick = two.split(", ")
    yield f"batches 2 ({slow} us, {quick} with reduce-overhead), 4 ({four}), 16 ({sixteen}) and 32"
    yield f"32 ({more})"
    yield from claims_of_modes()
    seconds = [read(path.name)["seconds"] for path in RESULTS.glob("h100-tune-*.json")]
    yield f"`gtco tune` of {spread(seconds)} s of search"
    tuned = [read(f"h100-tune-{name}.json")["replayed_us"] for name in ("resnet50", "setr_pup")]
    (none, own), (other, again) = tuned
    of_none = f"{none:.1f} and {own:.1f} us from no records at all"
    yield f"in turns before and after: {of_none}, {other:.0f} and {again:.0f} us"
    names = ("unet", "scan_unet", "segformer", "sam")
    turns = [read(f"h100-tune-{name}.json")["replayed_us"] for name in names]
    (before, after), *others = turns
    more = [f"{first:.0f} and {then:.0f}" for first, then in others]
    yield ", ".join((f"in turns before and after: {before:.0f} and {after:.0f} us", *more))
    yield from claims_of_wrong_answers()
    lent = read("h100-lent.json")["measured"].values()
    faster = [100 * (1 - each["lent"] / each["defaults"]) for each in lent]
    yield f"{spread(faster)}% faster than defaults"
    knobs = read("h100-untuned_knobs.json")["measured"]
    usual = [
        100 * (1 - knobs[name]["(2, 0, 0)"] / knobs[name]["(0, 1, 0)"])
        for name in read("h100-lent.json")["measured"]
    ]
    yield f"bring {spread(usual)}% more"
    whole = [
        run["seconds"]
        for run in read("h100-compile_time.json")["runs"]
        if run["model"].endswith("vit_b16")
    ]
    yield f"takes {spread(whole, 1)} s on a machine"
    together = over_library("vit_b16", "gemm") + over_library("vit_l16", "gemm")
    yield f"take {spread(together, 2)} of cuBLAS's time"
    for name, model in (
        ("those of ViT-H/14", "vit_h14"),
        ("with 577 tokens", "vit_b16_384"),
        ("of DETR's layers", "detr"),
        ("of ViT-B/16 at batch 32", "vit_b16_batch32"),
        ("at batch 8 those of ViT-B/16 take", "vit_b16_batch8"),
        ("nothing was tuned then,", "vit_l16_batch8"),
    ):
        yield f"{name} {spread(over_library(model, 'gemm'), 2)}"
    models = {row["model"] for row in read("h100-op_table.json")["rows"]}
    attention = [each for model in models for each in over_library(model, "attention")]
    yield f"Attention takes {spread(attention, 2)} of SDPA's time"
    searches = read("h100-searches.json")
    tasks = list(searches["tasks"].values())
    trials = [task["trials_to_random"]["draft + cost model"] for task in tasks]
    regrets = [task["ranking"]["cost model"]["regret"] for task in tasks]
    assert {task["programs"] for task in tasks} == {1000} and len(tasks) == 9
    yield "on nine tasks of which 1,000 programs each were measured"
    typical = f"{statistics.median(trials):.0f} programs in the median"
    yield f"the best of {searches['trials']} random programs after {typical}, {max(trials)} at most"
    yield f"a program within {100 * max(regrets):.1f}% of the pool's best"
    assert sum(each == 0 for each in regrets) == 8
    yield from claims_of_ablations()
    host = read("h100-host_cost.json")["costs"]["gtco"]["besides_gpu_us"]
    yield f"{host:.0f} us of a synchronised call of ViT-B/16 are spent outside the GPU"
    yield from claims_of_breadth()
    yield from claims_of_tables()
    yield from claims_of_copies()


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def claims_of_breadth() -> Iterator[str]:
    timm, transformers = read("timm_breadth.json"), read("transformers_breadth.json")
    for breadth in (timm, transformers):
        assert not breadth["wrong"]
        assert not any(each.get("aten") for each in breadth["families"].values())
    assert not timm["failures"] and len(transformers["failures"]) == 3
    yield f"each of {len(timm['families'])} families of timm: all are captured"
    families = len(transformers["families"])
    yield f"{families} families of vision models of transformers; three are refused"


def claims_of_wrong_answers() -> Iterator[str]:
    """How far off a peer is that has no ratio for it."""
    *_, last = (
        each for each in lines_of("h100-models.jsonl") if each["model"].endswith("mvit_v2_s")
    )
    peer = "inductor reduce-overhead"
    verdict = last["verdicts"][peer]["normal"]
    assert not verdict["ok"] and last["verdicts"]["gtco"]["normal"]["ok"] and not last["ratios"]
    yield f"off by {verdict['rmse']:.1f} where {verdict['limit']:.4f} is allowed"
    yield f"they take it {last['timings'][peer]['back_to_back_us']:.0f} us"


def claims_of_modes() -> Iterator[str]:
    """What Inductor's two modes take where both have run."""
    for card, title, model, layout in (
        ("h100", "ResNet-50", "convolutional:resnet50", ", channels last"),
        ("h100", "ConvNeXt-T", "convolutional:convnext_t", ", channels last"),
        ("h100", "CvT-13", "convolutional:cvt_13", ", channels last"),
        ("h100", "SETR-PUP", "autogtco:setr_pup", ", channels last"),
        ("h100", "SETR-Naive-Base", "autogtco:setr_naive_base", ""),
        ("h200", "DETR-E3", "autogtco:detr_e3", ", channels last"),
        ("h200", "DETR-E6", "autogtco:detr_e6", ", channels last"),
        ("h200", "DETR-E12", "autogtco:detr_e12", ", channels last"),
        ("h200", "SETR-Naive", "autogtco:setr_naive", ""),
    ):
        modes = [mode + layout for mode in MODES]
        took = [
            [line["timings"][mode]["back_to_back_us"] for mode in modes]
            for line in lines_of(f"{card}-models.jsonl")
            if line["model"] == f"experiments.models.{model}"
            and set(modes) <= line.get("timings", {}).keys()
        ][-1]
        assert took[0] > took[1], title
        yield f"{title} ({took[0]:.0f}, {took[1]:.0f})"


def claims_of_ablations() -> Iterator[str]:
    """What fusion gains over nine models."""
    rows = lines_of("h100-ablations.jsonl")
    assert len(rows) == 9
    best = [row["arms"]["DP, measured prices"]["median_us"] for row in rows]

    def over(name: str) -> str:
        times = [row["arms"][name]["median_us"] for row in rows]
        return spread([us / least for us, least in zip(times, best, strict=True)], 2)

    yield f"without fusion they take {over('no fusion')} times"
    yield f"with greedy fusion {over('greedy')} times"
    yield f"lead to plans that take {over('DP, draft prices')} times"
    yield f"untuned, those plans take {over('DP, draft prices, untuned')} times"
    (vit,) = (row for row in rows if row["row"] == "vit_b16")
    one, apart = vit["differences"]["greedy | DP, measured prices"][0]["measured_us"]
    yield f"which takes {one:.1f} us where the two take {apart:.1f}"


def claims_of_tables() -> Iterator[str]:
    """What is said of operators, parts of DETR and the small ResNet: over the best peer, or one."""
    largest = {
        each["row"]: list(each["points"].values())[-1] for each in lines_of("h100-ops.jsonl")
    }
    eager = {name: each["ratios"]["eager"]["back_to_back"] for name, each in largest.items()}
    yield f"takes {eager['add']:.2f} times as long as gtco for an addition"
    yield f"{eager['layer_norm']:.2f} for a layer norm"
    yield f"{eager['matmul_gelu']:.2f} for a product with its GELU"
    yield f"{eager['batched_matmul']:.2f} for four products"
    yield f"{eager['softmax']:.2f} for a softmax and {eager['patches']:.2f} for the patches"
    parts = lines_of("h100-subgraphs.jsonl")
    one, two, three = (f"{each['timings']['gtco']['back_to_back_us']:.0f}" for each in parts)
    best = [each["ratios"]["eager"]["back_to_back"] for each in parts]
    times = f"{best[0]:.2f}, {best[1]:.2f} and {best[2]:.2f}"
    yield f"{one}, {two} and {three} us, and eager in a CUDA graph {times} times as long"
    colours, greys = (
        f"{each['timings']['gtco']['back_to_back_us']:.0f} us and Inductor "
        f"{each['ratios']['inductor-channels-last']['back_to_back']:.2f} times as long"
        for each in lines_of("h100-resnet.jsonl")
    )
    yield f"{colours}, of grey images {greys}"


def claims_of_copies() -> Iterator[str]:
    """What is said of residuals: the first default's time read by the epilogue, and copied."""
    found = {
        each["product"]: each["programs"] for each in read("h100-epilogue_copies.json")["rows"]
    }
    second, third, large = (
        " and ".join(f"{program['run_us']:.1f}" for program in found[name][:2])
        for name in ("the second, batch 128", "the third, batch 128", "its FC2, batch 32")
    )
    yield f"ResNet-50's second stage at batch 128, {second} us, of its third {third}."
    yield f"FC2 at batch 32, whose long sums leave a residual little to hide, {large}:"


def prose() -> str:
    """docs/results.md without its tables and headlines, a space between two words."""
    text = re.sub(f"<!-- .*? -->\n.*?{END}", "", PAGE.read_text(), flags=re.DOTALL)
    return " ".join(re.sub(r"^#.*$", "", text, flags=re.MULTILINE).split())


NO_RESULTS = (
    r"\]\([^)]*\)",  # links
    r"`[^`]*`",
    r"(ViT-[BLH]|ResNet|SE-ResNet|CvT|DETR-E|SETR|H|TensorRT|RTX|fp|bf|tf)[-/ ]?\d[\d.]*(?: Ti)?",
    r"(?:at )?batch(?:es)? \d+(?: and \d+)?",
    r'"1\.50x" \| it takes 1\.5 times',
)
"""Names, and what explains a word."""


def test_each_number_of_the_sentences_is_that_of_its_file() -> None:
    text = prose()
    covered: set[int] = set()
    for claim in claims():
        at = text.find(claim)
        assert at >= 0, f"docs/results.md does not say: {claim}"
        covered.update(range(at, at + len(claim)))
    for pattern in NO_RESULTS:
        for name in re.finditer(pattern, text):
            covered.update(range(*name.span()))
    found = [
        text[max(0, digits.start() - 40) : digits.end() + 20]
        for digits in re.finditer(r"\d+", text)
        if digits.start() not in covered
    ]
    assert not found, f"of no file: {found}"


def test_the_readme_says_how_close_fp8_was() -> None:
    models = read("cpu-fp8-vit_b16.json")["models"]
    trained, drawn = (models[f"vit_b16, {name}"] for name in ("like trained", "as drawn"))
    assert trained["images"]["like calibration's"] == drawn["images"]["like calibration's"] == 30
    whole, part = trained["compensated, all"], drawn["compensated, budget"]
    of_whole, of_part = (each["like calibration's"] for each in (whole, part))
    assert whole["work_in_fp8"] == of_whole["top1_agreement"] == 1
    text = " ".join(README.read_text().split())
    assert "ViT-B/16 on 30 images held out: with weights like trained ones" in text
    assert f"{100 * of_whole['error']:.1f}% off fp32, the same class in all" in text
    assert f"with random weights {100 * part['work_in_fp8']:.0f}% of the work in fp8" in text
    same = f"the same class in {100 * of_part['top1_agreement']:.0f}%"
    assert f"{100 * of_part['error']:.1f}% off, {same}" in text


def test_every_row_says_its_command_card_and_versions() -> None:
    for each in results(RESULTS):
        assert each["command"].startswith(("python -m experiments.", "gtco bench")), each["model"]
        facts = each["environment"]
        assert facts["gpus"][0]["name"] and facts["driver"] and facts["packages"]["torch"]


def test_max_autotune_was_slower_wherever_both_modes_were_run() -> None:
    assert "Inductor's max-autotune was slower wherever both modes were run" in prose()
    lines = map(json.loads, (RESULTS / "h100-vit.jsonl").read_text().splitlines())
    both = [each["timings"] for each in lines if set(MODES) <= each.get("timings", {}).keys()]
    assert len(both) > 4
    for each in both:
        slow, quick = (each[mode]["back_to_back_us"] for mode in MODES)
        assert slow > quick


def test_the_readme_expects_of_large_batches_what_was_measured() -> None:
    (low, high) = re.search(r"expect ([\d.]+) to ([\d.]+) times", README.read_text()).groups()  # type: ignore[union-attr]
    rows = [line for line in table(results(RESULTS)).splitlines() if "H100" in line]
    rows = [line for line in rows if "| tf32 |" not in line]  # 16 bits are what it speaks of
    large = [
        float(re.findall(r"([\d.]+)x \(reduce", line)[-1])
        for line in rows
        if re.search(r"batch(16|32|64|128)`|l16_batch8`", line)
    ]
    assert len(large) == 19 and [low, high] == [f"{min(large):.1f}", f"{max(large):.1f}"]
