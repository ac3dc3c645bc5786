"""What gtco makes of a model, held against torch eager.

A `Case` is a module, its arguments and, where there is one, its answer in fp64. Each stage is
judged by itself: the captured graph interpreted, the fused graph interpreted, and at times the
module compiled for the host build or the GPU. What torch itself cannot run or export is no case.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch._export.utils as export_utils
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import gtco
from gtco.cost_model.model import roofline_us
from gtco.frontend.torch_export import CaptureError
from gtco.ir.graph import Graph, Node
from gtco.ir.ops import Pattern
from gtco.options import OptionError
from gtco.passes import fusion, run_pipeline
from gtco.passes.rewrite import DECLINED, Log
from gtco.target import find_target
from tests.fuzz.closeness import (
    Answers,
    as_far_off,
    differences,
    excused,
    finite,
    nearer,
    spec_text,
)
from tests.fuzz.ties import Ties

REFUSALS = (CaptureError, OptionError, gtco.TargetError, gtco.FallbackError)
OUR_FAULT = ("cannot be lowered",)
"""Refusals that are a crash of gtco's in other words."""

TARGETS = ("host", "cuda")

NOISY_RUNS = 16
"""Runs of the captured graph with other roundings: how much the answer hangs on them."""

TIED_RUNS = 16
"""Runs of eager with other signs of the zeros that it takes among zeros of both."""

PRICE = partial(roofline_us, target=find_target("sm_90a"))


@dataclass(frozen=True)
class Case:
    """A model to judge.

    Args:
        module: in eval mode.
        args: positional arguments, tensors among them.
        exact: the answer of the same model in fp64, or None where it has none.
    """

    module: nn.Module
    args: tuple[Any, ...]
    exact: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """How a case went.

    Args:
        kind: "right", "wrong", "crash", "refused" (a public exception), "torch" (torch itself
            cannot run or export it, or exports something else) or "unstable" (the answer hangs on
            how its values round, or on which of equal elements is taken).
        stage: "capture", "captured", "rewrite", "fused", or the target.
        detail: what differs, or the exception.
    """

    kind: str
    stage: str = ""
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in ("wrong", "crash")

    def __str__(self) -> str:
        return f"{self.kind} {self.stage}: {self.detail}"


