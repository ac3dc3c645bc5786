"""What an artifact's JSON holds: attribute values and arguments come back, all else is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gtco
from gtco.codegen.program import TensorMapArgument
from gtco.ir.aten import Slot
from gtco.runtime.encoding import EncodingError, decode_value, encode_value


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 0.1, float("-inf"), "text", torch.float16, torch.device("cuda:1"),
        torch.strided, torch.channels_last, (1, (2, Slot(0))), ("args", ((), None)),
    ],
)  # fmt: skip
def test_attribute_values_come_back(value: Any) -> None:
    back = decode_value(json.loads(json.dumps(encode_value(value), allow_nan=False)))
    assert back == value and type(back) is type(value)


def test_a_value_that_no_artifact_can_hold_is_refused() -> None:
    with pytest.raises(EncodingError, match="a Generator"):
        encode_value(torch.Generator())
    for data in ({"dtype": "f8"}, {"float": "__import__"}, {"slot": "0"}, {"other": 1}):
        with pytest.raises(EncodingError):
            decode_value(data)


def test_a_tensor_map_of_five_dimensions_comes_back(tmp_path: Path) -> None:
    model, x = nn.Linear(768, 768).half(), torch.randn(6304, 768).half()
    compiled = gtco.compile(model, (x,), target="sm_90a")
    compiled.save(tmp_path / "rows.gtco")
    (before,), (after,) = (
        [launch.program for launch in each._plan.launches]
        for each in (compiled, gtco.load(tmp_path / "rows.gtco"))
    )
    assert before is not None and before.sketch == "gemm_persistent"
    assert any(isinstance(a, TensorMapArgument) and len(a.sizes) == 5 for a in before.arguments)
    assert after == before
