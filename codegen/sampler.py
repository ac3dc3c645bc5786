"""Programs of one group: the defaults, random ones, mutations, crossings and neighbours.

Whatever leaves a sampler is legal: a sketch emitted it. Emitting takes 0.1 to 0.4 ms, and each
schedule is tried once: asked for again, it is the same object, or refused at once.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import Illegal, Knob, Schedule, Sketch

OTHERS = 1 / 6
"""How often a sketch is drawn that is not the preferred one, which counts 1."""
ENUMERATE = 4096
"""Largest product of knobs that is tried as a whole: drawing at random would miss its rare ones."""
TRIES = 40
"""Changes of one program that are tried before a sampler says that none is legal."""
PATIENCE = 1000
"""Draws without a new program before it says that it finds no more."""

Key = tuple[str, tuple[tuple[str, int], ...]]
"""A sketch's name and its schedule, sorted by knob: what tells one program from another."""


def schedule_key(sketch: str, schedule: Schedule) -> Key:
    """The key of `schedule` of the sketch called `sketch`."""
    return sketch, tuple(sorted(schedule.items()))


@dataclass(frozen=True, eq=False)
class Candidate:
    """One program of a task, and the sketch it came from."""

    sketch: Sketch
    program: KernelProgram

    @property
    def key(self) -> Key:
        return schedule_key(self.sketch.name, self.program.schedule)


