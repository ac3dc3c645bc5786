"""Torch's own samples of the operators that models of images, text and diffusion use."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Callable, Iterator
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.fuzz.judge import Case

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
MOST = 12
"""Samples of an operator in a dtype, evenly from all: max_pool2d has 1,400."""

LARGEST = 1 << 16
"""Elements of a sample's largest tensor."""

_NAMES = """
abs acos acosh add addbmm addcdiv addcmul addmm addmv all amax amin angle any arange argmax argmin
argsort asin asinh atan atan2 atanh baddbmm bitwise_and bitwise_not bitwise_or bitwise_xor bmm
broadcast_tensors broadcast_to bucketize cat ceil chunk clamp clamp_max clamp_min clone
column_stack complex constant_pad_nd contiguous copysign cos cosh cummax cumprod cumsum det diag
diagonal diff div dot einsum eq erf erfc exp exp2 expand expand_as expm1 fft.fft fft.fft2 fft.fftn
fft.fftshift fft.hfft fft.ifft fft.ifft2 fft.ihfft fft.irfft fft.irfft2 fft.rfft fft.rfft2
fft.rfftn flatten flip floor floor_divide fmax fmin fmod full full_like gather ge gt hstack hypot
index_add index_copy index_fill index_put index_select inner inverse isfinite isinf isnan kron le
lerp linalg.det linalg.inv linalg.norm linalg.solve linalg.vecdot linalg.vector_norm linspace log
log10 log1p log2 log_softmax logaddexp logical_and logical_not logical_or logical_xor logsumexp lt
masked_fill matmul max maximum mean meshgrid min minimum mm movedim mul mv nan_to_num narrow
native_group_norm native_layer_norm ne neg new_full new_ones new_zeros
nn.functional.adaptive_avg_pool1d nn.functional.adaptive_avg_pool2d
nn.functional.adaptive_max_pool2d nn.functional.avg_pool1d nn.functional.avg_pool2d
nn.functional.batch_norm nn.functional.bilinear nn.functional.celu nn.functional.channel_shuffle
nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose1d
nn.functional.conv_transpose2d nn.functional.cosine_similarity nn.functional.cross_entropy
nn.functional.elu nn.functional.embedding nn.functional.gelu nn.functional.glu
nn.functional.grid_sample nn.functional.group_norm nn.functional.hardsigmoid
nn.functional.hardswish nn.functional.hardtanh nn.functional.instance_norm
nn.functional.interpolate nn.functional.l1_loss nn.functional.layer_norm nn.functional.leaky_relu
nn.functional.linear nn.functional.local_response_norm nn.functional.logsigmoid
nn.functional.max_pool1d nn.functional.max_pool2d nn.functional.max_unpool2d nn.functional.mish
nn.functional.mse_loss nn.functional.normalize nn.functional.one_hot nn.functional.pad
nn.functional.pairwise_distance nn.functional.pixel_shuffle nn.functional.pixel_unshuffle
nn.functional.prelu nn.functional.relu nn.functional.relu6 nn.functional.rms_norm
nn.functional.scaled_dot_product_attention nn.functional.selu nn.functional.silu
nn.functional.smooth_l1_loss nn.functional.softmin nn.functional.softplus nn.functional.softsign
nn.functional.tanhshrink nn.functional.threshold nn.functional.unfold norm ones ones_like outer
permute polar pow prod reciprocal remainder repeat repeat_interleave reshape rms_norm roll rot90
round rsqrt rsub scatter scatter_add searchsorted select sigmoid sign signbit sin sinh slice
softmax sort split split_with_sizes sqrt square squeeze stack std std_mean stft sub sum t
take_along_dim tan tanh tensor_split tensordot tile to topk trace transpose tril triu true_divide
trunc unbind unflatten unfold unsqueeze var var_mean view view_as_complex vstack where zeros
zeros_like __getitem__ float half long bool bfloat16
"""

OPERATORS = frozenset(_NAMES.split())
"""What torchvision, timm, transformers and diffusers call, by torch's names."""


def cases(start: int, count: int) -> Iterator[tuple[str, Case]]:
    """The samples numbered `start` to `start + count`, each with a name: operator by operator."""
    return islice(_all(), start, start + count)


def _all() -> Iterator[tuple[str, Case]]:
    for info in _database().op_db:
        if info.name not in OPERATORS:
            continue
        name = f"{info.name} {info.variant_test_name}".strip()
        for dtype in DTYPES:
            if dtype not in info.supported_dtypes("cpu"):
                continue
            torch.manual_seed(0)
            samples = list(info.sample_inputs("cpu", dtype))
            for number in range(0, len(samples), -(-len(samples) // MOST) or 1):
                sample = samples[number]
                case = _case(info.op, (sample.input, *sample.args), sample.kwargs)
                if case is not None:
                    yield f"{name}, {dtype}, sample {number}", case


def _case(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Case | None:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = tuple(leaf.detach() for leaf in leaves if isinstance(leaf, Tensor))
    if not tensors or any(each.numel() > LARGEST for each in tensors):
        return None

    def exact() -> Any:
        wide = [_widen(leaf) for leaf in leaves]
        wide_args, wide_kwargs = pytree.tree_unflatten(wide, spec)
        return _in_parts(op(*wide_args, **wide_kwargs))

    return Case(Sample(op, leaves, spec).eval(), tensors, exact)


class Sample(nn.Module):
    """A call of `op` whose tensors are the arguments; the rest of the call stands."""

    def __init__(self, op: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.op, self.spec = op, spec
        self.literals = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)
        leaves = [next(given) if literal is None else literal[0] for literal in self.literals]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return _in_parts(self.op(*args, **kwargs))


def _in_parts(result: Any) -> Any:
    """`result` as a model returns it: complex numbers in two parts."""
    return pytree.tree_map_only(
        Tensor, lambda x: torch.view_as_real(x.resolve_conj()) if x.is_complex() else x, result
    )


def _widen(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().double()
    narrow = isinstance(leaf, torch.dtype) and leaf.is_floating_point
    return torch.float64 if narrow else leaf


def _database() -> ModuleType:
    """Torch's table of operators and samples."""
    if importlib.util.find_spec("expecttest") is None:  # a base class of tests; samples need none
        stand_in = ModuleType("expecttest")
        vars(stand_in).update(TestCase=unittest.TestCase, ACCEPT=False)
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal import common_methods_invocations

    return common_methods_invocations
