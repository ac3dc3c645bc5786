"""A plan on one device: constants, arena, loaded kernels, captured CUDA graphs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from gtco.ir.graph import Node
from gtco.passes.origins import READABLE
from gtco.runtime.arena import ALIGNMENT, Arena, plan_arena
from gtco.runtime.captured import CapturedGraph, Step
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.driver import BoundLaunch, DriverError, LoadedKernel
from gtco.runtime.in_place import copied_inputs, copied_outputs, follow, is_whole
from gtco.runtime.library import bind_library
from gtco.runtime.plan import Plan, Visit

log = logging.getLogger("gtco.runtime")
codegen_log = logging.getLogger("gtco.codegen")

UNLIKE_EXAMPLE = (
    "argument %s lies in memory otherwise than the example that the model was compiled with, or "
    "has gaps: each call copies it with one more kernel; pass one that lies like the example, or "
    "compile for it"
)
"""Of an input that a kernel could have read where it lies."""
Enqueue = Callable[[], object]
"""Enqueues work on torch's current CUDA stream."""


class GpuMemoryError(RuntimeError):
    """The GPU has not the memory that a compiled model needs."""


def compile_programs(*plans: Plan) -> dict[str, CompiledKernel]:
    """The distinct kernels of `plans` by entry point.

    Raises:
        CompileError: the first that does not compile.
    """
    from gtco.runtime.compile_pool import CompileJob, compile_many  # a loaded plan needs no NVRTC

    launches = (launch for plan in plans for launch in plan.launches)
    programs = {launch.program.name: launch.program for launch in launches if launch.program}
    jobs = [CompileJob(each.code, each.name, each.arch) for each in programs.values()]
    kernels: dict[str, CompiledKernel] = {}
    for job, result in zip(jobs, compile_many(jobs), strict=True):
        if not isinstance(result, CompiledKernel):
            raise result
        kernels[job.name] = result
        codegen_log.debug(
            "%s for %s: %d registers, %d bytes spilled, %d bytes of code",
            result.name,
            result.arch,
            result.registers,
            result.spill_bytes,
            len(result.cubin),
        )
        if result.serialized:
            codegen_log.warning(
                "kernel %s is slower than it could be: in it %s's products on wgmma wait for one"
                " another (GTCO_DUMP=folder keeps the assembler's words). `gtco tune` finds others;"
                " please report it.",
                result.name,
                programs[job.name].sketch,
            )
    return kernels


