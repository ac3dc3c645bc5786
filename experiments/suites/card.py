"""What the GPU did meanwhile: its clocks, power and temperature, as `nvidia-smi` says."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WATCHED = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
"""MHz, MHz, W, degrees Celsius."""
ONCE = ("name", "uuid", "driver_version", "power.limit", "clocks.max.sm", "persistence_mode")
EVERY_MS = 250


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """A dict that holds what was seen, once the block has ended; empty without a GPU.

    Each of `WATCHED` has its least, median and largest value; what cannot be read is left out.
    """
    found: dict[str, Any] = {}
    if not torch.cuda.is_available():
        yield found
        return
    card = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    try:
        once = _ask(ONCE, card)
        found.update(zip(ONCE, parse(once)[0], strict=True))
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        found["nvidia-smi"] = f"does not run: {error}"
        yield found
        return
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([*_command(WATCHED, card), f"-lms={EVERY_MS}"], stdout=out)
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
            out.seek(0)
            found.update(summary(parse(out.read())))


def _command(fields: tuple[str, ...], card: str) -> list[str]:
    query = f"--query-gpu={','.join(fields)}"
    return ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--id={card}"]


def _ask(fields: tuple[str, ...], card: str) -> str:
    run = subprocess.run(_command(fields, card), capture_output=True, text=True, check=True)
    return run.stdout


def parse(text: str) -> list[list[str]]:
    """The cells of each whole line."""
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line]


def summary(lines: list[list[str]]) -> dict[str, dict[str, float]]:
    """Least, median and largest value of each of `WATCHED`."""
    whole = [line for line in lines if len(line) == len(WATCHED)]
    found = {}
    for name, column in zip(WATCHED, zip(*whole, strict=True), strict=False):
        try:
            values = [float(cell) for cell in column]
        except ValueError:  # "[N/A]"
            continue
        found[name] = {
            "least": min(values),
            "median": statistics.median(values),
            "most": max(values),
        }
    return found
