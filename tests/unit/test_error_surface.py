"""What a user sees who hands in something else than `gtco.compile` wants, and around it."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import logging
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.dynamo import backend
from gtco.frontend.torch_export import capture

X = torch.linspace(-1, 1, 4 * 16).view(4, 16)


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(16, 8)

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        result: Tensor = self.score(x)
        return result if shift is None else result + shift


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, Tensor]


class WithOutput(Scored):
    def forward(self, x: Tensor) -> Output:  # type: ignore[override]
        return Output(self.score(x), (x + 1, x * 2))


class KeyCache:
    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class WithCache(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"logits": x + 1, "cache": KeyCache(x)}


class WithType(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + 1, x.dtype


def half() -> nn.Module:
    return Scored().half().eval()


def exported() -> torch.export.ExportedProgram:
    return torch.export.export(Scored().eval(), (X,))


REFUSED: Mapping[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a function": (
        lambda: gtco.compile(lambda x: x + 1, (X,), target="sm_90a"),
        gtco.CaptureError,
        "forward of an nn.Module",
    ),
    "a class": (
        lambda: gtco.compile(Scored, (X,), target="sm_90a"),
        gtco.CaptureError,
        r"pass an instance: Scored\(...\).eval\(\)",
    ),
    "weights": (
        lambda: gtco.compile(Scored().state_dict(), (X,), target="sm_90a"),
        gtco.CaptureError,
        "load the weights into a module",
    ),
    "no model": (
        lambda: gtco.compile(None, (X,), target="sm_90a"),
        gtco.CaptureError,
        "a NoneType, not a model",
    ),
    "a path that is none": (
        lambda: gtco.compile("nowhere.onnx", target="sm_90a"),
        gtco.CaptureError,
        "there is no file nowhere.onnx",
    ),
    "another file": (
        lambda: gtco.compile(Path("model.pt"), (X,), target="sm_90a"),
        gtco.CaptureError,
        "no .onnx file; load the model",
    ),
    "an artifact": (
        lambda: gtco.compile("vit.gtco", target="sm_90a"),
        gtco.CaptureError,
        r"gtco.load\('vit.gtco'\)",
    ),
    "fp16 weights with an fp32 example": (
        lambda: gtco.compile(half(), (X,), target="sm_90a"),
        gtco.CaptureError,
        r"x.half\(\) for float16",
    ),
    "an array": (
        lambda: gtco.compile(Scored().eval(), (np.ones((4, 16)),), target="sm_90a"),
        gtco.CaptureError,
        "example argument x is a ndarray, .*torch.as_tensor",
    ),
    "an object": (
        lambda: gtco.compile(Scored().eval(), ([KeyCache(X)],), target="sm_90a"),
        gtco.CaptureError,
        "example argument x holds a KeyCache, .*pass tensors",
    ),
    "a compiled module in a model": (
        lambda: gtco.compile(nn.Sequential(gtco.compile(half(), X.half(), target="sm_90a")), X),
        gtco.CaptureError,
        "the model's 0 is compiled already",
    ),
    "other examples than a program was exported for": (
        lambda: gtco.compile(exported(), (X.half(),), target="sm_90a"),
        gtco.CaptureError,
        r"x is f16\[4,16\], .*exported for f32\[4,16\]",
    ),
    "more examples than a program takes": (
        lambda: gtco.compile(exported(), (X, X), target="sm_90a"),
        gtco.CaptureError,
        "2 arguments by position are 1 too many",
    ),
    "an example too few": (
        lambda: gtco.compile(Scored().eval(), (), target="sm_90a"),
        gtco.CaptureError,
        "missing a required argument: 'x'",
    ),
    "an example that nobody takes": (
        lambda: gtco.compile(Scored().eval(), (X,), {"shfit": X}, target="sm_90a"),
        gtco.CaptureError,
        "unexpected keyword argument 'shfit'",
    ),
    "arguments that are no tuple": (
        lambda: gtco.compile(Scored().eval(), 3, target="sm_90a"),
        gtco.CaptureError,
        r"args is a int; pass a tuple of arguments: \(x,\)",
    ),
    "keywords that are no dict": (
        lambda: gtco.compile(Scored().eval(), (X,), [1], target="sm_90a"),
        gtco.CaptureError,
        "kwargs is a list",
    ),
    "shapes of a module": (
        lambda: gtco.compile(Scored().eval(), (X,), shapes={"x": (4, 16)}, target="sm_90a"),
        gtco.CaptureError,
        "shapes are those of an .onnx file",
    ),
    "a cache in the result": (
        lambda: gtco.compile(WithCache(), (X,), target="sm_90a"),
        gtco.CaptureError,
        r"returns a KeyCache at result\['cache'\].*use_cache=False",
    ),
    "an unknown option": (
        lambda: gtco.compile(half(), (X.half(),), traget="sm_90a"),
        gtco.OptionError,
        "did you mean 'target'",
    ),
    "a database that is no path": (
        lambda: gtco.compile(half(), (X.half(),), database=3, target="sm_90a"),
        gtco.OptionError,
        "database is the path of a file",
    ),
    "no graph to fuse": (lambda: gtco.fuse(half()), gtco.GraphError, r"gtco.capture\(model"),
    "no graph to interpret": (
        lambda: gtco.interpret(half(), (X,)),  # type: ignore[arg-type]
        gtco.GraphError,
        r"gtco.capture\(model",
    ),
    "a target that is no name": (
        lambda: gtco.fuse(gtco.capture(half(), X.half()), target=90),  # type: ignore[arg-type]
        gtco.TargetError,
        "an architecture's name such as 'sm_90a', not 90",
    ),
    "a limit that is no number": (
        lambda: gtco.tune(half(), X.half(), seconds="1"),  # type: ignore[arg-type]
        gtco.OptionError,
        "seconds is a limit, not '1'",
    ),
    "a type in the result": (
        lambda: gtco.compile(WithType(), (X,), target="sm_90a"),
        gtco.CaptureError,
        r"returns a dtype at result\[1\]",
    ),
    "no file to load": (lambda: gtco.load(3), gtco.ArtifactError, "path is 3"),
    "a mode of Inductor's": (
        lambda: backend(None, (), mode="max-autotune"),  # type: ignore[arg-type]
        gtco.OptionError,
        "gtco.tune searches",
    ),
    "no limit to tuning": (
        lambda: gtco.tune(half(), (X.half(),)),
        gtco.OptionError,
        "seconds=480",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_cause_and_the_next_step(case: str) -> None:
    call, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        call()


@pytest.fixture(scope="module")
def compiled() -> Any:
    return gtco.compile(half(), X.half(), target="sm_90a")


def test_one_tensor_may_stand_for_the_arguments(compiled: Any) -> None:
    assert compiled.report().launches == 1


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "argument x is missing"),
        ((X.half(), X), {}, "2 arguments by position are 1 too many"),
        ((X.half(),), {"shift": X}, "there is no argument shift"),
        (([X.half()],), {}, "argument x is a list of 1, and was one value"),
        ((3,), {}, "argument x is a int, not a tensor; pass a tensor of f16"),
    ],
)
def test_a_wrong_call_names_the_argument(
    compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(gtco.ArgumentError, match=words):
        compiled._captured.flatten(args, kwargs)


class Nested(nn.Module):
    def forward(self, given: dict[str, Any]) -> Tensor:
        result: Tensor = given["a"]["x"] + given["b"][0]
        return result


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a": X, "b": [X]}, r"number 1 has at \['a'\] one value, and had a dict of 'x' when"),
        ({"a": {"y": X}, "b": [X]}, r"has at \['a'\] a dict of 'y', and had a dict of 'x' when"),
        ({"a": {"x": X}, "b": [[X]]}, r"has at \['b'\]\[0\] a list of 1, and had one value when"),
        ({"a": {"x": X}}, r"number 1 is a dict of 'a', and was a dict of 'a', 'b' when"),
        ([X], r"number 1 is a list of 1, and was a dict of 'a', 'b' when"),
    ],
)
def test_a_wrong_call_names_the_place_in_an_argument(given: Any, words: str) -> None:
    captured = capture(Nested(), ({"a": {"x": X}, "b": [X]},))
    with pytest.raises(gtco.ArgumentError, match=words):
        captured.flatten((given,), {})


def test_a_compiled_module_says_what_it_is(compiled: Any) -> None:
    text = repr(compiled)
    assert "x: f16[4,16]) -> f16[4,8]" in text
    assert "target: sm_90a, precision: f16, as the model is" in text
    assert "launches: 1, 1 of them in generated kernels" in text


def test_a_copy_is_a_module_of_its_own(compiled: Any) -> None:
    for twin in (copy.copy(compiled), copy.deepcopy(compiled)):
        assert twin is not compiled and twin.report() == compiled.report()
    with pytest.raises(gtco.RecompileError, match=r"save it with \.save"):
        pickle.dumps(compiled)


def test_it_stays_where_it_is() -> None:
    on_host = gtco.compile(half(), (X.half(),), target="host")
    assert on_host.to("cpu") is on_host.cpu() is on_host.half() is on_host
    assert nn.Sequential(on_host, nn.ReLU()).to("cpu")[0] is on_host
    for move in (
        lambda: on_host.to("meta"),
        lambda: on_host.to(torch.float32),
        lambda: on_host.cuda(),
        lambda: nn.Sequential(on_host).float(),
    ):
        with pytest.raises(gtco.RecompileError):
            move()
    with pytest.raises(RuntimeError, match="Expected one of cpu"):
        on_host.to("nowhere")


def test_a_dataclass_comes_back_as_itself(tmp_path: Path) -> None:
    model = WithOutput().half().eval()
    compiled = gtco.compile(model, (X.half(),), target="sm_90a")
    captured = compiled._captured
    answer = captured.unflatten(gtco.interpret(captured.graph, (X.half(),)))
    expected = model(X.half())
    assert isinstance(answer, Output)
    assert torch.allclose(answer.logits, expected.logits, atol=1e-2)
    assert torch.equal(answer.hidden[1], expected.hidden[1])
    compiled.save(tmp_path / "m.gtco")
    assert gtco.load(tmp_path / "m.gtco")._captured.out_spec == captured.out_spec


def test_torch_warns_of_nothing_that_a_user_cannot_change() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gtco.compile(half(), (X.half(),), target="sm_90a")
        gtco.capture(nn.GRU(16, 8).eval(), (X,))


def test_predictions_know_the_precision() -> None:
    """fp32 products at a third of tf32's rate, tf32 at half that of 16 bits."""
    model = nn.Sequential(nn.Linear(768, 3072), nn.ReLU(), nn.Linear(3072, 768)).eval()
    us: dict[str, float] = {}
    for precision in ("fp32", "tf32", "fp16"):
        compiled = gtco.compile(model, torch.zeros(512, 768), target="sm_90a", precision=precision)
        us[precision] = compiled.report().predicted_us or 0.0
    assert us["fp32"] > 2 * us["tf32"] and us["tf32"] > 1.2 * us["fp16"] > 0


