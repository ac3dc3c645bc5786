"""`gtco report`: builds as a page."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from gtco.benchmarking.build_facts import build_facts
from gtco.benchmarking.rounds import Tell
from gtco.compiler import make_plan
from gtco.locate import Located, UsageError, artifact_path
from gtco.options import Options
from gtco.reporting.build import Build, BuildError
from gtco.runtime.artifact import read
from gtco.version import VERSION

Page = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="write the page there; by default to report.html"
    ),
]
Compare = Annotated[
    tuple[str, str] | None,
    typer.Option(
        metavar="A B",
        help="two builds side by side: saved artifacts, or what `gtco report --json` printed",
    ),
]


def build_of_model(
    found: Located, options: Options, database: str | os.PathLike[str] | None, tell: Tell
) -> Build:
    """Compile a located model and tell of it; raises what `gtco.compile` does."""
    tell(f"compiling {found.name}")
    plan, captured = make_plan(found.module, found.args, found.kwargs, options, database)
    return build_facts(found.name, plan, captured, VERSION, tell=tell, source=found)


def build_of_file(path: Path, tell: Tell) -> Build:
    """What a saved artifact holds, or a build that `gtco report --json` printed.

    Raises:
        ArtifactError: an artifact is damaged or not for this gtco.
        BuildError: a JSON file holds no build.
        OSError: it cannot be read.
    """
    if path.suffix == ".json":
        return _saved(path)
    tell(f"reading {path}")
    found = read(path)
    return build_facts(
        path.name, found.plan, found.captured, found.gtco_version, found.kernels, tell
    )


def file_of(name: str) -> Path:
    """The file of a build to compare.

    Raises:
        UsageError: it is no file, or none of a build.
    """
    path = Path(name)
    if path.suffix == ".json" or artifact_path(name) is not None:
        return path
    raise UsageError(
        f"--compare takes saved artifacts (gtco compile MODEL -o FILE) and what gtco report --json "
        f"printed, not {name!r}"
    )


def _saved(path: Path) -> Build:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        return Build.of(content["build"])
    except (BuildError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise BuildError(
            f"{path} is not what gtco report --json prints: {error}; make it again with this gtco"
        ) from error
