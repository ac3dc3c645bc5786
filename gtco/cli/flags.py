"""Arguments and flags of the commands, each with its help."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gtco.benchmarking.contestants import PEERS
from gtco.locate import UsageError

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="module:function that returns (module, args), or an .onnx file"
    ),
]
ModelOrFile = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|FILE", help="module:function, an .onnx file, or a saved artifact"
    ),
]
OptionalModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL|FILE", help="module:function, an .onnx file, or a saved artifact"
    ),
]
ShapeFlags = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="INPUT=1x3x224x224",
        help="sizes of an .onnx file's input whose axes have no fixed size; axes of one name have "
        "one size",
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="save an artifact there")
]
Rounds = Annotated[
    int, typer.Option(min=1, help="interleaved rounds; gtco and each peer run in every one")
]
Calls = Annotated[int, typer.Option(min=2, help="calls of gtco and of each peer in a round")]
Against = Annotated[
    str | None,
    typer.Option(
        help=f"peers, separated by commas, of {', '.join(PEERS)}; by default eager,inductor; a "
        "saved artifact has none"
    ),
]
TensorRTPython = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="an interpreter that imports tensorrt, for that peer"),
]
Oracles = Annotated[
    str | None,
    typer.Option(
        "--against",
        help="peers, separated by commas: eager, onnxruntime (for .onnx files); by default eager; "
        "a saved artifact is compared with its own graph in torch",
    ),
]
Layers = Annotated[
    bool, typer.Option("--layers", help="check group by group, and name the first wrong one")
]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="write a Chrome trace of one call there")
]
Dump = Annotated[
    Path | None,
    typer.Option(
        "--dump",
        metavar="DIR",
        help="write the graph after each pass, each kernel's source and cubin, and a script that "
        "runs it all again",
    ),
]


def parse_shapes(flags: Sequence[str] | None) -> dict[str, tuple[int, ...]] | None:
    """The sizes by input of `--shape x=1x3x224x224`, as often as it was given.

    Raises:
        UsageError: one is of another form, or two are of one input.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for flag in flags or ():
        name, equals, sizes = flag.rpartition("=")
        if not equals or not name or not re.fullmatch(r"[0-9]{1,18}(x[0-9]{1,18})*", sizes):
            raise UsageError(f"--shape is INPUT=SIZES, such as x=1x3x224x224, not {flag!r}")
        if name in shapes:
            raise UsageError(f"--shape names the input {name!r} twice")
        shapes[name] = tuple(map(int, sizes.split("x")))
    return shapes or None
