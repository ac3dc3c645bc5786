"""What a program does, in numbers, and the features that the learned cost model sees.

`work_of` describes a program before it is compiled: the group's arithmetic and bytes, and what one
block of the program does of them (`gtco.codegen.sketch.BlockWork`). A `TuningRecord` carries it, so
that a model can be trained from records alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gtco.codegen.sampler import Candidate
from gtco.target import Target

FEATURES_VERSION = 1
"""Moves whenever a feature is added, dropped or computed otherwise."""


@dataclass(frozen=True)
class Work:
    """One program of one group in numbers; the unit is in the name, else a count."""

    sketch: str

    def to_dict(self) -> dict[str, float | str]:
        """As JSON values: the `work` of a `TuningRecord`."""
        raise NotImplementedError

    @staticmethod
    def from_dict(data: Mapping[str, float | str]) -> Work:
        """What `to_dict` wrote."""
        raise NotImplementedError


def work_of(candidate: Candidate) -> Work:
    """The numbers of one program; the group's part is computed once a sketch."""
    raise NotImplementedError


def features(work: Work, target: Target) -> dict[str, float]:
    """One documented number each, in the order of `FEATURES`."""
    raise NotImplementedError
