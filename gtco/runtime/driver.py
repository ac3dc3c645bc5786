"""The GPU's driver, thinly: load a cubin, encode a tensor map, launch a kernel.

cuda-core loads the code. Tensor maps and launches go through its bindings (`cuda.bindings`),
because cuda-core 1.2 refuses the maps our kernels need (a box of one in the outermost dimension,
a head's stride that is smaller than a row's) and its `launch` takes no other 128-byte parameter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import Device, ObjectCode
from torch import Tensor

from gtco.codegen.program import Argument, KernelProgram, Pointer, TensorMapArgument
from gtco.runtime.cubin import CompiledKernel
from gtco.target import PORTABLE_CLUSTER

_MAP_TYPES = {
    torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    torch.float32: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
    torch.int32: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_INT32,
    torch.float8_e4m3fn: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    torch.int8: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
}
"""As what the copy engine brings elements: a tensor core would cut f32 that is not rounded, which
i32 is for."""
_SWIZZLES = {
    0: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
    32: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}
_ALL_SHARED_MEMORY = 100  # per cent of the multiprocessor's L1 and shared memory


class DriverError(RuntimeError):
    """The CUDA driver refused a call; the message names the kernel or the tensor map."""


def check(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call.

    Raises:
        DriverError: naming `what` failed and the driver's own words.
    """
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        words = text.decode() if isinstance(text, bytes) else str(text)
        raise DriverError(f"{what}: {status.name}: {words}")
    return values[0] if values else None


def ensure_context(device: int) -> None:
    """Give a thread that has no CUDA context the device's; torch's own calls do so themselves."""
    if not int(check(driver.cuCtxGetCurrent(), "the current context")):
        Device(device).set_current()


class LoadedKernel:
    """A kernel on one device, with its limits raised as a launch needs them.

    Args:
        compiled: the cubin.
        device: index of the device; its primary context (torch's) becomes current.
    """

    def __init__(self, compiled: CompiledKernel, device: int) -> None:
        self.compiled = compiled
        self.device = device
        Device(device).set_current()
        self._code = ObjectCode.from_cubin(compiled.cubin, name=compiled.name)
        self._kernel = self._code.get_kernel(compiled.name)
        self.handle = driver.CUfunction(int(self._kernel.handle))
        # One carve-out for every kernel: a multiprocessor drains before it changes its own.
        self._set("PREFERRED_SHARED_MEMORY_CARVEOUT", _ALL_SHARED_MEMORY)

    def allow(self, smem_bytes: int, cluster_size: int) -> None:
        """Permit launches with this much dynamic shared memory and clusters this large.

        Raises:
            DriverError: the device has not so much.
        """
        if smem_bytes > self._smem_allowed:
            self._set("MAX_DYNAMIC_SHARED_SIZE_BYTES", smem_bytes)
            self._smem_allowed = smem_bytes
        if cluster_size > PORTABLE_CLUSTER:
            self._set("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)

    _smem_allowed = 48 * 1024

    def _set(self, name: str, value: int) -> None:
        attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        kernel = driver.CUkernel(int(self._kernel.handle))
        result = driver.cuKernelSetAttribute(attribute, value, kernel, driver.CUdevice(self.device))
        check(result, f"kernel {self.compiled.name}, {name.lower()} = {value}")


def encode_tensor_map(argument: TensorMapArgument, base: int) -> bytes:
    """The 128 bytes that describe `argument` over the buffer at address `base`.

    Elements outside the tensor read as zero.

    Raises:
        DriverError: an alignment or size that the tensor map unit cannot take.
    """
    itemsize = argument.dtype.itemsize
    rank = len(argument.sizes)
    tensor = (
        _MAP_TYPES[argument.dtype],
        rank,
        base + argument.origin + argument.offset * itemsize,
        [driver.cuuint64_t(size) for size in argument.sizes],
        [driver.cuuint64_t(stride * itemsize) for stride in argument.strides],
    )
    modes = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        _SWIZZLES[argument.swizzle_bytes],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    box = [driver.cuuint32_t(size) for size in argument.box]
    if (window := argument.window) is None:
        steps = [driver.cuuint32_t(1)] * rank
        result = driver.cuTensorMapEncodeTiled(*tensor, box, steps, *modes)
    else:
        steps = [driver.cuuint32_t(step) for step in (1, *window.stride, 1)]
        corners = list(window.lower), list(window.upper)
        result = driver.cuTensorMapEncodeIm2col(*tensor, *corners, *box, steps, *modes)
    encoded = check(result, f"{argument} at {base:#x}")
    return ctypes.string_at(encoded.getPtr(), 128)


class Parameters:
    """Kernel parameters in memory, as the driver reads them: pointers to each one's bytes.

    Args:
        values: the bytes of each.

    Attributes:
        address: of the pointers.
    """

    def __init__(self, values: Sequence[bytes]) -> None:
        self._storage = [ctypes.create_string_buffer(value, len(value)) for value in values]
        pointers = [ctypes.addressof(buffer) for buffer in self._storage]
        self._table = (ctypes.c_void_p * max(1, len(pointers)))(*pointers)
        self.address = ctypes.addressof(self._table)

    def write(self, index: int, value: bytes) -> None:
        """Replace one parameter by another of its size."""
        self._storage[index].raw = value

    def copy(self) -> Parameters:
        """The same values in memory of their own."""
        return Parameters([buffer.raw for buffer in self._storage])


def parameter_bytes(argument: Argument, base: int) -> bytes:
    """One kernel parameter over the buffer at address `base`."""
    if isinstance(argument, Pointer):
        return (base + argument.origin).to_bytes(8, "little")
    return encode_tensor_map(argument, base)


class BoundLaunch:
    """A kernel with its launch shape and arguments fixed: calling it enqueues it.

    Args:
        kernel: of `program`.
        program: launch shape and parameters.
        tensors: where the stored values that the parameters name lie; they must stay alive.
        dependent: start before the kernel ahead of it in the stream has ended; both must be
            generated kernels.

    Attributes:
        what: it is, for messages.
        arguments: what the parameters stand for.
        values: the stored value that each of them names.
        parameters: as they are passed.

    Raises:
        DriverError: a limit of the device, or a tensor map that cannot be encoded.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        program: KernelProgram,
        tensors: dict[str, Tensor],
        *,
        dependent: bool,
    ) -> None:
        x, y, z = program.cluster
        kernel.allow(program.smem_bytes, x * y * z)
        self._kernel = kernel
        self.what = f"launch of {program.name}"
        self.arguments = program.arguments
        self.values = tuple(argument.value for argument in program.arguments)
        self.parameters = Parameters(
            [parameter_bytes(arg, tensors[arg.value].data_ptr()) for arg in program.arguments]
        )
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = program.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = program.block, 1, 1
        config.sharedMemBytes = program.smem_bytes
        attributes = []
        if program.cluster != (1, 1, 1):
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dims = cluster.value.clusterDim
            dims.x, dims.y, dims.z = x, y, z
            attributes.append(cluster)
        if dependent:
            early = driver.CUlaunchAttribute()
            names = driver.CUlaunchAttributeID
            early.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        if attributes:
            config.attrs = attributes
        config.numAttrs = len(attributes)
        self._config = config

    def __call__(self, stream: int) -> None:
        """Enqueue on the CUDA stream with this handle; the device must be current.

        Raises:
            DriverError: the driver refuses the launch.
        """
        self._config.hStream = driver.CUstream(stream)
        result = driver.cuLaunchKernelEx(
            self._config, self._kernel.handle, self.parameters.address, 0
        )
        check(result, self.what)
