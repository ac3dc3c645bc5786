"""Triton's kernels for `experiments.op_table`, as far as they go without triton and a GPU."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import experiments

TRITON = Path(experiments.__file__).with_name("triton_peers.py")
CPU = torch.device("cpu")


def test_triton_kernels_are_annotated_as_triton_allows() -> None:
    """Triton evaluates every annotation of a kernel and refuses all names but its own."""
    functions = [
        node for node in ast.parse(TRITON.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    kernels = [node for node in functions if node.decorator_list]
    assert [node.name for node in kernels] == ["linear_kernel", "attention_kernel"]
    for node in kernels:
        said = {ast.unparse(a.annotation) for a in node.args.args if a.annotation is not None}
        assert said == {"tl.constexpr"} and node.returns is None


class Kernel:
    """What `triton.jit` makes of a function: launches are kept instead of made."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.signature = inspect.signature(function)
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, num_stages: int, **constants: int) -> None:
            assert num_warps in (2, 4, 8) and num_stages in range(2, 6)
            bound = self.signature.bind(*args, **constants)
            self.launches.append((grid, dict(bound.arguments)))

        return launch


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`experiments.triton_peers` on a stand-in for triton."""
    triton: Any = ModuleType("triton")
    triton.language = ModuleType("triton.language")
    triton.jit = lambda do_not_specialize: Kernel
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", triton.language)
    spec = importlib.util.spec_from_file_location("triton_peers_here", TRITON)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_triton_launches_cover_every_shape(peers: Any) -> None:
    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float16)

    names = [str(each) for each in (*peers.LINEAR, *peers.ATTENTION)]
    assert len(set(names)) == len(names)
    for rows, columns, k in ((197, 2304, 768), (1050, 512, 256), (257, 1280, 5120)):
        for config in peers.LINEAR:
            tensors = empty(rows, k), empty(columns, k), empty(columns), empty(rows, columns)
            peers.linear(config, *tensors)
            (tiles,), given = peers.linear_kernel.launches[-1]
            assert tiles * given["BLOCK_M"] * given["BLOCK_N"] >= rows * columns
            assert (given["rows"], given["columns"], given["depth"]) == (rows, columns, k)
            assert k % given["BLOCK_K"] == 0
    for config in peers.ATTENTION:
        peers.attention(config, *(empty(2, 16, 257, 80) for _ in range(4)))
        (blocks, heads), given = peers.attention_kernel.launches[-1]
        assert heads == 32 and blocks * given["BLOCK_Q"] >= 257
        assert (given["WIDTH"], given["PADDED"]) == (80, 128)
    with pytest.raises(ValueError, match="K = 72 is no multiple of"):
        peers.linear(peers.LINEAR[0], empty(4, 72), empty(8, 72), empty(8), empty(4, 8))


def test_warming_compiles_every_configuration_and_fails_none(peers: Any) -> None:
    peers.warm(CPU, {32, 80})
    assert len(peers.linear_kernel.launches) == len(peers.LINEAR)
    assert len(peers.attention_kernel.launches) == 2 * len(peers.ATTENTION)
    peers.linear_kernel = None
    peers.warm(CPU, set())
