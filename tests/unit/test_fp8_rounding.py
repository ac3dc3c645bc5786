"""Weights of fp8 that are rounded by what linears read: what it gains, and where it is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gtco
from experiments import fp8_accuracy
from experiments.models import small
from gtco import rounding
from gtco.calibration import Calibration
from gtco.eight_bits import calibrate
from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.passes import compensation, run_pipeline
from gtco.passes.compensation import compensated_weights
from gtco.passes.quantize import operands, quantizable, scales_of_fp8
from gtco.passes.scales import FP8, Scales, fp8_scales, int8_scales
from tests.unit.test_fp8 import WIDTH, model

RANK = 6


def correlated(seed: int, rows: int = 20, k: int = WIDTH) -> Tensor:
    """[rows, k] of `RANK` directions that are the same for each seed, and a little noise."""
    directions = torch.randn(RANK, k, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, RANK, generator=generator) @ directions
    return x + 0.1 * torch.randn(rows, k, generator=generator)


def batch(seed: int) -> Tensor:
    return correlated(seed)[None].half()


def scales_of(w: Tensor, dtype: torch.dtype) -> Scales:
    """For activations of one channel like the other."""
    if dtype == torch.float8_e4m3fn:
        return fp8_scales(w, 16.0)
    seen = torch.tensor([-16.0, 16.0, 9.0])[:, None].expand(3, w.shape[1])
    return int8_scales({"w": w}, [seen], by_channel=True, centred=False)["w"]


def compensated(w: Tensor, moment: Tensor, dtype: torch.dtype) -> Tensor:
    return compensated_weights(scales_of(w, dtype).scaled(w), moment, dtype)


def off(rounded: Tensor, w: Tensor, x: Tensor) -> float:
    return float((x @ (scales_of(w, rounded.dtype).stands_for(rounded) - w).t()).norm())


def weights(rows: int = 48, k: int = WIDTH) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("k", [64, 208])
def test_errors_cancel_in_inputs_that_were_not_seen(k: int, dtype: torch.dtype) -> None:
    w, seen, unseen = weights(k=k), correlated(1, 400, k), correlated(2, 400, k)
    found = compensated(w, seen.t() @ seen, dtype)
    assert found.dtype == dtype and found.shape == w.shape
    assert off(found, w, unseen) < 0.4 * off(scales_of(w, dtype).nearest(w), w, unseen)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda shares: shares.roll(1, 1),
        lambda shares: -shares,
        lambda shares: shares.flip(0, 1).t(),
        torch.zeros_like,
    ],
    ids=["the next column", "the wrong way", "from the end", "not at all"],
)
def test_errors_that_go_elsewhere_do_not_cancel(
    wrong: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    w, seen, unseen = weights(), correlated(1, 400), correlated(2, 400)
    right = compensation._shares
    monkeypatch.setattr(compensation, "_shares", lambda moment: wrong(right(moment)))
    found = compensated(w, seen.t() @ seen, FP8)
    assert off(found, w, unseen) > 0.4 * off(scales_of(w, FP8).nearest(w), w, unseen)


def test_columns_that_nothing_is_known_of_are_rounded_to_the_nearest() -> None:
    w = weights()
    nearest = scales_of(w, FP8).nearest(w)
    assert torch.equal(compensated(w, torch.zeros(WIDTH, WIDTH), FP8), nearest)
    x = correlated(1)
    x[:, 10:20] = 0
    found = compensated(w, x.t() @ x, FP8)
    assert torch.equal(found[:, 10:20].float(), nearest[:, 10:20].float())


def graph_of(module: nn.Module) -> Graph:
    return run_pipeline(gtco.capture(module, (batch(0),)))


@pytest.mark.parametrize("mean", [0.0, 5.0])
def test_an_operand_is_what_the_weights_are_multiplied_by(mean: float) -> None:
    """Behind a folded norm: what the products give once mean and deviation are taken off."""
    graph = graph_of(model(mean=mean))
    linear = quantizable(graph)[0]
    operand = operands(graph)[linear.name]
    assert None not in (operand.mean, operand.rstd)
    readers = [node for node in graph.nodes if operand.rstd in node.inputs]
    names = (*operand.values, readers[0].name)
    whole = Graph(graph.inputs, graph.constants, graph.nodes, names)
    found = dict(zip(names, interpret(whole, (batch(1),), dtype=torch.float32), strict=True))
    w = graph.constants[linear.inputs[1]].float()
    product = operand.rows(found, fp8_scales(w, 16.0)) @ w.t()
    exact = found[readers[0].name].reshape(product.shape)
    assert 1e-3 < (product - exact).norm() / exact.norm() < 0.05 * (1 + mean)
    assert operands(graph)[quantizable(graph)[1].name].mean is None


def rounded_of(graph: Graph, batches: list[Tensor], largest: float = 16.0) -> dict[str, Any]:
    each = scales_of_fp8(graph, {node.name: largest for node in quantizable(graph)})
    found: dict[str, Any] = {}
    for part in rounding.rounded(graph, each, [(x,) for x in batches]):
        assert not set(part) & set(found)
        found |= part
    assert set(found) == set(each)
    return found


def test_what_gains_nothing_on_batches_held_out_stays_nearest() -> None:
    graph = graph_of(model())
    white = [torch.randn(1, 20, WIDTH).half() for _ in range(4)]
    alike = [batch(seed) for seed in range(4)]
    assert None not in rounded_of(graph, alike).values()
    first = quantizable(graph)[0].name
    assert rounded_of(graph, [*alike[:3], white[3]])[first] is None
    assert set(rounded_of(graph, alike[:1]).values()) == {None}, "nothing is held out of one batch"


def test_moments_are_kept_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, batches = graph_of(model()), [batch(seed) for seed in range(4)]
    whole = rounded_of(graph, batches)
    sizes = [4 * graph.specs[node.inputs[0]].sizes[-1] ** 2 for node in quantizable(graph)]
    monkeypatch.setattr(rounding, "ROOM", max(sizes))
    parts = rounded_of(graph, batches)
    assert all(torch.equal(parts[name].float(), whole[name].float()) for name in whole)
    monkeypatch.setattr(rounding, "ROOM", min(sizes))
    assert list(rounded_of(graph, batches).values()).count(None) == 1


BATCHES = [batch(seed) for seed in range(4)]


def test_calibration_gains_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrate(model(), BATCHES)
    assert set(found.weights) == {layer.name for layer in found.layers}
    assert "2 linears in 4 batches, the weights of 2 rounded with compensation" in str(found)
    monkeypatch.setattr(rounding, "ROOM", 0)
    nearest = calibrate(model(), BATCHES)
    assert not nearest.weights and {layer.rounded for layer in nearest.layers} == {""}
    graph, unseen = graph_of(model()), batch(77)
    exact = interpret(graph, (unseen,), dtype=torch.float64)[0]

    def error(calibration: Calibration) -> float:
        changed = calibration.quantized(graph, 0.5)
        answer = interpret(changed, (unseen,), dtype=torch.float64)[0]
        return float((answer - exact).norm() / exact.norm())

    assert error(found) < error(nearest)
    constants = found.quantized(graph, 0.5).constants
    used = [each for each in constants.values() if each.dtype == torch.float8_e4m3fn]
    assert all(any(torch.equal(w.float(), x.float()) for x in used) for w in found.weights.values())


def test_errors_are_measured_on_batches_that_weights_were_not_rounded_by() -> None:
    batches = [batch(seed) for seed in range(9)]
    found, graph = calibrate(model(), batches), graph_of(model())
    changed = found.changed(graph, found.layers, found.scales(graph))

    def error(part: list[Tensor]) -> float:
        exact, answers = (
            torch.cat([interpret(each, (x,), dtype=torch.float32)[0] for x in part])
            for each in (graph, changed)
        )
        return float((answers - exact).double().norm() / exact.double().norm())

    assert found.error == pytest.approx(error(batches[7:]), rel=1e-6)
    assert found.error != pytest.approx(error(batches[8:]), rel=1e-3)


def test_an_interrupted_rounding_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, module = tmp_path / "calibration.json", model()
    monkeypatch.setattr(rounding, "ROOM", 4 * (2 * WIDTH) ** 2)  # one linear at a time
    real, begun = rounding._compensated, []

    def stops(*given: Any) -> Any:
        begun.append(given[1])
        if len(begun) == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(rounding, "_compensated", stops)
    with pytest.raises(KeyboardInterrupt):
        calibrate(module, BATCHES, path=path)
    part = Calibration.load(path)
    assert [layer.rounded is None for layer in part.layers] == [False, True]
    assert len(part.weights) == 1 and not part.finished
    whole = calibrate(module, BATCHES, path=path)
    assert [len(each) for each in begun] == [1, 1, 1], "the first was rounded once"
    assert whole == calibrate(module, BATCHES) == Calibration.load(path)
    more = calibrate(module, [*BATCHES, batch(9)], path=path)
    assert more.layers[0].rounded != whole.layers[0].rounded, "another batch, other weights"


def test_batches_may_share_a_buffer() -> None:
    buffer = torch.empty_like(BATCHES[0])
    found = calibrate(model(), (buffer.copy_(each) for each in BATCHES))
    assert found == calibrate(model(), BATCHES) and found.weights


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda file: file.unlink(), "cannot be read"),
        (lambda file: file.write_bytes(file.read_bytes()[:90]), "cannot be read"),
        (lambda file: file.write_bytes(b""), "cannot be read"),
        (lambda file: file.write_bytes(_flipped(file.read_bytes())), "has another tensor"),
    ],
)
def test_damaged_weights_are_refused(
    damage: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    calibrate(model(), BATCHES, path=path)
    damage(tmp_path / "calibration.json.safetensors")
    with pytest.raises(gtco.CalibrationError, match=sentence):
        Calibration.load(path)


def _flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def test_weights_of_other_sizes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    found = calibrate(model(), BATCHES, path=path)
    name = found.layers[0].name
    strange = replace(found, weights={**found.weights, name: found.weights[name][:8]})
    with pytest.raises(gtco.CalibrationError, match="of another model"):
        strange.quantized(graph_of(model()), 0.5)
    content = json.loads(path.read_text())
    content["layers"][0]["rounded"] = 3
    path.write_text(json.dumps(content))
    with pytest.raises(gtco.CalibrationError, match="is no calibration"):
        Calibration.load(path)


def test_the_experiment_compares_both_roundings() -> None:
    model, (image, *_) = small.vit_l16()
    found = fp8_accuracy.measure(model, image, 4, 0.05, "fp8")
    nearest, compensated = (found[f"{each}, all"] for each in ("nearest", "compensated"))
    assert compensated["like calibration's"]["error"] < nearest["like calibration's"]["error"]
    assert nearest["calibration_says"] != compensated["calibration_says"]
    assert found["reference_from_fp64"] < 1e-5
