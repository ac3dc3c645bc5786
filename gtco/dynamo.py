"""`torch.compile(model, backend="gtco")`: found through its entry point, so nothing is imported.

Dynamo hands in a graph whose parameters and buffers are inputs, marked static. They are baked in as
constants here, and each call checks that it brings the same tensors, unchanged: if not, the graph
is compiled again, as it is for other sizes of a dynamic shape. Compiling waits for the first call:
that one has real tensors, and its errors reach the user as they are.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from gtco.compiler import compile as compile_model
from gtco.ir.autocast import autocast_here
from gtco.options import OptionError, Options

log = logging.getLogger("gtco.frontend")


MODES = (None, "default", "reduce-overhead")
"""What `torch.compile(..., mode=...)` may say: the others ask Inductor to search."""


class GradError(RuntimeError):
    """Gradients are wanted of a module that is compiled for inference."""


def backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Specialized:
    """A compiled function for one of Dynamo's graphs.

    Args:
        graph_module: the graph.
        example_inputs: not needed.
        options: the fields of `gtco.Options`, from `torch.compile(..., options={...})`.
        mode: from `torch.compile(..., mode=...)`; gtco does what "reduce-overhead" asks for anyway.

    Raises:
        OptionError: an unknown option, value or mode. What `gtco.compile` raises comes with the
            first call.
    """
    if mode not in MODES:
        raise OptionError(
            f"mode={mode!r} is none of gtco's; leave it out (CUDA graphs are used anyway, "
            f'options={{"cuda_graph": False}} turns them off; gtco.tune searches for fast kernels)'
        )
    return Specialized(graph_module, Options.of(**dict(options or {})))


@dataclass(frozen=True)
class _Variant:
    """A compiled module and what it has baked in.

    Args:
        compiled: the module.
        tracked: positions among the static tensors of those that count their versions: all but
            inference tensors.
        versions: theirs when it was compiled.
        alive: whoever drops one of the tensors drops the variant, so that no new tensor takes
            the identity of an old one.
    """

    compiled: Callable[..., Any]
    tracked: tuple[int, ...]
    versions: list[int]
    alive: tuple[weakref.ref[Tensor], ...]


class Specialized:
    """Dynamo's graph, compiled for each set of static tensors, sizes, types and autocast regions
    that it meets.

    Dynamo runs one graph for all modules of one class (a model's layers, after a graph break), so
    there may be several sets. Writing to a parameter makes its set stale; writing through `.data`
    escapes torch's version count, and so this check.

    Args:
        graph_module: whose placeholders Dynamo marked.
        options: how to compile.
    """

    def __init__(self, graph_module: fx.GraphModule, options: Options) -> None:
        self._graph_module = graph_module
        self._options = options
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        self._static = tuple(i for i, node in enumerate(placeholders) if _is_static(node))
        self._given = tuple(i for i in range(len(placeholders)) if i not in self._static)
        self._variants: dict[tuple[Any, ...], _Variant] = {}

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph.

        Raises:
            GradError: an input or a parameter requires grad, in grad mode.
            CaptureError, TargetError, FallbackError: as `gtco.compile`.
        """
        static = tuple([inputs[i] for i in self._static])
        given = [inputs[i] for i in self._given]
        key = (
            *map(id, static),
            *[(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in given],
            autocast_here(),
        )
        variant = self._variants.get(key)
        if variant is None or variant.versions != [static[i]._version for i in variant.tracked]:
            variant = self._variants[key] = self._compile(key, static, given)
        return variant.compiled(*given)

    def _compile(
        self, key: tuple[Any, ...], static: tuple[Tensor, ...], given: Sequence[Any]
    ) -> _Variant:
        tensors = [each for each in (*static, *given) if isinstance(each, Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise GradError(
                "gtco compiles for inference and gives no gradients: call the compiled model "
                "under torch.no_grad() or torch.inference_mode()"
            )
        if self._variants:
            log.info("compiling a graph again: other parameters, new values or other shapes")
        tracked = tuple(i for i, tensor in enumerate(static) if not tensor.is_inference())
        versions = [static[i]._version for i in tracked]
        model = _bake(self._graph_module, dict(zip(self._static, static, strict=True)))
        with torch.inference_mode(False), torch.no_grad():
            compiled = compile_model(model, tuple(given), **self._options.keywords())
        variants = self._variants
        alive = tuple(weakref.ref(each, lambda dead: variants.pop(key, None)) for each in static)
        return _Variant(compiled, tracked, versions, alive)


def _is_static(placeholder: fx.Node) -> bool:
    """Whether an input is a parameter, a buffer or marked so; torch's AOTAutograd asks the same."""
    marks = placeholder.meta.get("tensor_dict") or {}
    return bool(marks.get("_dynamo_static_input_type"))


def _bake(graph_module: fx.GraphModule, static: Mapping[int, Tensor]) -> fx.GraphModule:
    """The graph with its inputs at the positions of `static` as attributes.

    f(w, x) -> f(x), where w is `get_attr`
    """
    graph = copy.deepcopy(graph_module.graph)
    root = nn.Module()
    root.__dict__.update(graph_module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        root.__dict__[name] = dict(graph_module.__dict__[name])
    placeholders = graph.find_nodes(op="placeholder")
    for position, tensor in static.items():
        node = placeholders[position]
        root.register_buffer(node.name, tensor.detach())
        with graph.inserting_before(node):
            baked = graph.get_attr(node.name)
        node.replace_all_uses_with(baked)
        graph.erase_node(node)
    return fx.GraphModule(root, graph).eval()
