"""Options refuse what they do not know, with a suggestion."""

from __future__ import annotations

from typing import Any

import pytest

from gtco.cli.env import environment
from gtco.options import OptionError, Options


def test_defaults_leave_the_model_as_it_is() -> None:
    assert Options.of() == Options(None, None, "warn", True, False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"precison": "fp16"}, "unknown option 'precison'; did you mean 'precision'"),
        ({"zzz": 1}, "unknown option 'zzz'; known: precision, target"),
        ({"precision": "fp61"}, "precision='fp61' is not one of None, 'fp16'.*'fp16'"),
        ({"fallback": "eror"}, "did you mean 'error'"),
        ({"cuda_graph": "no"}, "cuda_graph is True or False, not 'no'"),
        ({"target": 90}, "target is an architecture's name, not 90"),
    ],
)
def test_wrong_options_name_the_option(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Options.of(**given)


def test_environment_is_plain_values() -> None:
    found = environment()
    assert found["nvrtc"].startswith("13.")
    assert found["packages"]["torch"]
    assert found["cache"]["folder"].endswith("cubins")
