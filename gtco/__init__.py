"""gtco: a graph-level fusion compiler with an autotuner for vision models on GPUs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtco.compiler import FallbackError, capture, compile, fuse
    from gtco.ir.graph import FusedGraph, Graph
    from gtco.ir.interpreter import interpret
    from gtco.options import Options
    from gtco.runtime.artifact import ArtifactError, load
    from gtco.target import TargetError
    from gtco.tuning.result import TuneResult
    from gtco.tuning.tuner import tune

_HOMES = {
    "ArtifactError": "gtco.runtime.artifact",
    "FallbackError": "gtco.compiler",
    "FusedGraph": "gtco.ir.graph",
    "Graph": "gtco.ir.graph",
    "Options": "gtco.options",
    "TargetError": "gtco.target",
    "TuneResult": "gtco.tuning.result",
    "capture": "gtco.compiler",
    "compile": "gtco.compiler",
    "fuse": "gtco.compiler",
    "interpret": "gtco.ir.interpreter",
    "load": "gtco.runtime.artifact",
    "tune": "gtco.tuning.tuner",
}

__all__ = [
    "ArtifactError",
    "FallbackError",
    "FusedGraph",
    "Graph",
    "Options",
    "TargetError",
    "TuneResult",
    "capture",
    "compile",
    "fuse",
    "interpret",
    "load",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Import on first use: a compile worker must not pay for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gtco' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
