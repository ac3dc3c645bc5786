"""ONNX operators of transformers and of models with a state: attention, rotary positions, caches.

Attention(q, k, v)           -> F.scaled_dot_product_attention(q, k, v, scale=scale)
RotaryEmbedding(x, cos, sin) -> concat(cos * x1 - sin * x2, sin * x1 + cos * x2)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.frontend.onnx_call import Call, Op
from gtco.frontend.onnx_shapes import dtype_of, wrap

# -- attention -----------------------------------------------------------------------------------


def _heads(call: Call, x: Tensor, attribute: str) -> Tensor:
    """[batch, tokens, heads * size] as [batch, heads, tokens, size]."""
    if x.dim() == 4:
        return x
    heads = call.attr(attribute)
    if x.dim() != 3 or not heads or x.shape[2] % heads:
        raise call.refuse(f"{list(x.shape)} has no {attribute}={heads} heads")
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def _repeated(call: Call, x: Tensor, heads: int) -> Tensor:
    """Keys or values for `heads` queries: each head stands for a group of them."""
    batch, found, tokens, size = x.shape
    if heads == found:
        return x
    if heads % found:
        raise call.refuse(f"{heads} heads of queries are no multiple of {found} of keys")
    grouped = x.unsqueeze(2).expand(batch, found, heads // found, tokens, size)
    return grouped.reshape(batch, heads, tokens, size)


def _attention(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    valid_keys: Tensor | None = None,
) -> Any:
    packed = q.dim() == 3
    q = _heads(call, q, "q_num_heads")
    k, v = _heads(call, k, "kv_num_heads"), _heads(call, v, "kv_num_heads")
    call.ignore("q_num_heads", "kv_num_heads")
    offset: int | Tensor = 0
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2]
        k, v = torch.cat((past_key, k), 2), torch.cat((past_value, v), 2)
    elif valid_keys is not None:
        offset = valid_keys.reshape(-1, 1, 1, 1) - q.shape[2]
    present = k, v
    k, v = _repeated(call, k, q.shape[1]), _repeated(call, v, q.shape[1])
    scale = call.attr("scale", 1 / math.sqrt(q.shape[3]) if q.shape[3] else 1.0)
    softcap = call.attr("softcap", 0.0)
    call.ignore("qk_matmul_output_mode")
    if softcap or call.wants(3) or not _softmax_is_wide(call, q):
        y, scores = _spelled_out(call, q, k, v, _bias(call, q, k, mask, valid_keys, offset))
    else:
        scores = None
        alone = mask is None and valid_keys is None and not _windows(call)
        if alone and call.attr("is_causal", 0) and isinstance(offset, int) and offset == 0:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            bias = _bias(call, q, k, mask, valid_keys, offset)
            y = F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
    if packed:
        y = y.transpose(1, 2).flatten(2)
    return y, *present, scores


def _softmax_is_wide(call: Call, q: Tensor) -> bool:
    """Whether the softmax may be torch's, which takes at least float."""
    code = call.attr("softmax_precision")
    return code is None or torch.promote_types(dtype_of(call, code), q.dtype) in (
        q.dtype,
        torch.float32,
    )


def _windows(call: Call) -> list[tuple[int, int]]:
    """(sign, size) of each bound on how far a key may be from its query."""
    bounds = [(1, call.attr("left_window_size", -1)), (-1, call.attr("right_window_size", -1))]
    return [(sign, size) for sign, size in bounds if size >= 0]


def _bias(
    call: Call,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    valid_keys: Tensor | None,
    offset: int | Tensor,
) -> Tensor | None:
    """What the scores get added (floats), or which of them count (booleans)."""
    queries = torch.arange(q.shape[2], device=q.device).reshape(-1, 1)
    keys = torch.arange(k.shape[2], device=q.device)
    if mask is not None and (short := k.shape[2] - mask.shape[-1]) > 0:
        mask = F.pad(mask, (0, short), value=False if mask.dtype == torch.bool else -math.inf)
    bounds = [queries + offset - keys >= 0] if call.attr("is_causal", 0) else []
    bounds += [sign * (queries + offset - keys) <= size for sign, size in _windows(call)]
    if valid_keys is not None:
        bounds.append(keys < valid_keys.reshape(-1, 1, 1, 1))
    if mask is not None and mask.dtype == torch.bool:
        bounds.append(mask)
        mask = None
    if not bounds:
        return mask
    allowed = bounds[0]
    for bound in bounds[1:]:
        allowed = allowed & bound
    return allowed if mask is None else torch.where(allowed, mask, -math.inf)


