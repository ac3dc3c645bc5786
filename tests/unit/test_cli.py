"""The commands as a new user runs them: what they print, and what they say to bad input."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import onnx
import pytest
import torch

import gtco
from gtco.cli import cache as cli_cache
from gtco.cli import main as cli
from gtco.options import Options
from gtco.passes import PIPELINE
from gtco.runtime import compile_pool
from gtco.runtime.cache_files import sealed
from gtco.runtime.cubin import CubinCache
from gtco.runtime.host import HostKernel, find_compiler
from tests.command_line import Run
from tests.processes import environment

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def test_env_names_versions_targets_and_the_cache(run: Run) -> None:
    text = run("env")
    assert text.code == 0
    for word in ("torch", "NVRTC", "sm_80, sm_86, sm_87, sm_89, sm_90a", "cache"):
        assert word in text.stdout
    data = json.loads(run("env", "--json").stdout)
    version = data["environment"]["packages"]["torch"]  # a wheel may leave the build out
    assert torch.__version__.split("+")[0] == version.split("+")[0]
    assert data["command"] == "gtco env --json"


@pytest.mark.parametrize("model", ["mlp", "shifted", "located"])
def test_compile_says_what_will_run(run: Run, model: str) -> None:
    outcome = run("compile", f"models_here:{model}", "--target", "sm_90a", "--json")
    assert outcome.code == 0, outcome.stderr
    data = json.loads(outcome.stdout)
    assert data["options"]["target"] == "sm_90a"
    assert data["report"]["launches"] == len(data["launches"]) > 0
    assert sum(kernel["launches"] for kernel in data["kernels"]) == data["report"]["generated"] > 0
    assert all(kernel["registers"] > 0 for kernel in data["kernels"])
    assert "compiling" in outcome.stderr


def test_compile_prints_tables(run: Run) -> None:
    outcome = run("compile", "models_here:mlp", "--target", "sm_80")
    assert outcome.code == 0, outcome.stderr
    assert "sm_80" in outcome.stdout
    assert "gtco_gemm" in outcome.stdout
    total = next(line for line in outcome.stdout.splitlines() if "total" in line and "│" in line)
    assert re.search(r"[1-9]\d* (default|record)", total)


def test_compile_saves_what_inspect_reads(run: Run, tmp_path: Path) -> None:
    made = run("compile", "models_here:mlp", "--target", "sm_90a", "-o", "mlp.gtco", "--json")
    assert made.code == 0, made.stderr
    compiled = json.loads(made.stdout)
    assert compiled["output"] == "mlp.gtco"
    assert [path.name for path in tmp_path.glob("*mlp*")] == ["mlp.gtco"]
    read = run("inspect", "mlp.gtco", "--json")
    assert read.code == 0, read.stderr
    found = json.loads(read.stdout)
    for part in ("report", "launches", "kernels", "options"):
        assert found[part] == compiled[part]
    assert found["inputs"] == {"x": "f16[24,64]"}
    text = run("inspect", "mlp.gtco").stdout
    for fact in ("made for", "sm_90a", "input %x: f16[24,64]", "gtco_gemm", "registers"):
        assert fact in text


def test_inspect_compiles_no_kernel(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(jobs: object) -> None:
        raise AssertionError("inspect compiled a kernel")

    monkeypatch.setattr(compile_pool, "compile_many", refuse)
    shown = run("inspect", "models_here:chain", "--target", "sm_90a")
    assert shown.code == 0, shown.stderr
    assert "operators" in shown.stdout and "aten.special_erfcx.default" in shown.stdout
    data = json.loads(run("inspect", "models_here:chain", "--target", "sm_90a", "--json").stdout)
    assert data["kernels"] == [] and data["gtco_version"] is None
    assert len(data["report"]["refusals"]) > 0
    for edge in data["report"]["refusals"]:
        assert f"%{edge['producer']} -> %{edge['consumer']}: {edge['reason']}" in shown.stdout


def test_a_saved_artifact_has_no_peers_and_no_options(run: Run) -> None:
    run("compile", "models_here:mlp", "--target", "sm_90a", "-o", "mlp.gtco")
    against = run("bench", "mlp.gtco", "--against", "eager")
    assert against.code == 2
    assert "not the model that eager would run" in against.stderr
    for command in ("bench", "inspect"):
        options = run(command, "mlp.gtco", "--precision", "fp16")
        assert options.code == 2
        assert "compiled already" in options.stderr


@NO_GPU
def test_bench_of_an_artifact_needs_a_gpu(run: Run) -> None:
    run("compile", "models_here:mlp", "--target", "sm_90a", "-o", "mlp.gtco")
    outcome = run("bench", "mlp.gtco")
    assert outcome.code == 2
    assert "no CUDA GPU" in outcome.stderr


@pytest.mark.parametrize("command", ["bench", "inspect"])
def test_a_damaged_artifact_is_named(run: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "broken.gtco").write_bytes(b"no artifact")
    for name, reason in (("broken.gtco", "is damaged"), ("missing.gtco", "does not exist")):
        outcome = run(command, name)
        assert outcome.code == 1
        assert f"{name} {reason}" in outcome.stderr
        assert "unexpected" not in outcome.stderr


# -- compare, dump and cache ---------------------------------------------------------------------


@pytest.mark.compiler
def test_compare_prints_errors_and_exits_with_0(run: Run) -> None:
    outcome = run("compare", "models_here:mlp", "--target", "host", "--layers")
    assert outcome.code == 0, outcome.stderr
    for fact in ("RMSE", "max abs", "large mean", "eager", "every group agrees"):
        assert fact in outcome.stdout
    assert "WRONG" not in outcome.stdout


@pytest.mark.compiler
def test_compare_of_a_wrong_kernel_exits_with_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        HostKernel, "__call__", lambda *args, **kwargs: None
    )  # the outputs stay poisoned
    outcome = run("compare", "models_here:mlp", "--target", "host", "--layers")
    assert outcome.code == 1
    assert "gtco's output for normal inputs is wrong: NaN in" in outcome.stderr
    assert "WRONG" in outcome.stdout
    assert "the first wrong group is gemm_0 (linear" in outcome.stdout
    data = json.loads(run("compare", "models_here:mlp", "--target", "host", "--json").stdout)
    assert data["ok"] is False and data["outputs"][0]["verdict"]["ok"] is False


def test_inspect_dumps(run: Run, tmp_path: Path) -> None:
    outcome = run("inspect", "models_here:mlp", "--target", "sm_80", "--dump", "here", "--json")
    assert outcome.code == 0, outcome.stderr
    kernels = json.loads(outcome.stdout)["kernels"]
    names = {path.name for path in (tmp_path / "here").iterdir()}
    assert {"00-captured.txt", "kernels.txt", "repro.py"} < names
    assert kernels and all(f"{kernel['name']}.cubin" in names for kernel in kernels)
    run("compile", "models_here:mlp", "--target", "sm_80", "-o", "mlp.gtco")
    assert run("inspect", "mlp.gtco", "--dump", "artifact").code == 0
    names = {path.name for path in (tmp_path / "artifact").iterdir()}
    assert {f"{len(PIPELINE) + 1}-fused.txt", "kernels.txt"} < names and "repro.py" not in names
    (tmp_path / "file").write_text("")
    refused = run("inspect", "models_here:mlp", "--target", "sm_80", "--dump", "file")
    assert refused.code == 1
    assert "error: file: File exists" in refused.stderr


@pytest.mark.compiler
def test_the_cache_is_shown_verified_and_cleared(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CubinCache(tmp_path / "cubins")
    monkeypatch.setattr(cli_cache, "user_cache", lambda: cache)
    monkeypatch.setattr(compile_pool, "user_cache", lambda: cache)
    monkeypatch.setattr(cli_cache, "cache_folder", lambda: tmp_path / "cubins")
    monkeypatch.setattr(cli_cache, "host_folder", lambda: tmp_path / "host")
    assert "0 cubins of 0.0 MB" in run("cache", "info").stdout
    run("compile", "models_here:mlp", "--target", "sm_80")
    (tmp_path / "host").mkdir()
    library = tmp_path / "host" / "kernel.so"
    command = [*(find_compiler() or ()), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=b"int seven() { return 7; }", check=True)
    library.write_bytes(sealed(library.name, library.read_bytes()))
    entries = cache.entries()
    info = json.loads(run("cache", "info", "--json").stdout)
    assert info["cubins"]["entries"] == len(entries) > 0
    assert info["cubins"]["bytes"] == sum(path.stat().st_size for path in entries)
    assert info["host_builds"]["entries"] == 1
    assert run("cache", "verify").code == 0
    entries[0].write_bytes(b"damaged")
    library.write_bytes(library.read_bytes()[:-1])
    outcome = run("cache", "verify", "--json")
    assert outcome.code == 1 and "were dropped" in outcome.stderr
    assert json.loads(outcome.stdout)["damaged"] == [entries[0].name, library.name]
    assert run("cache", "verify").code == 0
    assert not library.exists() and not entries[0].exists()


def test_the_cache_is_cleared_by_those_who_mean_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CubinCache(tmp_path / "cubins")
    monkeypatch.setattr(cli_cache, "user_cache", lambda: cache)
    monkeypatch.setattr(cli_cache, "host_folder", lambda: tmp_path / "host")
    (tmp_path / "host").mkdir()
    files = [tmp_path / "cubins" / "a.cubin", tmp_path / "host" / "b.so"]
    for path in files:
        path.write_bytes(bytes(10))
    asked = run("cache", "clear")
    assert asked.code == 2 and "--yes" in asked.stderr
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert run("cache", "clear").code == 1
    assert all(path.exists() for path in files)
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    outcome = run("cache", "clear")
    assert outcome.code == 0 and "removed 1 cubin of" in outcome.stdout
    assert not any(path.exists() for path in files)
    assert "removed 0 cubins" in run("cache", "clear", "--yes").stdout


class Terminal(io.StringIO):
    """Somebody who types."""

    def isatty(self) -> bool:
        return True


def test_a_misspelt_log_is_bad_usage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GTCO_LOGS", "+fusoin")
    outcome = run("env")
    assert outcome.code == 2
    assert "did you mean 'fusion'" in outcome.stderr


WRONG_SHAPES = {
    "y=2x8": "names 'y', but the model's inputs are 'x'",
    "x=2": "the sizes [2], which do not fit",
    "x=2x9": "the sizes [2, 9], which do not fit",
    "x=99999999999999x8": "input 'x'",
    f"x={'9' * 5000}x8": "x=1x3x224x224",
}


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("shape", WRONG_SHAPES, ids=WRONG_SHAPES.values())
@pytest.mark.parametrize("command", ["inspect", "compile"])
def test_shapes_that_do_not_fit_the_file_are_bad_usage(run: Run, command: str, shape: str) -> None:
    outcome = run(command, "free.onnx", "--shape", shape, "--target", "sm_90a")
    assert outcome.code == 2, outcome.stderr
    assert "--shape" in outcome.stderr and WRONG_SHAPES[shape] in outcome.stderr
    assert "unexpected" not in outcome.stderr


BAD_USAGE = {
    "no function": (["compile", "models_here"], "module:function"),
    "no such module": (["compile", "model_here:mlp"], "did you mean 'models_here'"),
    "no such function": (["compile", "models_here:mpl"], "did you mean 'mlp'"),
    "no function but a number": (["compile", "models_here:number"], "no function 'number'"),
    "returns a module alone": (["compile", "models_here:bare"], "returns Mlp"),
    "unknown precision": (["compile", "models_here:mlp", "--precision", "f16"], "'fp16'"),
    "unknown target": (["compile", "models_here:mlp", "--target", "sm_90"], "'sm_90a'"),
    "old target": (["compile", "models_here:mlp", "--target", "sm_75"], "older than sm_80"),
    "unknown flag": (["compile", "models_here:mlp", "--precison", "fp16"], "--precision"),
    "shapes of a function's model": (["compile", "models_here:mlp", "--shape", "x=2x3"], "--shape"),
    "a shape that is none": (["compile", "models_here:mlp", "--shape", "x=2,3"], "x=1x3x224x224"),
    "a shape twice": (["compile", "a.onnx", "--shape", "x=2", "--shape", "x=3"], "'x' twice"),
    "unknown command": (["benchmark", "models_here:mlp"], "benchmark"),
    "unknown peer": (["bench", "models_here:mlp", "--against", "tvm"], "eager, inductor"),
    "unknown oracle": (["compare", "models_here:mlp", "--against", "tensorrt"], "eager, onnx"),
    "no file for ONNX Runtime": (
        ["compare", "models_here:mlp", "--against", "onnxruntime", "--target", "host"],
        "models_here:mlp is none",
    ),
    "unknown cache command": (["cache", "purge"], "purge"),
    "no rounds": (["bench", "models_here:mlp", "--rounds", "0"], "--rounds"),
}


def test_the_version_is_printed(run: Run) -> None:
    outcome = run("--version")
    assert outcome.code == 0
    assert outcome.stdout == f"gtco {gtco.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        (["compile", "models_here:mpl", "--json"], "UsageError", 2),
        (["compile", "models_here:mlp", "--jsn", "--json"], "UsageError", 2),
        (["nothing", "--json"], "UsageError", 2),
        (["compile", "models_here:broken", "--json"], "ModelError", 1),
        (["compile", "models_here:mlp", "--target", "sm_1", "--json"], "TargetError", 2),
    ],
)
def test_an_error_is_json_where_json_is_wanted(
    run: Run, arguments: list[str], kind: str, code: int
) -> None:
    outcome = run(*arguments)
    error = json.loads(outcome.stdout)["error"]
    assert (error["kind"], error["exit_code"], outcome.code) == (kind, code, code)
    assert error["message"] in outcome.stderr


def test_the_exit_codes_are_in_the_help_and_in_the_documentation(run: Run) -> None:
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    shown = " ".join(run("--help").stdout.split())
    for code, meaning in cli.EXIT_CODES.items():
        assert f"{code}: {meaning}" in shown
        assert f"| {code} | {meaning} |" in page


@pytest.mark.parametrize("loaded", [False, True])
def test_the_end_is_fast_but_beside_triton_which_would_list_what_is_not_freed(
    monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(cli.gc, "freeze", lambda: frozen.append(True))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    if loaded:
        monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    cli._freeze()
    assert bool(frozen) != loaded


def test_an_interrupt_ends_with_its_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: str, shapes: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "locate", interrupt)
    assert run("compile", "models_here:mlp").code == 130
    outcome = run("compile", "models_here:mlp", "--json")
    assert outcome.code == 130 and json.loads(outcome.stdout)["error"]["kind"] == "Interrupted"


@pytest.fixture
def free(tmp_path: Path) -> None:
    """The file free.onnx, with an input of [n, 8]."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 8])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 8])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "free.onnx")