class Executable:
    """A plan made ready to run.

    Args:
        plan: what to run.
        device: the CUDA device.
        kernels: the plan's compiled kernels by entry point.

    Attributes:
        inputs: the buffers for inputs that kernels cannot read where the caller has them.
        outputs: the tensors in the arena that stand for the outputs.
        copied_inputs: positions of the inputs that every call copies.
        copied_outputs: positions of the outputs that a call copies to give fresh tensors.
        enqueue: one run, from `inputs` to `outputs`.
        uncaptured: launches that no CUDA graph could hold, as "name: error".
        nbytes: device memory it holds besides constants that were there already.

    Raises:
        GpuMemoryError: with the bytes needed and free; nothing stays allocated.
        DriverError: a kernel cannot be loaded or launched.
    """

    def __init__(
        self, plan: Plan, device: torch.device, kernels: dict[str, CompiledKernel]
    ) -> None:
        self.plan = plan
        self.device = device
        self.kernels = kernels
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: list[Tensor] = []
        self.copied_inputs: tuple[int, ...] = ()
        self.copied_outputs: tuple[int, ...] = ()
        self.enqueue: Enqueue
        self.uncaptured: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._values: dict[str, Tensor] = {}
        self._steps: list[Step] = []
        self._graph: CapturedGraph | None = None
        arena = plan_arena(plan.lifetimes())
        self.nbytes = arena.nbytes + sum(
            plan.graph.specs[name].nbytes
            for name in plan.constants
            if not _usable(plan.graph.constants[name], device)
        )
        if not self._try_build(arena, kernels):
            raise self._memory_error()  # outside the except block: it would keep the frames' memory

    def _try_build(self, arena: Arena, kernels: dict[str, CompiledKernel]) -> bool:
        """Build, or drop everything again and say no if the memory does not suffice."""
        with _plain_torch(self.device):
            try:
                self._build(arena, kernels)
            except torch.OutOfMemoryError:
                pass
            except DriverError as error:
                if "OUT_OF_MEMORY" not in str(error):
                    raise
            else:
                return True
            self._values, self.inputs, self.outputs, self._steps = {}, (), [], []
            return False

    def _memory_error(self) -> GpuMemoryError:
        free, _ = torch.cuda.mem_get_info(self.device)
        return GpuMemoryError(
            f"{self.device} is out of memory: the compiled model needs {self.nbytes} bytes for "
            f"constants and arena (besides what ATen calls use), and {free} are free; release "
            f"tensors or models (torch.cuda.empty_cache() returns torch's cached blocks), then "
            f"call it again"
        )

    def _build(self, arena: Arena, kernels: dict[str, CompiledKernel]) -> None:
        plan, device = self.plan, self.device
        self._values = _upload(plan, device)
        memory = torch.zeros(arena.nbytes, dtype=torch.uint8, device=device)
        self._arena = range(memory.data_ptr(), memory.data_ptr() + arena.nbytes)
        for name, offset in arena.offsets.items():
            spec = plan.graph.specs[name]
            flat = memory[offset : offset + spec.nbytes]
            self._values[name] = flat.view(spec.dtype).view(spec.sizes)
        self.inputs = tuple(self._values[name] for name in plan.graph.inputs)
        assert device.index is not None
        loaded = {name: LoadedKernel(each, device.index) for name, each in kernels.items()}
        for index, launch in enumerate(plan.launches):
            if launch.program is None:
                self._steps.append(bind_library(launch.group, self._values, plan.options.precision))
            else:
                self._steps.append(
                    BoundLaunch(
                        loaded[launch.program.name],
                        launch.program,
                        self._values,
                        dependent=plan.is_dependent(index),
                    )
                )
        self._bind_outputs()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._default_stream = torch.cuda.default_stream(device)
        self._last_stream_id = self._default_stream.stream_id
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):  # cuBLAS and others allocate at their first call
            for step in self._steps:
                # A call's matrix need not be singular as these zeros are.
                with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                    self._enqueue([step])
        self._stream.synchronize()
        log.info(
            "%d launches on %s: %.1f MB of arena, %.1f MB in all",
            len(plan.launches),
            device,
            arena.nbytes / 1e6,
            self.nbytes / 1e6,
        )
        self.copied_inputs = tuple(range(len(self.inputs)))
        self.copied_outputs = tuple(range(len(self.outputs)))
        self.enqueue = (
            self._capture() if plan.options.cuda_graph else partial(self._enqueue, self._steps)
        )

    def _bind_outputs(self) -> None:
        """Output tensors as views of stored values; what is no view is copied out by a step."""
        for name in self.plan.graph.outputs:
            base, chain = self.plan.outputs[name]
            stored = self._values[base]
            view = follow(stored, chain)
            if view.untyped_storage().data_ptr() != stored.untyped_storage().data_ptr():
                self._steps.append(_copy_step(view, stored, chain))
            self.outputs.append(view)

    # -- capture ----------------------------------------------------------------------------------

    def _capture(self) -> Enqueue:
        """One CUDA graph of all steps; where that fails, graphs around what cannot be captured."""
        try:
            return self._capture_whole()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("the model does not fit one CUDA graph: %s", error)
        segments: list[Enqueue] = []
        run: list[Step] = []
        refused: list[str] = []
        names = [launch.group.name for launch in self.plan.launches]
        names += ["output"] * (len(self._steps) - len(names))
        for name, step in zip(names, self._steps, strict=True):
            reason = None if isinstance(step, BoundLaunch) else self._refusal(step)
            if reason is None:
                run.append(step)
                continue
            refused.append(f"{name}: {reason}")
            if run:
                segments.append(self._capture_steps(run))
                run = []
            segments.append(partial(self._enqueue, [step]))
        if run:
            segments.append(self._capture_steps(run))
        self.uncaptured = tuple(refused)
        return partial(_call_each, segments)

    def _capture_whole(self) -> Enqueue:
        """One CUDA graph, which reads inputs and stores outputs where the caller has them."""
        plan = self.plan
        refused_in, refused_out = copied_inputs(plan), copied_outputs(plan, self._values)
        moved_in = [name for name in plan.graph.inputs if name not in refused_in]
        movable = {name: self._values[name].data_ptr() for name in moved_in}
        views = dict(zip(plan.graph.outputs, self.outputs, strict=True))
        stored = {name: self._values[base] for name, (base, _) in plan.outputs.items()}
        moved_out = [name for name in plan.graph.outputs if name not in refused_out]
        parts = [name for name in moved_out if not is_whole(views[name], stored[name])]
        whole = [name for name in moved_out if name not in parts]
        for name in (*whole, *parts):
            movable[plan.outputs[name][0]] = stored[name].data_ptr()
        graph = CapturedGraph(self._steps, self._stream, movable)
        for kind, refused in (("input", refused_in), ("output", refused_out)):
            for name, reason in refused.items():
                log.debug("each call copies %s %%%s: %s", kind, name, reason)
        self.copied_inputs = _positions(plan.graph.inputs, refused_in)
        self.copied_outputs = _positions(plan.graph.outputs, refused_out)
        homes = map(movable.get, plan.graph.inputs)
        self._places = tuple(zip(plan.graph.inputs, self.inputs, homes, strict=True))
        self._fresh_outputs = _positions(plan.graph.outputs, whole)
        self._fresh_parts = tuple(
            (index, stored[name], _layout_in(views[name], stored[name]))
            for index, name in enumerate(plan.graph.outputs)
            if name in parts
        )
        self._output_homes = graph.home[len(moved_in) :]
        self._graph = graph
        return partial(graph.replay, graph.home)

    def _refusal(self, step: Step) -> str | None:
        """Why `step` cannot be captured, or None."""
        try:
            self._capture_steps([step])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.synchronize(self.device)
            return str(error).splitlines()[0]
        return None

    def _capture_steps(self, steps: Sequence[Step]) -> Enqueue:
        graph = CapturedGraph(steps, self._stream, {})
        return partial(graph.replay, [])

    def _enqueue(self, steps: Sequence[Step]) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        for step in steps:
            step(stream)

    # -- calls ------------------------------------------------------------------------------------

    def __call__(self, inputs: Sequence[Tensor], *, static_outputs: bool) -> list[Tensor]:
        """Run on the caller's current stream.

        Args:
            inputs: one per graph input, checked.
            static_outputs: give the buffers themselves, which the next call overwrites.

        Returns:
            One tensor per graph output.
        """
        with self._lock:
            if torch.cuda.current_device() == self.device.index:
                return self._run(inputs, static_outputs)
            with torch.cuda.device(self.device):
                return self._run(inputs, static_outputs)

    def _run(self, inputs: Sequence[Tensor], static_outputs: bool) -> list[Tensor]:
        """A call on the right device. Its cost on the host counts: no call here is there in vain.

        Autograd needs no switching off: an input that requires grad is taken only where grad mode
        is off, and no buffer requires it.
        """
        stream_id = torch.accelerator.current_stream(self.device.index).stream_id
        if stream_id != self._last_stream_id:
            self._follow_last_call()
            self._last_stream_id = stream_id
        try:
            graph = self._graph
            # A graph of the caller's may keep this one as it was captured: from buffer to buffer.
            if graph is None or torch.cuda.is_current_stream_capturing():
                self._copy_in(inputs)
                self.enqueue()
                if static_outputs:
                    return list(self.outputs)
                return [output.clone() for output in self.outputs]
            addresses = self._place_inputs(inputs)
            outputs = list(self.outputs)
            if static_outputs:
                addresses += self._output_homes
                graph.replay(addresses)
                return outputs
            for index in self._fresh_outputs:
                outputs[index] = fresh = torch.empty_like(outputs[index])
                addresses.append(fresh.data_ptr())
            for index, stored, layout in self._fresh_parts:
                fresh = torch.empty_like(stored)
                addresses.append(fresh.data_ptr())
                outputs[index] = fresh.as_strided_(*layout)  # the tensor itself, no view of one
            graph.replay(addresses)
            for index in self.copied_outputs:
                outputs[index] = outputs[index].clone()
            return outputs
        finally:
            if stream_id != self._default_stream.stream_id:
                self._done.record(torch.cuda.current_stream())

    def _place_inputs(self, inputs: Sequence[Tensor]) -> list[int]:
        """Where the graph finds each movable input: as the caller has it, else copied here."""
        addresses = []
        arena = self._arena
        for (name, buffer, home), tensor in zip(self._places, inputs, strict=True):
            moves = home is not None  # an empty tensor's home is address 0
            if moves and type(tensor) is Tensor and tensor.is_contiguous() and not tensor.is_neg():
                address = tensor.data_ptr()
                # In the arena lie static outputs of the last call, which this one overwrites.
                if address % READABLE == 0 and address not in arena:
                    addresses.append(address)
                    continue
            buffer.copy_(tensor)
            if home is not None:
                addresses.append(home)
                if name not in self._told and not tensor.is_contiguous():
                    self._told.add(name)
                    log.warning(UNLIKE_EXAMPLE, name)
        return addresses

    def _copy_in(self, inputs: Sequence[Tensor]) -> None:
        for buffer, tensor in zip(self.inputs, inputs, strict=True):
            buffer.copy_(tensor)

    def walk(self, inputs: Sequence[Tensor], visit: Visit) -> list[Tensor]:
        """Run outside the CUDA graph, launch by launch, with `visit` called for each.

        Everything runs on one stream and has ended on return. `visit` may write to the values that
        its launch reads and stores, and to no others: dead ones share memory with live ones.

        Args:
            inputs: one per graph input, checked; copied in.
            visit: has to call what it is given to run the launch.

        Returns:
            Fresh tensors, one per graph output.
        """
        with self._lock, _plain_torch(self.device):
            torch.cuda.synchronize(self.device)
            self._copy_in(inputs)
            launches = self.plan.launches
            for launch, step in zip(launches, self._steps, strict=False):
                visit(launch, self._values, partial(self._enqueue, [step]))
            self._enqueue(self._steps[len(launches) :])  # outputs that are no views
            outputs = [output.clone() for output in self.outputs]
            torch.cuda.synchronize(self.device)
        return outputs

    def _follow_last_call(self) -> None:
        """Let the current stream wait for what the last call enqueued on another one.

        The default stream outlives every call, so it is asked only now. Any other may be gone
        (a user's own `ExternalStream`): a call on one records an event.
        """
        stream = torch.cuda.current_stream()
        if self._last_stream_id == self._default_stream.stream_id:
            stream.wait_stream(self._default_stream)
        else:
            stream.wait_event(self._done)


