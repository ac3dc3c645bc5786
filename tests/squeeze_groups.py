"""Groups of squeeze-and-excitation: the mean of each image and two linears, for kernel tests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def gate(
    image: tuple[int, ...],
    hidden: int,
    columns: int = 0,
    dtype: torch.dtype = F16,
    *,
    channels_first: bool = False,
    silu: bool = False,
    scaled: bool = False,
    bias: bool = True,
) -> Group:
    """sigmoid(linear(relu(linear(mean(x))))) of x [N, pixels ..., C].

    With `silu` in place of relu; with `scaled` the mean and the result are computed on; with
    `channels_first` x is stored as [N, C, pixels ...].
    """
    b = GraphBuilder()
    n, *pixels, c = image
    x = b.input("x", TensorSpec((n, c, *pixels) if channels_first else image, dtype))
    if channels_first:
        x = b.add("permute", x, dims=(0, *range(2, len(image)), 1))
    generator = torch.Generator().manual_seed(1)

    def constant(name: str, *sizes: int) -> str:
        values = torch.randn(*sizes, generator=generator) / sizes[-1] ** 0.5
        return b.constant(name, values.to(dtype))

    def linear(value: str, name: str, rows: int, depth: int) -> str:
        given = [constant(f"{name}_bias", rows)] if bias else []
        return b.add("linear", value, constant(f"{name}_weight", rows, depth), *given)

    y = b.add("mean", x, dims=tuple(range(1, len(image) - 1)), keepdim=not scaled)
    if scaled:
        y = b.add("mul", b.add("add", y, constant("shift", c)), other=1.5)
    y = linear(y, "squeeze", hidden, c)
    y = b.add("mul", y, b.add("sigmoid", y)) if silu else b.add("relu", y)
    y = b.add("sigmoid", linear(y, "excite", columns or c, hidden))
    if scaled:
        y = b.add("mul", y, b.input("gain", TensorSpec(b.specs[y].sizes, dtype)))
        y = b.add("reshape", y, shape=(n, 1, columns or c))
    return Group("gate", b.build([y]))


CASES: dict[str, Callable[[], Group]] = {
    "se_64": lambda: gate((3, 5, 7, 64), 4),
    "se_512": lambda: gate((2, 2, 2, 512), 32, silu=True),
    "se_odd": lambda: gate((3, 3, 5, 37), 5, 11, scaled=True),
    "se_72": lambda: gate((1, 9, 11, 72), 3, dtype=BF16, scaled=True, silu=True),
    "se_lines": lambda: gate((2, 301, 24), 7, 50, F32, bias=False),
    "se_wide": lambda: gate((1, 2, 3, 1160), 49, 600, BF16),
    "se_channels_first": lambda: gate((2, 6, 5, 40), 10, 16, channels_first=True),
    "se_one": lambda: gate((1, 1, 1, 1), 1),
}
