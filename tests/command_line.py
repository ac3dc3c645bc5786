"""The command line, run in this process, in a folder with models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gtco.cli import main as cli

MODELS = """
import torch

from gtco.locate import Located

class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(64, 256)
        self.down = torch.nn.Linear(256, 64)

    def forward(self, x, *, shift=None):
        x = self.down(torch.nn.functional.gelu(self.up(x)))
        return x if shift is None else x + shift

def mlp():
    return Mlp().eval().half(), (torch.randn(24, 64).half(),)

def shifted():
    return Mlp().eval().half(), (torch.randn(24, 64).half(),), {"shift": torch.ones(64).half()}

def located():
    return Located("a name", Mlp().eval().half(), (torch.randn(24, 64).half(),), {})

def chain():
    class Chain(torch.nn.Module):
        def forward(self, x):
            return torch.special.erfcx(x.softmax(-1)) @ x.t()

    return Chain(), (torch.randn(24, 64),)

def training():
    model = torch.nn.Sequential(Mlp(), torch.nn.Dropout(0.5))
    return model.half(), (torch.randn(24, 64).half(),)

def bare():
    return Mlp()

def broken():
    raise KeyError("weights.pt")

number = 7
"""


@dataclass
class Outcome:
    code: int
    stdout: str
    stderr: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in a folder that holds `models_here.py` and `broken_here.py`."""
    (tmp_path / "models_here.py").write_text(MODELS)
    (tmp_path / "broken_here.py").write_text("import a_package_that_is_missing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "models_here", raising=False)

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["gtco", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        code = stopped.value.code
        assert code is None or isinstance(code, int)
        seen = capsys.readouterr()
        return Outcome(code or 0, seen.out, seen.err)

    return call