def test_fallbacks_of_one_reason_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5))).double().eval()
    with caplog.at_level(logging.WARNING, "gtco"):
        compiled = gtco.compile(model, (X.double(),), target="sm_90a")
    (line,) = caplog.messages
    assert "5 x linear" in line and "products in fp64; cast the model: model.float()" in line
    (kind,) = compiled.report().fallback_kinds
    assert len(kind.launches) == 5
    with pytest.raises(gtco.FallbackError, match="5 groups have no generated kernel"):
        gtco.compile(model, (X.double(),), target="sm_90a", fallback="error")


def test_every_public_name_is_there() -> None:
    assert gtco.__version__
    for name in gtco.__all__:
        assert getattr(gtco, name) is not None
    (checked,) = (each for each in ast.parse(Path(gtco.__file__).read_text()).body
                  if isinstance(each, ast.If))  # fmt: skip
    imports = [each for each in checked.body if isinstance(each, ast.ImportFrom)]
    known = {alias.asname or alias.name for each in imports for alias in each.names}
    assert known == set(gtco.__all__), "a type checker sees other names"
    found = {
        name: getattr(importlib.import_module(module), name)
        for name, module in gtco._HOMES.items()
        if name.endswith("Error")
    }
    assert all(issubclass(each, Exception) for each in found.values())
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    missing = [name for name in found if f"`{name}`" not in page]
    assert not missing, f"docs/command-line.md says nothing of {missing}"