def _usable(tensor: Tensor, device: torch.device) -> bool:
    """Whether a constant can be read where it is."""
    return tensor.device == device and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def _upload(plan: Plan, device: torch.device) -> dict[str, Tensor]:
    """The constants on the device, contiguous; shared ones once."""
    values: dict[str, Tensor] = {}
    uploaded: dict[int, Tensor] = {}
    for name in plan.constants:
        tensor = plan.graph.constants[name].detach()
        if not _usable(tensor, device):
            known = uploaded.get(id(plan.graph.constants[name]))
            if known is None:
                known = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)
                uploaded[id(plan.graph.constants[name])] = known
            tensor = known
        values[name] = tensor
    return values


def _call_each(segments: Sequence[Enqueue]) -> None:
    for segment in segments:
        segment()


def _positions(names: Iterable[str], chosen: Container[str]) -> tuple[int, ...]:
    return tuple(index for index, name in enumerate(names) if name in chosen)


def _layout_in(view: Tensor, stored: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Sizes, strides and first element of `view` in memory that has what is `stored` alone."""
    offset = int(view.storage_offset() - stored.storage_offset())
    return tuple(view.shape), view.stride(), offset


def _copy_step(out: Tensor, stored: Tensor, chain: Sequence[Node]) -> Step:
    def copy(stream: int) -> None:
        out.copy_(follow(stored, chain))

    return copy


@contextmanager
def _plain_torch(device: torch.device) -> Iterator[None]:
    """No autograd and no inference mode: the caller's must not leak into what is kept."""
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
        yield
