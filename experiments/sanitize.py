"""Every kernel family once at small odd shapes, for compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no python -m experiments.sanitize
    compute-sanitizer --tool racecheck python -m experiments.sanitize
    compute-sanitizer --tool memcheck --report-api-errors no python -m experiments.sanitize --graph

The API errors that are left out are those of cuda-bindings, which asks for functions that a driver
need not have. One line a program; exits with 1 if an answer is wrong or two runs differ in a bit.
Inputs are made and answers judged on the CPU, so that hardly any kernel but gtco's own runs. With
`--graph`, a ViT of two layers goes through `gtco.compile` and its CUDA graph is replayed 20 times;
run that once without the tool, under which compiling is slow.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import gtco
from gtco.check import judge
from gtco.codegen.program import KernelProgram
from gtco.codegen.rules import derive
from gtco.codegen.sketch import Illegal, Schedule, Sketch
from gtco.ir.graph import Group
from gtco.passes.legality import family
from gtco.runtime.run import run_group
from gtco.target import Target, target_of_capability
from tests import (
    attention_groups,
    back_to_back_groups,
    box_groups,
    column_groups,
    groups,
    models,
    projection_groups,
    squeeze_groups,
    stencil_groups,
    tile_groups,
    transpose_groups,
)
from tests.kernel_checks import inputs_of, wrong_outputs

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
REPLAYS = 20
TRIES = 10_000
MULTIPROCESSORS = 4
"""For which kernels are made: blocks that stay then have several tiles of a small result."""


@dataclass(frozen=True)
class Case:
    """A group and knob values that its schedules must have, one schedule each.

    Args:
        make: the group.
        wishes: by sketch name; other knobs are random. Every sketch runs its first default too.
    """

    make: Callable[[], Group]
    wishes: Mapping[str, tuple[Schedule, ...]]


_ANY: Mapping[str, tuple[Schedule, ...]] = {
    "gemm_mma": ({"block_k": 32}, {"block_k": 64, "stages": 2}),
    "attention": (
        {"warps_k": 1, "stages": 1, "copy_warps": 6, "tma": 0},
        {"warps_k": 2, "stages": 2, "copy_warps": 0, "tma": 0},
        {"block_q": 48, "warps_k": 1, "stages": 2, "copy_warps": 2, "tma": 0},
        {"warps_k": 2, "stages": 2, "copy_warps": 0, "tma": 1},
    ),
    "attention_wgmma": (
        {"parts": 2, "stages": 2, "split": 1},
        {"block_q": 64, "block_k": 16, "parts": 1, "stages": 2, "split": 1},
    ),
    "attention_projection": (
        {"block_q": 16, "warps_k": 1, "stages": 2},
        {"block_q": 32, "warps_k": 4, "stages": 1},
        {"block_q": 64, "warps_k": 2},
    ),
    "rowwise": ({}, {}),
    "elementwise": ({"vectors": 4}, {"vectors": 2}),
}
_CLUSTERS: Mapping[str, tuple[Schedule, ...]] = {
    "gemm_wgmma": (
        {"swap": 1, "block_p": 64, "split": 4, "stages": 2},
        {"swap": 0, "split": 2},
        {"swap": 0, "block_p": 64, "multicast": 2, "stages": 2},
        {"swap": 1, "block_p": 64, "multicast": 4},
        {"swap": 1, "block_p": 64, "split": 2, "cluster_q": 2, "stages": 2},
        {"swap": 1, "split": 1, "cluster_q": 3},
    ),
    "gemm_mma": ({"stages": 2}, {"stages": 3, "warps_m": 2}),
    "gemm_persistent": (
        {"cooperative": 0, "block_m": 64, "block_n": 64},
        {"cooperative": 1, "block_m": 128, "block_n": 64},
        {"cooperative": 1, "block_m": 192, "block_n": 64},
    ),
}
_COPIES: Mapping[str, tuple[Schedule, ...]] = {
    **_CLUSTERS,
    "gemm_persistent": tuple(
        {**wish, "copies": copies} for wish in _CLUSTERS["gemm_persistent"] for copies in (0, 1)
    ),
}
_FEW_ROWS: Mapping[str, tuple[Schedule, ...]] = {
    "gemm_skinny": (
        {"columns": 64, "split": 4, "warps": 2},
        {"columns": 128, "split": 1},
        {"columns": 64, "split": 2, "warps": 3, "ahead": 1},
    ),
}
_SWAPS: Mapping[str, tuple[Schedule, ...]] = {
    "gemm_wgmma": ({"swap": 0}, {"swap": 1, "block_p": 128}),
    "gemm_mma": ({},),
    "gemm_persistent": ({"block_m": 64},),
}
_PATCHES: Mapping[str, tuple[Schedule, ...]] = {
    "conv_mma": ({"chunks": 1, "stages": 2}, {"chunks": 2, "stages": 1}, {"chunks": 4}),
    "conv_wgmma": ({"chunks": 2, "stages": 2}, {"chunks": 4, "consumers": 2}),
}
_ONE_CHUNK: Mapping[str, tuple[Schedule, ...]] = {
    "conv_mma": ({"tile_t": 1, "tile_h": 4, "stages": 3}, {"tile_t": 4, "stages": 1}),
}

CASES: dict[str, Case] = {
    "norm_gelu": Case(lambda: groups.norm_linear(70, 328, 232, F16, gelu=True), _CLUSTERS),
    "residual_stats": Case(lambda: groups.residual_linear(67, 264, 256, BF16), _COPIES),
    "few_rows": Case(lambda: groups.residual_linear(5, 328, 200, BF16), _FEW_ROWS),
    "one_row": Case(
        lambda: groups.norm_linear(1, 264, 91, F16, gelu=True), {"gemm_skinny": ({"ahead": 2},)}
    ),
    "odd_columns": Case(lambda: groups.plain_linear(19, 72, 91, F16), _SWAPS),
    "batches": Case(lambda: groups.batched_matmul(2, 35, 64, 72, F16, transposed=True), _SWAPS),
    "patches": Case(lambda: groups.patch_embedding(42, 14, 72, F16), _ANY),
    "windows": Case(
        lambda: groups.convolution((2, 9, 11, 24), 72, (3, 3), F16, stride=(1, 2)), _PATCHES
    ),
    "windows_of_volumes": Case(
        lambda: groups.convolution((1, 3, 6, 9, 8), 24, (3, 3, 3), BF16), _ONE_CHUNK
    ),
    "bmm_odd": Case(lambda: groups.batched_matmul(2, 17, 45, 39, BF16), _ANY),
    "packed": Case(lambda: attention_groups.packed(37, 2, 32, epilogue=True), _ANY),
    "masked": Case(
        lambda: attention_groups.cross((2,), 17, 100, 24, 40, BF16, mask=torch.bool), _ANY
    ),
    "shared keys": Case(
        lambda: attention_groups.cross((2,), 17, 100, 24, 40, BF16, mask=BF16),
        {"attention_wgmma": ({"split": 2, "parts": 2}, {"split": 4}, {"rest": 16})},
    ),
    "two masks": Case(lambda: attention_groups.decomposed(2, (5, 13), (8, 12), 24), {}),
    "causal": Case(lambda: attention_groups.cross((2,), 70, 33, 16, causal=True), _ANY),
    "projected": Case(
        lambda: projection_groups.projected(4, 37, 32, 256, batch=2, residual=True, stats=True),
        _ANY,
    ),
    "bottleneck": Case(
        lambda: back_to_back_groups.bottleneck(1034, (72, 136, 64), F16),
        {"gemm_back_to_back": ({"stages": 2},)},
    ),
    "perceptron": Case(
        lambda: back_to_back_groups.perceptron(1034, (40, 168, 40), BF16),
        {"gemm_back_to_back": ({"stages": 2},)},
    ),
    "squeeze": Case(squeeze_groups.CASES["se_512"], {"squeeze": ({"split": 4},)}),
    "stencils": Case(stencil_groups.CASES["three_behind_a_token"], {}),
    "tiles": Case(
        stencil_groups.TILES["statistics of 128"],
        {"stencil_tiles": ({"channels": 64, "rows": 2}, {"channels": 128, "threads": 128})},
    ),
    "boxes": Case(stencil_groups.TILES["boxes of 7 x 7"], {}),
    "runs": Case(box_groups.RUNS["means, residual"], {}),
    "moments": Case(box_groups.RUNS["moments of 8 of 72"], {}),
    "moments_of_lines": Case(
        box_groups.LINES["channels of 40 columns"],
        {"conv_mma": ({"stages": 2, "block_n": 32},), "conv_wgmma": ({"consumers": 2},)},
    ),
    "lines": Case(
        lambda: groups.norm_linear(300, 24, 72, F16, gelu=True),
        {"gemm_persistent": ({"lines": 1, "cooperative": 0}, {"lines": 1, "cooperative": 1})},
    ),
    "resize": Case(next(iter(stencil_groups.RESIZES.values())), {}),
    "samples": Case(stencil_groups.SAMPLES["bilinear_heads"], {}),
    "sum_of_samples": Case(
        stencil_groups.SAMPLES["sum_of_heads"], {"grid_sample": ({"share": 4}, {"share": 1})}
    ),
    "topk": Case(tile_groups.TOPK["most_of_ties"], {"topk": ({"threads": 128}, {"threads": 1024})}),
    "layer_norm": Case(lambda: tile_groups.layer_norm(9, 197, residual=True), _ANY),
    "softmax": Case(lambda: tile_groups.softmax(3, 1000, dtype=BF16), _ANY),
    "columns": Case(lambda: tile_groups.standardize(37, 24, dims=(0,), dtype=F16), _ANY),
    "pixels": Case(column_groups.COLUMNWISE["stored_sum_of_groups"], {}),
    "statistics": Case(lambda: tile_groups.class_token(9, 200, stats=True), _ANY),
    "merged": Case(lambda: tile_groups.merge_stats(9, 200), _ANY),
    "gelu": Case(lambda: tile_groups.gelu_bias(5, 7), _ANY),
    "channels_apart": Case(transpose_groups.CASES["normalized"], {"transpose": ({}, {})}),
    "concat": Case(lambda: tile_groups.concat_columns(9, 5, 8, 3), _ANY),
    "padded": Case(lambda: tile_groups.padded_patches(1, 14, (0, 1, 0), (0, 0, 4)), _ANY),
    "permuted": Case(tile_groups.permuted, _ANY),
}


def programs(case: Case, group: Group, target: Target) -> Iterator[KernelProgram]:
    """The programs of a case on every sketch that takes it, each once."""
    seen = set()
    few = replace(target, sm_count=MULTIPROCESSORS)
    for sketch in derive(group, family(group), few).sketches:
        wishes = [
            wish
            for wish in case.wishes.get(sketch.name, ())
            # A cluster's blocks, and tensor maps.
            if target.has_wgmma or (wish.get("split", 1) == 1 and not wish.get("tma"))
        ]
        for program in (
            sketch.emit(next(iter(sketch.defaults()))),
            *(wished(sketch, wish, seed) for seed, wish in enumerate(wishes)),
        ):
            if program.name not in seen:
                seen.add(program.name)
                yield program


def wished(sketch: Sketch, wish: Schedule, seed: int) -> KernelProgram:
    """A random legal program with the knob values of `wish`.

    Raises:
        ValueError: there seems to be none.
    """
    chosen = random.Random(seed)
    for _ in range(TRIES):
        schedule = {knob.name: chosen.choice(knob.choices) for knob in sketch.knobs()}
        try:
            return sketch.emit({**schedule, **wish})
        except Illegal:
            continue
    raise ValueError(f"{sketch.name} of {sketch.group} has no legal schedule with {dict(wish)}")


def run_from_cpu(
    program: KernelProgram, group: Group, values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """`run_group` with values and results on the CPU."""
    results = run_group(program, group, {name: value.cuda() for name, value in values.items()})
    return {name: result.cpu() for name, result in results.items()}


def run_kernels(target: Target) -> bool:
    """Run and judge every program; whether all were right."""
    ok = True
    for name, case in CASES.items():
        group = case.make()
        values = inputs_of(group, seed=1)
        for program in programs(case, group, target):
            wrong = wrong_outputs(program, group, values, run_from_cpu)
            first, again = (run_from_cpu(program, group, values) for _ in range(2))
            if not all(same_bits(first[each], again[each]) for each in first):
                wrong.append("two runs differ")
            knobs = " ".join(f"{knob}={value}" for knob, value in program.schedule.items())
            print(f"{'WRONG' if wrong else 'right'} {program.sketch} {name} {knobs}", flush=True)
            for line in wrong:
                print(f"      {line}", flush=True)
            ok = ok and not wrong
    return ok


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def run_graph() -> bool:
    """Replay a compiled ViT; whether all answers were right and the same."""
    torch.manual_seed(0)
    model = models.vit().half()
    image = torch.randn(1, 3, 32, 32).half()
    with torch.no_grad():
        eager, exact = model(image), copy.deepcopy(model).double()(image.double())
    compiled = gtco.compile(model, (image,), fallback="error")
    on_gpu = image.cuda()
    with torch.no_grad():
        answers = [compiled(on_gpu).cpu() for _ in range(REPLAYS)]
    verdict = judge(answers[0], eager, exact, F16)
    same = all(same_bits(answers[0], each) for each in answers)
    print(f"{len(compiled.launches)} launches, {REPLAYS} replays: {verdict}")
    if not same:
        print("two replays differ")
    return verdict.ok and same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", action="store_true", help="replay a compiled model instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    if options.graph:
        return 0 if run_graph() else 1
    return 0 if run_kernels(target_of_capability(*torch.cuda.get_device_capability())) else 1


if __name__ == "__main__":
    sys.exit(main())
