"""`precision="int8"`: what calibration sees, what the pass makes of it, what the host computes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.calibration import Calibration, CalibrationError, layers_of
from gtco.check import judge
from gtco.compiler import make_plan
from gtco.ir.graph import Graph, GraphBuilder, Group
from gtco.ir.interpreter import interpret
from gtco.ir.ops import OPS
from gtco.ir.spec import TensorSpec
from gtco.passes import int8_factors, run_pipeline
from gtco.passes.quantize import quantizable, quantize, scales_of_int8, sums
from gtco.passes.scales import INT8_HEADROOM, int8_scales, seen_in, seen_in_both
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests.kernel_checks import sample
from tests.unit.test_fp8 import batch, model

F16, F32, INT8 = torch.float16, torch.float32, torch.int8
H100 = TARGETS["sm_90a"]


class Bottlenecks(nn.Module):
    """Two of ResNet's, behind a stem that makes few channels many."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(16, width, 1)
        self.reduce = nn.ModuleList(nn.Conv2d(width, 16, 1) for _ in range(2))
        self.wide = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.expand = nn.ModuleList(nn.Conv2d(16, width, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for reduce, wide, expand in zip(self.reduce, self.wide, self.expand, strict=True):
            x = F.relu(x + expand(F.relu(wide(F.relu(reduce(x))))))
        return x.mean((2, 3))


def images(seed: int) -> Tensor:
    return torch.randn(2, 16, 7, 9, generator=torch.Generator().manual_seed(seed)).half()


def resnet() -> nn.Module:
    torch.manual_seed(3)
    return Bottlenecks().half().eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "a norm and an MLP": (model, batch),
    "bottlenecks": (resnet, images),
}


@pytest.fixture
def every_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of any size are large."""
    monkeypatch.setattr(sys.modules[quantize.__module__], "LARGE", 0)


def calibrated(name: str, **keywords: Any) -> Calibration:
    make, given = MODELS[name]
    return gtco.calibrate(make(), [given(seed) for seed in range(6)], precision="int8", **keywords)


def graph_of(name: str) -> Graph:
    make, given = MODELS[name]
    return run_pipeline(gtco.capture(make(), (given(0),)))


def off(graph: Graph, changed: Graph, given: Tensor) -> float:
    exact, found = (interpret(each, (given,), dtype=torch.float64)[0] for each in (graph, changed))
    return float((found - exact).norm() / exact.norm())


# -- scales ----------------------------------------------------------------------------------------


def scales(x: Tensor, w: Tensor, *, by_channel: bool = True, centred: bool = False) -> Any:
    seen = [seen_in(x)]
    return int8_scales({"w": w}, seen, by_channel=by_channel, centred=centred)["w"]


def random(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("centred", [False, True])
def test_what_was_seen_is_as_close_as_a_step(centred: bool) -> None:
    x = random(400, 48) * torch.logspace(-2, 2, 48) + torch.linspace(-3, 50, 48)
    found = scales(x, random(24, 48, seed=1), centred=centred)
    assert ((found.as_rounded(x) - x).abs() <= 0.5001 / found.factor).all(), "nothing is cut"
    zero = found.as_rounded(torch.zeros(1, 48))
    assert not centred or (zero.eq(0).all() and found.offset.eq(0).all())


def test_rounded_weights_stand_for_the_weights() -> None:
    w = random(24, 48, seed=1)
    found = scales(random(400, 48) * torch.logspace(-1, 1, 48), w)
    rounded = found.nearest(w)
    assert rounded.dtype == INT8 and rounded.abs().amax(1).eq(127).all()
    steps = found.factor / found.rows[:, None]
    assert ((found.stands_for(rounded) - w).abs() <= 0.5001 * steps).all()


def test_channels_of_other_sizes_have_other_factors_where_that_is_closer() -> None:
    x, w = random(400, 48), random(24, 48, seed=1)
    x[:, 5] *= 100
    w[:, 5] /= 100
    apart, alike = scales(x, w), scales(x, w, by_channel=False)
    assert alike.factor.numel() == 1 and apart.factor.numel() == 48
    exact = x @ w.t()
    errors = [
        (each.as_rounded(x) @ each.stands_for(each.nearest(w)).t() - exact).norm()
        for each in (apart, alike)
    ]
    assert errors[0] < 0.1 * errors[1]


def test_readers_of_other_numbers_of_channels_share_a_factor() -> None:
    x = random(40, 48)
    weights = {"w": random(8, 48), "v": random(8, 96)}
    seen = [seen_in(x), seen_in(x.reshape(20, 96))]
    found = int8_scales(weights, seen, by_channel=False, centred=False)
    assert found["w"].factor.equal(found["v"].factor) and found["w"].factor.numel() == 1
    assert ((found["v"].as_rounded(x) - x).abs() <= 0.5001 / found["v"].factor).all()


def test_nothing_below_zero_takes_all_256_steps() -> None:
    x = random(400, 8).relu()
    found = scales(x, random(4, 8))
    assert found.offset.tolist() == [-128.0], "one number, as each channel has the same"
    assert (1 / found.factor).amax() <= INT8_HEADROOM * float(x.amax()) / 254


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0])
def test_constant_channels_are_what_they_are(value: float) -> None:
    x = random(40, 8)
    x[:, 3] = value
    found = scales(x, random(4, 8)).as_rounded(x)
    assert (found[:, 3] - value).abs().max() < 0.05
    assert scales(torch.full((4, 8), value), random(4, 8)).as_rounded(x).isfinite().all()


def test_batches_add_up_to_what_all_were_seen_to_be() -> None:
    parts = [random(10, 8, seed=seed) for seed in range(3)]
    found = seen_in(parts[0])
    for number, part in enumerate(parts[1:], 2):
        found = seen_in_both(found, seen_in(part), 1 / number)
    torch.testing.assert_close(found, seen_in(torch.cat(parts)))


# -- the pass --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_sum")
@pytest.mark.parametrize("name", MODELS)
def test_all_in_int8_is_close(name: str) -> None:
    found, graph, given = calibrated(name), graph_of(name), MODELS[name][1](77)
    assert found.finished and found.error is not None and 0 < found.error < 0.03
    changed = found.quantized(graph, 1.0)
    changed.verify()
    eight = [node for node in changed.nodes if changed.specs[node.inputs[0]].dtype == INT8]
    products = [node for node in eight if node.definition.multiplies]
    assert len(products) == len(quantizable(graph, INT8))
    assert 1e-5 < off(graph, changed, given) < 0.03


def test_convolutions_and_sums_are_calibrated_too(every_sum: None) -> None:
    layers = calibrated("bottlenecks").layers
    kinds = [each.name.rstrip("_0123456789") for each in layers]
    assert (kinds.count("conv"), kinds.count("linear"), kinds.count("add")) == (2, 5, 2)
    assert all(each.work > 0 and each.error is not None for each in layers)


@pytest.mark.usefixtures("every_sum")
def test_a_sum_reads_integers_where_a_product_does() -> None:
    found, graph = calibrated("bottlenecks"), graph_of("bottlenecks")
    stored = {spec.dtype for node in found.quantized(graph, 1.0).nodes for spec in node.outputs}
    assert stored == {INT8, F32, F16}
    (name, (base, reader)), *_ = sums(graph).items()
    only = replace(found, layers=tuple(x for x in found.layers if x.name == name))
    assert str(only.quantized(graph, 1.0)) == str(graph), "no product rounds what it reads"
    both = replace(found, layers=tuple(x for x in found.layers if x.name in (name, reader)))
    changed = both.quantized(graph, 1.0)
    made = [node for node in changed.nodes if node.op == "quantize_affine"]
    assert len(made) == 1 and base not in {x for node in changed.nodes for x in node.inputs[1:]}
    readers = [node.op for node in changed.nodes if made[0].name in node.inputs]
    assert sorted(readers) == ["cast", "linear"]


def test_small_sums_stay_as_they_are() -> None:
    assert not sums(graph_of("bottlenecks"))


@pytest.mark.parametrize("fault", ["offsets", "borders", "sums of the norm"])
def test_what_is_left_out_would_be_wrong(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, images_of = MODELS["a norm and an MLP" if fault == "sums of the norm" else "bottlenecks"]
    module = model(mean=100.0) if fault == "sums of the norm" else make()
    graph, given = run_pipeline(gtco.capture(module, (images_of(0),))), images_of(77)
    nodes = quantizable(graph, INT8)
    read = tuple(dict.fromkeys(node.inputs[0] for node in nodes))
    values = interpret(replace(graph, outputs=read), (images_of(1),), dtype=F32)
    of_value = {value: seen_in(x) for value, x in zip(read, values, strict=True)}
    by = scales_of_int8(graph, {node.name: of_value[node.inputs[0]] for node in nodes})
    right = off(graph, quantize(graph, by), given)
    if fault == "offsets":
        by = {key: replace(each, offset=each.offset - 40) for key, each in by.items()}
    elif fault == "borders":
        by = {
            key: replace(each, offset=torch.full((1,), -100.0)) if key.startswith("conv") else each
            for key, each in by.items()
        }
    else:
        monkeypatch.setattr("gtco.passes.quantize._folded_norm", lambda *_: None)
    assert off(graph, quantize(graph, by), given) > 1.3 * right


# -- factors ---------------------------------------------------------------------------------------


def behind_a_residual(*, twice: bool = False, sign: float = 1.0) -> Graph:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 9, 32), F32))
    y = b.add(
        "add", b.add("mul", x, b.constant("u", random(32).abs())), b.constant("c", random(32))
    )
    p = b.input("p", TensorSpec((2, 9, 32), INT8))
    s = b.add("mul", b.add("cast", p, dtype=F32), other=0.03)
    s = b.add("cast", b.add("add", s, b.constant("d", random(32, seed=2))), dtype=F16)
    r = b.add("relu", b.add("add", b.add("cast", y, dtype=F16), s))
    factor = b.constant("f", sign * (random(32, seed=3).abs() + 20))
    q = b.add("quantize_affine", r, factor, b.constant("z", torch.tensor([-128.0])))
    return b.build([q, r] if twice else [q])


def test_factors_become_those_of_what_is_added() -> None:
    graph = behind_a_residual()
    folded = int8_factors.fold_factors(graph)
    folded.verify()
    given = (random(2, 9, 32, seed=5), torch.randint(-128, 128, (2, 9, 32)).to(INT8))
    before, after = (interpret(each, given, dtype=torch.float64)[0] for each in (graph, folded))
    assert (before.int() - after.int()).abs().max() <= 1 and (before == after).float().mean() > 0.99
    columns = [name for name, x in folded.constants.items() if x.numel() == 32]
    assert len(columns) == 3 < len([x for x in graph.constants.values() if x.numel() == 32])
    assert F16 not in {spec.dtype for spec in folded.specs.values()}
    assert str(int8_factors.fold_factors(folded)) == str(folded)


@pytest.mark.parametrize("graph", [behind_a_residual(twice=True), behind_a_residual(sign=-1.0)],
                         ids=["read elsewhere", "of the other sign"])  # fmt: skip
def test_factors_stay_where_they_cannot_move(graph: Graph) -> None:
    assert str(int8_factors.fold_factors(graph)) == str(graph)


# -- kernels ---------------------------------------------------------------------------------------

EXTREMES = [0.0, 0.49, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e9, -1e9, 3e38, -3e38,
            float("inf"), -float("inf")]  # fmt: skip


@pytest.mark.compiler
@pytest.mark.parametrize("columns", [16, 15, 2])
def test_the_host_rounds_ends_and_halves(columns: int) -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((6, columns), F32))
    one, zero = b.constant("f", torch.ones(1)), b.constant("z", torch.zeros(1))
    group = Group("g", b.build([b.add("quantize_affine", x, one, zero)]))
    from gtco.codegen.sketches.elementwise import Elementwise

    values = torch.tensor(EXTREMES).repeat(12)[: 6 * columns].reshape(6, columns)
    for program in sample(Elementwise(group, H100), 2):
        (found,) = run_on_host(program, group, {"x": values}).values()
        expected = OPS["quantize_affine"].reference(values, torch.ones(1), torch.zeros(1))
        assert torch.equal(found, expected)


@pytest.mark.compiler
@pytest.mark.usefixtures("every_sum")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", ["host", "sm_90a"])
def test_the_host_build_computes_it(name: str, target: str) -> None:
    make, given = MODELS[name]
    options = {"precision": "int8", "calibration": calibrated(name), "error_budget": 0.5}
    x = given(9)
    if target == "sm_90a":
        plan, _ = make_plan(make(), (x,), None, gtco.Options(target=target, **options))
        assert all(launch.program for launch in plan.launches)
        return
    module = make()
    answer = gtco.compile(module, (x,), target=target, **options)(x)
    exact = module.double()(x.double())
    verdict = judge(answer, make()(x), exact, "int8")
    assert verdict.ok, verdict.reason


def test_int8_is_for_every_target() -> None:
    found = calibrated("bottlenecks")
    options = gtco.Options(target="sm_80", precision="int8", calibration=found, error_budget=0.5)
    plan, _ = make_plan(resnet(), (images(0),), None, options)
    dtypes = {spec.dtype for launch in plan.launches for spec in launch.group.graph.specs.values()}
    assert INT8 in dtypes and all(launch.program for launch in plan.launches)


# -- what is kept ----------------------------------------------------------------------------------


def test_a_calibration_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    found = calibrated("bottlenecks", path=path)
    kept = Calibration.load(path)
    assert kept == found and kept.precision == "int8"
    assert all(torch.equal(kept.seen[name], x) for name, x in found.seen.items())
    graph = graph_of("bottlenecks")
    one, other = (str(each.quantized(graph, 0.5)) for each in (found, kept))
    assert one == other
    assert "int8" in str(kept) and "products and sums" in str(kept)


def test_an_interrupted_one_goes_on(tmp_path: Path) -> None:
    path, batches = tmp_path / "calibration.json", [images(seed) for seed in range(6)]

    def stops() -> Any:
        yield from batches[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gtco.calibrate(resnet(), stops(), precision="int8", path=path)
    assert Calibration.load(path).batches == 2
    whole = gtco.calibrate(resnet(), batches, precision="int8", path=path)
    apart = gtco.calibrate(resnet(), batches, precision="int8")
    assert all(torch.equal(whole.seen[name], x) for name, x in apart.seen.items())
    assert whole.error == apart.error


def test_another_file_beside_it_is_refused(tmp_path: Path) -> None:
    import safetensors.torch

    path = tmp_path / "calibration.json"
    calibrated("bottlenecks", path=path)
    beside = Path(f"{path}.safetensors")
    tensors = safetensors.torch.load(beside.read_bytes())
    name = next(each for each in tensors if each.endswith(".seen"))
    beside.write_bytes(safetensors.torch.save({**tensors, name: tensors[name] + 1}))
    with pytest.raises(CalibrationError, match="has another tensor"):
        Calibration.load(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "precision": "int4"}))
    with pytest.raises(CalibrationError, match="its precision is 'int4'"):
        Calibration.load(path)


@pytest.mark.parametrize("change", [lambda x: x[:, 1:], lambda x: x[:2], None],
                         ids=["channels", "facts", "none"])  # fmt: skip
def test_what_was_seen_of_other_sizes_is_refused(change: Any) -> None:
    found = calibrated("bottlenecks")
    name = next(iter(found.seen))
    seen = {key: x for key, x in found.seen.items() if change or key != name}
    if change:
        seen[name] = change(seen[name])
    with pytest.raises(CalibrationError, match="of another model"):
        replace(found, seen=seen).quantized(graph_of("bottlenecks"), 0.5)


def test_one_for_fp8_is_none_for_int8(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    fp8 = gtco.calibrate(model(), [batch(seed) for seed in range(3)], path=path)
    with pytest.raises(gtco.OptionError, match="for fp8, not for int8"):
        gtco.compile(model(), (batch(0),), target="host", precision="int8", calibration=fp8)
    with pytest.raises(CalibrationError, match="a calibration for fp8, not for int8"):
        gtco.calibrate(model(), [batch(0)], precision="int8", path=path)
    with pytest.raises(gtco.OptionError, match="precision is one of fp8, int8"):
        gtco.calibrate(model(), [batch(0)], precision="fp16")
    with pytest.raises(gtco.OptionError, match='precision="int8"\\), or the file'):
        gtco.compile(model(), (batch(0),), target="host", precision="int8")


def test_layers_of_int8_contain_those_of_fp8() -> None:
    graph = graph_of("bottlenecks")
    names = [{each.name for each in layers_of(graph, kind)} for kind in ("fp8", "int8")]
    assert names[0] < names[1]
