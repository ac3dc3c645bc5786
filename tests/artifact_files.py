"""Artifacts written anew with changes and right checksums, as by somebody who knows the format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Content = dict[str, Any]
"""The JSON of an artifact's plan."""


def read_parts(path: Path) -> tuple[dict[str, str], dict[str, tuple[dict[str, Any], bytes]]]:
    """The metadata, and each part's entry in the header and bytes."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    about = header.pop("__metadata__")
    parts = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        parts[name] = (entry, data[begin + first : begin + last])
    return about, parts


def read_content(path: Path) -> Content:
    """The plan."""
    content: Content = json.loads(read_parts(path)[1]["plan"][1])
    return content


def rewrite(
    path: Path,
    change: Callable[[Content], None] = lambda content: None,
    metadata: dict[str, str] | None = None,
    rename: dict[str, str] | None = None,
    blobs: Callable[[dict[str, bytes]], None] = lambda blobs: None,
    text: Callable[[str], str] = lambda text: text,
) -> None:
    """Write the file anew.

    Args:
        path: an artifact.
        change: edits its plan.
        metadata: of the header.
        rename: parts.
        blobs: edits the parts of bytes, which are cubins.
        text: edits the plan as it is written.
    """
    about, parts = read_parts(path)
    parts = {(rename or {}).get(name, name): part for name, part in parts.items()}
    content = json.loads(parts.pop("plan")[1])
    change(content)
    raw = {name: part[1] for name, part in parts.items() if part[0]["dtype"] == "U8"}
    blobs(raw)
    raw["plan"] = text(json.dumps(content)).encode()
    body = {name: part[1] for name, part in parts.items() if part[0]["dtype"] != "U8"} | raw
    end, entries = 0, {}
    for name, data in body.items():
        kept = {} if name in raw else parts[name][0]
        entries[name] = {"dtype": "U8", "shape": [len(data)], **kept}
        entries[name]["data_offsets"] = [end, end + len(data)]
        end += len(data)
    digests = {name: hashlib.sha256(each).hexdigest() for name, each in body.items()}
    about = {**about, "sha256": json.dumps(digests), **(metadata or {})}
    head = json.dumps({"__metadata__": about, **entries}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(body.values()))
