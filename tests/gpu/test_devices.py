"""The card that is here, as the driver describes it, and what serves it."""

from __future__ import annotations

import pytest
import torch

from gtco.cli.demo import VisionTransformer, randomize
from gtco.compiler import plan_captured
from gtco.cost_model.knowledge import known_on
from gtco.frontend.torch_export import capture
from gtco.options import Options
from gtco.runtime.device import device_at, resolve_device
from gtco.target import CARDS

pytestmark = pytest.mark.gpu


def test_the_driver_says_what_torch_says() -> None:
    card, properties = device_at(), torch.cuda.get_device_properties()
    assert (card.name, card.sm_count) == (properties.name, properties.multi_processor_count)
    assert card.l2_bytes == properties.L2_cache_size
    assert 100 <= card.dram_gbps <= 20_000
    assert resolve_device(None) == resolve_device(card.arch) == card


def test_a_hopper_card_needs_no_tuning_for_a_vit() -> None:
    card = device_at()
    if card.arch != "sm_90a":
        pytest.skip("records of sm_90a ship")
    model = VisionTransformer(patch=16, width=768, depth=12, heads=12)
    randomize(model, seed=0)
    image = torch.randn(1, 3, 224, 224).half()
    plan = plan_captured(capture(model.eval().half(), (image,)), Options())
    sources = {launch.source for launch in plan.launches}
    own = card.name == CARDS["sm_90a"].name or any(known_on(card).all())
    assert own or sources == {f"from {CARDS['sm_90a'].name}"}
    assert "default" not in sources
