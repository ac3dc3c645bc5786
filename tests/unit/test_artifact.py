"""Artifacts: what is saved comes back equal, and whatever is not whole is refused by name."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gtco
from gtco.runtime import artifact
from gtco.runtime.artifact import ArtifactError
from gtco.runtime.module import CompiledModule
from gtco.target import TargetError
from tests.artifact_files import rewrite
from tests.models import vit
from tests.processes import environment

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")


class Structured(nn.Module):
    """A keyword, a literal, an infinite attribute, an ATen fallback, a shared constant."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.register_buffer("mask", torch.arange(16) < 3)

    def forward(self, x: Tensor, scale: float, *, shift: Tensor) -> dict[str, Any]:
        y = self.up(x).masked_fill(self.mask, float("-inf")) * scale
        return {"pair": (y, shift), "index": torch.special.erfcx(x), "none": None, "n": 3}


@pytest.fixture(scope="module")
def compiled() -> CompiledModule:
    torch.manual_seed(0)
    image = torch.randn(1, 3, 32, 32).half()
    return gtco.compile(vit().half(), (image,), target="sm_90a", static_outputs=True)


@pytest.fixture(scope="module")
def written(compiled: CompiledModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "vit.gtco"
    compiled.save(path)
    return path


@pytest.fixture
def file(written: Path, tmp_path: Path) -> Path:
    """A copy that the test may spoil."""
    path = tmp_path / "vit.gtco"
    path.write_bytes(written.read_bytes())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        gtco.load(path)
    return str(caught.value)


# -- there and back --------------------------------------------------------------------------------


def test_a_module_comes_back_as_it_was(compiled: CompiledModule, written: Path) -> None:
    loaded = gtco.load(written)
    assert str(loaded.graph) == str(compiled.graph)
    assert loaded.launches == compiled.launches
    assert loaded.kernels == compiled.kernels
    assert loaded.report() == compiled.report()
    assert loaded._plan.options == compiled._plan.options
    assert loaded._plan.constants == compiled._plan.constants
    for ours, theirs in zip(loaded._plan.launches, compiled._plan.launches, strict=True):
        assert ours.program == theirs.program
        assert list(ours.group.graph.inputs) == list(theirs.group.graph.inputs)
        assert ours.group.graph.outputs == theirs.group.graph.outputs
    image = torch.randn(1, 3, 32, 32).half()
    for ours, theirs in zip(
        gtco.interpret(loaded.graph, (image,)),
        gtco.interpret(compiled.graph, (image,)),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_weights_lie_once_in_a_file_that_any_tool_opens(
    compiled: CompiledModule, written: Path
) -> None:
    distinct = {id(each): each for each in compiled._plan.graph.constants.values()}
    with safe_open(written, framework="pt") as found:
        weights = [name for name in found.keys() if name.startswith("weights.")]  # noqa: SIM118
    assert len(weights) == len(distinct) > 0


@pytest.fixture(scope="module")
def structured() -> tuple[CompiledModule, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    args, kwargs = (torch.randn(4, 16), 0.5), {"shift": torch.randn(4)}
    return gtco.compile(Structured().eval(), args, kwargs, target="sm_90a"), args, kwargs


def test_signatures_and_structures_come_back(
    structured: tuple[CompiledModule, tuple[Any, ...], dict[str, Any]], tmp_path: Path
) -> None:
    compiled, args, kwargs = structured
    compiled.save(tmp_path / "a.gtco")
    loaded = gtco.load(tmp_path / "a.gtco")
    ours, theirs = loaded._captured, compiled._captured
    for name in ("in_spec", "out_spec", "input_positions", "input_literals", "output_template"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert str(ours.graph) == str(theirs.graph)
    inputs = ours.flatten(args, kwargs)
    result = ours.unflatten(gtco.interpret(loaded.graph, inputs))
    assert list(result) == ["pair", "index", "none", "n"]
    assert result["none"] is None and result["n"] == 3
    expected = theirs.unflatten(gtco.interpret(compiled.graph, inputs))
    assert torch.equal(result["pair"][0], expected["pair"][0])
    with pytest.raises(gtco.ir.interpreter.ArgumentError, match="baked in"):
        ours.flatten((args[0], 0.25), kwargs)


def test_an_output_class_of_transformers_comes_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        image_size=16, patch_size=8, num_labels=3,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    image = torch.randn(1, 3, 16, 16)
    compiled = gtco.compile(model, (image,), target="sm_90a")
    path = tmp_path / "hf.gtco"
    compiled.save(path)
    loaded = gtco.load(path)
    result = loaded._captured.unflatten(gtco.interpret(loaded.graph, (image,)))
    assert type(result).__name__ == "ImageClassifierOutput"
    torch.testing.assert_close(result.logits, model(image).logits)
    name = "transformers.modeling_outputs.ImageClassifierOutput"
    with pytest.MonkeyPatch.context() as patch:  # as in a process that has not imported it
        patch.delitem(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE, name)
        message = refusal(path)
    assert f"{name}, which is not registered" in message
    assert "import transformers.modeling_outputs before loading" in message


def test_loading_needs_no_compiler(written: Path) -> None:
    code = f"""
import sys
sys.modules["gtco.runtime.nvrtc"] = None  # importing it raises
import gtco
loaded = gtco.load({str(written)!r})
assert loaded.kernels
assert not {{"gtco.compiler", "gtco.runtime.compile_pool"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=120)


def test_a_module_for_the_host_is_not_saved(compiled: CompiledModule, tmp_path: Path) -> None:
    plan = replace(compiled._plan, options=gtco.Options(target="host"))
    with pytest.raises(ArtifactError, match="not for artifacts"):
        artifact.save(tmp_path / "a.gtco", plan, compiled._captured, compiled.compile_kernels())
    assert not list(tmp_path.iterdir())


@NO_GPU
def test_a_call_without_the_gpu_says_what_the_artifact_was_made_for(written: Path) -> None:
    with pytest.raises(TargetError, match=r"compiled for sm_90a, and no CUDA GPU is here"):
        gtco.load(written)(torch.randn(1, 3, 32, 32).half())


@NO_GPU
def test_a_call_on_another_gpu_names_both(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    with pytest.raises(TargetError, match=r"compiled for sm_90a, and the current GPU is sm_86"):
        gtco.load(written)(torch.randn(1, 3, 32, 32).half())


# -- damage ----------------------------------------------------------------------------------------


def offsets(path: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """Where the data begins, and each part's range in the file."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    del header["__metadata__"]
    ranges = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        ranges[name] = (begin + first, begin + last)
    return begin, ranges


def test_a_file_cut_short_is_refused(file: Path) -> None:
    data = file.read_bytes()
    begin, _ = offsets(file)
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randint(0, len(data), (24,), generator=generator).tolist()
    for cut in [0, 1, 8, begin - 1, begin, len(data) - 1, *cuts]:
        file.write_bytes(data[:cut])
        assert "is damaged" in refusal(file)
    file.write_bytes(data + b"\0")
    assert "is damaged" in refusal(file)


def test_a_flipped_byte_is_refused_with_the_name_of_its_part(file: Path) -> None:
    data = file.read_bytes()
    _, ranges = offsets(file)
    assert {name.split(".")[0] for name in ranges} == {"weights", "cubins", "plan"}
    for name, (first, last) in ranges.items():
        middle = (first + last) // 2
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :])
        assert f"checksum of its part {name!r} differs" in refusal(file)


def test_a_flipped_byte_of_the_header_is_refused(file: Path) -> None:
    data = file.read_bytes()
    begin, _ = offsets(file)
    for place in range(8, begin, max(1, (begin - 8) // 60)):
        file.write_bytes(data[:place] + bytes([data[place] ^ 0x04]) + data[place + 1 :])
        assert str(file) in refusal(file)


# -- edits, with checksums made again --------------------------------------------------------------


def test_the_test_can_rewrite_a_file(file: Path, compiled: CompiledModule) -> None:
    rewrite(file)
    assert gtco.load(file).launches == compiled.launches


def nodes(content: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = content["plan"]["graph"]["nodes"]
    return found


def aten(content: dict[str, Any], target: str) -> None:
    nodes(content)[0].update(op="aten", attrs={"target": target, "args": [], "kwargs": []})


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Returns(nn.Module):
    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor) -> Any:
        return self.result(x)


@pytest.mark.parametrize(
    ("result", "name"),
    [
        (lambda x: {"best": torch.topk(x, 2)}, "torch.return_types.topk"),
        (lambda x: Pair(x + 1, x * 2), "test_artifact.Pair"),
        (lambda x: [defaultdict(list, a=x + 1)], "collections.defaultdict"),
    ],
)
def test_a_result_of_a_type_without_a_name(
    result: Callable[[Tensor], Any], name: str, tmp_path: Path
) -> None:
    compiled = gtco.compile(Returns(result).eval(), (torch.randn(4, 8),), target="sm_90a")
    with pytest.raises(ArtifactError, match=rf"{name} in the model's result, .*such as tuple\("):
        compiled.save(tmp_path / "m.gtco")


def first_program(content: dict[str, Any]) -> dict[str, Any]:
    program: dict[str, Any] = next(
        each["program"] for each in content["plan"]["launches"] if each["program"]
    )
    return program


def first_map(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(
        argument
        for launch in content["plan"]["launches"]
        for argument in (launch["program"] or {"arguments": []})["arguments"]
        if "tensor_map" in argument
    )
    return found


def import_by_enum(content: dict[str, Any]) -> None:
    hook = {"__enum__": True, "fqn": "antigravity:x", "name": "y"}
    tree = {"type": "builtins.dict", "context": json.dumps([hook]), "children_spec": [None]}
    content["signature"]["out_spec"] = [1, tree]


EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "unknown operator": (lambda c: nodes(c)[0].update(op="system"), "unknown operator 'system'"),
    "unknown ATen call": (lambda c: aten(c, "os.system.default"), "os.system.default, which"),
    "ATen call of no operator": (lambda c: aten(c, "aten.__class__.x"), "aten.__class__.x, which"),
    "ATen call that writes": (lambda c: aten(c, "aten.add_.Tensor"), "more than compute a tensor"),
    "ATen call that opens files": (lambda c: aten(c, "aten.from_file.default"), "more than"),
    "import by enum": (import_by_enum, "an enum or a defaultdict"),
    "wrong shape": (
        lambda c: nodes(c)[0]["outputs"][0]["shape"].append(1),
        "but the node says",
    ),
    "unknown target": (lambda c: c["plan"].update(target="sm_75"), "made for another GPU: target"),
    "other target": (lambda c: c["plan"].update(target="sm_80"), "is for sm_90a, the plan for"),
    "code for the CPU": (
        lambda c: c["plan"]["options"].update(target="host"),
        "not for artifacts",
    ),
    "unknown option": (
        lambda c: c["plan"]["options"].update(quantize=True),
        "unknown option 'quantize'",
    ),
    "a kernel's source": (
        lambda c: c["plan"]["sources"].update({first_program(c)["kernel"]: "int x;"}),
        "is another kernel",
    ),
    "a kernel without a cubin": (
        lambda c: c["kernels"].pop(0),
        "has no cubin",
    ),
    "an argument from nowhere": (
        lambda c: first_program(c).update(arguments=[{"pointer": "nowhere"}]),
        "no stored value %nowhere",
    ),
    "a tensor map of four dimensions": (
        lambda c: first_map(c).update(sizes=[64, 8, 8, 1], strides=[128, 1024, 8192]),
        "a tensor map of 4 sizes, 3 strides",
    ),
    "a launch too few": (lambda c: c["plan"]["launches"].pop(), "no launch computes"),
    "launches out of order": (lambda c: c["plan"]["launches"].reverse(), "before a launch"),
    "no launches": (lambda c: c["plan"].pop("launches"), "KeyError: 'launches'"),
    "an attribute too many": (lambda c: nodes(c)[0]["attrs"].update(x=1), "TypeError"),
    "a path for a part": (
        lambda c: c["plan"]["graph"]["constants"][0].update(part="../../etc/passwd"),
        "unknown part '../../etc/passwd'",
    ),
    "another signature": (
        lambda c: c["signature"]["graph"]["inputs"][0]["shape"].append(1),
        "its part 'plan' is",
    ),
    "a time that is a text": (
        lambda c: c["plan"]["launches"][0].update(predicted_us="now"),
        "predicted_us is 'now'",
    ),
    "a kernel that is no text": (
        lambda c: first_program(c).update(sketch=["gemm"]),
        "sketch is ['gemm']",
    ),
    "an output less": (lambda c: c["plan"]["graph"]["outputs"].clear(), "passes changed the model"),
    "arguments of no structure": (
        lambda c: c["signature"].update(in_spec=c["signature"]["out_spec"]),
        "not as gtco writes it",
    ),
    "a result from nowhere": (
        lambda c: c["signature"].update(output_template=[{"slot": 3}]),
        "IndexError",
    ),
    "a number for everything": (lambda c: c.update(plan=7), "not as gtco writes it"),
}  # fmt: skip


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_plan_is_refused(file: Path, case: str) -> None:
    change, expected = EDITS[case]
    rewrite(file, change)
    message = refusal(file)
    assert expected in message
    assert str(file) in message


def test_another_format_version_is_refused(file: Path) -> None:
    rewrite(file, metadata={"format_version": "1"})
    assert "format version 1, and this gtco reads 6" in refusal(file)


def test_a_part_that_belongs_to_nothing_is_refused(file: Path, tmp_path: Path) -> None:
    _, ranges = offsets(file)
    name = next(name for name in ranges if name.startswith("cubins."))
    before = set(tmp_path.rglob("*"))
    rewrite(file, rename={name: "cubins.../../../tmp/evil"})
    assert "not as gtco writes it" in refusal(file)
    assert set(tmp_path.rglob("*")) == before


def test_what_is_no_artifact_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    other = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(2)}, other)
    assert "is no gtco artifact" in refusal(other)
    other.write_bytes(b"PK\3\4" + bytes(100))
    assert "no gtco artifact" in refusal(other)
    assert "is a folder" in refusal(tmp_path)
    assert "does not exist" in refusal(tmp_path / "missing.gtco")


# -- a file that cannot be written -----------------------------------------------------------------


@contextmanager
def keeps(path: Path) -> Iterator[None]:
    """The folder of `path` holds the same files with the same bytes after as before."""
    before = {each: each.read_bytes() for each in path.parent.iterdir()}
    yield
    assert {each: each.read_bytes() for each in path.parent.iterdir()} == before


def test_a_disk_that_fills_up_leaves_the_old_file(
    compiled: CompiledModule, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(artifact.os, "fsync", full)
    with keeps(file), pytest.raises(ArtifactError, match="No space left on device"):
        compiled.save(file)


def test_a_write_that_the_system_cuts_leaves_the_old_file(
    compiled: CompiledModule, file: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    try:
        with keeps(file), pytest.raises(ArtifactError, match="cannot be written: File too large"):
            compiled.save(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_interrupt_leaves_the_old_file(
    compiled: CompiledModule, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(artifact.os, "replace", interrupt)
    with keeps(file), pytest.raises(KeyboardInterrupt):
        compiled.save(file)


def test_places_that_take_no_file_are_named(compiled: CompiledModule, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is a folder"):
        compiled.save(tmp_path)
    with pytest.raises(ArtifactError, match="No such file or directory"):
        compiled.save(tmp_path / "missing" / "vit.gtco")


def test_a_link_to_an_artifact_stays_a_link(
    compiled: CompiledModule, file: Path, tmp_path: Path
) -> None:
    link = tmp_path / "latest.gtco"
    link.symlink_to(file)
    compiled.save(link)
    assert link.is_symlink() and gtco.load(link).launches == compiled.launches
