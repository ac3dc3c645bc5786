"""gtco: a graph-level fusion compiler with an autotuner for vision models on GPUs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtco.calibration import Calibration, CalibrationError
    from gtco.compiler import FallbackError, capture, compile, fuse
    from gtco.cost_model.record import DatabaseError
    from gtco.dynamo import GradError
    from gtco.eight_bits import calibrate
    from gtco.frontend.onnx_call import OnnxError
    from gtco.frontend.refusals import CaptureError
    from gtco.ir.graph import FusedGraph, Graph
    from gtco.ir.interpreter import ArgumentError, interpret
    from gtco.ir.spec import GraphError
    from gtco.options import OptionError, Options
    from gtco.runtime.artifact import ArtifactError
    from gtco.runtime.driver import DriverError
    from gtco.runtime.executable import GpuMemoryError
    from gtco.runtime.host import HostCompilerError
    from gtco.runtime.module import RecompileError, load
    from gtco.runtime.nvrtc import CompileError
    from gtco.target import TargetError
    from gtco.tuning.result import TuneResult
    from gtco.tuning.tuner import tune
    from gtco.version import VERSION as __version__

_HOMES = {
    "ArgumentError": "gtco.ir.interpreter",
    "ArtifactError": "gtco.runtime.artifact",
    "Calibration": "gtco.calibration",
    "CalibrationError": "gtco.calibration",
    "CaptureError": "gtco.frontend.refusals",
    "CompileError": "gtco.runtime.nvrtc",
    "DatabaseError": "gtco.cost_model.record",
    "DriverError": "gtco.runtime.driver",
    "FallbackError": "gtco.compiler",
    "FusedGraph": "gtco.ir.graph",
    "GpuMemoryError": "gtco.runtime.executable",
    "GradError": "gtco.dynamo",
    "Graph": "gtco.ir.graph",
    "GraphError": "gtco.ir.spec",
    "HostCompilerError": "gtco.runtime.host",
    "OnnxError": "gtco.frontend.onnx_call",
    "OptionError": "gtco.options",
    "Options": "gtco.options",
    "RecompileError": "gtco.runtime.module",
    "TargetError": "gtco.target",
    "TuneResult": "gtco.tuning.result",
    "calibrate": "gtco.eight_bits",
    "capture": "gtco.compiler",
    "compile": "gtco.compiler",
    "fuse": "gtco.compiler",
    "interpret": "gtco.ir.interpreter",
    "load": "gtco.runtime.module",
    "tune": "gtco.tuning.tuner",
}

__all__ = [
    "ArgumentError",
    "ArtifactError",
    "Calibration",
    "CalibrationError",
    "CaptureError",
    "CompileError",
    "DatabaseError",
    "DriverError",
    "FallbackError",
    "FusedGraph",
    "GpuMemoryError",
    "GradError",
    "Graph",
    "GraphError",
    "HostCompilerError",
    "OnnxError",
    "OptionError",
    "Options",
    "RecompileError",
    "TargetError",
    "TuneResult",
    "__version__",
    "calibrate",
    "capture",
    "compile",
    "fuse",
    "interpret",
    "load",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Import on first use: a compile worker must not pay for torch."""
    if name == "__version__":
        return import_module("gtco.version").VERSION
    if name not in _HOMES:
        raise AttributeError(f"module 'gtco' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
