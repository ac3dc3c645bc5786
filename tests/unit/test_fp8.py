"""fp8: what calibration keeps, what the pass makes of it, and what the host build computes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.calibration import Calibration, layers_of
from gtco.check import judge
from gtco.codegen.sketches.elementwise import Elementwise
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.codegen.sketches.rowwise import Rowwise
from gtco.compiler import make_plan
from gtco.ir.graph import Graph, GraphBuilder, Group
from gtco.ir.interpreter import interpret
from gtco.ir.spec import TensorSpec
from gtco.passes import run_pipeline
from gtco.passes.quantize import quantizable, quantize, scales_of_fp8
from gtco.passes.scales import fp8_scales
from gtco.runtime.encoding import decode_plan, encode_plan
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests.kernel_checks import sample

FP8 = torch.float8_e4m3fn
F16 = torch.float16
H100 = TARGETS["sm_90a"]
WIDTH = 64


class Block(nn.Module):
    """An MLP behind a layer norm, with its residual, and a head that reads their mean."""

    def __init__(self, mean: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 8)
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mean
        x = x + self.second(torch.nn.functional.gelu(self.first(self.norm(x))))
        return self.head(x.mean(1))


def model(dtype: torch.dtype = torch.float16, mean: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Block(mean).to(dtype).eval()


def batch(seed: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(1, 20, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def calibrated(module: nn.Module, **keywords: Any) -> Calibration:
    dtype = next(module.parameters()).dtype
    return gtco.calibrate(module, [batch(seed, dtype) for seed in range(3)], **keywords)


def graph_of(module: nn.Module) -> Graph:
    return run_pipeline(gtco.capture(module, (batch(),)))


def test_the_linears_of_many_rows_are_calibrated() -> None:
    found = calibrated(model())
    assert [layer.source for layer in found.layers] == ["first", "second"]
    assert found.finished and found.batches == 3
    seen = max(float(batch(seed).abs().max()) for seed in range(3))
    assert found.layers[0].largest == seen, "behind a folded norm it is the residual stream"
    assert all(layer.error and 0 < layer.error < 0.1 for layer in found.layers)
    assert "second" in str(found) and "all in fp8" in str(found)


def test_a_budget_takes_the_cheap_ones_first() -> None:
    found = calibrated(model())
    dear, cheap = sorted(found.layers, key=lambda each: each.error or 0.0, reverse=True)
    found = dataclasses.replace(
        found,
        error=0.05,
        layers=(
            dataclasses.replace(dear, error=0.04, work=1000),
            dataclasses.replace(cheap, error=0.01, work=1000),
        ),
    )
    assert found.chosen(0.0) == ()
    assert [each.name for each in found.chosen(0.03)] == [cheap.name]
    assert len(found.chosen(0.1)) == 2


@pytest.mark.parametrize("mean", [0.0, 5.0])
def test_the_pass_folds_scales_and_sums_of_rounded_weights(mean: float) -> None:
    module = model(mean=mean)
    graph = graph_of(module)
    largest = {layer.name: 8.0 for layer in layers_of(graph, "fp8")}
    changed = quantize(graph, scales_of_fp8(graph, largest))
    changed.verify()
    eight = [node for node in changed.nodes if changed.specs[node.inputs[0]].dtype == FP8]
    assert [node.op for node in eight] == ["linear", "linear"]
    exact = interpret(graph, (batch(),), dtype=torch.float64)[0]
    found = interpret(changed, (batch(),), dtype=torch.float64)[0]
    assert 1e-4 < (found - exact).norm() / exact.norm() < 0.06


def test_sums_of_the_unrounded_weights_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of the residual stream must cancel against the weights as they are rounded."""
    graph = graph_of(model(mean=100.0))
    scales = scales_of_fp8(graph, {quantizable(graph)[0].name: 110.0})
    exact = interpret(graph, (batch(),), dtype=torch.float64)[0]

    def off() -> float:
        found = interpret(quantize(graph, scales), (batch(),), dtype=torch.float64)[0]
        return float((found - exact).norm() / exact.norm())

    right = off()
    monkeypatch.setattr("gtco.passes.quantize._folded_norm", lambda *_: None)
    assert off() > 1.2 * right


def test_weights_are_rounded_by_powers_of_two_of_each_row() -> None:
    w = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [1e-3, 1.0, 50.0, 1e4, 0.0, 1e-6]
    ).unsqueeze(1)
    scales = fp8_scales(w, 3.0)
    assert torch.equal(scales.rows.log2(), scales.rows.log2().round())
    assert torch.allclose(scales.stands_for(scales.nearest(w)), w, rtol=0.0626, atol=1e-9)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_host_build_computes_it(dtype: torch.dtype) -> None:
    module, x = model(dtype), batch(9, dtype)
    options = {"precision": "fp8", "calibration": calibrated(module), "error_budget": 0.5}
    compiled = gtco.compile(module, (x,), target="host", **options)
    assert "precision: fp8" in repr(compiled)
    with torch.no_grad():
        eager, exact = module(x), module.double()(x.double())
    assert judge(compiled(x), eager, exact, "fp8").ok
    assert not judge(compiled(x), eager, exact, torch.float16).ok, "it was not rounded to fp8"
    assert not judge(torch.zeros_like(eager), eager, exact, "fp8").ok


