"""The command line: results on stdout, progress and errors on stderr, exit codes 0, 1 and 2."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import math
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import typer
from rich.console import Console

import gtco
from gtco import cli_db, cli_tune, show
from gtco import demo as demo_model
from gtco.bench import BenchResult, bench, parse_peers
from gtco.bench_artifact import bench_artifact
from gtco.compiler import make_plan
from gtco.env import environment
from gtco.locate import Located, ModelError, UsageError, artifact_path, locate
from gtco.options import OptionError, Options
from gtco.runtime.artifact import read
from gtco.target import TargetError

out = Console(width=None if sys.stdout.isatty() else 120)  # tables keep their shape in a file
err = Console(stderr=True)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Compile vision models into fused, tuned CUDA kernels.",
)

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
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="save an artifact there")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]
Rounds = Annotated[int, typer.Option(min=1, help="turns of every contestant")]
Calls = Annotated[int, typer.Option(min=2, help="calls of one turn")]
Against = Annotated[
    str | None,
    typer.Option(
        help="peers, separated by commas: eager, inductor (both for a model; a saved artifact has "
        "none)"
    ),
]


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` one flag for each field of `Options` instead of its parameter `options`."""
    fields = dataclasses.fields(Options)
    hints = get_type_hints(Options)
    descriptions = _field_descriptions()

    @functools.wraps(command)
    def with_flags(**given: Any) -> None:
        chosen = {field.name: given.pop(field.name) for field in fields}
        command(**given, options=Options.of(**chosen))

    own = inspect.signature(command, eval_str=True).parameters.values()
    flags = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[hints[field.name], typer.Option(help=descriptions[field.name])],
        )
        for field in fields
    ]
    parameters = [parameter for parameter in own if parameter.name != "options"]
    with_flags.__signature__ = inspect.Signature([*parameters, *flags])  # type: ignore[attr-defined]
    with_flags.__annotations__ = {each.name: each.annotation for each in [*parameters, *flags]}
    return with_flags


def _field_descriptions() -> dict[str, str]:
    """The `Args:` of the docstring of `Options`, so that a flag's help is written once."""
    described: dict[str, str] = {}
    name = ""
    names = {field.name for field in dataclasses.fields(Options)}
    for line in inspect.cleandoc(Options.__doc__ or "").splitlines():
        head, colon, rest = line.strip().partition(":")
        if colon and head in names:
            name, line = head, rest
        if name:
            described[name] = f"{described.get(name, '')} {line.strip()}".strip()
    return described


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
        cli_tune.show(out, model, result)


@app.command("bench")
@takes_options
def bench_command(
    *,
    model: ModelOrFile,
    against: Against = None,
    rounds: Rounds = 5,
    calls: Calls = 100,
    as_json: Json = False,
    options: Options,
) -> None:
    """Time MODEL beside its peers in alternating rounds, or FILE alone; checks every answer."""
    path = artifact_path(model)
    if path is None:
        peers = parse_peers("eager,inductor" if against is None else against)
        with progress() as tell:
            found = _locate(model, tell)
            result = bench(found, options, peers, rounds=rounds, calls=calls, tell=tell)
        _print_bench(found.name, options, result, as_json)
        return
    if parse_peers(against or ""):
        raise UsageError(
            f"{path} holds kernels, not the model that {against} would run: leave --against out, "
            "or bench module:function"
        )
    _refuse_options(path, options)
    with progress() as tell:
        result = bench_artifact(path, rounds=rounds, calls=calls, tell=tell)
    _print_bench(model, options, result, as_json)


@app.command("inspect")
@takes_options
def inspect_command(*, model: ModelOrFile, as_json: Json = False, options: Options) -> None:
    """Say what MODEL becomes, or what FILE holds, without a GPU: operators, groups, refusals."""
    path = artifact_path(model)
    if path is None:
        with progress() as tell:
            found = _locate(model, tell)
            tell(f"planning {model}")
            plan, captured = make_plan(found.module, found.args, found.kwargs, options)
        inspected = show.Inspected(plan, captured)
    else:
        _refuse_options(path, options)
        artifact = read(path)
        inspected = show.Inspected(artifact.plan, artifact.captured, artifact)
    if as_json:
        print_json(model=model, **show.inspected_json(inspected))
    else:
        show.inspected(out, inspected)


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
    """Versions, GPUs, driver, targets and the cache folder."""
    if as_json:
        print_json()
    else:
        show.environment(out, environment())


def _locate(model: str, tell: Callable[[str], None]) -> Located:
    tell(f"making {model}")
    return locate(model)


def _refuse_options(path: Path, options: Options) -> None:
    if options != Options():
        raise UsageError(f"{path} is compiled already: its options cannot be changed")


def _print_bench(model: str, options: Options, result: BenchResult, as_json: bool) -> None:
    if as_json:
        print_json(model=model, options=dataclasses.asdict(options), **result.to_dict())
    else:
        show.bench(out, model, result)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that shows a line of progress on stderr."""
    if not err.is_terminal:
        yield lambda message: err.print(message, style=None, markup=False, highlight=False)
        return
    with err.status("") as status:
        yield lambda message: status.update(message)


def print_json(**payload: Any) -> None:
    """One JSON object on stdout: `payload`, the command and where it ran."""
    payload["command"] = shlex.join(["gtco", *sys.argv[1:]])
    payload["environment"] = environment()
    sys.stdout.write(json.dumps(_plain(payload), indent=2) + "\n")


app.add_typer(cli_db.make_app(out, print_json), name="db")


def _plain(value: Any) -> Any:
    """`value` with what JSON has no number for (NaN, infinity) as null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def exit_code(error: Exception) -> int:
    """2 for what the user asked wrongly, 1 for work that failed."""
    return 2 if isinstance(error, (UsageError, OptionError, TargetError)) else 1


def message(error: Exception) -> str:
    """One message for `error`; an error of no kind that gtco raises on purpose says so."""
    module = type(error).__module__
    ours = module.startswith("gtco") or isinstance(error, (torch.OutOfMemoryError, ModelError))
    kind = "" if ours else f"unexpected {type(error).__name__}: "
    hint = "" if ours else " (GTCO_DEBUG=1 shows where)"
    return f"error: {kind}{error}{hint}"


def main() -> None:
    """Run the command line and exit."""
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="copyreg"
    )  # torch.export's own
    try:
        app(prog_name="gtco")
    except Exception as error:
        if os.environ.get("GTCO_DEBUG"):
            traceback.print_exc()
        err.print(message(error), style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(exit_code(error))
