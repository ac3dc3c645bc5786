"""What a row of a table is: a model, or one operator at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from experiments.models.transformers_zoo import Model
from gtco.locate import Located, locate

Make = Callable[[], Located]

PEERS = (
    "untuned",
    "eager-calls",
    "eager",
    "torchscript",
    "inductor",
    "onnxruntime-cuda",
    "onnxruntime-tensorrt",
    "tensorrt",
)
LAYOUT_PEERS = ("eager-channels-last", "inductor-channels-last")
"""Besides, for models of convolutions."""
OF_A_CPU = ("onnxruntime",)
"""Besides, in a rehearsal: most others are missing there."""


class AnyRow(Protocol):
    """What `run` and `child` need of a row."""

    @property
    def name(self) -> str:
        """Of the row, for the command line."""

    @property
    def title(self) -> str:
        """For people."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Contestants that do not run by default, and why."""

    @property
    def calls(self) -> int | None:
        """Of a turn, if not as many as the table's other rows have."""

    def peers(self, quick: bool) -> tuple[str, ...]:
        """Of `gtco.benchmarking`."""

    def cases(self, quick: bool) -> dict[str, Make]:
        """What to bench, by the size; "" where there is one thing alone."""

    def facts(self, quick: bool) -> dict[str, Any]:
        """What the result says besides."""


@dataclass(frozen=True)
class Published:
    """Milliseconds that AutoGTCO's authors give, on an RTX 2080 Ti."""

    jit: float
    tensorrt: float
    ansor: float
    autogtco: float


@dataclass(frozen=True)
class Row:
    """One model.

    Args:
        name: a function of `experiments.models.<module>`, and of `experiments.models.small`.
        title: for people.
        module: where the model is.
        convolves: its images have a layout that matters.
        published: what its source says.
        left_out: contestants that do not run by default, and why.
        calls: of a turn, if not as many as the table's other rows have.
    """

    name: str
    title: str
    module: str = "convolutional"
    convolves: bool = True
    published: Published | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    calls: int | None = None

    def peers(self, quick: bool) -> tuple[str, ...]:
        layouts = LAYOUT_PEERS if self.convolves else ()
        return PEERS + layouts + (OF_A_CPU if quick else ())

    def cases(self, quick: bool) -> dict[str, Make]:
        return {"": partial(locate, self._model(quick))}

    def facts(self, quick: bool) -> dict[str, Any]:
        published = None if self.published is None else asdict(self.published)
        return {"model": self._model(quick), "published": published}

    def _model(self, quick: bool) -> str:
        return f"experiments.models.{'small' if quick else self.module}:{self.name}"


@dataclass(frozen=True)
class Sweep:
    """One operator, or model, at several sizes.

    Args:
        name: for the command line.
        title: for people, with what its sizes are.
        sizes: with which `make` is called.
        small: those of a rehearsal.
        make: the module and its arguments.
        small_make: likewise, of a rehearsal; None: the same.
        against: peers.
        left_out, calls: as of a `Row`.
    """

    name: str
    title: str
    sizes: tuple[int, ...]
    small: tuple[int, ...]
    make: Callable[[int], Model]
    small_make: Callable[[int], Model] | None = None
    against: tuple[str, ...] = ("eager", "inductor")
    left_out: Mapping[str, str] = field(default_factory=dict)
    calls: int | None = None

    def peers(self, quick: bool) -> tuple[str, ...]:
        return self.against + (OF_A_CPU if quick else ())

    def cases(self, quick: bool) -> dict[str, Make]:
        make = self.small_make if quick and self.small_make is not None else self.make
        return {str(size): partial(self._located, make, size) for size in self._sizes(quick)}

    def facts(self, quick: bool) -> dict[str, Any]:
        return {"sizes": self._sizes(quick)}

    def _sizes(self, quick: bool) -> tuple[int, ...]:
        return self.small if quick else self.sizes

    def _located(self, make: Callable[[int], Model], size: int) -> Located:
        module, args = make(size)
        return Located(f"{self.name} of {size}", module, args, {})
