"""Every sketch at extents of 1, 2, 3, 5 and 7 on the host build: right, or refused for a reason.

The GPU tests run the same cases. `--thorough` adds those that are not in `QUICK`, and six random
schedules of each.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gtco
from gtco.codegen.emit import Region
from gtco.ir.graph import Group
from gtco.runtime.host import HostError, run_on_host
from tests import degenerate_groups as groups
from tests.groups import plain_linear
from tests.kernel_checks import inputs_of, sample, wrong_outputs

pytestmark = pytest.mark.compiler

SLACK = 1e-2
"""Of an output's size: what is judged has few elements, and a fault makes an error of its size."""


def faults(group: Group, count: int) -> list[str]:
    """What is wrong with the first default and `count` random schedules of every sketch."""
    values = inputs_of(group, seed=1)
    found = []
    for sketch in groups.derived(group):
        for program in sample(sketch, count):
            try:
                found += wrong_outputs(program, group, values, run_on_host, SLACK)
            except HostError as error:
                found.append(f"{error} with {dict(program.schedule)}")
    return found


@pytest.mark.parametrize("case", groups.QUICK)
def test_right_in_every_sketch(case: str) -> None:
    assert not faults(groups.CASES[case](), 0)


@pytest.mark.parametrize("family", groups.FAMILIES)
def test_right_in_many_schedules(family: str, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--thorough"):
        pytest.skip("minutes: pytest --thorough runs it")
    for case, make in groups.FAMILIES[family].items():
        assert not faults(make(), 6), case


@pytest.mark.parametrize("bias", (True, False))
def test_a_head_of_one_score(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(768, 1, bias=bias).half()
    x = torch.randn(5, 768).half()
    compiled = gtco.compile(model, (x,), target="host", fallback="error")
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ("gemm_skinny", "gemm_mma"))
def test_calls_that_are_wider_than_a_row_are_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Region, "__post_init__", lambda region: None)
    group = plain_linear(3, 64, 1, torch.float16)
    sketch = next(each for each in groups.derived(group) if each.name == name)
    (program,) = sample(sketch, 0)
    with pytest.raises(HostError, match=r"writes byte \d+ of %linear again, and another value"):
        run_on_host(program, group, inputs_of(group))


@pytest.mark.parametrize("family", groups.FAMILIES)
def test_every_extent_has_its_turn(family: str) -> None:
    chosen = set(groups.QUICK) & set(groups.FAMILIES[family])
    extents = {int(name.replace(",", "").split(" ")[-1]) for name in chosen}
    assert extents == set(groups.EXTENTS)
