"""TensorRT beside gtco: an engine that another interpreter holds, and the times of `trtexec`."""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load, save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gtco.benchmarking.answers import Call, Inputs
from gtco.benchmarking.onnx_peer import export_onnx

RUNNER = Path(__file__).with_name("tensorrt_runner.py")


class TensorRTError(RuntimeError):
    """TensorRT, or the interpreter that has it, says no."""


@dataclass(frozen=True)
class TensorRTPlace:
    """Where TensorRT is.

    Args:
        python: an interpreter that imports `tensorrt`, or a script that becomes one.
        engines: a folder that keeps engines, what their building measured, and why others could
            not be built; None keeps nothing.
    """

    python: Path
    engines: Path | None = None


class TensorRTRunner:
    """The process that has TensorRT, see `tensorrt_runner`.

    Attributes:
        version: of TensorRT.

    Raises:
        TensorRTError: the interpreter does not start, or has no TensorRT.
    """

    def __init__(self, python: Path) -> None:
        try:
            self._process = subprocess.Popen(
                [python, RUNNER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise TensorRTError(f"{python} does not start: {error.strerror}") from error
        self._said: deque[str] = deque(maxlen=5)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self.version = str(self._answer()["tensorrt"])
        except TensorRTError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        """What the process answers to a command of its own.

        Raises:
            TensorRTError: it failed, or the process has ended.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended: the answer says so
            self._process.stdin.write(json.dumps({"do": do, **given}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def build(
        self, onnx: Path, engines: Path | None, patience: float | None = None
    ) -> dict[str, Any]:
        """Make the engine of a file ready; `tensorrt_runner` says what is known of it then.

        fp16 where the file has it, and tf32 where torch may use it for matrix products.

        Args:
            onnx: the file.
            engines: a folder that keeps the engine, or why there is none; None keeps nothing.
            patience: seconds after which it is given up.

        Raises:
            TensorRTError: TensorRT cannot parse or build it, or could not the last time.
        """
        tf32 = torch.get_float32_matmul_precision() != "highest"  # as torch's own peers
        if engines is None:
            return self._build(patience, onnx=str(onnx), tf32=tf32)
        engines.mkdir(parents=True, exist_ok=True)
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        with onnx.open("rb") as file:
            of_file = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        name = f"{self.version}-{card}".replace(" ", "_")
        kept = engines / f"{name}-{of_file}{'-tf32' * tf32}"
        engine, refusal = (kept.with_name(f"{kept.name}.{end}") for end in ("engine", "refused"))
        if refusal.exists():
            raise TensorRTError(refusal.read_text())
        cache = str(engines / f"{name}.cache")
        try:
            given = {"onnx": str(onnx), "engine": str(engine), "timing_cache": cache}
            return self._build(patience, **given, tf32=tf32)
        except TensorRTError as error:
            refusal.write_text(str(error))
            raise

    def _build(self, patience: float | None, **given: str | bool) -> dict[str, Any]:
        if patience is None:
            return self.ask("build", **given)
        clock = threading.Timer(patience, self._process.kill)
        clock.start()
        try:
            return self.ask("build", **given)
        except TensorRTError as error:
            if clock.is_alive():
                raise
            was_at = f", it was at: {self._said[-1]}" if self._said else ""
            raise TensorRTError(f"no engine after {patience:.0f} s{was_at}") from error
        finally:
            clock.cancel()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._listener.join(timeout=1)
            last = f": {self._said[-1]}" if self._said else ""
            raise TensorRTError(f"its process ended with {self._process.returncode}{last}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise TensorRTError(found["error"])
        return found

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            self._said.extend(line.strip() for line in lines if line.strip())


class TensorRT:
    """A model's engine as a contestant, and as its own clock.

    A call takes and gives what the model's does, through files. The times are of the CUDA graph of
    the engine alone, which reads the inputs where they were left and overwrites its outputs.

    Args:
        place: where TensorRT is.
        module: in eval mode, in the precision that counts.
        args: positional tensors to export it with.
        folder: takes files meanwhile.

    Attributes:
        facts: of the engine, and how it was built.

    Raises:
        TensorRTError: no TensorRT, or it refuses the model.
        RuntimeError: torch cannot export the model (of several types).
    """

    def __init__(
        self, place: TensorRTPlace, module: nn.Module, args: tuple[Any, ...], folder: Path
    ) -> None:
        self._folder = folder
        self._device = args[0].device
        self._runner = TensorRTRunner(place.python)
        self._placed: Inputs | None = None
        try:
            file = folder / "tensorrt.onnx"
            export_onnx(module, args, file)
            with torch.no_grad():
                _, self._structure = pytree.tree_flatten(module(*args))
            self.facts = self._runner.build(file, place.engines)
        except BaseException:
            self.close()
            raise
        self.facts["version"] = self._runner.version

    def close(self) -> None:
        """End its process."""
        self._runner.close()

    def __call__(self, *args: Tensor) -> Any:
        """The model's answer, in its structure."""
        outputs = self._folder / "outputs.safetensors"
        self._place(args, outputs)
        found = load(outputs.read_bytes())
        leaves = [found[spec["name"]].to(self._device) for spec in self.facts["outputs"]]
        return pytree.tree_unflatten(leaves, self._structure)

    def single(self, call: Call, inputs: Inputs) -> tuple[float, float]:
        """Microseconds until the answer is there, and until the call returned."""
        self._keep(inputs)
        found = self._runner.ask("single")
        return float(found["us"]), float(found["host_us"])

    def back_to_back(self, call: Call, inputs: Sequence[Inputs], calls: int) -> float:
        """Microseconds per call of `calls` calls in a row."""
        self._keep(inputs[0])
        return float(self._runner.ask("back_to_back", calls=calls)["us"])

    def _keep(self, inputs: Inputs) -> None:
        """Inputs of the timed calls; it costs too much to change them in between."""
        if self._placed is None:
            self._place(inputs[0], None)
            self._placed = inputs

    def _place(self, args: Sequence[Tensor], outputs: Path | None) -> None:
        file = self._folder / "inputs.safetensors"
        own = [x.clone(memory_format=torch.contiguous_format).cpu() for x in args]  # none is shared
        save_file({f"input_{index}": x for index, x in enumerate(own)}, file)
        self._placed = None
        self._runner.ask("run", inputs=str(file), outputs=None if outputs is None else str(outputs))


def read_trtexec(file: Path) -> list[float]:
    """Microseconds of the GPU's part of each call in what `trtexec --exportTimes` wrote.

    Raises:
        TensorRTError: it is no such file.
    """
    try:
        return [float(each["computeMs"]) * 1e3 for each in json.loads(file.read_text())]
    except (ValueError, TypeError, KeyError) as error:
        raise TensorRTError(
            f"{file} is not what trtexec --exportTimes writes: {type(error).__name__}: {error}"
        ) from error
