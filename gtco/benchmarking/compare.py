"""`gtco compare`: who computes what the model says, output by output and group by group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import gtco
from gtco.benchmarking.answers import (
    INPUT_KINDS,
    Call,
    Inputs,
    Interpreted,
    References,
    compute_precision,
    example_inputs,
    fresh_inputs,
    graph_precision,
    interpret_exactly,
    own_references,
    plan_precision,
    poison,
    references,
)
from gtco.benchmarking.bench import float32_products
from gtco.benchmarking.onnx_peer import OnnxRuntime
from gtco.benchmarking.rounds import Tell
from gtco.check import Precision, Verdict, judge
from gtco.frontend.torch_export import Captured
from gtco.ir.interpreter import interpret
from gtco.locate import Located
from gtco.options import Options
from gtco.runtime.artifact import read
from gtco.runtime.library import library_precision
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import Launch
from gtco.target import HOST

PEERS = ("eager", "onnxruntime")
"""What `--against` takes."""

GRAPH = "its graph in torch"
"""Who stands in for the model of a saved artifact."""


@dataclass(frozen=True)
class OutputError:
    """How far one output of one contestant is from the reference.

    Args:
        contestant: "gtco" or a peer.
        kind: of inputs, such as "normal".
        output: its place in the model's result.
        verdict: of the judge in `gtco.check`.
        max_abs: the largest absolute error where both are finite; None for what is no float.
    """

    contestant: str
    kind: str
    output: str
    verdict: Verdict
    max_abs: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "verdict": self.verdict.to_dict()}


@dataclass(frozen=True)
class GroupCheck:
    """One group, given what the interpreter gives it, against the interpreter.

    Args:
        group: its name.
        kernel: entry point, or "aten".
        ops: its operators.
        modules: the user's modules that they come from.
        verdict: on its outputs; the reference is the interpreter in fp64.
        max_abs: the largest absolute error of all its outputs; None if none is a float.
    """

    group: str
    kernel: str
    ops: tuple[str, ...]
    modules: tuple[str, ...]
    verdict: Verdict
    max_abs: float | None

    def __str__(self) -> str:
        return f"{self.group} ({' -> '.join(self.ops)}, {self.kernel}): {self.verdict}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "verdict": self.verdict.to_dict()}


@dataclass(frozen=True)
class Comparison:
    """What one comparison found.

    Args:
        outputs: one entry per contestant, kind of inputs and output.
        groups: one entry per group, in launch order; none if they were not asked for.
    """

    outputs: tuple[OutputError, ...]
    groups: tuple[GroupCheck, ...] = ()

    @property
    def first_wrong_group(self) -> GroupCheck | None:
        """The first group whose results are wrong beside the interpreter's."""
        return next((check for check in self.groups if not check.verdict.ok), None)

    @property
    def wrong(self) -> tuple[str, ...]:
        """What is wrong, a sentence each; a wrong group counts as well."""
        lines = [
            f"{each.contestant}'s {each.output} for {each.kind} inputs is {each.verdict}"
            for each in self.outputs
            if not each.verdict.ok
        ]
        lines += [str(check) for check in self.groups if not check.verdict.ok]
        return tuple(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        first = self.first_wrong_group
        return {
            "ok": not self.wrong,
            "outputs": [each.to_dict() for each in self.outputs],
            "groups": [each.to_dict() for each in self.groups],
            "first_wrong_group": None if first is None else first.group,
        }


def compare(
    model: Located,
    options: Options,
    peers: Sequence[str] = ("eager",),
    *,
    layers: bool = False,
    tell: Tell = lambda message: None,
) -> Comparison:
    """Compile `model` and judge it and its peers against the model in fp64.

    Args:
        model: with its arguments, where the kernels will run; an .onnx file's are moved there.
        options: for `gtco.compile`; `target="host"` needs no GPU.
        peers: of `PEERS`.
        layers: check every group as well.
        tell: called with a line of progress.

    Raises:
        UsageError: a peer that cannot run this model, or is not installed.
        TargetError: the GPU that it is compiled for is not there.
    """
    runtime = OnnxRuntime(model) if "onnxruntime" in peers else None
    on_gpu = torch.cuda.is_available() and options.target != HOST
    model = model.file_on("cuda" if on_gpu else "cpu")
    given = (model.args, model.kwargs)
    with torch.no_grad(), float32_products(options.precision):
        tell("compiling with gtco")
        compiled = gtco.compile(model.module, *given, **options.keywords())
        compiled.prepare()
        truth = references(model, options.precision)
        contestants: dict[str, Call] = {"gtco": compiled}
        if "eager" in peers:
            contestants["eager"] = truth.eager
        if runtime is not None:
            contestants[runtime.name] = runtime
        precision = compute_precision(model, options.precision)
        outputs = judge_answers(contestants, truth, given, precision, tell)
        groups = check_groups(compiled, fresh_inputs(given, "normal", 100), tell) if layers else ()
    return Comparison(outputs, groups)


def compare_artifact(
    path: str | os.PathLike[str], *, layers: bool = False, tell: Tell = lambda message: None
) -> Comparison:
    """Judge a saved module against its own graph in torch, which is all of the model it holds.

    Raises:
        ArtifactError: the file is damaged or not for this gtco.
        TargetError: the GPU that it was made for is not there.
    """
    artifact = read(path)
    plan, captured = artifact.plan, artifact.captured
    with torch.no_grad(), library_precision(plan.options.precision):
        tell("loading its kernels")
        compiled = CompiledModule(plan, captured, dict(artifact.kernels))
        given = example_inputs(captured, compiled.prepare().device)
        graph = Interpreted(captured, plan.fused)
        truth = own_references(graph)
        contestants: dict[str, Call] = {"gtco": compiled, GRAPH: graph}
        outputs = judge_answers(contestants, truth, given, plan_precision(plan), tell)
        groups = check_groups(compiled, fresh_inputs(given, "normal", 100), tell) if layers else ()
    return Comparison(outputs, groups)


# -- outputs -------------------------------------------------------------------------------------


class NoReference(RuntimeError):
    """torch cannot run the model that answers would be held against."""


def judge_answers(
    contestants: Mapping[str, Call],
    truth: References,
    like: Inputs,
    precision: Precision,
    tell: Tell = lambda message: None,
) -> tuple[OutputError, ...]:
    """Every contestant on each kind of input, output by output.

    Args:
        contestants: name to what is called; the answers of "gtco" are overwritten.
        truth: what they are held against.
        like: args and kwargs of a call.
        precision: a key of `gtco.check.BOUNDS`.
        tell: called with a line of progress.

    Raises:
        NoReference: torch cannot run the model itself.
    """
    errors: list[OutputError] = []
    for seed, kind in enumerate(INPUT_KINDS):
        tell(f"checking answers for {kind} inputs")
        args, kwargs = fresh_inputs(like, kind, 100 + seed)
        try:
            reference, eager = truth.exact((args, kwargs)), truth.judged((args, kwargs))
        except RuntimeError as error:
            raise NoReference(f"torch cannot run the model itself: {error}") from error
        for name, call in contestants.items():
            answer = call(*args, **kwargs)
            for output, verdict, max_abs in judge_outputs(answer, eager, reference, precision):
                errors.append(OutputError(name, kind, output, verdict, max_abs))
            if name == "gtco":
                poison(answer)  # what the next call forgets to write is seen
    return tuple(errors)


def judge_outputs(
    answer: Any, eager: Any, reference: Any, precision: Precision
) -> list[tuple[str, Verdict, float | None]]:
    """(place, verdict, largest absolute error) of each output; arguments as for `judge`."""
    expected, tree = pytree.tree_flatten_with_path(eager)
    leaves, own_tree = pytree.tree_flatten(answer)
    if own_tree != tree:
        return [("result", judge(answer, eager, reference, precision), None)]
    truths = pytree.tree_leaves(reference)
    return [
        (
            f"output {pytree.keystr(place)}" if place else "output",
            judge(mine, theirs, truth, precision),
            max_abs_error(mine, truth),
        )
        for mine, (place, theirs), truth in zip(leaves, expected, truths, strict=True)
    ]


def max_abs_error(answer: Any, reference: Any) -> float | None:
    """The largest absolute error among elements that are finite in both; None without any."""
    both = isinstance(answer, Tensor) and isinstance(reference, Tensor)
    if not both or not answer.is_floating_point() or answer.shape != reference.shape:
        return None
    error = (answer.double() - reference.double()).abs()
    finite = error[error.isfinite()]
    return float(finite.max()) if finite.numel() else None


# -- groups --------------------------------------------------------------------------------------


def check_groups(
    compiled: CompiledModule, inputs: Inputs, tell: Tell = lambda message: None
) -> tuple[GroupCheck, ...]:
    """Run `compiled` group by group, each on the interpreter's values, and judge its outputs.

    So an error stays with the group that makes it, and the first wrong one is where to look.

    Args:
        compiled: where it can run.
        inputs: args and kwargs of a call.
        tell: called with a line of progress.

    Raises:
        ArgumentError, TargetError: as for a call of `compiled`.
    """
    tell("checking group by group")
    right: dict[str, Tensor] = {}
    checks: list[GroupCheck] = []

    def visit(launch: Launch, values: dict[str, Tensor], run: Callable[[], object]) -> None:
        graph = launch.group.graph
        for name in graph.inputs:
            # Only the model's own inputs are no group's output.
            values[name].copy_(right.setdefault(name, values[name].clone()))
        given = [right[name] for name in graph.inputs]
        eager = interpret(graph, given, rounded=True)
        for name in graph.outputs:
            if name in values:
                poison(values[name])
        run()
        answer = [values[name] for name in graph.outputs]
        exact = interpret_exactly(graph, given)
        precision: Precision = graph_precision(graph)
        if precision == torch.float32 and compiled.options.precision == "tf32":
            precision = "tf32"
        verdict = judge(answer, list(eager), list(exact), precision)
        errors = [max_abs_error(*pair) for pair in zip(answer, exact, strict=True)]
        checks.append(
            GroupCheck(
                launch.group.name,
                launch.program.name if launch.program else "aten",
                tuple(node.op for node in launch.group.compute),
                launch.modules,
                verdict,
                max((error for error in errors if error is not None), default=None),
            )
        )
        right.update(zip(graph.outputs, (each.contiguous() for each in eager), strict=True))

    args, kwargs = inputs
    with torch.no_grad():
        compiled.walk(visit, *args, **kwargs)
    return tuple(checks)


def random_inputs(captured: Captured, device: torch.device, seed: int) -> Inputs:
    """Random arguments for a captured model; masks let all pass, other integers are zero."""
    return fresh_inputs(example_inputs(captured, device), "normal", seed)
