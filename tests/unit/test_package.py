"""The package as it is built, the order in which modules import, and where assembly may stand."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

from gtco.codegen.sketches.gemm import PROMOTED_ATOMS
from gtco.codegen.sketches.gemm_persistent import COPY_COLUMNS
from gtco.ir.references import STATS_CHUNK

ROOT = Path(__file__).parents[2]
FOLDERS = ("gtco", "passes", "codegen", "cost_model")

LAYERS: tuple[tuple[str, ...], ...] = (
    ("gtco.constants", "gtco.version"),
    ("gtco.target", "gtco.options", "gtco.logs"),
    ("gtco.ir",),
    ("gtco.frontend",),
    ("gtco.passes",),
    ("gtco.codegen",),
    ("gtco.runtime",),
    ("gtco.reporting",),
    ("gtco.runtime.module", "gtco.runtime.trace"),
    ("gtco.cost_model",),
    (
        "gtco.models",
        "gtco.rounding",
        "gtco.calibration",
        "gtco.calibrator",
        "gtco.selection",
        "gtco.compiler",
        "gtco.eight_bits",
    ),
    ("gtco.tuning",),
    ("gtco",),
    ("gtco.check", "gtco.dynamo", "gtco.locate"),
    ("gtco.benchmarking",),
    ("gtco.cli", "gtco.__main__"),
)
"""A module imports from its own layer and from those above it in this list."""


def source_files(suffix: str) -> Iterator[tuple[str, Path]]:
    """(path inside the package, file) of every file with `suffix`, each one once."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob(f"*{suffix}")):
            inside = path.relative_to(ROOT).as_posix()
            if folder == "gtco" and inside.split("/")[1] in FOLDERS:
                continue  # the same files again, through the links
            yield (inside if folder == "gtco" else f"gtco/{inside}"), path


def module_name(inside: str) -> str:
    return inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def layer(module: str) -> int:
    """The position of the longest prefix of `module` in LAYERS."""
    best, found = -1, ""
    for position, names in enumerate(LAYERS):
        for name in names:
            exact = module == name or (name != "gtco" and module.startswith(f"{name}."))
            if exact and len(name) > len(found):
                best, found = position, name
    assert best >= 0, f"{module} stands in no layer: add it to LAYERS"
    return best


