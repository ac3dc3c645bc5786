"""How far an answer may be from eager's: rounding, what rounding hangs on, and ties."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gtco import check

Answers = list[Tensor]

EXCUSE = 8
"""An answer may be off by this many times what other roundings change."""


def nearer(mine: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Where `one` is nearer to `mine` than `other` is: element by element of floats, which hang on
    a sign each; of what counts elements, all or none."""
    if not mine.is_floating_point():
        return ((mine != one).sum() < (mine != other).sum()).expand(mine.shape)
    a, b, c = mine.double(), one.double(), other.double()
    off, usual = (
        torch.where(_alike(a, x), 0.0, (a - x).abs().nan_to_num(math.inf, math.inf)) for x in (b, c)
    )
    return off < usual


def differences(answer: Answers, eager: Answers, exact: Answers | None) -> dict[int, str]:
    """Output number to what is wrong with it."""
    found = {}
    for index, (mine, theirs) in enumerate(zip(answer, eager, strict=True)):
        reason = _difference(mine, theirs, exact[index] if exact else None)
        if reason:
            found[index] = reason
    return found


def _difference(mine: Tensor, theirs: Tensor, exact: Tensor | None) -> str:
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return f"{spec_text(mine)} instead of {spec_text(theirs)}"
    if not theirs.is_floating_point():
        count = int((mine != theirs).sum())
        return f"{count} of {mine.numel()} elements differ" if count else ""
    close = _close(mine, theirs)
    if not close or exact is None or theirs.dtype == torch.float64:
        return close
    verdict = check.judge(mine, theirs, exact, theirs.dtype)
    return "" if verdict.ok else verdict.reason


def _close(mine: Tensor, theirs: Tensor) -> str:
    """What differs beyond rounding, with what is not finite in the same places."""
    a, b = mine.double(), theirs.double()
    odd = ~(a.isfinite() & b.isfinite())
    if odd.any():
        same = _alike(mine, theirs)
        if (odd & ~same).any():
            where = tuple((odd & ~same).nonzero()[0].tolist())
            return f"{a[where].item()} at {where} where eager has {b[where].item()}"
        a, b = a[~odd], b[~odd]
    if a.numel() == 0:
        return ""
    scale = float(b.square().mean().sqrt())
    bound = TOLERANCES[theirs.dtype] * (b.abs() + scale)
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


def excused(mine: Tensor, theirs: Tensor, base: Tensor, noisy: list[Tensor]) -> bool:
    """Whether other roundings of the captured graph change its answer as much as `mine` is off."""
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return False
    if not mine.is_floating_point():
        return any(not torch.equal(run, base) for run in noisy)
    if any(not torch.equal(finite(run), finite(base)) for run in noisy):
        return True
    here = finite(mine)
    if not torch.equal(here, finite(theirs)):
        return False
    moved = [~_alike(run, base) for run in noisy]
    if (~here & ~_alike(mine, theirs) & ~torch.stack(moved).any(0)).any():
        return False  # an infinity of the other sign, or NaN, which no rounding brings
    if not here.any():
        return True
    off = (mine.double() - theirs.double())[here].abs().max()
    spread = max((run.double() - base.double())[finite(base)].abs().max() for run in noisy)
    return bool(off <= EXCUSE * spread)


def as_far_off(mine: Tensor, theirs: Tensor, exact: Tensor) -> bool:
    """Whether eager itself misses the answer in fp64 by more than rounding, and `mine` by no more
    than `EXCUSE` times as much: a floor of what an ulp takes across a step, say."""
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape or not mine.is_floating_point():
        return False
    if not finite(mine).all() or not _close(theirs, exact.to(theirs.dtype)):
        return False
    off, usual = ((x.double() - exact.double()).square().mean() for x in (mine, theirs))
    return bool(off <= EXCUSE**2 * usual)


def _alike(x: Tensor, y: Tensor) -> Tensor:
    """Which elements are equal, or NaN in both."""
    a, b = x.double(), y.double()
    return (a == b) | (a.isnan() & b.isnan())


def finite(x: Tensor) -> Tensor:
    """Which elements are finite; torch does not say it of fp8."""
    return x.double().isfinite()


def spec_text(x: Tensor) -> str:
    return f"{x.dtype}{list(x.shape)}"
