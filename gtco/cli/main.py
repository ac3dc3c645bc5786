"""The command line: results on stdout, progress and errors on stderr, exit codes of one table.

With --json an error is a JSON object on stdout as well, with its kind, message and exit code.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import logging
import os
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

import gtco
from gtco import logs
from gtco.benchmarking import compare as comparison
from gtco.benchmarking.answers import parse_peers
from gtco.benchmarking.bench import BenchResult, WrongAnswer, bench
from gtco.benchmarking.bench_artifact import bench_artifact
from gtco.benchmarking.contestants import PEERS
from gtco.benchmarking.tensorrt_peer import TensorRTPlace
from gtco.cli import base, show
from gtco.cli import calibrate as cli_calibrate
from gtco.cli import db as cli_db
from gtco.cli import demo as demo_model
from gtco.cli import report as cli_report
from gtco.cli import tune as cli_tune
from gtco.cli.base import Json, err, out, print_json, progress, takes_options
from gtco.cli.cache import cache_app
from gtco.cli.ending import EXIT_CODES, end, exit_code, message
from gtco.cli.env import environment, records_here
from gtco.cli.flags import (
    Against,
    Calls,
    Dump,
    Layers,
    Model,
    ModelOrFile,
    OptionalModel,
    Oracles,
    Output,
    Rounds,
    ShapeFlags,
    TensorRTPython,
    Trace,
    parse_shapes,
)
from gtco.compiler import make_plan
from gtco.locate import Located, UsageError, artifact_path, locate
from gtco.options import Options
from gtco.reporting import dump
from gtco.reporting.page import page
from gtco.runtime.artifact import read
from gtco.runtime.executable import compile_programs
from gtco.target import HOST
from gtco.version import VERSION

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # whose tables cut names off at 80 columns
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Compile vision models into fused, tuned CUDA kernels.",
    epilog="\b\nExit codes:\n"  # from \b on, lines stay as they are
    + "\n".join(
        textwrap.fill(f"{code}: {what}", 76, initial_indent="  ", subsequent_indent="     ")
        for code, what in EXIT_CODES.items()
    ),
)

app.add_typer(cache_app, name="cache")
app.add_typer(cli_db.make_app(out, print_json), name="db")


def print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"gtco {VERSION}", highlight=False)
        raise typer.Exit


@app.callback()
def with_version(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    pass


@app.command("compile")
@takes_options
def compile_command(
    *,
    model: Model,
    output: Output = None,
    database: cli_tune.Db = None,
    shapes: ShapeFlags = None,
    as_json: Json = False,
    options: Options,
) -> None:
    """Compile MODEL; say what will run, what was not fused and why."""
    with progress() as tell:
        found = _locate(model, shapes, tell)
        tell(f"compiling {model}")
        compiled = gtco.compile(
            found.module,
            found.args,
            found.kwargs,
            database=database,
            **dataclasses.asdict(options),
        )
        tell("compiling its kernels")
        kernels = compiled.kernels
        if output is not None:
            tell(f"saving {output}")
            compiled.save(output)
    if as_json:
        print_json(
            model=model,
            output=None if output is None else str(output),
            options=dataclasses.asdict(options),
            **show.compiled_json(compiled, kernels),
        )
    else:
        show.compiled(out, compiled, kernels)


@app.command("calibrate")
def calibrate_command(
    *,
    model: Model,
    batches: cli_calibrate.Batches,
    precision: cli_calibrate.Precision = "fp8",
    output: cli_calibrate.File = Path("calibration.json"),
    shapes: ShapeFlags = None,
    as_json: Json = False,
) -> None:
    """Run MODEL on real inputs, for --precision fp8 or int8.

    FILE takes how large the values are that each product reads, and the error that 8 bits bring in
    there. FILE.safetensors beside it takes the weights in 8 bits.

    Ctrl-C keeps what was measured; the same command continues from there.
    """
    with progress() as tell:
        files = cli_calibrate.files_of(batches)
        found = _locate(model, shapes, tell)
    found_out = cli_calibrate.run(found, files, precision, output)
    if as_json:
        print_json(model=model, output=str(output), **found_out.facts())
    else:
        cli_calibrate.show(out, found_out)
    command = shlex.join(
        ["gtco", "compile", model, *(word for flag in shapes or () for word in ("--shape", flag)),
         "--precision", precision, "--calibration", str(output)]
    )  # fmt: skip
    err.print(f"wrote {output}; next: {command}", markup=False, highlight=False, soft_wrap=True)


@app.command("tune")
@takes_options
def tune_command(
    *,
    model: Model,
    seconds: cli_tune.Seconds = None,
    trials: cli_tune.TrialsFlag = None,
    database: cli_tune.Db = None,
    seed: cli_tune.Seed = 0,
    shapes: ShapeFlags = None,
    as_json: Json = False,
    options: Options,
) -> None:
    """Search for fast kernels of MODEL on the GPU here.

    Ctrl-C keeps the best; the same command continues from there.
    """
    with progress() as tell:
        found = _locate(model, shapes, tell)
    result = cli_tune.run(
        found, options, seconds=seconds, trials=trials, database=database, seed=seed, err=err
    )
    if as_json:
        print_json(model=model, options=dataclasses.asdict(options), **result.to_dict())
    else:
        cli_tune.show(out, model, result, host=options.target == HOST)


@app.command("bench")
@takes_options
def bench_command(
    *,
    model: ModelOrFile,
    against: Against = None,
    rounds: Rounds = 5,
    calls: Calls = 100,
    trace: Trace = None,
    tensorrt_python: TensorRTPython = None,
    shapes: ShapeFlags = None,
    as_json: Json = False,
    options: Options,
) -> None:
    """Time MODEL beside its peers, or FILE alone; check every answer.

    All of them run in one process, in interleaved rounds.
    """
    path = artifact_path(model)
    if path is None:
        peers = parse_peers("eager,inductor" if against is None else against, PEERS)
        with progress() as tell:
            found = _locate(model, shapes, tell)
            result = bench(
                found,
                options,
                peers,
                rounds=rounds,
                calls=calls,
                trace=trace,
                tensorrt=None if tensorrt_python is None else TensorRTPlace(tensorrt_python),
                tell=tell,
            )
        _print_bench(found.name, options, result, as_json)
        return
    _refuse_peers(path, against)
    _refuse_options(path, options, shapes)
    with progress() as tell:
        result = bench_artifact(path, rounds=rounds, calls=calls, trace=trace, tell=tell)
    _print_bench(model, options, result, as_json)


@app.command("compare")
@takes_options
def compare_command(
    *,
    model: ModelOrFile,
    against: Oracles = None,
    layers: Layers = False,
    shapes: ShapeFlags = None,
    as_json: Json = False,
    options: Options,
) -> None:
    """Judge every output of MODEL and its peers against fp64.

    The exit code is 1 if one is wrong. With --target host it needs no GPU, but takes long.
    """
    path = artifact_path(model)
    if path is None:
        peers = parse_peers("eager" if against is None else against, comparison.PEERS)
        with progress() as tell:
            found = _locate(model, shapes, tell)
            result = comparison.compare(found, options, peers, layers=layers, tell=tell)
    else:
        _refuse_peers(path, against)
        _refuse_options(path, options, shapes)
        with progress() as tell:
            result = comparison.compare_artifact(path, layers=layers, tell=tell)
    if as_json:
        print_json(model=model, options=dataclasses.asdict(options), **result.to_dict())
    else:
        show.comparison(out, model, result)
    if result.wrong:
        raise WrongAnswer(result.wrong[0])


@app.command("inspect")
@takes_options
def inspect_command(
    *,
    model: ModelOrFile,
    folder: Dump = None,
    shapes: ShapeFlags = None,
    as_json: Json = False,
    options: Options,
) -> None:
    """Show what MODEL becomes, or what FILE holds; needs no GPU.

    Operators, groups, and each edge that is not fused with the reason.
    """
    path = artifact_path(model)
    if path is None:
        with progress() as tell:
            found = _locate(model, shapes, tell)
            options = _somewhere(options, tell)
            tell(f"planning {model}")
            folder = folder or dump.environment_folder()
            plan, captured = make_plan(
                found.module, found.args, found.kwargs, options, folder=folder
            )
            inspected = show.Inspected(plan, captured)
            if folder is not None:
                tell("compiling its kernels")
                inspected = dataclasses.replace(inspected, compiled=compile_programs(plan))
    else:
        _refuse_options(path, options, shapes)
        artifact = read(path)
        inspected = show.Inspected(
            artifact.plan, artifact.captured, artifact.kernels, artifact.gtco_version
        )
        if folder is not None:
            dump.write_plan(folder, artifact.plan)
    if folder is not None:
        dump.write_kernels(folder, inspected.plan, inspected.compiled)
    if as_json:
        print_json(model=model, **show.inspected_json(inspected))
    else:
        show.inspected(out, inspected)
    if folder is not None:
        err.print(f"wrote {folder}", markup=False, highlight=False)


@app.command("report")
@takes_options
def report_command(
    *,
    model: OptionalModel = None,
    output: cli_report.Page = None,
    compare: cli_report.Compare = None,
    shapes: ShapeFlags = None,
    database: cli_tune.Db = None,
    as_json: Json = False,
    options: Options,
) -> None:
    """Write a page on MODEL: fused graph, kernels, timeline, answers.

    On a GPU times are measured and answers checked, and the exit code is 1 if one is wrong. Without
    one, times are predictions; --target host checks the answers on the CPU.
    """
    if (model is None) == (compare is None):
        raise UsageError("gtco report takes a MODEL, or --compare with two builds")
    with progress() as tell:
        if compare is not None:
            _refuse_options(Path(compare[0]), options, shapes)
            paths = [cli_report.file_of(name) for name in compare]
            builds = [cli_report.build_of_file(path, tell) for path in paths]
        elif model is not None and (path := artifact_path(model)) is not None:
            _refuse_options(path, options, shapes)
            builds = [cli_report.build_of_file(path, tell)]
        else:
            found = _locate(str(model), shapes, tell)
            options = _somewhere(options, tell)
            builds = [cli_report.build_of_model(found, options, database, tell)]
    if output is not None or not as_json:
        file = output or Path("report.html")
        file.write_text(page(builds), encoding="utf-8")
        err.print(f"wrote {file}", markup=False, highlight=False)
    if as_json:
        name = "build" if compare is None else "builds"
        plain = [build.to_dict() for build in builds]
        print_json(**{name: plain[0] if compare is None else plain})
    if compare is None and builds[0].wrong:
        raise WrongAnswer(builds[0].wrong[0])


@app.command("demo")
def demo_command(*, as_json: Json = False) -> None:
    """Compile ViT-B/16: timed on a GPU, else checked on the CPU."""
    if torch.cuda.is_available():
        found = demo_model.vit_b16()
        with progress() as tell:
            result = bench(found, Options(), tell=tell)
        _print_bench(found.name, Options(), result, as_json)
        return
    with progress() as tell:
        rehearsal = demo_model.rehearse(tell)
    if as_json:
        print_json(model=demo_model.NAME, **show.rehearsal_json(rehearsal))
    else:
        show.rehearsal(out, rehearsal)
    if not rehearsal.verdict.ok:
        raise demo_model.DemoFailed(f"the fused graph is {rehearsal.verdict}")
    if rehearsal.on_host is not None and not rehearsal.on_host.ok:
        raise demo_model.DemoFailed(f"the kernels on the CPU: {rehearsal.on_host}")


@app.command("env")
def env_command(*, as_json: Json = False) -> None:
    """Versions, GPUs, driver, targets and the cache folder."""
    if as_json:
        print_json(records=records_here())
    else:
        show.environment(out, environment(), records_here())


def _locate(model: str, shapes: Sequence[str] | None, tell: Callable[[str], None]) -> Located:
    tell(f"making {model}")
    return locate(model, parse_shapes(shapes))


def _somewhere(options: Options, tell: Callable[[str], None]) -> Options:
    """`options` with a target: that of the demo where none is named and no GPU is here."""
    if options.target is not None or torch.cuda.is_available():
        return options
    tell(f"no CUDA GPU is here: planning for {demo_model.TARGET} (--target names another)")
    return dataclasses.replace(options, target=demo_model.TARGET)


def _refuse_peers(path: Path, against: str | None) -> None:
    if against:
        raise UsageError(
            f"{path} holds kernels, not the model that {against} would run: leave --against out, "
            "or name the model"
        )


def _refuse_options(path: Path, options: Options, shapes: Sequence[str] | None) -> None:
    if options != Options() or shapes:
        raise UsageError(f"{path} is compiled already: its options cannot be changed")


def _print_bench(model: str, options: Options, result: BenchResult, as_json: bool) -> None:
    if as_json:
        print_json(model=model, options=dataclasses.asdict(options), **result.to_dict())
    else:
        show.bench(out, model, result)


def main() -> None:
    """Run the command line and exit."""
    atexit.register(_freeze)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    as_json = "--json" in sys.argv[1:]
    base.printed_json = False
    try:
        logs.configure()
        code = app(prog_name="gtco", standalone_mode=not as_json)
        if code == 130:
            end("Interrupted", "interrupted", code, as_json)
        sys.exit(code)
    except Exception as error:
        if (text := getattr(error, "format_message", None)) is not None:  # typer's, for JSON
            end("UsageError", f"error: {text()}", 2, as_json)
        if os.environ.get("GTCO_DEBUG"):
            traceback.print_exc()
        end(type(error).__name__, message(error), exit_code(error), as_json)


def _freeze() -> None:
    """Spare the ending interpreter a search of all of torch for cycles, which takes a second.

    Not with triton, which then lists on stderr each of its objects that was not freed.
    """
    if "triton" not in sys.modules:
        gc.freeze()
