"""When an answer is right: the judge of benchmarks, the demo and the tests.

As torch's own benchmarks decide: an answer may be off from an fp64 run of the same weights by a
few times as much as torch eager is in the same precision, plus a tenth of that precision's
tolerance. Two additions make planted answers fail: the constant part shrinks with outputs smaller
than one, so that zeros never pass, and whatever is not finite has to agree element by element.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Precision = torch.dtype | str
"""What was computed in: a dtype, "tf32", "fp8" or "int8"."""


@dataclass(frozen=True)
class Bound:
    """RMSE allowed: `multiple` times eager's, plus a tenth of `tolerance`, times the size of an
    output up to `largest`."""

    multiple: float
    tolerance: float
    largest: float = 1.0


BOUNDS: dict[Precision, Bound] = {
    torch.float16: Bound(3, 1e-2),
    torch.bfloat16: Bound(3, 1e-2),
    "tf32": Bound(3, 1e-3),
    torch.float32: Bound(2, 1e-4),
    "fp8": Bound(3, 0.5, math.inf),
    "int8": Bound(3, 0.5, math.inf),
}


@dataclass(frozen=True)
class Verdict:
    """What the judge found.

    Args:
        reason: why the answer is wrong, or "".
        rmse: root mean square error against the reference, of the worst output.
        eager_rmse: the same of torch eager.
        limit: the largest `rmse` that would pass.
    """

    reason: str
    rmse: float = 0.0
    eager_rmse: float = 0.0
    limit: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.reason

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        if self.reason:
            return f"wrong: {self.reason}"
        return (
            f"right: RMSE {self.rmse:.2e} against fp64, torch eager {self.eager_rmse:.2e}, "
            f"limit {self.limit:.2e}"
        )


def judge(candidate: Any, eager: Any, reference: Any, precision: Precision) -> Verdict:
    """Decide whether `candidate` is a right answer.

    Args:
        candidate: a tensor, or any structure of tensors.
        eager: torch eager's answer in the tested precision, of the same structure; its dtypes and
            shapes are what `candidate` must have.
        reference: the same model and inputs in fp64 (fp32 where fp64 does not run).
        precision: a key of `BOUNDS`.

    Returns:
        The verdict on the first wrong output, else on the one closest to its limit.
    """
    bound = BOUNDS[precision]
    ours, our_tree = pytree.tree_flatten(candidate)
    theirs, their_tree = pytree.tree_flatten(eager)
    exact = pytree.tree_leaves(reference)
    if our_tree != their_tree:
        return Verdict(f"the output is structured {our_tree}, not {their_tree}")
    verdicts = []
    for index, (mine, other, truth) in enumerate(zip(ours, theirs, exact, strict=True)):
        verdict = _judge_leaf(mine, other, truth, bound)
        if verdict.reason:
            where = f"output {index}: " if len(ours) > 1 else ""
            return Verdict(where + verdict.reason, verdict.rmse, verdict.eager_rmse, verdict.limit)
        verdicts.append(verdict)
    return max(verdicts, key=lambda one: one.rmse / (one.limit or math.inf), default=Verdict(""))


def _judge_leaf(candidate: Any, eager: Any, reference: Any, bound: Bound) -> Verdict:
    if not isinstance(eager, Tensor):
        return Verdict("" if candidate == eager else f"{candidate!r} instead of {eager!r}")
    if not isinstance(candidate, Tensor):
        return Verdict(f"a {type(candidate).__name__} instead of a tensor")
    if candidate.dtype != eager.dtype:
        return Verdict(f"dtype {candidate.dtype} instead of {eager.dtype}")
    if candidate.shape != eager.shape:
        return Verdict(f"shape {tuple(candidate.shape)} instead of {tuple(eager.shape)}")
    if not eager.is_floating_point():
        differs = (candidate != eager) & (candidate != reference)
        return Verdict(f"{int(differs.sum())} elements differ" if differs.any() else "")
    return _judge_floats(candidate.double(), eager.double(), reference.double(), bound)


def _judge_floats(candidate: Tensor, eager: Tensor, reference: Tensor, bound: Bound) -> Verdict:
    # Eager may overflow where fp64 does not; the candidate may do so in the same place, and what
    # came of it (infinity minus infinity) may be NaN in both.
    broken = eager.isnan()
    wants_nan = reference.isnan()
    count = int((candidate.isnan() & ~wants_nan & ~broken).sum())
    if count:
        return Verdict(f"NaN in {count} of {candidate.numel()} elements", math.nan)
    if (wants_nan & ~candidate.isnan()).any():
        return Verdict("a number where the reference has NaN", math.nan)
    infinite = candidate.isinf() & (candidate != reference) & (candidate != eager) & ~broken
    if infinite.any():
        return Verdict(f"infinite in {int(infinite.sum())} elements", math.inf)
    if (reference.isinf() & (candidate != reference)).any():
        return Verdict("finite where the reference is infinite", math.inf)
    finite = candidate.isfinite() & eager.isfinite() & reference.isfinite()
    truth = reference[finite]
    if truth.numel() == 0:
        return Verdict("")
    rmse = _rms(candidate[finite] - truth)
    eager_rmse = _rms(eager[finite] - truth)
    constant = bound.tolerance / 10 * min(bound.largest, _rms(truth))
    limit = bound.multiple * eager_rmse + constant
    reason = "" if rmse <= limit else f"RMSE {rmse:.2e} against fp64, the limit is {limit:.2e}"
    return Verdict(reason, rmse, eager_rmse, limit)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
