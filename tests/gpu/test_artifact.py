"""Artifacts on the GPU: saved in one process, loaded and run in another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gtco
from tests.models import vit
from tests.processes import environment

pytestmark = pytest.mark.gpu

LOAD = """
import sys
sys.modules["gtco.runtime.nvrtc"] = None  # importing it raises
import torch, gtco
image = torch.load(sys.argv[2], weights_only=True).cuda()
with torch.no_grad():
    torch.save(gtco.load(sys.argv[1])(image).cpu(), sys.argv[3])
"""


@pytest.mark.parametrize("from_cpu", [False, True])
def test_an_artifact_gives_the_same_bits_in_another_process(tmp_path: Path, from_cpu: bool) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90a GPU")
    torch.manual_seed(0)
    image, model = torch.randn(1, 3, 32, 32).half(), vit().half()
    if from_cpu:
        compiled = gtco.compile(model, (image,), target="sm_90a")
    else:
        compiled = gtco.compile(model.cuda(), (image.cuda(),), target="sm_90a")
    paths = [str(tmp_path / name) for name in ("vit.gtco", "image.pt", "result.pt")]
    compiled.save(paths[0])
    torch.save(image, paths[1])
    subprocess.run([sys.executable, "-c", LOAD, *paths], check=True, env=environment(), timeout=300)
    result = torch.load(paths[2], weights_only=True)
    with torch.no_grad():
        assert torch.equal(result, compiled(image.cuda()).cpu())
