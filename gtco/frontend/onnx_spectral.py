"""ONNX's Fourier transforms and the windows of signals as torch functions.

DFT(x[b, n, 1]) -> view_as_real(fft(x[..., 0]))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from gtco.frontend.onnx_call import Call, Op
from gtco.frontend.onnx_shapes import dtype_of

HAMMING = 25 / 46
"""What ONNX's Hamming window adds its cosine to."""


def _complex(x: Tensor) -> Tensor:
    """The numbers of x [..., 1] or [..., 2], whose last dimension holds their parts."""
    return torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x.squeeze(-1)


def _dft(
    call: Call, x: Tensor, length: Tensor | None = None, along: Tensor | None = None
) -> Tensor:
    axis = call.attr("axis", 1)
    if call.opset >= 20:
        axis = int(call.constant(2)[0]) if call.has(2) else -2
    axis = call.axis(axis, x.dim())
    points = int(call.constant(1)[0]) if call.has(1) else None
    one_sided, inverse = bool(call.attr("onesided", 0)), bool(call.attr("inverse", 0))
    if one_sided and inverse == (x.shape[-1] == 1):
        raise call.refuse("onesided=1 is of real numbers, and its inverse of complex ones")
    z = _complex(x)
    if one_sided and inverse:
        back: Tensor = torch.fft.irfft(z, points, axis)
        return back.unsqueeze(-1)
    if one_sided:
        return torch.view_as_real(torch.fft.rfft(z, points, axis))
    return torch.view_as_real((torch.fft.ifft if inverse else torch.fft.fft)(z, points, axis))


def _window(make: Callable[[int, bool], Tensor]) -> Op:
    def run(call: Call, size: Tensor) -> Tensor:
        dtype = dtype_of(call, call.attr("output_datatype", 1))
        periodic = bool(call.attr("periodic", 1))
        return make(int(call.constant(0)[0]), periodic).to(size.device, dtype)

    return run


SPECTRAL: Mapping[str, Op] = MappingProxyType(
    {
        "BlackmanWindow": _window(torch.blackman_window),
        "DFT": _dft,
        "HammingWindow": _window(
            lambda size, periodic: torch.hamming_window(size, periodic, HAMMING, 1 - HAMMING)
        ),
        "HannWindow": _window(torch.hann_window),
    }
)
