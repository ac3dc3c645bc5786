"""`torch.compile(model, backend="gtco")` on the GPU."""

from __future__ import annotations

import pytest
import torch

import gtco
from gtco import dynamo
from tests.models import vit

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_backend_gives_what_compile_gives(mode: type[torch.no_grad]) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, image = vit().half().cuda(), torch.randn(1, 3, 32, 32).half().cuda()
    direct = gtco.compile(model, (image,))
    compiled = torch.compile(model, backend=dynamo.backend)
    with mode():
        before = direct(image)
        for _ in range(2):
            assert torch.equal(compiled(image), before)
        model.head.bias.add_(1)
        torch.testing.assert_close(compiled(image), before + 1, rtol=1e-2, atol=1e-2)
