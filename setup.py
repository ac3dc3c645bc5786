"""Refuses to build from a clone without symbolic links: its wheel would lack the subpackages."""

from pathlib import Path

from setuptools import setup

for name in ("passes", "codegen", "cost_model"):
    if not (Path(__file__).parent / "gtco" / name).is_dir():
        raise SystemExit(
            f"gtco/{name} is no directory: clone again with git config core.symlinks true"
        )
setup()
