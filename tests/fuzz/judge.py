"""What gtco makes of a model, held against torch eager.

A `Case` is a module, its arguments and, where there is one, its answer in fp64. Each stage is
judged by itself: the captured graph interpreted, the fused graph interpreted, and at times the
module compiled for the host build or the GPU. What torch itself cannot run or export is no case.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gtco
from gtco import check
from gtco.frontend.torch_export import CaptureError
from gtco.options import OptionError

Answers = list[Tensor]
REFUSALS = (CaptureError, OptionError, gtco.TargetError, gtco.FallbackError)
OUR_FAULT = ("cannot be lowered",)
"""Refusals that are a crash of gtco's in other words."""

NUDGES = 3
"""Runs of eager on inputs that differ in the last bits: how much the answer hangs on them."""


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
            cannot run or export it) or "unstable" (eager's own answer hangs on the last bits).
        stage: "capture", "captured", "fuse", "fused", or the target.
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


def judge(case: Case, targets: Sequence[str] = ()) -> Outcome:
    """The first failure of `case`, else "right".

    Args:
        targets: also compile for these ("host", or "gpu": with and without a CUDA graph).
    """
    with _quiet(), torch.no_grad():
        try:
            eager = _tensors(case.module(*_copied(case.args)))
        except Exception as error:
            return Outcome("torch", "eager", _first_line(error))
        refusal: Outcome | None = None
        try:
            graph = gtco.capture(case.module, case.args)
        except Exception as error:
            return _refused("capture", error, lambda: _export_fails(case))
        tensors = [x for x in pytree.tree_leaves(case.args) if isinstance(x, Tensor)]
        stages: list[tuple[str, Callable[[], Any]]] = [
            ("captured", lambda: gtco.interpret(graph, _copied(tensors))),
            ("fused", lambda: gtco.interpret(gtco.fuse(graph), _copied(tensors))),
        ]
        for target in targets:
            stages += _compiled(case, target)
        for stage, run in stages:
            try:
                answer = _tensors(run())
            except Exception as error:
                return _refused(stage, error, lambda: False)
            outcome = _compare(case, stage, answer, eager)
            if outcome.failed:
                return outcome
            if outcome.kind != "right":
                refusal = refusal or outcome
    return refusal or Outcome("right")


def _compiled(case: Case, target: str) -> list[tuple[str, Callable[[], Any]]]:
    def run(device: str, **options: Any) -> Callable[[], Any]:
        def answer() -> Any:
            module = case.module.to(device)
            args = pytree.tree_map_only(Tensor, lambda x: x.to(device), case.args)
            try:
                compiled = gtco.compile(module, args, **options)
                first = _tensors(compiled(*_copied(args)))
                again = _tensors(compiled(*_copied(args)))
            finally:
                case.module.to("cpu")
            for x, y in zip(first, again, strict=True):
                if not torch.equal(_bits(x), _bits(y)):
                    raise AssertionError("two calls with the same inputs gave different bits")
            return [x.cpu() for x in first]

        return answer

    if target == "gpu":
        return [
            ("gpu", run("cuda", cuda_graph=False)),
            ("gpu, in a CUDA graph", run("cuda", cuda_graph=True)),
        ]
    return [(target, run("cpu", target=target))]


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)


# -- answers ---------------------------------------------------------------------------------------


def _compare(case: Case, stage: str, answer: Answers, eager: Answers) -> Outcome:
    if len(answer) != len(eager):
        return Outcome("wrong", stage, f"{len(answer)} outputs instead of {len(eager)}")
    exact = _exact(case, eager)
    reasons = _differences(answer, eager, exact)
    if not reasons:
        return Outcome("right")
    nudged = [_tensors(case.module(*_nudged(case.args, seed))) for seed in range(NUDGES)]
    unstable = set[int]()
    for other in nudged:
        unstable |= set(_differences(other, eager, exact, slack=0.1))
    for index, reason in reasons.items():
        if index not in unstable or "instead of" in reason:
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


def _differences(
    answer: Answers, eager: Answers, exact: Answers | None, slack: float = 1.0
) -> dict[int, str]:
    """Output number to what is wrong with it; `slack` below 1 is stricter."""
    found = {}
    for index, (mine, theirs) in enumerate(zip(answer, eager, strict=True)):
        reason = _difference(mine, theirs, exact[index] if exact else None, slack)
        if reason:
            found[index] = reason
    return found


def _difference(mine: Tensor, theirs: Tensor, exact: Tensor | None, slack: float) -> str:
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return f"{_spec(mine)} instead of {_spec(theirs)}"
    if not theirs.is_floating_point():
        count = int((mine != theirs).sum())
        return f"{count} of {mine.numel()} elements differ" if count else ""
    close = _close(mine, theirs, slack)
    if not close or exact is None or theirs.dtype == torch.float64:
        return close
    verdict = check.judge(mine, theirs, exact, theirs.dtype)
    return "" if verdict.ok else verdict.reason


def _close(mine: Tensor, theirs: Tensor, slack: float) -> str:
    """What differs beyond rounding, with what is not finite in the same places."""
    a, b = mine.double(), theirs.double()
    odd = ~(a.isfinite() & b.isfinite())
    if odd.any():
        same = (a == b) | (a.isnan() & b.isnan())
        if (odd & ~same).any():
            where = tuple((odd & ~same).nonzero()[0].tolist())
            return f"{a[where].item()} at {where} where eager has {b[where].item()}"
        a, b = a[~odd], b[~odd]
    if a.numel() == 0:
        return ""
    scale = float(b.square().mean().sqrt())
    bound = slack * TOLERANCES[theirs.dtype] * (b.abs() + scale)
    off = (a - b).abs()
    if not (off > bound).any():
        return ""
    worst = int((off - bound).argmax())
    return f"{a.flatten()[worst].item()} where eager has {b.flatten()[worst].item()}"


TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 2e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}
"""Of an element, relative to itself and to the output's root mean square; beyond it an answer in
less than fp64 may still be as near to fp64 as eager is, which `gtco.check` decides."""


def _nudged(args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)

    def nudge(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x.clone()
        sign = torch.randint(-1, 2, x.shape, generator=generator).to(torch.float64)
        return (x.double() * (1 + sign * 2 * torch.finfo(x.dtype).eps)).to(x.dtype)

    result: tuple[Any, ...] = pytree.tree_map_only(Tensor, nudge, args)
    return result


def _copied(args: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, args)


def _tensors(answer: Any) -> Answers:
    return [x for x in pytree.tree_leaves(answer) if isinstance(x, Tensor)]


def _spec(x: Tensor) -> str:
    return f"{x.dtype}{list(x.shape)}"


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


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
