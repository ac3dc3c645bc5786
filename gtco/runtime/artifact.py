"""A compiled module in one file, and back.

The file is a safetensors container: the tensors `weights.NAME`; the cubins as the byte tensors
`cubins.KERNEL`; the plan and the signature as the byte tensor `plan`, which is JSON. Its metadata
holds the format, its version and the sha256 of each of these parts. Nothing in it is unpickled or
imported, and none of its names is used as a path.

The checksums find damage. What is whole is then held against itself: the graph is inferred again,
each kernel has the name that follows from its launch, and each launch stays within what its code,
the architecture and the values that it names allow (`gtco.runtime.soundness`). All this finds
mistakes, not malice: a cubin is code that the GPU runs, so load only what you would run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gtco.frontend.torch_export import Captured
from gtco.ir.spec import DTYPE_NAMES, GraphError
from gtco.options import OptionError
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.encoding import EncodingError, decode_plan, encode_plan
from gtco.runtime.inputs import check_signature
from gtco.runtime.plan import Plan, PlanError
from gtco.runtime.signature_encoding import decode_signature, encode_signature
from gtco.runtime.soundness import check_soundness
from gtco.target import TargetError
from gtco.version import VERSION

log = logging.getLogger("gtco.runtime")

FORMAT = "gtco-artifact"
FORMAT_VERSION = "6"
SUFFIX = ".gtco"
"""What the command line takes for an artifact's name."""

_PLAN = "plan"
_WEIGHTS = "weights."
_CUBINS = "cubins."


class ArtifactError(RuntimeError):
    """A file that cannot be written, or that is no whole artifact for this gtco."""


@dataclass(frozen=True, eq=False)
class Artifact:
    """What a file holds.

    Args:
        gtco_version: of the gtco that wrote it.
        plan: what runs.
        captured: the model's signature.
        kernels: compiled kernels by entry point.
    """

    gtco_version: str
    plan: Plan
    captured: Captured
    kernels: Mapping[str, CompiledKernel]


# -- writing ---------------------------------------------------------------------------------------


def save(
    path: str | os.PathLike[str],
    plan: Plan,
    captured: Captured,
    kernels: Mapping[str, CompiledKernel],
) -> None:
    """Write an artifact whole: until it is, the file that was there before stays.

    Raises:
        ArtifactError: the file cannot be written, or the plan holds what no artifact can.
    """
    weights, tensors = _weights(plan)
    parts: dict[str, Callable[[], memoryview]] = {
        name: lambda tensor=tensor: _bytes(tensor)  # type: ignore[misc]
        for name, tensor in tensors.items()
    }
    for name, kernel in kernels.items():
        parts[_CUBINS + name] = lambda kernel=kernel: memoryview(kernel.cubin)  # type: ignore[misc]
    try:
        text = _plan_text(plan, captured, kernels, weights)
    except EncodingError as error:
        raise ArtifactError(f"{path} is not written: {error}") from error
    parts[_PLAN] = lambda: memoryview(text)
    header = _header(tensors, parts)
    with _replacing(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for data in parts.values():
            file.write(data())
    log.info("saved %s: %d weights, %d kernels", path, len(tensors), len(kernels))


def _plan_text(
    plan: Plan,
    captured: Captured,
    kernels: Mapping[str, CompiledKernel],
    weights: Mapping[str, str],
) -> bytes:
    infos = []
    for kernel in kernels.values():
        info = asdict(kernel)
        del info["cubin"]
        infos.append(info)
    content = {
        "gtco_version": VERSION,
        "plan": encode_plan(plan, weights),
        "signature": encode_signature(captured),
        "kernels": infos,
    }
    return json.dumps(content, allow_nan=False).encode()


def _weights(plan: Plan) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Constant name to part, and part to tensor; a tensor of two names is one part.

    Wide types come first, so that each tensor is aligned in the file.
    """
    parts: dict[int, str] = {}
    names: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in plan.graph.constants.items():
        part = parts.setdefault(id(tensor), _WEIGHTS + name)
        names[name] = part
        tensors[part] = tensor
    order = sorted(tensors, key=lambda part: -tensors[part].itemsize)
    return names, {part: tensors[part] for part in order}


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _header(tensors: Mapping[str, Tensor], parts: Mapping[str, Callable[[], memoryview]]) -> bytes:
    digests: dict[str, str] = {}
    entries: dict[str, Any] = {}
    end = 0
    for name, data in parts.items():
        view = data()
        digests[name] = hashlib.sha256(view).hexdigest()
        begin, end = end, end + view.nbytes
        if name in tensors:
            tensor = tensors[name]
            dtype, shape = DTYPE_NAMES[tensor.dtype].upper(), list(tensor.shape)
        else:
            dtype, shape = "U8", [view.nbytes]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "sha256": json.dumps(digests),
    }
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    return text + b" " * (-len(text) % 8)


@contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when all of it is on the disk.

    Raises:
        ArtifactError: the system refuses; nothing stays behind.
    """
    target = Path(path).resolve()
    if target.is_dir():
        raise ArtifactError(f"{path} is a folder; name a file in it")
    temporary = target.with_name(f".{target.name[:64]}.{secrets.token_hex(8)}.tmp")
    try:
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written: {error.strerror or error}") from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- reading ---------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> Artifact:
    """What the file `path` holds, checked; no code is loaded.

    Raises:
        ArtifactError: as for `load`.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArtifactError(
            f"path is {path!r:.80}, not that of a file; name one that compiled.save() wrote"
        )
    parts = _read_parts(path)
    weights = {name: tensor for name, tensor in parts.items() if name.startswith(_WEIGHTS)}
    try:
        content = _json(_raw(parts[_PLAN]))
        kernels = _decode_kernels(content["kernels"], parts)
        plan = decode_plan(content["plan"], weights)
        captured = decode_signature(content["signature"])
        check_signature(plan, captured)
        _try_signature(captured)
        check_soundness(plan, kernels)
        _check_parts(content, parts)
        log.info("read %s: %d weights, %d kernels", path, len(weights), len(kernels))
        return Artifact(str(content["gtco_version"]), plan, captured, kernels)
    except TargetError as error:
        raise ArtifactError(f"{path} was made for another GPU: {error}") from error
    except (EncodingError, GraphError, OptionError, PlanError) as error:
        raise ArtifactError(f"{path}: its part {_PLAN!r} is refused: {error}") from error
    except Exception as error:  # an operator's reference raises what it likes for wrong attributes
        cause = f"{type(error).__name__}: {error}"
        raise ArtifactError(
            f"{path}: its part {_PLAN!r} is not as gtco writes it ({cause:.200})"
        ) from error


def _read_parts(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Every part by name, as its checksum says."""
    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "does not exist"
        raise ArtifactError(f"{path} {what}; name a file that compiled.save() wrote")
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            digests = _digests(path, file.metadata() or {})
            names = set(file.keys())
            for name in sorted(names ^ set(digests)):
                fault = "is missing" if name in digests else "has no checksum"
                raise ArtifactError(f"{path} is damaged: its part {name!r} {fault}")
            # a copy: the file may change while it is mapped
            parts = {name: file.get_tensor(name).clone() for name in sorted(names)}
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            f"{path} is damaged, or no gtco artifact: its header is refused ({error})"
        ) from error
    for name, tensor in parts.items():
        if hashlib.sha256(_bytes(tensor)).hexdigest() != digests[name]:
            raise ArtifactError(
                f"{path} is damaged or was edited: the checksum of its part {name!r} differs"
            )
    return parts


