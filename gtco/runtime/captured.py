"""Steps captured as one CUDA graph, in which some values may lie elsewhere at each replay.

torch captures, instantiates and replays. What lies elsewhere is told to the driver: it gives the
kernels that name it new arguments, while their shapes, clusters and edges stay as captured. A
replay that was launched before keeps the arguments it had.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import torch
from cuda.bindings import driver

from gtco.runtime.driver import BoundLaunch, DriverError, check, ensure_context, parameter_bytes

Step = Callable[[int], None]
"""Enqueues work on the CUDA stream with this handle, which is torch's current one."""

ADDRESSES = 16
"""Encoded arguments kept of each parameter: callers go round in a few buffers."""


def capture(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, enqueue: Callable[[], None]
) -> None:
    """Capture what `enqueue` sends to `stream`, which is torch's current one meanwhile.

    `torch.cuda.graph` would collect garbage and give torch's cached memory back first: in a large
    process that takes half a second and more. Each graph has a pool of its own, since a failed
    capture spoils the one it used.

    What libraries take for themselves must come from that pool too. torch keeps cuBLAS's workspace
    of each stream, wherever it was first asked for; it is dropped ahead of the capture, so that the
    graph gets one of its own, and after it, so that nobody else is given the graph's.
    """
    with torch.cuda.stream(stream):
        torch._C._cuda_clearCublasWorkspaces()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            enqueue()
        finally:
            graph.capture_end()
            torch._C._cuda_clearCublasWorkspaces()


class CapturedGraph:
    """A CUDA graph of `steps`.

    Args:
        steps: what to capture; what they use must stay alive.
        stream: to capture on; its device is the current one.
        movable: the values that may lie elsewhere, and where they lie during the capture. Only
            generated launches may use them.

    Attributes:
        home: the addresses of the movable values during the capture.

    Raises:
        DriverError: the driver does not know a launch that was just captured.
        RuntimeError: a step cannot be captured.
    """

    def __init__(
        self, steps: Sequence[Step], stream: torch.cuda.Stream, movable: Mapping[str, int]
    ) -> None:
        self.home = list(movable.values())
        self._device = torch.cuda.current_device()
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        launches: list[tuple[BoundLaunch, driver.CUgraphNode]] = []

        def enqueue() -> None:
            for step in steps:
                step(stream.cuda_stream)
                if isinstance(step, BoundLaunch) and not movable.keys().isdisjoint(step.values):
                    launches.append((step, _last_node(stream.cuda_stream)))

        with warnings.catch_warnings():
            if not steps:  # a model of views alone; torch warns that nothing was captured
                warnings.simplefilter("ignore")
            capture(self._graph, stream, enqueue)
        self._graph.instantiate()
        self._exec = driver.CUgraphExec(self._graph.raw_cuda_graph_exec())
        nodes = [_KernelNode(launch, handle) for launch, handle in launches]
        self._uses = [
            [(node, at) for node in nodes for at, value in enumerate(node.values) if value == name]
            for name in movable
        ]
        self._bound = self.home

    def replay(self, addresses: list[int]) -> None:
        """Run on torch's current stream; the graph's device is the current one.

        Args:
            addresses: where the movable values lie now; on the graph's device, and aligned as the
                kernels assume. The list is kept.

        Raises:
            DriverError: an address that a kernel cannot take.
        """
        if addresses != self._bound:
            self._bind(addresses)
        self._graph.replay()

    def _bind(self, addresses: list[int]) -> None:
        ensure_context(self._device)
        bound, self._bound = self._bound, []  # after an error nothing is known to be right
        moved: dict[_KernelNode, None] = {}
        for index, address in enumerate(addresses):
            if bound and bound[index] == address:
                continue
            for node, at in self._uses[index]:
                node.move(at, address)
                moved[node] = None
        for node in moved:
            node.update(self._exec)
        self._bound = addresses


class _KernelNode:
    """A captured launch: its arguments, which an executable graph takes over at `update`."""

    def __init__(self, launch: BoundLaunch, handle: driver.CUgraphNode) -> None:
        self.values = launch.values
        self._handle = handle
        self._what = f"new arguments for the {launch.what}"
        self._parameters = launch.parameters.copy()
        self._encode = [
            lru_cache(maxsize=ADDRESSES)(partial(parameter_bytes, argument))
            for argument in launch.arguments
        ]
        # All that the driver knows of the node, but for where its arguments are read from.
        self._node_params = check(driver.cuGraphKernelNodeGetParams(handle), self._what)
        self._node_params.kernelParams = self._parameters.address

    def move(self, at: int, address: int) -> None:
        """Make argument `at` anew for a value at `address`."""
        self._parameters.write(at, self._encode[at](address))

    def update(self, graph_exec: driver.CUgraphExec) -> None:
        """Let later launches of `graph_exec` use the arguments as they are now."""
        result = driver.cuGraphExecKernelNodeSetParams(graph_exec, self._handle, self._node_params)
        check(result, self._what)


def _last_node(stream: int) -> driver.CUgraphNode:
    """The node of the launch that was just captured: all that the stream's next one waits for."""
    result = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
    check(result, "the state of the capture")
    nodes = result[4]  # after the status: capturing or not, id, graph, dependencies, their edges
    if len(nodes) != 1:
        raise DriverError(f"{len(nodes)} nodes stand for the launch that was captured last")
    return nodes[0]
