"""The command line: results on stdout, progress and errors on stderr, exit codes 0, 1 and 2."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
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
from gtco.cli import db as cli_db
from gtco.cli import demo as demo_model
from gtco.cli import report as cli_report
from gtco.cli import show
from gtco.cli import tune as cli_tune
from gtco.cli.base import Json, err, out, print_json, progress, takes_options
from gtco.cli.cache import cache_app
from gtco.cli.env import environment, records_here
from gtco.compiler import make_plan
from gtco.locate import Located, ModelError, UsageError, artifact_path, locate
from gtco.options import OptionError, Options
from gtco.reporting import dump
from gtco.reporting.page import page
from gtco.runtime.artifact import read
from gtco.runtime.executable import compile_programs
from gtco.target import HOST, TargetError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Compile vision models into fused, tuned CUDA kernels.",
)

app.add_typer(cache_app, name="cache")
app.add_typer(cli_db.make_app(out, print_json), name="db")

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
    bool, typer.Option("--layers", help="check group by group, and name the first that departs")
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


@app.command("compile")
@takes_options
def compile_command(
    *,
    model: Model,
    output: Output = None,
    database: cli_tune.Db = None,
    as_json: Json = False,
    options: Options,
) -> None:
    """Compile MODEL and say what will run: launches, kernels, what was not fused and why."""
    with progress() as tell:
        found = _locate(model, tell)
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


@app.command("tune")
@takes_options
def tune_command(
    *,
    model: Model,
    seconds: cli_tune.Seconds = None,
    trials: cli_tune.TrialsFlag = None,
    database: cli_tune.Db = None,
    seed: cli_tune.Seed = 0,
    as_json: Json = False,
    options: Options,
) -> None:
    """Search for fast kernels of MODEL on the GPU here; Ctrl-C keeps the best, again resumes."""
    with progress() as tell:
        found = _locate(model, tell)
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
    as_json: Json = False,
    options: Options,
) -> None:
    """Time MODEL beside its peers in alternating rounds, or FILE alone; checks every answer."""
    path = artifact_path(model)
    if path is None:
        peers = parse_peers("eager,inductor" if against is None else against, PEERS)
        with progress() as tell:
            found = _locate(model, tell)
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
    _refuse_options(path, options)
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
    as_json: Json = False,
    options: Options,
) -> None:
    """Judge every output of MODEL and its peers against fp64; the exit code is 1 if one is wrong.

    With --target host it needs no GPU, and much time.
    """
    path = artifact_path(model)
    if path is None:
        peers = parse_peers("eager" if against is None else against, comparison.PEERS)
        with progress() as tell:
            found = _locate(model, tell)
            result = comparison.compare(found, options, peers, layers=layers, tell=tell)
    else:
        _refuse_peers(path, against)
        _refuse_options(path, options)
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
    *, model: ModelOrFile, folder: Dump = None, as_json: Json = False, options: Options
) -> None:
    """Say what MODEL becomes, or what FILE holds, without a GPU: operators, groups, refusals."""
    path = artifact_path(model)
    if path is None:
        with progress() as tell:
            found = _locate(model, tell)
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
        _refuse_options(path, options)
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
    database: cli_tune.Db = None,
    as_json: Json = False,
    options: Options,
) -> None:
    """Write a page on MODEL: its fused graph, each kernel, a timeline and errors by layer.

    On a GPU times are measured and answers checked; without one, times are predictions.
    """
    if (model is None) == (compare is None):
        raise UsageError("gtco report takes a MODEL, or --compare with two builds")
    with progress() as tell:
        if compare is not None:
            _refuse_options(Path(compare[0]), options)
            paths = [cli_report.file_of(name) for name in compare]
            builds = [cli_report.build_of_file(path, tell) for path in paths]
        elif model is not None and (path := artifact_path(model)) is not None:
            _refuse_options(path, options)
            builds = [cli_report.build_of_file(path, tell)]
        else:
            builds = [cli_report.build_of_model(str(model), options, database, tell)]
    if output is not None or not as_json:
        file = output or Path("report.html")
        file.write_text(page(builds), encoding="utf-8")
        err.print(f"wrote {file}", markup=False, highlight=False)
    if as_json:
        name = "build" if compare is None else "builds"
        plain = [build.to_dict() for build in builds]
        print_json(**{name: plain[0] if compare is None else plain})


@app.command("demo")
def demo_command(*, as_json: Json = False) -> None:
    """Take ViT-B/16 the whole way: timed on a GPU, checked on the CPU where there is none."""
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
    """Versions, GPUs and what is known of them, driver, targets and the cache folder."""
    if as_json:
        print_json(records=records_here())
    else:
        show.environment(out, environment(), records_here())


def _locate(model: str, tell: Callable[[str], None]) -> Located:
    tell(f"making {model}")
    return locate(model)


def _refuse_peers(path: Path, against: str | None) -> None:
    if against:
        raise UsageError(
            f"{path} holds kernels, not the model that {against} would run: leave --against out, "
            "or name the model"
        )


def _refuse_options(path: Path, options: Options) -> None:
    if options != Options():
        raise UsageError(f"{path} is compiled already: its options cannot be changed")


def _print_bench(model: str, options: Options, result: BenchResult, as_json: bool) -> None:
    if as_json:
        print_json(model=model, options=dataclasses.asdict(options), **result.to_dict())
    else:
        show.bench(out, model, result)


def exit_code(error: Exception) -> int:
    """2 for what the user asked wrongly, 1 for work that failed."""
    return 2 if isinstance(error, (UsageError, OptionError, TargetError)) else 1


def message(error: Exception) -> str:
    """One message for `error`; an error of no kind that gtco raises on purpose says so."""
    module = type(error).__module__
    ours = module.startswith("gtco") or isinstance(error, (torch.OutOfMemoryError, ModelError))
    kind = "" if ours else f"unexpected {type(error).__name__}: "
    hint = "" if ours else " (GTCO_DEBUG=1 shows where)"
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: {error.filename}: {error.strerror}"
    return f"error: {kind}{error}{hint}"


def main() -> None:
    """Run the command line and exit."""
    atexit.register(gc.freeze)  # or the interpreter searches all of torch for cycles as it ends
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="copyreg"
    )  # torch.export's own
    try:
        logs.configure()
        app(prog_name="gtco")
    except Exception as error:
        if os.environ.get("GTCO_DEBUG"):
            traceback.print_exc()
        err.print(message(error), style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(exit_code(error))