@pytest.mark.usefixtures("free")
def test_a_function_may_name_an_onnx_file(run: Run, tmp_path: Path) -> None:
    """With the sizes of its free axes from the command line or from arguments."""
    code = "import torch\ndef path(): return 'free.onnx'\n"
    code += "def given(): return 'free.onnx', (torch.ones(3, 8),)\n"
    (tmp_path / "files_here.py").write_text(code)
    free = run("inspect", "files_here:path", "--target", "sm_90a")
    assert free.code == 1 and "--shape x=1x8" in free.stderr
    for arguments, shape in (
        (["files_here:path", "--shape", "x=5x8"], "f32[5,8]"),
        (["free.onnx", "--shape", "x=2x8"], "f32[2,8]"),
        (["files_here:given"], "f32[3,8]"),
    ):
        outcome = run("inspect", *arguments, "--target", "sm_90a")
        assert outcome.code == 0, outcome.stderr
        assert shape in outcome.stdout


@pytest.mark.parametrize("case", BAD_USAGE)
def test_bad_usage_is_explained_and_exits_with_2(run: Run, case: str) -> None:
    arguments, expected = BAD_USAGE[case]
    outcome = run(*arguments)
    assert outcome.code == 2
    assert expected in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not outcome.stdout


FAILURES = {
    "the module does not import": ("broken_here:mlp", "a_package_that_is_missing"),
    "the function raises": ("models_here:broken", "KeyError: 'weights.pt'"),
    "training mode": ("models_here:training", "eval()"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_work_that_fails_is_explained_and_exits_with_1(run: Run, case: str) -> None:
    model, expected = FAILURES[case]
    outcome = run("compile", model, "--target", "sm_90a")
    assert outcome.code == 1
    assert expected in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not outcome.stdout


def test_debug_shows_the_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GTCO_DEBUG", "1")
    outcome = run("compile", "models_here:broken", "--target", "sm_90a")
    assert outcome.code == 1
    assert "Traceback" in outcome.stderr
    assert "in broken" in outcome.stderr


def test_an_error_nobody_expected_names_its_type(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, shapes: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(cli, "locate", fail)
    outcome = run("compile", "models_here:mlp")
    assert outcome.code == 1
    assert "unexpected IndexError: list index out of range" in outcome.stderr
    assert "GTCO_DEBUG=1" in outcome.stderr


@NO_GPU
def test_a_gpu_that_is_missing_is_named(run: Run) -> None:
    without_target = run("compile", "models_here:mlp")
    assert without_target.code == 2
    assert 'target="sm_90a"' in without_target.stderr
    bench = run("bench", "models_here:mlp")
    assert bench.code == 2
    assert "no CUDA GPU" in bench.stderr


@NO_GPU
def test_inspect_plans_for_some_gpu_where_there_is_none(run: Run) -> None:
    outcome = run("inspect", "models_here:mlp")
    assert outcome.code == 0
    assert "planning for sm_90a (--target names another)" in outcome.stderr
    assert "sm_90a" in outcome.stdout


def test_every_option_is_a_flag(run: Run) -> None:
    for command in ("compile", "bench", "compare", "inspect", "report"):
        shown = run(command, "--help").stdout
        for field in fields(Options):
            assert f"--{field.name.replace('_', '-')}" in shown
        assert "architecture to compile for" in " ".join(shown.split())


def test_help_cuts_nothing_off_at_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ((), ("db",), ("cache",), ("bench",), ("compile",), ("tune",), ("report",)):
        shown = run(*command, "--help").stdout
        assert not re.search(r"…|(?<!ARGS\])\.\.\.", shown), shown
        assert max(map(len, shown.splitlines())) <= 80


@NO_GPU
def test_the_demo_needs_no_gpu(tmp_path: Path) -> None:
    """In a process of its own, from an empty folder, as the README's first command runs it."""
    outcome = subprocess.run(
        [sys.executable, "-m", "gtco", "demo"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert outcome.returncode == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    for fact in ("operators in", "launches out", "bytes saved", "not fused", "cubins for sm_90a"):
        assert any(fact in line for line in lines), fact
    edges = [line for line in lines if line.startswith("  %")]
    assert len(edges) == 3
    assert all(len(line.split(": ", 1)[1]) > 10 for line in edges)
    assert "is right: RMSE" in outcome.stdout
    assert lines[-1].startswith("Checked on the CPU; nothing was timed here.")
    assert "gtco compile your_module:your_function" in lines[-1]
    timed = [line for line in lines if " us" in line]
    assert all("predicted" in line for line in timed)
