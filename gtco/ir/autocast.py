"""torch.autocast around gtco: read where a model is captured, off wherever gtco itself computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_DEVICES = ("cpu", "cuda")


@contextmanager
def no_autocast() -> Iterator[None]:
    """Meanwhile operators compute in the types of their operands: those of a captured graph are
    what they should be already."""
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def autocast_here() -> tuple[tuple[str, torch.dtype], ...]:
    """The regions that the caller is in: (device type, dtype)."""
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in _DEVICES
        if torch.is_autocast_enabled(device)
    )