class Sampler:
    """Draws programs of the sketches of one group.

    Args:
        sketches: from `gtco.codegen.rules.derive`, preferred first.
        seed: two samplers of one seed that are asked the same draw the same.

    Attributes:
        refused: how often each limit refused a schedule: "sketch: reason" with N for the numbers.
    """

    def __init__(self, sketches: Sequence[Sketch], seed: int) -> None:
        self.sketches = tuple(sketches)
        self.refused: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._knobs = {sketch.name: sketch.knobs() for sketch in sketches}
        self._known: dict[Key, Candidate | None] = {}
        self._whole: dict[str, list[Candidate]] = {}

    def make(self, sketch: Sketch, schedule: Schedule) -> Candidate | None:
        """The program of `schedule`, or None (and one more in `refused`) if it is not legal."""
        key = schedule_key(sketch.name, schedule)
        if key not in self._known:
            try:
                self._known[key] = Candidate(sketch, sketch.emit(dict(schedule)))
            except Illegal as error:
                self._known[key] = None
                self.refused[f"{sketch.name}: {re.sub(r'[0-9]+', 'N', str(error))}"] += 1
        return self._known[key]

    def adopt(self, name: str, schedule: Schedule) -> Candidate | None:
        """The program of another task's `schedule` of the sketch called `name`.

        Values that this group does not offer become the nearest that it does, and a knob that is
        newer than the schedule has its first choice, as has one more where that alone makes it
        legal: tiles of other numbers may come in no clusters. None if no sketch is called so, it
        lacks a knob of the schedule, or the result is not legal here.
        """
        sketch = next((each for each in self.sketches if each.name == name), None)
        if sketch is None or not set(schedule) <= {knob.name for knob in self._knobs[name]}:
            return None
        knobs = {knob.name: knob.choices for knob in self._knobs[name]}
        whole = {knob: schedule.get(knob, choices[0]) for knob, choices in knobs.items()}
        nearest = {
            knob: min((abs(choice - whole[knob]), choice) for choice in choices)[1]
            for knob, choices in knobs.items()
        }
        less = ({**nearest, name: knobs[name][0]} for name in reversed(knobs))
        made = (self.make(sketch, each) for each in itertools.chain((whole, nearest), less))
        return next(filter(None, made), None)

    def defaults(self, count: int) -> list[Candidate]:
        """The first `count` default programs of the preferred sketch, fewer of the others."""
        found: dict[Key, Candidate] = {}
        for position, sketch in enumerate(self.sketches):
            most = count if position == 0 else math.ceil(count * OTHERS)
            made = (self.make(sketch, schedule) for schedule in sketch.defaults())
            for candidate in itertools.islice(filter(None, made), most):
                found[candidate.key] = candidate
        return list(found.values())

    def random(self, count: int) -> list[Candidate]:
        """Up to `count` different programs drawn from all sketches."""
        found: dict[Key, Candidate] = {}
        if not self.sketches:
            return []
        weights = [1.0] + [OTHERS] * (len(self.sketches) - 1)
        misses = 0
        while len(found) < count and misses < PATIENCE:
            (sketch,) = self._random.choices(self.sketches, weights)
            candidate = self._draw(sketch)
            if candidate is None or candidate.key in found:
                misses += 1
            else:
                found[candidate.key] = candidate
                misses = 0
        return list(found.values())

    def mutate(self, candidate: Candidate) -> Candidate | None:
        """`candidate` with one to three knobs drawn anew; None if no legal one was found."""
        knobs = [k for k in self._knobs[candidate.sketch.name] if len(k.choices) > 1]
        if not knobs:
            return None
        for _ in range(TRIES):
            schedule = dict(candidate.program.schedule)
            (number,) = self._random.choices((1, 2, 3), (6, 3, 1))
            for knob in self._random.sample(knobs, min(number, len(knobs))):
                others = [value for value in knob.choices if value != schedule[knob.name]]
                schedule[knob.name] = self._random.choice(others)
            changed = self.make(candidate.sketch, schedule)
            if changed is not None:
                return changed
        return None

    def crossover(self, first: Candidate, second: Candidate) -> Candidate | None:
        """Each knob from either parent; None if they have two sketches or no child is legal."""
        if first.sketch.name != second.sketch.name:
            return None
        parents = (first.program.schedule, second.program.schedule)
        for _ in range(TRIES):
            schedule = {name: self._random.choice(parents)[name] for name in parents[0]}
            child = self.make(first.sketch, schedule)
            if child is not None and child.key not in (first.key, second.key):
                return child
        return None

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """All programs one step of one knob away."""
        schedule = candidate.program.schedule
        found = []
        for knob in self._knobs[candidate.sketch.name]:
            for value in _beside(knob, schedule[knob.name]):
                near = self.make(candidate.sketch, {**schedule, knob.name: value})
                if near is not None:
                    found.append(near)
        return found

    def rings(self, candidate: Candidate) -> list[Candidate]:
        """All other programs of its tile: every value of the knobs of its ring."""
        ring = [k for k in self._knobs[candidate.sketch.name] if k.name in candidate.sketch.ring]
        found = []
        for values in itertools.product(*(knob.choices for knob in ring)):
            changed = {knob.name: value for knob, value in zip(ring, values, strict=True)}
            other = self.make(candidate.sketch, {**candidate.program.schedule, **changed})
            if other is not None and other.key != candidate.key:
                found.append(other)
        return found

    def _draw(self, sketch: Sketch) -> Candidate | None:
        knobs = self._knobs[sketch.name]
        if math.prod(len(knob.choices) for knob in knobs) <= ENUMERATE:
            whole = self._all(sketch)
            return self._random.choice(whole) if whole else None
        return self.make(sketch, {k.name: self._random.choice(k.choices) for k in knobs})

    def _all(self, sketch: Sketch) -> list[Candidate]:
        """Every legal program of a small sketch."""
        if sketch.name not in self._whole:
            knobs = self._knobs[sketch.name]
            products = itertools.product(*(knob.choices for knob in knobs))
            names = [knob.name for knob in knobs]
            made = (self.make(sketch, dict(zip(names, each, strict=True))) for each in products)
            self._whole[sketch.name] = [candidate for candidate in made if candidate is not None]
        return self._whole[sketch.name]


def _beside(knob: Knob, value: int) -> list[int]:
    """The next smaller and the next larger choice."""
    smaller = [choice for choice in knob.choices if choice < value]
    larger = [choice for choice in knob.choices if choice > value]
    return [*([max(smaller)] if smaller else []), *([min(larger)] if larger else [])]
