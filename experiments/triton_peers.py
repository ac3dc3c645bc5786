"""A plain GEMM and a plain attention in Triton, for `experiments.op_table` to time beside gtco's.

A program a tile, no persistence, no tensor maps: what most people would write, each with a handful
of configurations for the caller to try. Importing this module needs triton.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton evaluates a kernel's annotations on the device's side: all but tl.constexpr are refused.

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x,
    w,
    bias,
    y,
    rows,
    columns,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """y[rows, columns] = x[rows, depth] w[columns, depth]^T + bias[columns]; BLOCK_K | depth."""
    # Programs go down GROUP tiles of rows, then to the next columns, so that both stay in L2.
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    band = tl.program_id(0) // (GROUP * tiles_n)
    within = tl.program_id(0) % (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    m = (band * GROUP + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (within // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # What lies outside is read at the last row or column, and not stored: loads need no mask.
    x_at = x + tl.minimum(m, rows - 1)[:, None] * depth + k[None, :]
    w_at = w + tl.minimum(n, columns - 1)[None, :] * depth + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, depth, BLOCK_K):
        acc = tl.dot(tl.load(x_at), tl.load(w_at), acc)
        x_at += BLOCK_K
        w_at += BLOCK_K
    inside_n = n < columns
    acc += tl.load(bias + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    inside = (m < rows)[:, None] & inside_n[None, :]
    tl.store(y + m[:, None] * columns + n[None, :], acc.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def attention_kernel(
    q,
    k,
    v,
    y,
    tokens,
    scale,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y = softmax(q k^T scale / log2 e) v a head; all [heads, tokens, WIDTH].

    A program has BLOCK_Q queries of one head and goes once over its keys. PADDED is the power of 2
    from WIDTH on.
    """
    first = tl.program_id(1) * tokens * WIDTH
    column = tl.arange(0, PADDED)
    row = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_at = first + row[:, None] * WIDTH + column[None, :]
    q_inside = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    queries = tl.load(q + q_at, mask=q_inside, other=0.0)
    most = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_Q, PADDED), dtype=tl.float32)
    for start in range(0, tokens, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        at = first + key[:, None] * WIDTH + column[None, :]
        inside = (key < tokens)[:, None] & (column < WIDTH)[None, :]
        keys = tl.load(k + at, mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        scores = tl.where((key < tokens)[None, :], scores, float("-inf"))
        more = tl.maximum(most, tl.max(scores, 1))  # finite: each tile has a key
        weights = tl.exp2(scores - more[:, None])
        shrink = tl.exp2(most - more)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v + at, mask=inside, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
        most = more
    tl.store(y + q_at, (acc / total[:, None]).to(y.dtype.element_ty), mask=q_inside)


@dataclass(frozen=True)
class LinearConfig:
    """Tile and launch of `linear`."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        tile = f"{self.block_m} x {self.block_n} x {self.block_k}"
        return f"{tile}, {self.warps} warps, {self.stages} stages"


@dataclass(frozen=True)
class AttentionConfig:
    """Tile and launch of `attention`."""

    block_q: int
    block_k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block_q} x {self.block_k}, {self.warps} warps, {self.stages} stages"


GROUP = 8
LINEAR = (
    LinearConfig(32, 64, 128, 4, 4),
    LinearConfig(64, 32, 128, 4, 4),
    LinearConfig(64, 64, 64, 4, 5),
    LinearConfig(64, 64, 128, 4, 3),
    LinearConfig(64, 128, 64, 4, 4),
    LinearConfig(128, 64, 64, 4, 4),
    LinearConfig(128, 128, 64, 4, 3),
    LinearConfig(128, 128, 64, 8, 4),
    LinearConfig(128, 256, 64, 8, 3),
    LinearConfig(256, 128, 64, 8, 3),
)
ATTENTION = (
    AttentionConfig(32, 64, 4, 3),
    AttentionConfig(64, 32, 4, 3),
    AttentionConfig(64, 64, 4, 2),
    AttentionConfig(64, 64, 4, 3),
    AttentionConfig(64, 128, 4, 2),
    AttentionConfig(128, 64, 4, 3),
    AttentionConfig(128, 64, 8, 3),
    AttentionConfig(128, 128, 8, 2),
)


def linear(config: LinearConfig, x: Tensor, w: Tensor, bias: Tensor, y: Tensor) -> None:
    """y[rows, columns] = x[rows, k] w[columns, k]^T + bias[columns]; all contiguous.

    Raises:
        ValueError: k is no multiple of the tile's.
    """
    (rows, depth), columns = x.shape, w.shape[0]
    if depth % config.block_k:
        raise ValueError(f"K = {depth} is no multiple of {config.block_k}")
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(columns, config.block_n)
    linear_kernel[(tiles,)](
        x,
        w,
        bias,
        y,
        rows,
        columns,
        depth,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=GROUP,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def attention(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor, y: Tensor) -> None:
    """y = softmax(q k^T / sqrt(width)) v; all contiguous (batch, heads, tokens, width)."""
    batch, heads, tokens, width = q.shape
    attention_kernel[(triton.cdiv(tokens, config.block_q), batch * heads)](
        q,
        k,
        v,
        y,
        tokens,
        width**-0.5 * LOG2_E,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        BLOCK_Q=config.block_q,
        BLOCK_K=config.block_k,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def warm(device: torch.device, widths: set[int]) -> None:
    """Compile every configuration (0.2 to 0.5 s each) by a small launch.

    One that fails is left alone: it will say so when it is tried.

    Args:
        device: a GPU.
        widths: of heads.
    """
    rows, columns, depth = 32, 64, max(config.block_k for config in LINEAR)

    def some(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.float16, device=device)

    x, w, bias, y = some(rows, depth), some(columns, depth), some(columns), some(rows, columns)
    for tile in LINEAR:
        with suppress(Exception):
            linear(tile, x, w, bias, y)
    for width in sorted(widths):
        q, k, v, z = (some(1, 1, rows, width) for _ in range(4))
        for config in ATTENTION:
            with suppress(Exception):
                attention(config, q, k, v, z)