def imports(tree: ast.Module) -> Iterator[str]:
    """gtco modules that `tree` imports when it runs; those for type checking alone do not count."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    modules = {module_name(inside) for inside, _ in source_files(".py")}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else str(node.module)


@pytest.fixture(scope="module")
def edges() -> set[tuple[str, str]]:
    """(importer, imported) of all modules of the package, late imports too."""
    return {
        (module_name(inside), imported)
        for inside, path in source_files(".py")
        for imported in imports(ast.parse(path.read_text()))
    }


def test_modules_import_downwards_only(edges: set[tuple[str, str]]) -> None:
    wrong = [f"{one} imports {other}" for one, other in edges if layer(other) > layer(one)]
    assert not wrong, "\n".join(sorted(wrong))


def cycles(edges: set[tuple[str, str]]) -> list[set[str]]:
    """The modules that import each other, directly or through others."""
    found = nx.strongly_connected_components(nx.DiGraph(sorted(edges)))
    return [names for names in found if len(names) > 1]


def test_no_two_modules_import_each_other(edges: set[tuple[str, str]]) -> None:
    assert len(edges) > 500 and not cycles(edges)
    assert cycles(edges | {("gtco.ir.graph", "gtco.ir.views"), ("gtco.ir.views", "gtco.ir.graph")})


def test_the_import_check_sees_an_upward_import() -> None:
    tree = ast.parse("def late():\n    from gtco import compiler\n")
    assert [layer(name) for name in imports(tree)] == [layer("gtco.compiler")]
    assert layer("gtco.compiler") > layer("gtco.passes.fusion")


def test_the_package_imports_nothing_that_stands_beside_it() -> None:
    beside = re.compile(r"^\s*(from|import) (tests|experiments)\b", re.MULTILINE)
    assert beside.search("def late():\n    from experiments.ops import x\n")
    files = [inside for inside, path in source_files(".py") if beside.search(path.read_text())]
    assert not files


@pytest.mark.parametrize("folder", [*FOLDERS, "experiments"])
def test_each_folder_says_what_is_in_it(folder: str) -> None:
    linked = {ROOT / "gtco" / name for name in FOLDERS}
    for path in (ROOT / folder).rglob("__init__.py"):
        if not linked & set(path.parents):
            said = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert 1 <= len(said.splitlines()) <= 10, f"{path}: what is in its folder"
            beside = {each.stem for each in path.parent.iterdir()}
            gone = {name for name in re.findall(r"`([a-z_0-9]+)`", said)} - beside
            assert not gone, f"{path} names {gone}, which is not there"


def test_inline_assembly_stands_in_two_headers() -> None:
    assembly = re.compile(r"\basm\s*(volatile)?\s*\(")
    allowed = {"gtco/codegen/device/ptx.cuh", "gtco/codegen/device/wgmma.cuh"}
    headers = {inside for inside, path in source_files(".cuh") if assembly.search(path.read_text())}
    assert headers == allowed
    emitters = [inside for inside, path in source_files(".py") if assembly.search(path.read_text())]
    assert not emitters


@pytest.mark.parametrize(
    ("header", "name", "value"),
    [
        ("promotion", "PROMOTED_ATOMS", PROMOTED_ATOMS),
        ("stats", "STATS_CHUNK", STATS_CHUNK),
        ("copied", "BOX", COPY_COLUMNS),
    ],
)
def test_numbers_of_kernels_and_of_their_sketches_agree(header: str, name: str, value: int) -> None:
    text = (ROOT / f"gtco/codegen/device/{header}.cuh").read_text()
    assert re.findall(rf"\b{name} = (\d+)", text) == [str(value)]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel built from that sdist), built from a copy of the checkout."""
    work = tmp_path_factory.mktemp("build")
    checkout = work / "checkout"
    checkout.mkdir()
    hidden = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, checkout / folder, symlinks=True, ignore=hidden)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    build(checkout, "sdist", work)
    sdist = next(work.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "sdist", filter="data")
    build(next((work / "sdist").iterdir()), "wheel", work)
    return sdist, next(work.glob("*.whl"))


def build(folder: Path, kind: str, out: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr


def test_sdist_and_wheel_hold_every_source_file(distributions: tuple[Path, Path]) -> None:
    sources = {
        inside
        for suffix in (".py", ".cuh", ".jsonl", ".html")
        for inside, _ in source_files(suffix)
    }
    sources.add("gtco/py.typed")
    sdist, wheel = distributions
    with tarfile.open(sdist) as archive:
        packed = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert not sources - packed
    with zipfile.ZipFile(wheel) as archive:
        assert not sources - set(archive.namelist())


def test_every_module_imports_from_the_wheel(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    with zipfile.ZipFile(distributions[1]) as archive:
        archive.extractall(tmp_path)
    modules = [module_name(inside) for inside, _ in source_files(".py")]
    modules.remove("gtco.__main__")  # importing it runs the command
    code = (
        f"import sys, importlib; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"for name in {modules!r}:\n"
        f"    file = importlib.import_module(name).__file__\n"
        f"    assert file.startswith({str(tmp_path)!r}), file\n"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr


def test_a_clone_without_links_refuses_to_build(tmp_path: Path) -> None:
    shutil.copy(ROOT / "setup.py", tmp_path / "setup.py")
    (tmp_path / "gtco").mkdir()
    (tmp_path / "gtco" / "passes").write_text("../passes")
    run = subprocess.run(
        [sys.executable, "setup.py", "--name"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert "gtco/passes is no directory" in run.stderr


def test_ci_runs_the_command_that_the_readme_shows() -> None:
    """`.ci/run` finds the command by a marker, so the two cannot come to differ."""
    marker = re.search(r"^marker='(.*)'$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert marker is not None
    shown = (ROOT / "README.md").read_text().split(f"{marker[1]}\n```sh\n")
    assert len(shown) == 2
    command = shown[1].split("```")[0]
    for step in ("python3 -m venv .venv", "ruff check", "mypy", "clang-format", "pytest -n 2"):
        assert step in command
