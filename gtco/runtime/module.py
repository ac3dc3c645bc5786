"""What `gtco.compile` returns: a module that validates its inputs and replays a CUDA graph."""

from __future__ import annotations

import os
import threading
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gtco import logs
from gtco.frontend.torch_export import Captured
from gtco.ir.aten import Slot
from gtco.ir.graph import FusedGraph, Graph
from gtco.ir.spec import DTYPE_NAMES
from gtco.options import Options
from gtco.reporting.report import Report, make_report
from gtco.runtime import artifact
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.executable import Executable, compile_programs
from gtco.runtime.host import HostExecutable
from gtco.runtime.infos import KernelInfo, LaunchInfo, kernel_infos, launch_infos
from gtco.runtime.inputs import check_signature, input_checks
from gtco.runtime.plan import Plan, Visit
from gtco.target import HOST, Target, TargetError


class RecompileError(RuntimeError):
    """A change that a compiled module cannot take: the model has to be compiled again."""


_CHANGED = (
    "a compiled module cannot be moved or cast (.to, .cuda, .half, ...): move or cast the model "
    "itself and compile it again"
)


class CompiledModule(nn.Module):
    """A model compiled for one GPU architecture, with the signature of the model itself.

    Calls run on the caller's current stream and return fresh tensors; concurrent calls wait for
    each other. Kernels read an input where it lies and store an output where the caller gets it;
    copies are made where ATen takes part, and of inputs with gaps, at odd addresses or in another
    order of dimensions than the example that it was compiled with. It has no parameters: the
    weights are baked in, and what would change or move them raises `RecompileError`.

    Args:
        plan: what to run.
        captured: the signature; its graph's inputs and outputs stand in the plan's order.
        kernels: the plan's compiled kernels by entry point; None compiles them when needed.

    Raises:
        CompileError: on a machine with the right GPU, where everything is made ready at once.
        HostCompilerError: for target "host", if there is no C++ compiler.
        GpuMemoryError: likewise, if the GPU has too little memory.
        PlanError: the plan and the signature do not fit.
    """

    def __init__(
        self,
        plan: Plan,
        captured: Captured,
        kernels: dict[str, CompiledKernel] | None = None,
    ) -> None:
        super().__init__()
        self.training = False
        check_signature(plan, captured)
        self._plan = plan
        self._captured = captured
        self._checks = input_checks(captured.graph)
        self._positional = _is_positional(captured)
        self._single = _single_output(captured)
        self._lock = threading.Lock()
        self._kernels = kernels
        self._executable: Executable | HostExecutable | None = None
        if plan.options.target == HOST or _fitting_device(plan.target) is not None:
            self.prepare()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Floats of another type than what was compiled for are converted on the
        way in; an autocast region around the call changes nothing.

        Raises:
            ArgumentError: an argument differs from what was compiled for, or requires grad.
            TargetError: the GPU that it was compiled for is not there.
            GpuMemoryError: the GPU has too little memory; a later call tries again.
        """
        if self._positional and not kwargs and len(args) == len(self._checks):
            inputs = args
        else:
            inputs = self._captured.flatten(args, kwargs)
        executable = self._executable or self.prepare()
        device = executable.device
        grad = torch.is_grad_enabled()
        inputs = tuple(
            [
                check(tensor, device, grad)
                for check, tensor in zip(self._checks, inputs, strict=True)
            ]
        )
        outputs = executable(inputs, static_outputs=self._plan.options.static_outputs)
        if self._single is not None:
            return outputs[self._single]
        return self._captured.unflatten(outputs)

    def prepare(self) -> Executable | HostExecutable:
        """Upload, load and capture, once: what the first call needs.

        Raises:
            TargetError: the GPU that it was compiled for is not there.
            GpuMemoryError: the GPU has too little memory; a later call tries again.
        """
        with self._lock:
            if self._executable is None and self._plan.options.target == HOST:
                self._executable = HostExecutable(self._plan)
            if self._executable is None:
                device = _fitting_device(self._plan.target)
                if device is None:
                    raise TargetError(_missing_gpu(self._plan.target))
                self._executable = Executable(self._plan, device, self.compile_kernels())
            return self._executable

    def compile_kernels(self) -> dict[str, CompiledKernel]:
        """The compiled kernels by entry point; compiles them if need be.

        Raises:
            CompileError: a kernel does not compile.
        """
        if self._kernels is None:
            self._kernels = compile_programs(self._plan)
        return self._kernels

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an artifact that `gtco.load` reads; compiles the kernels if need be.

        A file that is there already stays until the new one is whole.

        Raises:
            ArtifactError: it cannot be written, or the model holds what no artifact can.
            CompileError: a kernel does not compile.
        """
        artifact.save(path, self._plan, self._captured, self.compile_kernels())

    def trace(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Run the model once and write a Chrome trace, for ui.perfetto.dev or chrome://tracing.

        The launches run one by one outside the CUDA graph, each in a profiler and NVTX range that
        names its group and the user's modules; the trace's metadata says what its times are.

        Args:
            path: the file to write, JSON.
            *args: as of a call.
            **kwargs: as of a call.

        Raises:
            ArgumentError, TargetError, GpuMemoryError: as for a call.
            OSError: the file cannot be written.
        """
        from gtco.runtime.trace import write_trace  # brings torch's profiler

        write_trace(path, self._plan, lambda visit: self.walk(visit, *args, **kwargs))

    def walk(self, visit: Visit, *args: Any, **kwargs: Any) -> Any:
        """Run the model outside the CUDA graph, with `visit` called for each launch.

        Raises:
            ArgumentError, TargetError, GpuMemoryError: as for a call.
        """
        inputs = self._captured.flatten(args, kwargs)
        executable = self.prepare()
        device, grad = executable.device, torch.is_grad_enabled()
        inputs = tuple(
            check(tensor, device, grad) for check, tensor in zip(self._checks, inputs, strict=True)
        )
        return self._captured.unflatten(executable.walk(inputs, visit))

    # -- what is in it ----------------------------------------------------------------------------

    @property
    def graph(self) -> FusedGraph:
        """The rewritten graph and its groups."""
        return self._plan.fused

    @property
    def options(self) -> Options:
        """How it was compiled."""
        return self._plan.options

    @property
    def launches(self) -> tuple[LaunchInfo, ...]:
        """One entry per launch, in order."""
        return launch_infos(self._plan)

    @property
    def kernels(self) -> tuple[KernelInfo, ...]:
        """The distinct generated kernels, in order of their first launch; compiles if need be.

        Raises:
            CompileError: a kernel does not compile.
        """
        return kernel_infos(self._plan, self.compile_kernels())

    def extra_repr(self) -> str:
        """What it is, for `repr`."""
        report = self.report()
        precision = self.options.precision or f"{_types(self._captured.graph)}as the model is"
        lines = [
            f"model: {_signature(self._captured.graph)}",
            f"target: {self.options.target or report.target}, precision: {precision}",
            f"launches: {report.launches}, {report.generated} of them in generated kernels",
        ]
        if report.predicted_us is not None and report.predicted_generated is not None:
            share = f"{report.predicted_generated:.0%} of it in generated kernels"
            lines.append(f"predicted: {report.predicted_us:.0f} us a call, {share}")
        return "\n".join(lines)

    def report(self) -> Report:
        """What was fused, what was not and why, what falls back, and what is predicted."""
        uncaptured = self._executable.uncaptured if self._executable else ()
        return make_report(self._plan, self._captured.graph, uncaptured)

    # -- what a compiled module refuses -----------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """What `.to`, `.cuda`, `.half` and their like do to every tensor, here or in a module
        around this one: nothing, if that leaves the tensors as and where they are.

        Raises:
            RecompileError: it does not.
        """
        here = self._executable.device if self._executable else _fitting_device(self._plan.target)
        if here is None:
            raise RecompileError(_CHANGED)
        graph = self._captured.graph
        for dtype in {graph.specs[name].dtype for name in (*graph.inputs, *graph.constants)}:
            tensor = torch.empty(0, dtype=dtype, device=here)
            try:
                moved = fn(tensor)
            except (AssertionError, RuntimeError) as error:  # of a device that is not there
                raise RecompileError(_CHANGED) from error
            if (moved.device, moved.dtype) != (tensor.device, dtype):
                raise RecompileError(_CHANGED)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """A module of its own, ready to call; plan, weights and code are shared, for nothing ever
        changes them."""
        return CompiledModule(self._plan, self._captured, self._kernels)

    def __copy__(self) -> CompiledModule:
        return self.__deepcopy__({})

    def __reduce__(self) -> NoReturn:
        raise RecompileError(
            "a compiled module cannot be pickled: save it with .save(path), and read it with "
            "gtco.load(path)"
        )

    def train(self, mode: bool = True) -> Self:
        if mode:
            raise RecompileError(
                "a compiled module is for inference: call .train() on the model itself, and "
                "compile it again after training"
            )
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RecompileError(
            "the weights are baked into a compiled module: load them into the model itself and "
            "compile it again"
        )


def _signature(graph: Graph) -> str:
    inputs = ", ".join(f"{name}: {spec}" for name, spec in graph.given.items())
    outputs = ", ".join(str(graph.specs[name]) for name in graph.outputs)
    weights = sum(graph.specs[name].nbytes for name in graph.constants) / 1e6
    return f"({inputs}) -> {outputs}, {weights:.1f} MB of weights"


def _types(graph: Graph) -> str:
    """The types that the model's products multiply."""
    products = [node for node in graph.nodes if node.definition.multiplies]
    dtypes = (DTYPE_NAMES[graph.specs[node.inputs[0]].dtype] for node in products)
    return "".join(f"{dtype}, " for dtype in dict.fromkeys(dtypes))


def load(path: str | os.PathLike[str]) -> CompiledModule:
    """The compiled module that `CompiledModule.save` wrote; it needs no compiler.

    Without the GPU that it was made for it loads as well, and raises when it is called.

    Raises:
        ArtifactError: no such file, a damaged or edited one (naming the part), one whose launches
            are not what its kernels were compiled for, one of another format version, or one for
            an architecture that this gtco does not know.
        GpuMemoryError: the GPU that it is for is here and has too little memory.
        OptionError: an unknown area in `GTCO_LOGS`.
    """
    logs.configure()
    found = artifact.read(path)
    return CompiledModule(found.plan, found.captured, dict(found.kernels))


def _is_positional(captured: Captured) -> bool:
    """Whether a call is just one tensor per graph input, in order."""
    count = len(captured.input_positions)
    plain = pytree.tree_structure((tuple(range(count)), {}))
    ordered = captured.input_positions == tuple(range(count))
    return ordered and not captured.input_literals and captured.in_spec == plain


def _single_output(captured: Captured) -> int | None:
    """The graph output that the model returns by itself; None if it returns a structure."""
    if not captured.out_spec.is_leaf():
        return None
    (leaf,) = captured.output_template
    return leaf.index if isinstance(leaf, Slot) else None


def runs_on(target: Target, capability: tuple[int, int]) -> bool:
    """Whether code for `target` runs on a GPU of this compute capability."""
    if target.arch.endswith("a"):
        return target.capability == capability
    return target.capability[0] == capability[0] and target.capability[1] <= capability[1]


def _fitting_device(target: Target) -> torch.device | None:
    """The current CUDA device if it runs code for `target`."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return device if runs_on(target, torch.cuda.get_device_capability(device)) else None


def _missing_gpu(target: Target) -> str:
    if not torch.cuda.is_available():
        return (
            f"this module was compiled for {target.arch}, and no CUDA GPU is here; "
            f'gtco.interpret(compiled.graph, args) runs it on the CPU, and target="host" '
            f"(--target host) compiles its kernels for the CPU"
        )
    major, minor = torch.cuda.get_device_capability()
    return (
        f"this module was compiled for {target.arch}, and the current GPU is sm_{major}{minor}; "
        f"compile it again without target= for this one"
    )