def _spelled_out(
    call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The result, and the scores of the stage that `qk_matmul_output_mode` names."""
    root = math.sqrt(call.attr("scale", 1 / math.sqrt(q.shape[3])))
    softcap, mode = call.attr("softcap", 0.0), call.attr("qk_matmul_output_mode", 0)
    stages = [(q * root) @ (k.transpose(2, 3) * root)]
    stages.append(torch.tanh(stages[0] / softcap) * softcap if softcap else stages[0])
    if bias is None:
        stages.append(stages[1])
    elif bias.dtype == torch.bool:
        stages.append(torch.where(bias, stages[1], -math.inf))
    else:
        stages.append(stages[1] + bias)
    code = call.attr("softmax_precision")
    wide = stages[2] if code is None else stages[2].to(dtype_of(call, code))
    weights = wide.softmax(-1)
    empty = (wide == -math.inf).all(-1, keepdim=True)  # no key: a row of zeros, not of NaN
    stages.append(torch.where(empty, 0, weights).to(q.dtype))
    if not 0 <= mode <= 3:
        raise call.refuse(f"qk_matmul_output_mode={mode} is not 0 to 3")
    return stages[3] @ v, stages[mode]


# -- positions, caches ---------------------------------------------------------------------------


def _rotary(
    call: Call, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None
) -> Tensor:
    packed = x.dim() == 3
    heads = _heads(call, x, "num_heads")
    call.ignore("num_heads")
    size = call.attr("rotary_embedding_dim", 0) or heads.shape[3]
    turned, rest = heads[..., :size], heads[..., size:]
    if positions is not None:
        cos = F.embedding(wrap(positions, cos.shape[0]), cos)
        sin = F.embedding(wrap(positions, sin.shape[0]), sin)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (batch, 1, tokens, size / 2)
    if interleaved := call.attr("interleaved", 0):
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, -1)
    parts = cos * first - sin * second, sin * first + cos * second
    y = torch.stack(parts, -1).flatten(3) if interleaved else torch.cat(parts, -1)
    y = torch.cat((y, rest), -1) if rest.shape[3] else y
    return y.transpose(1, 2).flatten(2) if packed else y


def _tensor_scatter(
    call: Call, cache: Tensor, update: Tensor, starts: Tensor | None = None
) -> Tensor:
    axis = call.axis(call.attr("axis", -2), cache.dim())
    mode = call.attr("mode", "linear")
    if mode not in ("linear", "circular"):
        raise call.refuse(f"mode={mode!r} is not linear or circular")
    steps = torch.arange(update.shape[axis], device=cache.device)
    where = steps.reshape([-1 if i == axis else 1 for i in range(cache.dim())])
    if starts is not None:
        where = where + starts.reshape([-1] + [1] * (cache.dim() - 1))
    if mode == "circular":
        where = where % cache.shape[axis]
    return cache.scatter(axis, where.expand(update.shape), update)


def _causal_conv(
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    activation = call.attr("activation", "none")
    if activation not in ("none", "silu", "swish"):
        raise call.refuse(f"activation={activation!r} is not supported")
    state = weight.shape[2] - 1
    longer = F.pad(x, (state, 0)) if past is None else torch.cat((past, x), 2)
    y = F.conv1d(longer, weight, bias, groups=x.shape[1])
    y = y if activation == "none" else F.silu(y)
    return y, longer[:, :, longer.shape[2] - state :]


def _linear_attention(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step after the other, in float; q, k and v are [batch, steps, heads * size]."""
    call.ignore("chunk_size")  # how to compute, not what
    rule = call.attr("update_rule", "gated_delta")
    if rule not in ("linear", "gated", "delta", "gated_delta"):
        raise call.refuse(f"update_rule={rule!r} is not supported")
    if ("gated" in rule) != (decay is not None) or ("delta" in rule) != (beta is not None):
        raise call.refuse(f"update_rule={rule!r} does not fit which of decay and beta are given")
    heads = call.attr("kv_num_heads")
    queries = _heads(call, q, "q_num_heads").float()
    keys = _heads(call, k, "kv_num_heads").float()
    values = _heads(call, v, "kv_num_heads").float()
    batch, _, steps, size = keys.shape
    scale = call.attr("scale", 0.0) or 1 / math.sqrt(queries.shape[3])
    kept = (q if past is None else past).dtype
    state = values.new_zeros(batch, heads, size, values.shape[3]) if past is None else past.float()
    rows = []
    for i in range(steps):
        key, value = keys[:, :, i, :, None], values[:, :, i, None, :]
        if decay is not None:  # per head, or per element of the key
            state = state * decay[:, i].float().reshape(batch, heads, -1, 1).exp()
        if beta is not None:
            found = (state * key).sum(2, True)
            value = (value - found) * beta[:, i].float().reshape(batch, -1, 1, 1)
        state = state + key * value
        rows.append(queries[:, :, None, i] @ _repeated(call, state, queries.shape[1]) * scale)
    y = torch.cat(rows, 2).transpose(1, 2).flatten(2).to(q.dtype)
    return y, state.to(kept)


ATTENTION: Mapping[str, Op] = MappingProxyType(
    {
        "Attention": _attention,
        "CausalConvWithState": _causal_conv,
        "LinearAttention": _linear_attention,
        "RotaryEmbedding": _rotary,
        "TensorScatter": _tensor_scatter,
    }
)