def judge(case: Case, target: str | None = None) -> Outcome:
    """The first failure of `case`, else "right".

    Args:
        case: what to judge.
        target: also compile for this one ("host", or "cuda": with and without a CUDA graph).
    """
    with _quiet(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # others lose NaN on a CPU
        try:
            eager = _tensors(case.module(*_copied(case.args)))
        except Exception as error:
            return Outcome("torch", "eager", _first_line(error))
        try:
            graph = gtco.capture(case.module, case.args)
        except Exception as error:
            return _refused("capture", error, lambda: _export_fails(case))
        given = [x for x in pytree.tree_leaves(case.args) if isinstance(x, Tensor)]
        outcomes = []
        for stage, run in _stages(case, graph, given, target):
            try:
                answer = _tensors(run())
            except Exception as error:
                if "report a bug to PyTorch" in str(error):
                    return Outcome("torch", stage, _first_line(error))
                lacking = stage.startswith("cuda") and _cuda_lacks_it(case)
                if lacking or _export_differs(case, eager):
                    return Outcome("torch", stage, _first_line(error))
                return _refused(stage, error, lambda: False)
            if stage.startswith("cuda") and (types := _other_types(case, answer, eager)):
                return Outcome("torch", stage, types)
            outcome = _compare(case, graph, given, stage, answer, eager)
            if outcome.failed:
                torchs = stage == "captured" and _export_differs(case, eager)
                return replace(outcome, kind="torch") if torchs else outcome
            outcomes.append(outcome)
    return next((outcome for outcome in outcomes if outcome.kind != "right"), Outcome("right"))


def _stages(
    case: Case, graph: Graph, given: list[Tensor], target: str | None
) -> Iterator[tuple[str, Callable[[], Any]]]:
    def fused() -> Any:
        log = Log()
        rewritten = run_pipeline(graph, log=log)
        declined = [str(each) for each in log.refusals if each.reason.startswith(DECLINED)]
        if declined:
            raise AssertionError(declined[0])
        return gtco.interpret(fusion.fuse(rewritten, PRICE), _copied(given))

    yield "captured", lambda: gtco.interpret(graph, _copied(given))
    yield "fused", fused
    own = all(node.op != "aten" for node in graph.nodes)  # torch's may sum in any order
    if target == "host":
        yield "host", lambda: _compiled(case, "cpu", own, target="host")
    if target == "cuda":
        yield "cuda", lambda: _compiled(case, "cuda", own, cuda_graph=False)
        yield "cuda, in a graph", lambda: _compiled(case, "cuda", own, cuda_graph=True)


def _compiled(case: Case, device: str, repeats: bool, **options: Any) -> Answers:
    """The answer of two calls of the compiled module, and of one that converts wider inputs, which
    agree to the bit if it `repeats`."""
    args = pytree.tree_map_only(Tensor, lambda x: x.to(device), case.args)
    module = case.module.to(device)
    try:
        compiled = gtco.compile(module, args, **options)
        with _memory_poisoned():
            given = (_copied(args), _copied(args), pytree.tree_map_only(Tensor, _widened, args))
            first, again, converted = (_tensors(compiled(*each)) for each in given)
    finally:
        case.module.to("cpu")
    for x, y, z in zip(first, again, converted, strict=True):
        if repeats and not torch.equal(_bits(x), _bits(y)):
            raise AssertionError("two calls with the same inputs gave different bits")
        if repeats and not torch.equal(_bits(x), _bits(z)):
            raise AssertionError("inputs that a call converts gave different bits")
    return [x.cpu() for x in first]


def _widened(x: Tensor) -> Tensor:
    """`x` with the same values in fp64, which a call converts back."""
    return x.double() if x.is_floating_point() and x.dtype != torch.float8_e4m3fn else x.clone()


@contextlib.contextmanager
def _memory_poisoned() -> Iterator[None]:
    """Meanwhile torch fills what it allocates with NaN or the largest number: an output that nobody
    stored does not look right because it lies where an earlier answer lay."""
    before = torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _bits(x: Tensor) -> Tensor:
    plain = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
    return plain.reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def operator_tables_kept() -> Iterator[None]:
    """Meanwhile torch.export looks through all operators once, not twice an export: that is half
    of the time of a small model."""
    collect = export_utils._collect_all_valid_cia_ops_for_namespace
    export_utils._collect_all_valid_cia_ops_for_namespace = functools.cache(collect)
    try:
        yield
    finally:
        export_utils._collect_all_valid_cia_ops_for_namespace = collect


# -- answers ---------------------------------------------------------------------------------------


def _compare(
    case: Case, graph: Graph, given: list[Tensor], stage: str, answer: Answers, eager: Answers
) -> Outcome:
    if len(answer) != len(eager):
        return Outcome("wrong", stage, f"{len(answer)} outputs instead of {len(eager)}")
    exact = _exact(case, eager)
    reasons = differences(answer, eager, exact)
    if not reasons:
        return Outcome("right")
    tied, (eager, exact) = reasons, _settled(case, answer, eager, exact)
    reasons = differences(answer, eager, exact)
    if not reasons:
        return Outcome("unstable", stage, f"but for ties: {'; '.join(tied.values())}")
    base = _tensors(gtco.interpret(graph, _copied(given)))
    noisy = [_noisy(graph, given, seed) for seed in range(NOISY_RUNS)]
    too_large = _overflows(graph, given)
    for index, reason in reasons.items():
        runs = [run[index] for run in noisy]
        if too_large and not finite(answer[index]).all():
            continue
        if exact and as_far_off(answer[index], eager[index], exact[index]):
            continue
        if not excused(answer[index], eager[index], base[index], runs):
            return Outcome("wrong", stage, f"output {index}: {reason}")
    return Outcome("unstable", stage, "; ".join(reasons.values()))


def _exact(case: Case, eager: Answers) -> Answers | None:
    """The answer in fp64, if it is one of the same model: same shapes, as finite as eager."""
    if case.exact is None:
        return None
    try:
        exact = _tensors(case.exact())
    except Exception:
        return None
    same = [x.shape for x in exact] == [x.shape for x in eager]
    return exact if same else None


def _settled(
    case: Case, answer: Answers, eager: Answers, exact: Answers | None
) -> tuple[Answers, Answers | None]:
    """Eager's answer and that in fp64 where equal elements keep their order, with what hangs on the
    signs of equal zeros as near to `answer` as other signs bring it."""
    settled, wide, found = _tied(case, None)
    if not found or [spec_text(x) for x in answer] != [spec_text(x) for x in settled]:
        return eager, exact
    for seed in range(TIED_RUNS):
        signed, wide_signed, _ = _tied(case, seed)
        for index, mine in enumerate(answer):
            closer = nearer(mine, signed[index], settled[index])
            settled[index] = torch.where(closer, signed[index], settled[index])
            if wide and wide_signed:
                wide[index] = torch.where(closer, wide_signed[index], wide[index])
    return settled, wide


def _tied(case: Case, seed: int | None) -> tuple[Answers, Answers | None, bool]:
    """Eager's answer with `Ties(seed)`, that in fp64, and whether there are any."""
    with Ties(seed) as ties:
        answer = _tensors(case.module(*_copied(case.args)))
    with Ties(seed):
        return answer, _exact(case, answer), ties.found


def _overflows(graph: Graph, given: list[Tensor]) -> bool:
    """Whether a value on the way is finite in fp64 alone: a sum in another order may be too."""
    floats = [v for v, spec in graph.specs.items() if spec.dtype.is_floating_point]
    every = replace(graph, outputs=tuple(floats))
    try:
        narrow = gtco.interpret(every, _copied(given))
        wide = gtco.interpret(every, _copied(given), dtype=torch.float64)
    except Exception:
        return False
    return any(bool((finite(w) & ~finite(n)).any()) for n, w in zip(narrow, wide, strict=True))


def _noisy(graph: Graph, given: list[Tensor], seed: int) -> Answers:
    """The answer of `graph` where each value that is computed is off by an ulp or none, and each
    sum of products by what another order of adding may change. In the first run sums that cancel
    to within an ulp of their terms are zero, and a sum that is zero has either sign."""
    generator = torch.Generator().manual_seed(seed)

    def signs(x: Tensor) -> Tensor:
        return torch.randint(-1, 2, x.shape, generator=generator).to(torch.float64)

    def noisy(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        return (x.double() * (1 + signs(x) * torch.finfo(x.dtype).eps)).to(x.dtype)

    def noisy_sum(node: Node, x: Tensor, operands: list[Tensor]) -> Tensor:
        if not x.is_floating_point():
            return x
        if node.definition.multiplies and node.op != "attention":
            sizes = node.definition.reference(*(each.abs() for each in operands), **node.attrs)
            off = sizes.double() * torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
            small = (x.abs() <= sizes * torch.finfo(x.dtype).eps) & (seed == 0)
            x = torch.where(small, 0.0, x.double() + signs(x) * off).to(x.dtype)
        if node.op == "amax":
            return x  # `Ties` knows which zeros have either sign
        return torch.where(x == 0, torch.where(signs(x) > 0, -x, x), x)  # of either sign

    values = dict(graph.constants)
    for name, tensor in zip(graph.inputs, _copied(given), strict=True):
        values[name] = graph.as_stored(name, tensor)
    for node in graph.nodes:
        operands = [values[name] for name in node.inputs]
        result = node.definition.reference(*operands, **node.attrs)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if not node.definition.is_view:
            results = [noisy(each) for each in results]
            if node.definition.multiplies or node.pattern is Pattern.REDUCTION:
                results[0] = noisy_sum(node, results[0], operands)
        values.update(zip(node.values, results, strict=True))
    return [values[name] for name in graph.outputs]


def _copied(args: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, args)


def _tensors(answer: Any) -> Answers:
    return [x for x in pytree.tree_leaves(answer) if isinstance(x, Tensor)]


# -- exceptions ------------------------------------------------------------------------------------


def _refused(stage: str, error: Exception, torchs_own: Callable[[], bool]) -> Outcome:
    text = _first_line(error)
    public = isinstance(error, REFUSALS) and not any(part in str(error) for part in OUR_FAULT)
    if public:
        return Outcome("torch" if torchs_own() else "refused", stage, text)
    return Outcome("crash", stage, text)


def _export_fails(case: Case) -> bool:
    try:
        torch.export.export(case.module, case.args, strict=False).run_decompositions()
    except Exception:
        return True
    return False


def _cuda_lacks_it(case: Case) -> bool:
    """Whether torch itself fails on the GPU: it has no integer products there, and autocast has
    other types, which may not be mixed."""
    try:
        _eager_on_gpu(case)
    except Exception:
        return True
    return False


def _other_types(case: Case, answer: Answers, eager: Answers) -> str:
    """What to say where eager's results have other types on a GPU, and the answer has those: a
    region of autocast computes more operators in fp32 there."""
    mine, here = [spec_text(x) for x in answer], [spec_text(x) for x in eager]
    if mine == here or mine != [spec_text(x) for x in _eager_on_gpu(case)]:
        return ""
    return f"eager's results on a GPU are {', '.join(mine)}, not {', '.join(here)}"


def _eager_on_gpu(case: Case) -> Answers:
    try:
        args = pytree.tree_map_only(Tensor, lambda x: x.cuda(), case.args)
        return _tensors(case.module.to("cuda")(*args))
    finally:
        case.module.to("cpu")


def _export_differs(case: Case, eager: Answers) -> bool:
    """Whether torch's own exported program gives something else than its eager mode, as for
    `pixel_unshuffle` of an empty tensor, or states another shape."""
    try:
        program = torch.export.export(case.module, case.args, strict=False).run_decompositions()
        answer = _tensors(program.module()(*_copied(case.args)))
    except Exception:
        return True
    (results,) = program.graph.output_node().args
    values = [node.meta["val"] for node in pytree.tree_leaves(results) if isinstance(node, fx.Node)]
    stated = [value.shape for value in values if isinstance(value, Tensor)]
    if stated != [x.shape for x in eager]:
        return True
    return bool(differences(answer, eager, _exact(case, eager)))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
