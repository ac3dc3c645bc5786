"""What `gtco.compile` returns: a module that validates its inputs and replays a CUDA graph."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gtco.frontend.torch_export import Captured
from gtco.ir.graph import FusedGraph, Graph
from gtco.ir.interpreter import ArgumentError
from gtco.ir.ops import Slot
from gtco.ir.spec import DTYPE_NAMES, TensorSpec
from gtco.options import Options
from gtco.reporting.report import Report, make_report
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.executable import Executable, compile_programs
from gtco.runtime.host import HostExecutable
from gtco.runtime.plan import Launch, Plan, PlanError, Visit
from gtco.target import HOST, Target, TargetError


class RecompileError(RuntimeError):
    """A change that a compiled module cannot take: the model has to be compiled again."""


_CHANGED = (
    "a compiled module cannot be moved or cast (.to, .cuda, .half, ...): move or cast the model "
    "itself and compile it again"
)


@dataclass(frozen=True)
class LaunchInfo:
    """One launch of a compiled module.

    Args:
        name: the group's name.
        kernel: entry point of the generated kernel, or "aten".
        family: of the group, such as "gemm".
        ops: the operators it computes, in order.
        modules: the user's modules that they come from.
        schedule: knob values of the generated kernel.
        source: where the choice comes from: "tuned here", "record" (shipped), "transferred"
            (the schedule of a similar workload, whose blocks do the same), "default" or "fallback".
        reason: why there is no generated kernel.
        predicted_us: its time from start to start, if something predicted it.
    """

    name: str
    kernel: str
    family: str
    ops: tuple[str, ...]
    modules: tuple[str, ...]
    schedule: Mapping[str, int]
    source: str
    reason: str
    predicted_us: float | None


@dataclass(frozen=True)
class KernelInfo:
    """One distinct kernel of a compiled module.

    Args:
        name: its entry point.
        sketch: the structure it was made from.
        launches: how often a call launches it.
        registers: of a thread.
        smem_bytes: shared memory of a block, static and dynamic.
        spill_bytes: stored to local memory for want of registers, of a thread.
        cubin_bytes: size of the code.
    """

    name: str
    sketch: str
    launches: int
    registers: int
    smem_bytes: int
    spill_bytes: int
    cubin_bytes: int


class CompiledModule(nn.Module):
    """A model compiled for one GPU architecture, with the signature of the model itself.

    Calls run on the caller's current stream and return fresh tensors; concurrent calls wait for
    each other. Kernels read an input where it lies and store an output where the caller gets it;
    copies are made where ATen takes part, and of inputs with gaps or at odd addresses. It has no
    parameters: the weights are baked in, and what would change or move them raises
    `RecompileError`.

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
        self._checks = tuple(InputCheck(name, spec) for name, spec in captured.graph.inputs.items())
        self._positional = _is_positional(captured)
        self._single = _single_output(captured)
        self._lock = threading.Lock()
        self._kernels = kernels
        self._executable: Executable | HostExecutable | None = None
        if plan.options.target == HOST or _fitting_device(plan.target) is not None:
            self.prepare()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

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
        for check, tensor in zip(self._checks, inputs, strict=True):
            check(tensor, device, grad)
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
        from gtco.runtime.artifact import save  # which itself makes a module when it loads

        save(path, self._plan, self._captured, self.compile_kernels())

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
        for check, tensor in zip(self._checks, inputs, strict=True):
            check(tensor, executable.device, torch.is_grad_enabled())
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
        precision = self.options.precision or f"{_types(self._captured.graph)}, as the model is"
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

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Nothing, where it is already; it moves nowhere else.

        Raises:
            RecompileError: another device, or a dtype or memory format.
        """
        try:
            device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            raise RecompileError(f".to() was given what is no device ({_CHANGED})") from error
        if dtype is not None or memory_format is not None:
            self._apply(None)
        return self if device is None else self._stay_on(device)

    def cuda(self, device: torch.device | int | None = None) -> Self:
        """Nothing, where it is on that GPU already.

        Raises:
            RecompileError: it is not.
        """
        number = isinstance(device, int)
        return self._stay_on(torch.device(f"cuda:{device}" if number else device or "cuda"))

    def cpu(self) -> Self:
        """Nothing, where it is on the CPU already (target "host").

        Raises:
            RecompileError: it is not.
        """
        return self._stay_on(torch.device("cpu"))

    def _stay_on(self, device: torch.device) -> Self:
        here = self._executable.device if self._executable else _fitting_device(self._plan.target)
        if here is None or device.type != here.type:
            self._apply(None)
        if device.index is not None and here is not None and device.index != (here.index or 0):
            self._apply(None)
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

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise RecompileError(_CHANGED)

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
    inputs = ", ".join(f"{name}: {spec}" for name, spec in graph.inputs.items())
    outputs = ", ".join(str(graph.specs[name]) for name in graph.outputs)
    weights = sum(graph.specs[name].nbytes for name in graph.constants) / 1e6
    return f"({inputs}) -> {outputs}, {weights:.1f} MB of weights"


def _types(graph: Graph) -> str:
    """The types that the model's products multiply."""
    products = [node for node in graph.nodes if node.definition.multiplies]
    dtypes = (DTYPE_NAMES[graph.specs[node.inputs[0]].dtype] for node in products)
    return ", ".join(dict.fromkeys(dtypes)) or "no products"