def test_an_interrupted_calibration_goes_on(tmp_path: Path) -> None:
    path, module = tmp_path / "calibration.json", model()
    taken: list[int] = []

    def batches(stop: int) -> Any:
        for seed in range(3):
            if seed == stop:
                raise KeyboardInterrupt
            taken.append(seed)
            yield batch(seed)

    with pytest.raises(KeyboardInterrupt):
        gtco.calibrate(module, batches(2), path=path)
    part = Calibration.load(path)
    assert part.batches == 2 and not part.finished and "not yet" in str(part)
    with pytest.raises(gtco.CalibrationError, match="not finished"):
        gtco.compile(module, (batch(),), target="host", precision="fp8", calibration=path)
    whole = gtco.calibrate(module, batches(3), path=path)
    assert whole == calibrated(module) == Calibration.load(path)


def _edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return edit


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(path.read_text()[:50]),
        lambda path: path.write_text("[]"),
        lambda path: path.write_bytes(b"\xff\x00"),
        _edited(lambda content: content.pop("layers")),
        _edited(lambda content: content.update(format="another")),
        _edited(lambda content: content["layers"][0].update(largest=-1)),
        _edited(lambda content: content["layers"][0].update(largest="2")),
        _edited(lambda content: content["layers"][0].update(work=0)),
        _edited(lambda content: content["layers"][0].update(error=None)),
        _edited(lambda content: content["layers"][0].update(extra=1)),
        _edited(lambda content: content.update(error=float("nan"))),
        _edited(lambda content: content.update(batches=-1)),
    ],
)
def test_a_damaged_file_is_refused(damage: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    calibrated(model(), path=path)
    damage(path)
    with pytest.raises(gtco.CalibrationError, match="is no calibration"):
        Calibration.load(path)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    module, x, path = model(), batch(), tmp_path / "calibration.json"
    found = calibrated(module, path=path)

    def refused(kind: type[Exception], sentence: str, **options: Any) -> None:
        with pytest.raises(kind, match=sentence):
            gtco.compile(module, (x,), **{"target": "host", "precision": "fp8", **options})

    refused(gtco.OptionError, "needs the sizes of the values")
    refused(gtco.OptionError, "calibration is what gtco.calibrate returned", calibration=3)
    refused(gtco.OptionError, "error_budget is a share", calibration=found, error_budget=5)
    refused(gtco.CalibrationError, "cannot be read", calibration=str(tmp_path / "none"))
    refused(gtco.TargetError, "not on sm_80", calibration=found, target="sm_80")
    with torch.no_grad():
        module.first.weight *= 2  # type: ignore[operator, union-attr]
    refused(gtco.CalibrationError, "is of another model", calibration=found)
    with pytest.raises(gtco.CalibrationError, match="of another model, or of other sizes"):
        gtco.calibrate(module, [x], path=path)
    for batches, sentence in (
        ([], "no batch was given"),
        (["x"], "a batch is a str"),
        ([x * torch.inf], "read (inf|nan) in batch 0"),
    ):
        with pytest.raises(gtco.CalibrationError, match=sentence):
            gtco.calibrate(module, batches)
    with pytest.raises(gtco.CalibrationError, match="nothing to take into fp8"):
        gtco.calibrate(nn.Linear(8, 8).half().eval(), [torch.zeros(2, 8).half()])


def test_a_stored_plan_of_fp8_needs_no_calibration() -> None:
    module, x = model(), batch()
    options = gtco.Options.of(target="sm_90a", precision="fp8", calibration=calibrated(module))
    plan, _ = make_plan(module, (x,), None, options)
    constants = plan.graph.constants
    text = json.loads(json.dumps(encode_plan(plan, {name: name for name in constants})))
    again = decode_plan(text, dict(constants))
    assert again.options.precision == "fp8" and again.options.calibration is None
    assert [str(each) for each in again.graph.nodes] == [str(each) for each in plan.graph.nodes]


def test_torchs_own_cast_to_fp8_stays_torchs() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(FP8).to(torch.float32)

    x = torch.tensor([0.1, 447.0, 500.0, -1e4, torch.nan])
    fused = gtco.fuse(gtco.capture(Casts(), (x,)))
    (found,) = interpret(fused, (x,))
    torch.testing.assert_close(found, Casts()(x), equal_nan=True)
    compiled = gtco.compile(Casts(), (x,), target="host")
    torch.testing.assert_close(compiled(x), Casts()(x), equal_nan=True)


@pytest.mark.compiler
@pytest.mark.parametrize("reader", ["mul", "amax", "linear"])
def test_what_reads_rounded_values_in_their_own_kernel_reads_them_rounded(reader: str) -> None:
    """Powers of two around them, so that every result is exact."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((5, 64), F16))
    y = x
    if reader == "linear":  # whose epilogue rounds
        y = b.add("linear", x, b.constant("w", torch.eye(64, dtype=F16)))
    rounded = b.add("quantize", y, b.constant("scale", torch.tensor([16.0])))
    wide = b.add("cast", rounded, dtype=torch.float32)
    outputs = [b.add("amax", wide, dims=[1], keepdim=True)] if reader == "amax" else []
    group = Group("rounded", b.build([*outputs, b.add("mul", wide, other=0.5)]))
    values = {"x": torch.randn(5, 64, generator=torch.Generator().manual_seed(3)).half()}
    values |= group.graph.constants
    wanted = interpret(group.graph, (values["x"],))
    sketch = {"mul": Elementwise, "amax": Rowwise, "linear": GemmMma}[reader](group, H100)
    for program in sample(sketch, 2):
        found = run_on_host(program, group, values)
        for answer, right in zip(found.values(), wanted, strict=True):
            assert torch.equal(answer, right)
        source = program.source.replace("round_to<e4m3_t>", "")
        assert source != program.source
        wrong = run_on_host(dataclasses.replace(program, source=source), group, values)
        assert not torch.equal(wrong[group.graph.outputs[-1]], wanted[-1])
