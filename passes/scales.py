"""By what the operands of a product are multiplied ahead of rounding them to 8 bits.

    x [rows, K] as `x * factor + offset`,   w [columns, K] as `w / factor * rows`

fp8 (e4m3) is a floating-point type, of which another factor changes no digit on average: powers of
two, one of the activations and one of each row of the weights. Twice the largest value that was
seen finds room.

Integers have steps of one size, so that a channel which is larger than others needs larger ones:
each channel of the activations has its own factor, up to its range, and the weights make up for it
(as SmoothQuant does, Xiao et al. 2023). How much of their difference it takes over is chosen by the
error of both operands; one factor for all is taken where it costs little. What has no value below
0, as behind a ReLU, has an offset that leaves all 256 steps to the others; a border of zeros, which
is one of integers, asks for none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
HEADROOM = 2.0
"""How much larger than in calibration a value may be before it is cut, of fp8."""
INT8_LARGEST, INT8_STEPS = 127, 255
INT8_HEADROOM = 1.5
"""How much wider than in calibration the range of a channel may be before values are cut. What few
rows of each input have, such as a ViT's class token, is seen seldom: without room, images that were
not seen cost a ViT-S/16 two to three times as much error, with 2 a third more
(experiments/notes/44-calibrated-int8.md)."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the differences between channels of activations, that their factors take over."""
CLOSER = 1.25
"""How much less squared error each other choice has to cost than one factor for all channels, which
no epilogue has to load."""
SMALLEST = 2.0**-12
"""Of the largest channel's range, that a channel is taken to have at least."""
COMPENSATED = 0.2
"""What is left of the weights' squared error where they are rounded with compensation
(experiments/notes/23-fp8.md)."""


@dataclass(frozen=True)
class Scales:
    """How the operands of one product become 8 bits.

    Args:
        dtype: fp8 (e4m3) or int8.
        factor: [1] or [K], fp32, of the activations.
        offset: the same, whole numbers; zeros of fp8.
        rows: [columns of the result], fp32, of the weights.
    """

    dtype: torch.dtype
    factor: Tensor
    offset: Tensor
    rows: Tensor

    def as_rounded(self, x: Tensor) -> Tensor:
        """[..., K], the values that `x` in 8 bits stands for, in fp32."""
        factor, offset = self.factor.to(x.device), self.offset.to(x.device)
        rounded = to_8_bits(x.float() * factor + offset, self.dtype)
        return (rounded.float() - offset) / factor

    def scaled(self, w: Tensor) -> Tensor:
        """[columns, ..., K], the weights `w` ahead of rounding them."""
        return w.float() / self.factor.to(w.device) * self._by_row(w)

    def nearest(self, w: Tensor) -> Tensor:
        """`w` in 8 bits, to the nearest."""
        return to_8_bits(self.scaled(w), self.dtype)

    def stands_for(self, rounded: Tensor) -> Tensor:
        """The weights that `rounded` stands for, in fp32."""
        return rounded.float() / self._by_row(rounded) * self.factor.to(rounded.device)

    def _by_row(self, w: Tensor) -> Tensor:
        return self.rows.to(w.device).reshape(-1, *(1,) * (w.dim() - 1))


def to_8_bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest in `dtype`, whose ends stand for what lies beyond them."""
    if dtype == FP8:
        return values.clamp(-LARGEST, LARGEST).to(FP8)
    return values.round().clamp(-INT8_LARGEST - 1, INT8_LARGEST).to(torch.int8)


def fp8_scales(w: Tensor, largest: float) -> Scales:
    """Of the weights `w`, and of activations up to `largest`."""
    room = LARGEST / (HEADROOM * largest) if largest else 1.0
    factor = torch.tensor([2.0 ** math.floor(math.log2(room))])
    most = (w.float() / factor.to(w.device)).abs().flatten(1).amax(1)
    rows = torch.where(most > 0, torch.exp2((LARGEST / most).log2().floor()), 1.0)
    return Scales(FP8, factor, torch.zeros(1), rows)


# -- integers --------------------------------------------------------------------------------------


def seen_in(x: Tensor) -> Tensor:
    """[3, K]: of the channels of `x` [..., K] the least value, the largest, and the mean square."""
    rows = x.float().reshape(-1, x.shape[-1])
    return torch.stack((rows.amin(0), rows.amax(0), rows.square().mean(0))).cpu()


def seen_in_both(one: Tensor, other: Tensor, share: float) -> Tensor:
    """The same of what both were seen in; `share` of it was the other one's."""
    low, high = torch.minimum(one[0], other[0]), torch.maximum(one[1], other[1])
    return torch.stack((low, high, torch.lerp(one[2], other[2], share)))


