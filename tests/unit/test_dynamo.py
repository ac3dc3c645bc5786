"""`torch.compile(model, backend="gtco")`, on the CPU: the kernels' place takes `interpret`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco import dynamo
from gtco.runtime.module import CompiledModule
from gtco.target import TargetError
from tests.models import vit
from tests.processes import ROOT, environment

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")

FOR_H100 = {"target": "sm_90a"}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CompiledModule]:
    """Every module that gets compiled; each runs through `interpret` instead of its kernels."""
    modules: list[CompiledModule] = []

    def compile_and_interpret(*args: Any, **options: Any) -> Callable[..., Any]:
        compiled = gtco.compile(*args, **options)
        modules.append(compiled)
        captured = compiled._captured

        def run(*inputs: Any) -> Any:
            return captured.unflatten(gtco.interpret(compiled.graph, captured.flatten(inputs)))

        return run

    monkeypatch.setattr(dynamo, "compile_model", compile_and_interpret)
    return modules


def through_gtco(model: nn.Module, **options: Any) -> Any:
    chosen = {**FOR_H100, **options.pop("options", {})}
    return torch.compile(model, backend=dynamo.backend, options=chosen, **options)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_parameters_are_constants_and_not_inputs(made: list[CompiledModule]) -> None:
    torch.manual_seed(0)
    model, image = vit(), torch.randn(1, 3, 32, 32)
    compiled = through_gtco(model)
    for _ in range(2):
        close(compiled(image), model(image))
    (module,) = made
    assert [str(spec) for spec in module.graph.graph.inputs.values()] == ["f32[1,3,32,32]"]
    direct = gtco.compile(model, (image,), target="sm_90a")
    assert [launch.ops for launch in module.launches] == [x.ops for x in direct.launches]


class Broken(nn.Module):
    """Two layers of one class with a graph break between them, and a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.shift = torch.randn(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.shift
        torch._dynamo.graph_break()
        return self.second(torch.relu(x)) + self.shift


@torch.no_grad()
def test_graph_breaks_make_several_modules(made: list[CompiledModule]) -> None:
    torch.manual_seed(0)
    model, x = Broken().eval(), torch.randn(4, 8)
    compiled = through_gtco(model)
    for _ in range(2):
        close(compiled(x), model(x))
    assert len(made) == 2


@torch.no_grad()
def test_layers_that_share_a_graph_keep_their_own_weights(made: list[CompiledModule]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8).eval() for _ in range(3)]
    compiled = [through_gtco(layer) for layer in layers]
    for _ in range(2):
        ours = expected = torch.randn(4, 8)
        for fast, layer in zip(compiled, layers, strict=True):
            ours, expected = fast(ours), layer(expected)
        close(ours, expected)
    assert len(made) == 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@torch.no_grad()
def test_weights_that_are_gone_are_let_go(made: list[CompiledModule]) -> None:
    seen: list[dynamo.Specialized] = []

    def keep(graph: Any, inputs: Any, **given: Any) -> dynamo.Specialized:
        seen.append(dynamo.backend(graph, inputs, **given))
        return seen[-1]

    model, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    compiled = torch.compile(model, backend=keep, options=FOR_H100)
    for _ in range(4):
        model.weight = nn.Parameter(torch.randn(8, 8))
        close(compiled(x), model(x))
    assert sum(len(each._variants) for each in seen) <= 2
    assert len(made) == 4


@torch.no_grad()
def test_new_weights_are_seen(made: list[CompiledModule]) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    compiled = through_gtco(model)
    close(compiled(x), model(x))
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    close(compiled(x), model(x))
    model.weight = nn.Parameter(torch.randn(8, 8))
    close(compiled(x), model(x))
    assert len(made) == 3


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_other_shapes_compile_again(made: list[CompiledModule], dynamic: bool | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Flatten(0)).eval()
    compiled = through_gtco(model, dynamic=dynamic)
    for rows in (4, 6, 4, 7):
        x = torch.randn(rows, 8)
        close(compiled(x), model(x))
    assert len(made) >= 3


def test_inference_mode_works(made: list[CompiledModule]) -> None:
    with torch.inference_mode():
        model, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)  # without version counts
        compiled = through_gtco(model)
        for _ in range(2):
            close(compiled(x), model(x))
    assert len(made) == 1


def test_gradients_are_refused(made: list[CompiledModule]) -> None:
    model = nn.Linear(8, 8).eval()
    compiled = through_gtco(model)
    with pytest.raises(dynamo.GradError, match=r"torch\.no_grad\(\)"):
        compiled(torch.randn(4, 8))
    model.requires_grad_(False)
    close(compiled(torch.ones(4, 8)), model(torch.ones(4, 8)))


@torch.no_grad()
def test_options_are_checked_and_used(made: list[CompiledModule]) -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    with pytest.raises(Exception, match="did you mean 'precision'") as caught:
        through_gtco(model, options={"precison": "fp16"})(x)
    assert "OptionError" in str(caught.value)
    through_gtco(model, options={"precision": "fp16"})(x)
    assert made[-1]._plan.options.precision == "fp16"
    model, x = nn.Linear(64, 48).eval().half(), torch.randn(20, 64).half()
    known = gtco.calibrate(model, [x])
    through_gtco(model, options={"precision": "fp8", "calibration": known})(x)
    assert made[-1]._plan.options.calibration is known


@NO_GPU
@torch.no_grad()
@NO_GPU
@pytest.mark.parametrize("mode", dynamo.MODES)
def test_modes_that_ask_for_what_gtco_does_anyway_are_taken(mode: str | None) -> None:
    compiled = torch.compile(nn.ReLU(), backend="gtco", mode=mode)
    with pytest.raises(TargetError, match="no CUDA GPU is here"):
        compiled(torch.ones(3))


@torch.no_grad()
@NO_GPU
def test_without_a_gpu_it_says_what_to_do() -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    with pytest.raises(TargetError, match='target="sm_90a"'):
        torch.compile(model, backend=dynamo.backend)(x)
    with pytest.raises(TargetError, match="compiled for sm_90a, and no CUDA GPU is here"):
        through_gtco(model)(x)


@NO_GPU
def test_the_name_needs_no_import(tmp_path: Path) -> None:
    """With the entry point as an installation writes it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (group,) = project["entry-points"]
    lines = [f"{name} = {value}" for name, value in project["entry-points"][group].items()]
    info = tmp_path / "gtco-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gtco\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    code = """
import torch
model = torch.compile(torch.nn.Linear(8, 8).eval(), backend="gtco", options={"target": "sm_90a"})
with torch.no_grad():
    model(torch.randn(4, 8))
"""
    outcome = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    last = outcome.stderr.strip().splitlines()[-1]
    assert last.startswith("gtco.target.TargetError: this module was compiled for sm_90a")