class InputCheck:
    """What one input must be.

    Args:
        name: of the argument, for messages.
        spec: its shape and dtype.
    """

    def __init__(self, name: str, spec: TensorSpec) -> None:
        self.name = name
        self.spec = spec
        self._shape = torch.Size(spec.sizes)
        self._dtype = spec.dtype

    def __call__(self, tensor: Any, device: torch.device, grad_enabled: bool) -> None:
        """Accept `tensor` (any strides).

        Raises:
            ArgumentError: naming the argument, what was expected and what was given.
        """
        if (
            isinstance(tensor, Tensor)
            and tensor.shape == self._shape
            and tensor.dtype == self._dtype
            and tensor.device == device
            and not (grad_enabled and tensor.requires_grad)
        ):
            return
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"argument {self.name}: expected a tensor, got {tensor!r:.80}")
        if tensor.shape != self._shape or tensor.dtype != self._dtype:
            raise ArgumentError(
                f"argument {self.name}: expected {self.spec}, got {_show(tensor)}; a compiled "
                f"module takes one shape and dtype, so convert the tensor or compile again for it"
            )
        if tensor.device != device:
            raise ArgumentError(
                f"argument {self.name}: expected a tensor on {device}, got one on {tensor.device}; "
                f"move it with .to({str(device)!r})"
            )
        raise ArgumentError(
            f"argument {self.name} requires grad, and a compiled module is for inference: call it "
            f"under torch.no_grad(), or pass {self.name}.detach()"
        )


def _show(tensor: Tensor) -> str:
    try:
        return str(TensorSpec.of(tensor))
    except KeyError:  # a dtype that gtco has no name for
        return f"{tensor.dtype}{list(tensor.shape)}"


def check_signature(plan: Plan, captured: Captured) -> None:
    """Refuse a rewritten graph whose inputs or outputs are not the captured ones in order.

    Raises:
        PlanError: naming both.
    """
    for kind in ("inputs", "outputs"):
        specs = [
            [graph.specs[name] for name in getattr(graph, kind)]
            for graph in (plan.graph, captured.graph)
        ]
        if specs[0] != specs[1]:
            raise PlanError(f"the passes changed the model's {kind}: {specs[1]} became {specs[0]}")


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


def launch_infos(plan: Plan) -> tuple[LaunchInfo, ...]:
    """One entry per launch of `plan`, in order."""
    return tuple(_launch_info(launch) for launch in plan.launches)


def kernel_infos(plan: Plan, compiled: Mapping[str, CompiledKernel]) -> tuple[KernelInfo, ...]:
    """The distinct kernels of `plan`, `compiled`, in order of their first launch."""
    programs = [launch.program for launch in plan.launches if launch.program]
    counts: dict[str, int] = {}
    for program in programs:
        counts[program.name] = counts.get(program.name, 0) + 1
    first = {program.name: program for program in reversed(programs)}
    return tuple(
        KernelInfo(
            name,
            first[name].sketch,
            count,
            compiled[name].registers,
            compiled[name].smem_bytes + first[name].smem_bytes,
            compiled[name].spill_bytes,
            len(compiled[name].cubin),
        )
        for name, count in counts.items()
    )


def _launch_info(launch: Launch) -> LaunchInfo:
    program = launch.program
    return LaunchInfo(
        launch.group.name,
        "aten" if program is None else program.name,
        launch.family,
        tuple(node.op for node in launch.group.compute),
        launch.modules,
        {} if program is None else dict(program.schedule),
        launch.source,
        launch.reason,
        launch.predicted_us,
    )


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
            f"gtco.interpret(compiled.graph, args) runs it on the CPU"
        )
    major, minor = torch.cuda.get_device_capability()
    return (
        f"this module was compiled for {target.arch}, and the current GPU is sm_{major}{minor}; "
        f"compile it again without target= for this one"
    )
