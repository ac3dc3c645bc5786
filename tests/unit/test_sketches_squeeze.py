"""The gates of squeeze-and-excitation: right in every schedule, taken and refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.squeeze import Squeeze
from gtco.passes.legality import explain, family
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import squeeze_groups
from tests.kernel_checks import compile_for_all, inputs_of, wrong_outputs
from tests.pass_checks import Golden

H100 = TARGETS["sm_90a"]


@pytest.mark.compiler
@pytest.mark.parametrize("case", squeeze_groups.CASES)
def test_right_on_the_host_build(case: str) -> None:
    group = squeeze_groups.CASES[case]()
    sketch = Squeeze(group, H100)
    legal = {program.grid: program for _, program in sketch.legal()}  # one of each split
    programs = [*legal.values(), sketch.emit(next(iter(sketch.defaults())))]
    for seed, program in enumerate(programs):
        values = inputs_of(group, seed)
        assert not wrong_outputs(
            program, group, values, lambda *given, seed=seed: run_on_host(*given, seed)
        )


def test_kernels_compile_without_spills() -> None:
    for case in ("se_64", "se_odd", "se_wide"):
        group = squeeze_groups.CASES[case]()
        assert not list(compile_for_all(lambda target, group=group: Squeeze(group, target), 1))


def test_source(golden: Golden) -> None:
    sketch = Squeeze(squeeze_groups.CASES["se_512"](), H100)
    golden("squeeze_512.cu", sketch.emit({"split": 4, "threads": 256}).code)


def test_a_slice_below_a_sector_is_refused() -> None:
    sketch = Squeeze(squeeze_groups.CASES["se_64"](), H100)
    with pytest.raises(Illegal, match="8 channels of a block are less than the 32 B"):
        sketch.emit({"split": 8, "threads": 128})
    with pytest.raises(Illegal, match="sm_80 has no clusters"):
        Squeeze(squeeze_groups.CASES["se_64"](), TARGETS["sm_80"]).emit(
            {"split": 2, "threads": 128}
        )


@pytest.mark.parametrize(
    ("images", "split", "staged"), [(132, 1, True), (133, 1, False), (16, 8, True), (17, 8, False)]
)
def test_weights_are_staged_where_no_block_waits_for_their_room(
    images: int, split: int, staged: bool
) -> None:
    group = squeeze_groups.gate((images, 2, 2, 128), 32)
    program = Squeeze(group, H100).emit({"split": split, "threads": 128})
    assert ("STAGED = true" in program.source) == staged
    assert (program.smem_bytes >= 2 * 32 * 128 // split * 2) == staged


def test_what_does_not_fit_is_not_staged() -> None:
    group = squeeze_groups.gate((1, 2, 2, 1024), 512)  # 1 MB each
    fit = {
        program.schedule["split"]: "STAGED = true" in program.source
        for _, program in Squeeze(group, H100).legal()
    }
    assert fit == {1: False, 2: False, 4: False, 8: False}
    group = squeeze_groups.gate((1, 2, 2, 1024), 256)
    program = Squeeze(group, H100).emit({"split": 8, "threads": 256})
    assert "STAGED = true" in program.source


class Excited(nn.Module):
    """A convolution times its gate; `shown` is returned as well."""

    def __init__(self, channels: int, hidden: int, shown: str = "") -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, channels, 1)
        self.squeeze = nn.Conv2d(channels, hidden, 1)
        self.excite = nn.Conv2d(hidden, channels, 1)
        self.shown = shown

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.conv(x)
        mean = x.mean((2, 3), keepdim=True)
        hidden = torch.nn.functional.silu(self.squeeze(mean))
        gate = torch.sigmoid(self.excite(hidden))
        shown = {"mean": (mean,), "hidden": (hidden,), "gate": (gate,)}.get(self.shown, ())
        return (x * gate, *shown)


def families(module: nn.Module, *shape: int, target: str = "sm_90a") -> list[str]:
    graph = gtco.capture(module.eval().half(), (torch.randn(*shape).half(),))
    return [family(group) for group in gtco.fuse(graph, target=target)]


def test_the_linears_of_a_gate_share_no_kernel_without_its_mean() -> None:
    group = squeeze_groups.CASES["se_64"]()
    names = [node.op for node in group.compute]
    first, last = names.index("linear"), len(names) - 1 - names[::-1].index("linear")
    assert "mean" in names[:first]
    reason = explain(group.graph, group.compute[first : last + 1])
    assert reason is not None and "are two contractions" in reason


def test_a_gate_is_one_kernel() -> None:
    for shown in ("", "gate"):
        found = families(Excited(64, 4, shown), 8, 8, 16, 16)
        assert found == ["gemm", "squeeze", "elementwise"]


@pytest.mark.parametrize("shown", ["mean", "hidden"])
def test_what_others_read_keeps_the_linears_apart(shown: str) -> None:
    assert "squeeze" not in families(Excited(64, 4, shown), 8, 8, 16, 16)


def test_a_large_image_is_no_work_of_one_block() -> None:
    assert "squeeze" not in families(Excited(32, 8), 1, 8, 112, 112, target="sm_80")


def test_large_weights_are_read_once() -> None:
    assert "squeeze" not in families(Excited(1024, 1024), 64, 8, 7, 7)
