"""From groups to CUDA C++.

`sketch` and `rules` say which structures a group may have, `sketches` are the kernel families,
`emit` and `tiles` write what runs of each element, `program` is the result. `device` is the tile
library that generated code includes, `host` the same library for a CPU.
"""

from __future__ import annotations

from pathlib import Path

DEVICE_HEADERS = Path(__file__).parent / "device"
