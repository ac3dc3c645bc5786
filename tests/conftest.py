"""Fixtures that every test may use, and the rule for tests that need a GPU or a compiler."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gtco.runtime.host import find_compiler

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing"
    )
    parser.addoption(
        "--thorough", action="store_true", help="every kernel case on the CPU, in more schedules"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = pytest.mark.skip(reason="needs a CUDA GPU")
    if find_compiler() is None:
        missing["compiler"] = pytest.mark.skip(reason="needs a C++ compiler")
    for item in items:
        for name, skip in missing.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws does not depend on what its process ran before."""
    torch.manual_seed(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """`golden("name.txt", value)` compares `str(value)` with `tests/golden/name.txt`."""

    def compare(name: str, value: object) -> None:
        path = GOLDEN / name
        actual = f"{value}\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(actual)
            return
        if not path.exists():
            pytest.fail(f"{path} does not exist; run pytest --update-golden and read what it wrote")
        expected = path.read_text()
        if actual != expected:
            lines = difflib.unified_diff(
                expected.splitlines(), actual.splitlines(), name, "now", lineterm=""
            )
            pytest.fail("\n".join([*lines, "if this is meant: pytest --update-golden"]))

    return compare
