"""What the tuner's worker measures, and what it throws away or survives, without a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from gtco.cost_model.benches import GUARD_BYTES, HostBench, Operands
from gtco.cost_model.judge import Judge, random_values
from gtco.ir.graph import Group
from gtco.ir.interpreter import interpret
from gtco.ir.ops import OPS
from gtco.runtime.poison import poisoned
from tests import groups, tile_groups

CPU = torch.device("cpu")
F16 = torch.float16


# -- the judgement ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Answers:
    """A group, what it is exactly and what torch makes of it."""

    group: Group
    exact: tuple[Tensor, ...]
    eager: tuple[Tensor, ...]
    verdict: Judge

    def judge(self, *results: Tensor) -> str:
        """The verdict on `results`, in the order of the group's outputs."""
        return self.verdict(dict(zip(self.group.graph.outputs, results, strict=True)))


def answers(group: Group) -> Answers:
    values = random_values(group, CPU, seed=0)
    args = [values[name] for name in group.graph.inputs]
    exact = interpret(group.graph, args, dtype=torch.float64)
    return Answers(group, exact, interpret(group.graph, args), Judge(group, values))


@pytest.fixture(scope="module")
def residual() -> Answers:
    """Two outputs: the sum in fp16 and its statistics in fp32."""
    return answers(groups.residual_linear(33, 136, 104, F16))


def test_right_answers_pass(residual: Answers) -> None:
    assert residual.judge(*residual.eager) == ""
    assert residual.judge(*(each.float() for each in residual.exact)) == ""
    noise = (residual.eager[0].double() - residual.exact[0]) * 2
    assert residual.judge((residual.exact[0] + noise).half(), residual.eager[1]) == ""


def test_poisoned_outputs_never_pass(residual: Answers) -> None:
    specs = residual.group.graph.specs
    untouched = [poisoned(specs[name], CPU) for name in residual.group.graph.outputs]
    for slot, name in enumerate(residual.group.graph.outputs):
        results = list(residual.eager)
        results[slot] = untouched[slot]
        assert f"%{name} has an RMSE of nan" in residual.judge(*results)
    integers = answers(tile_groups.integers())
    for slot, name in enumerate(integers.group.graph.outputs):
        results = list(integers.eager)
        results[slot] = poisoned(integers.group.graph.specs[name], CPU)
        assert f"%{name}" in integers.judge(*results)


@pytest.mark.parametrize("at", [0, 1])
def test_one_nan_or_infinity_never_passes(residual: Answers, at: int) -> None:
    for value in (float("nan"), float("inf")):
        results = [each.clone() for each in residual.eager]
        results[at].view(-1)[-1] = value
        assert "wrong answer" in residual.judge(*results)


def test_planted_wrong_answers_are_rejected(residual: Answers) -> None:
    for slot, right in enumerate(residual.eager):
        for wrong in (
            torch.zeros_like(right),
            -right,
            right * 1.01,
            right.roll(1, dims=1),
            torch.cat((right[:, :-1], right[:, :1]), dim=1),
            torch.randn_like(right),
        ):
            results = list(residual.eager)
            results[slot] = wrong
            assert "wrong answer" in residual.judge(*results)


def test_the_first_wrong_output_is_named(residual: Answers) -> None:
    first, second = residual.group.graph.outputs
    y, stats = residual.eager
    assert f"%{first}" in residual.judge(-y, -stats)
    assert f"%{second}" in residual.judge(y, -stats)


# -- the inputs ------------------------------------------------------------------------------------


def test_random_values_are_what_the_group_reads() -> None:
    group = groups.norm_linear(7, 200, 40, F16)
    values = random_values(group, CPU, seed=3)
    graph = group.graph
    assert set(values) == {*graph.inputs, *graph.constants}
    for name in graph.inputs:
        assert (tuple(values[name].shape), values[name].dtype) == (
            graph.specs[name].sizes,
            graph.specs[name].dtype,
        )
    assert (values["stats"][..., 1] >= 0).all()
    again = random_values(group, CPU, seed=3)
    assert all(torch.equal(values[name], again[name]) for name in values)
    assert not torch.equal(values["x"], random_values(group, CPU, seed=4)["x"])


def test_a_masked_row_of_nan_must_be_nan_in_the_answer_too() -> None:
    group = tile_groups.softmax(2, 5, dtype=torch.float32)
    x = torch.randn(2, 5)
    x[1] = -torch.inf
    values = {name: x for name in group.graph.inputs}
    judge, (name,) = Judge(group, values), group.graph.outputs
    (right,) = interpret(group.graph, [x])
    assert right[1].isnan().all() and not judge({name: right})
    assert judge({name: right.nan_to_num()})
    assert judge({name: torch.full_like(right, torch.nan)})


# -- the memory ------------------------------------------------------------------------------------


def operands() -> tuple[Group, Operands]:
    group = groups.residual_linear(33, 136, 104, F16)
    return group, Operands(group, random_values(group, CPU, seed=0), CPU)


def test_operands_hold_the_values_and_poisoned_outputs() -> None:
    group, memory = operands()
    values = random_values(group, CPU, seed=0)
    for name, value in values.items():
        assert torch.equal(memory.tensors[name], value)
        assert memory.tensors[name].data_ptr() % 256 == 0
    for name in group.graph.outputs:
        assert memory.tensors[name].isnan().all()
        memory.tensors[name].zero_()
    assert not memory.damaged()
    memory.poison()
    assert memory.tensors[group.graph.outputs[0]].isnan().all()


@pytest.mark.parametrize("offset", [-8, -GUARD_BYTES])
def test_a_store_ahead_of_an_output_is_seen(offset: int) -> None:
    group, memory = operands()
    for name in group.graph.outputs:
        tensor = memory.tensors[name]
        start = tensor.storage_offset() * tensor.element_size() + offset
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        whole[start] += 1
        assert memory.damaged()
        whole[start] -= 1
        assert not memory.damaged()


def test_a_store_past_an_output_or_into_an_input_is_seen() -> None:
    group, memory = operands()
    whole = torch.empty(0, dtype=torch.uint8)
    last = memory.tensors[group.graph.outputs[-1]]
    whole.set_(last.untyped_storage())
    end = (last.storage_offset() + last.numel()) * last.element_size()
    for place in (end + 7, len(whole) - 300):
        whole[place] ^= 1
        assert memory.damaged()
        whole[place] ^= 1
    memory.tensors["x"][0, 0, 0] += 1
    assert memory.damaged()


# -- the library -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tf32", [False, True])
def test_the_library_is_timed_in_the_precision_of_the_workload(
    tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = groups.convolution((1, 6, 6, 8), 8, (3, 3), torch.float32)
    group = groups.tf32(group) if tf32 else group
    allowed: list[tuple[bool, bool, bool, str]] = []
    conv, cudnn = OPS["conv"], torch.backends.cudnn

    def noticed(*inputs: Tensor, **attrs: object) -> Tensor:
        precision = torch.get_float32_matmul_precision()
        allowed.append((cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32, precision))
        return conv.reference(*inputs, **attrs)

    bench = HostBench(group, CPU)
    monkeypatch.setitem(OPS, "conv", dataclasses.replace(conv, reference=noticed))  # type: ignore[arg-type]
    with cudnn.flags(enabled=True, benchmark=True, allow_tf32=True):  # the user's
        bench.library()()
    assert allowed == [(True, True, tf32, "high" if tf32 else "highest")]
