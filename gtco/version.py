"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("gtco")
except PackageNotFoundError:  # a checkout that is not installed
    VERSION = "unknown"
