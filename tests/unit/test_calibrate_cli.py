"""`gtco calibrate` as a user runs it, and the compilation that takes its file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import gtco
from gtco.calibration import Calibration
from tests.command_line import MODELS, Run

ROWS = np.random.default_rng(0).standard_normal((72, 64)).astype(np.float32)
SHIFT = np.ones(64, np.float32)
DETERMINED = MODELS.replace(
    "    return Mlp()", "    torch.manual_seed(0)\n    return Mlp()"
)  # the same weights in each command


@pytest.fixture
def here(run: Run, tmp_path: Path) -> Path:
    (tmp_path / "models_here.py").write_text(DETERMINED)
    return tmp_path


def test_calibrate_then_compile(run: Run, here: Path) -> None:
    np.save("x.npy", ROWS)
    words = ("calibrate", "models_here:mlp", "--batches", "x.npy")
    outcome = run(*words)
    assert outcome.code == 0, outcome.stderr
    assert "2 linears in 3 batches" in outcome.stdout and "in fp8" in outcome.stdout
    following = "gtco compile models_here:mlp --precision fp8 --calibration calibration.json"
    assert following in outcome.stderr
    compiled = run(*following.split()[1:], "--target", "sm_90a", "--error-budget", "0.5", "--json")
    assert compiled.code == 0, compiled.stderr
    launches = json.loads(compiled.stdout)["launches"]
    assert sum("quantize" in json.dumps(each) for each in launches) >= 1
    again = run(*words, "--json")
    data = json.loads(again.stdout)
    assert data["batches"] == 3 and len(data["layers"]) == 2 and data["error"] > 0


def test_every_kind_of_file_gives_what_python_gives(run: Run, here: Path) -> None:
    np.save("x.npy", ROWS.astype(">f8"))
    for name in ("folder", "some"):
        (here / name).mkdir()
    np.savez("some/first.npz", x=ROWS[:24])
    save_file({"x": torch.from_numpy(ROWS[24:]).bfloat16().float()}, "some/second.safetensors")
    np.save("folder/a.npy", ROWS[:24])
    np.save("folder/b.npy", ROWS[24:])
    (here / "folder" / "notes.txt").write_text("no batch")
    found = {}
    for name, places in {"npy": ["x.npy"], "npys": ["folder"], "mixed": ["some"]}.items():
        flags = [word for place in places for word in ("--batches", place)]
        outcome = run("calibrate", "models_here:mlp", *flags, "-o", f"{name}.json")
        assert outcome.code == 0, outcome.stderr
        found[name] = Calibration.load(f"{name}.json")
    import models_here  # type: ignore[import-not-found]

    model, _ = models_here.mlp()
    parts = torch.from_numpy(ROWS).half().split(24)
    assert gtco.calibrate(model, parts) == found["npy"] == found["npys"]
    assert found["mixed"].batches == 3


def test_int8_is_calibrated_for_too(run: Run, here: Path) -> None:
    np.save("x.npy", ROWS)
    words = ("calibrate", "models_here:mlp", "--batches", "x.npy", "--precision")
    outcome = run(*words, "int8")
    assert outcome.code == 0, outcome.stderr
    assert Calibration.load("calibration.json").precision == "int8"
    assert "in int8" in outcome.stdout
    assert "--precision int8 --calibration calibration.json" in outcome.stderr
    assert run(*words, "fp16").code == 2


def test_inputs_by_name_go_where_they_belong(run: Run, here: Path) -> None:
    np.savez("both.npz", x=ROWS[:48], shift=np.concatenate([SHIFT, 2 * SHIFT]))
    outcome = run("calibrate", "models_here:shifted", "--batches", "both.npz", "--json")
    assert outcome.code == 0, outcome.stderr
    largest = json.loads(outcome.stdout)["layers"][0]["largest"]
    assert largest == float(torch.from_numpy(ROWS[:48]).half().abs().max())


def test_an_interrupted_calibration_goes_on(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save("x.npy", ROWS)
    words = ("calibrate", "models_here:mlp", "--batches", "x.npy")
    from gtco.calibrator import Calibrator

    observe, seen = Calibrator.observe, []

    def stops(self: Calibrator, tensors: Any) -> None:
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt
        observe(self, tensors)

    monkeypatch.setattr(Calibrator, "observe", stops)
    assert run(*words).code == 130
    assert Calibration.load("calibration.json").batches == 2
    assert run(*words).code == 0
    assert len(seen) == 4, "one batch was left"


def write(name: str, *, text: bytes = b"nothing") -> Callable[[], object]:
    return lambda: Path(name).write_bytes(text)


@pytest.mark.parametrize(
    ("model", "name", "make", "code", "sentence"),
    [
        ("mlp", "none.npy", lambda: None, 2, "there is no file none.npy"),
        ("mlp", "x.txt", write("x.txt"), 2, "takes .npy, .npz, .safetensors files, not x.txt"),
        ("mlp", "empty", lambda: Path("empty").mkdir(), 2, "the folder empty has no .npy"),
        ("mlp", "x.npy", write("x.npy"), 1, "x.npy is damaged, or holds Python objects"),
        ("mlp", "x.npz", write("x.npz"), 1, "x.npz is damaged, or holds Python objects"),
        ("mlp", "x.npz", write("x.npz", text=b"PK\x03\x04"), 1, "x.npz cannot be read"),
        ("mlp", "x.safetensors", write("x.safetensors"), 1, "x.safetensors cannot be read"),
        ("mlp", "x.npy", lambda: np.save("x.npy", np.array([{}])), 1, "holds Python objects"),
        ("mlp", "x.npz", lambda: np.savez("x.npz", x=np.array([{}])), 1, "holds Python objects"),
        ("mlp", "x.npy", lambda: np.save("x.npy", np.array(["a"])), 1, "which is no number"),
        ("mlp", "x.npy", lambda: np.save("x.npy", ROWS[:25]), 1, r"x is \[25, 64\], and the model"),
        ("mlp", "x.npy", lambda: np.save("x.npy", ROWS.astype("u1")), 1, "x is of uint8"),
        ("mlp", "x.npz", lambda: np.savez("x.npz", y=ROWS), 1, "holds y, and the model takes x"),
        ("shifted", "x.npy", lambda: np.save("x.npy", ROWS), 1, "the model takes x, shift"),
        ("shifted", "x.npz", lambda: np.savez("x.npz", x=ROWS, shift=SHIFT), 1, "3 of x, 1 of"),
        ("mlp", "x.npy", lambda: np.save("x.npy", ROWS[:24] * np.nan), 1, "read nan in batch 0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(
    run: Run, here: Path, model: str, name: str, make: Any, code: int, sentence: str
) -> None:
    make()
    outcome = run("calibrate", f"models_here:{model}", "--batches", name)
    assert outcome.code == code, outcome.stderr
    assert re.search(sentence, outcome.stderr), outcome.stderr
    assert not Path("calibration.json").exists() and "allow_pickle" not in outcome.stderr


def test_there_has_to_be_a_folder_for_the_file(run: Run, here: Path) -> None:
    np.save("x.npy", ROWS)
    outcome = run("calibrate", "models_here:mlp", "--batches", "x.npy", "-o", "no/c.json")
    assert outcome.code == 2 and "there is no folder no" in outcome.stderr