def _digests(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> dict[str, str]:
    if metadata.get("format") != FORMAT:
        raise ArtifactError(f"{path} is no gtco artifact: it does not say so in its header")
    found = metadata.get("format_version")
    if found != FORMAT_VERSION:
        raise ArtifactError(
            f"{path} has format version {found}, and this gtco reads {FORMAT_VERSION}; save the "
            f"model again with this gtco, or load it with the one that wrote it"
        )
    try:
        digests = _json(metadata["sha256"].encode())
    except (KeyError, EncodingError):
        digests = None
    if not isinstance(digests, dict) or _PLAN not in digests:
        raise ArtifactError(f"{path} is damaged: its header has no table of checksums")
    return digests


def _json(text: bytes) -> Any:
    """What a part holds.

    Raises:
        EncodingError: it is no JSON, or deeper than any that gtco writes.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise EncodingError("its JSON is nested too deeply") from None
    except ValueError as error:
        raise EncodingError(f"it is no JSON ({error})") from error


def _raw(tensor: Tensor) -> bytes:
    return bytes(_bytes(tensor))


def _decode_kernels(
    infos: list[dict[str, Any]], parts: Mapping[str, Tensor]
) -> dict[str, CompiledKernel]:
    kernels: dict[str, CompiledKernel] = {}
    for info in infos:
        kernel = CompiledKernel(cubin=_raw(parts[_CUBINS + info["name"]]), **info)
        numbers = (kernel.registers, kernel.smem_bytes, kernel.spill_bytes, kernel.local_bytes)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise EncodingError(f"the kernel {kernel.name} is described by {numbers!r:.80}")
        if not isinstance(kernel.log, str) or kernel.name in kernels:
            raise EncodingError(f"the kernel {kernel.name} is described twice, or by no text")
        kernels[kernel.name] = kernel
    return kernels


def _try_signature(captured: Captured) -> None:
    """Take arguments apart and put a result together once, as calls will."""
    graph = captured.graph
    captured.flatten(*captured.arguments([spec.meta() for spec in graph.given.values()]))
    captured.unflatten([graph.specs[name].meta() for name in graph.outputs])


def _check_parts(content: dict[str, Any], parts: Mapping[str, Tensor]) -> None:
    """Refuse parts of which the plan knows nothing, and constants of another one's part.

    Raises:
        EncodingError: naming the part.
    """
    held = {each["name"]: each["part"] for each in content["plan"]["graph"]["constants"]}
    for name, part in held.items():
        holder = str(part).removeprefix(_WEIGHTS)  # one tensor of several names is one part
        if held.get(holder) != part:
            raise EncodingError(f"the constant %{name} has the part {part!r}, not %{holder}")
    named = set(held.values())
    named.update(_CUBINS + info["name"] for info in content["kernels"])
    for name in parts:
        if name not in named and name != _PLAN:
            raise EncodingError(f"the part {name!r} belongs to nothing")
