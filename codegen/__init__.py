"""From groups to CUDA C++; the tile library that the generated code includes is in `device`."""

from __future__ import annotations

from pathlib import Path

DEVICE_HEADERS = Path(__file__).parent / "device"