def int8_scales(
    weights: Mapping[str, Tensor], seen: Sequence[Tensor], *, by_channel: bool, centred: bool
) -> dict[str, Scales]:
    """Of products that read the same values.

    Args:
        weights: by the name of each, [columns, ..., K].
        seen: of what each reads, as `seen_in` gives it.
        by_channel: whether each channel may have its own factor.
        centred: whether zero has to be the integer zero.
    """
    if not by_channel:  # readers may have another number of channels each
        seen = [torch.stack((x[0].amin(), x[1].amax(), x[2].mean()))[:, None] for x in seen]
    low = torch.stack([each[0] for each in seen]).amin(0)
    high = torch.stack([each[1] for each in seen]).amax(0)
    squares = torch.stack([each[2] for each in seen]).mean(0)
    columns = [w.float().cpu().flatten(0, -2) for w in weights.values()]
    alike = _with_room(low.amin(0, keepdim=True), high.amax(0, keepdim=True), centred)
    choices = [(*alike, _span(*alike) / INT8_STEPS)]
    if by_channel:
        apart = _with_room(low, high, centred)
        span = _span(*apart)
        steps = [span**share * span.amax() ** (1 - share) / INT8_STEPS for share in SHARES]
        choices += [(*apart, step) for step in steps]
    errors = [_error(step, columns, squares) for *_, step in choices]
    low, high, step = next(
        choice
        for choice, error in zip(choices, errors, strict=True)
        if error <= CLOSER * min(errors)
    )
    factor = 1 / step
    offset = torch.where(low == 0, -128.0, -0.5 - (low + high) / 2 * factor).round()
    offset = torch.zeros_like(offset) if centred else offset
    if bool((offset == offset[0]).all()):
        offset = offset[:1]
    found = {}
    for name, w in weights.items():
        largest = (w.float().cpu() / factor).abs().flatten(1).amax(1)
        rows = torch.where(largest > 0, INT8_LARGEST / largest, 1.0)
        found[name] = Scales(torch.int8, factor, offset, rows)
    return found


def _with_room(low: Tensor, high: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
    """The ends of what finds room, of what was seen from `low` to `high`. Where no channel was
    below 0, all begin there, and share an offset."""
    if centred:
        high = torch.maximum(high.abs(), low.abs())
        low = -high
    low = low.clamp(max=0.0) if bool((low >= 0).all()) else low
    room = (high - low) * (INT8_HEADROOM - 1) / 2
    return torch.where(low == 0, low, low - room), high + room


def _span(low: Tensor, high: Tensor) -> Tensor:
    """How far apart they are; of channels that hardly vary a share of the widest."""
    span = high - low
    most = float(span.amax())
    return span.clamp(min=most * SMALLEST) if most else torch.ones_like(span)


def _error(step: Tensor, weights: Iterable[Tensor], squares: Tensor) -> float:
    """Squared, of the results of products with `weights`, whose activations have such steps: of
    rounding these, and the weights."""
    total = 0.0
    for w in weights:
        scaled = w * step
        of_rows = scaled.abs().amax(1) / INT8_LARGEST  # steps of the weights
        total += float(scaled.double().square().sum())
        total += (
            COMPENSATED
            * float(of_rows.double().square().sum())
            * float((squares.double() / step.double().square()).sum())
        )
    return total
