"""The fused graph of a build as SVG: a box a launch, repeated layers once in a frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise

from gtco.reporting.build import Build, LaunchFacts, Layers
from gtco.reporting.layered import Drawing, Point, draw

_BOX = (196.0, 50.0)
_END = (196.0, 26.0)
"""A box that is an input or an output of the model."""
_PORT = (1.0, 1.0)
"""Where edges enter and leave a frame."""
_PAD, _HEAD = 12.0, 22.0
"""Around what a frame holds, and above it."""
_LETTERS = 23
"""Of a line in a box."""


def graph_svg(build: Build, colours: Mapping[str, int], prefix: str) -> str:
    """The drawing; each box links to `#{prefix}launch-{position}`.

    Args:
        build: the build.
        colours: family to the number of its colour.
        prefix: of ids in the page.
    """
    inputs = [_End(text) for text in build.inputs]
    units = [*inputs, *_units(build, colours, prefix)]
    home: dict[int, int] = {-1 - number: number for number in range(len(inputs))}
    for place, unit in enumerate(units):
        home |= dict.fromkeys(unit.positions, place)
    edges = [
        (home[maker], place)
        for place, unit in enumerate(units)
        for maker in unit.reads
        if home[maker] != place
    ]
    for text, maker in build.outputs:
        edges.append((home[maker], len(units)))
        units.append(_End(text))
    edges = list(dict.fromkeys(edges))
    drawing = draw([unit.size for unit in units], edges)
    parts = [_edge(path, (0.0, 0.0)) for path in drawing.paths]
    parts += [unit.svg(corner) for unit, corner in zip(units, drawing.corners, strict=True)]
    width, height = drawing.width + 8, drawing.height + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="group" aria-label="the fused graph" '
        f'width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="-4 -4 {width:.1f} {height:.1f}">{"".join(parts)}</svg>'
    )


class _End:
    """An input or an output of the model."""

    size = _END
    positions: Sequence[int] = ()
    reads: Sequence[int] = ()

    def __init__(self, text: str) -> None:
        self.text = text

    def svg(self, corner: Point) -> str:
        x, y = corner
        width, height = self.size
        return (
            f"<g><title>{escape(self.text)}</title>"
            f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{width}" height="{height}" rx="13"/>'
            f'<text class="small" text-anchor="middle" x="{x + width / 2:.1f}" y="{y + 17:.1f}">'
            f"{escape(short(self.text, 27))}</text></g>"
        )


class _Box:
    """A launch."""

    size = _BOX

    def __init__(self, build: Build, at: int, colours: Mapping[str, int], prefix: str) -> None:
        self.launch = build.launches[at]
        self.positions: Sequence[int] = (at,)
        self.reads: Sequence[int] = self.launch.reads
        self.us = build.launch_us(self.launch)
        self.colour = colours[self.launch.family]
        self.link = f"{prefix}launch-{at}"

    def svg(self, corner: Point) -> str:
        x, y = corner
        width, height = self.size
        launch = self.launch
        time = "" if self.us is None else f", {self.us:.2f} us"
        about = f"{launch.name}: {' -> '.join(launch.ops)}{time}"
        lines = (
            f'<text x="{x + 13:.1f}" y="{y + 20:.1f}">{escape(short(headline(launch)))}</text>'
            f'<text class="small" x="{x + 13:.1f}" y="{y + 38:.1f}">'
            f"{escape(short(f'{family_name(launch)}{time}', 30))}</text>"
        )
        return (
            f'<a href="#{self.link}" class="c{self.colour}"><title>{escape(about)}</title>'
            f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{width}" height="{height}" rx="5"/>'
            f'<rect style="fill:var(--c)" x="{x:.1f}" y="{y:.1f}" width="6" height="{height}"/>'
            f"{lines}</a>"
        )


class _Frame:
    """The first of repeated layers, drawn by itself."""

    def __init__(
        self, build: Build, layers: Layers, colours: Mapping[str, int], prefix: str
    ) -> None:
        first = range(layers.start, layers.start + layers.period)
        self.count = layers.count
        self.positions: Sequence[int] = range(
            layers.start, layers.start + layers.period * layers.count
        )
        self.boxes = [_Box(build, at, colours, prefix) for at in first]
        self.reads = [maker for box in self.boxes for maker in box.reads if maker not in first]
        entry, leave = 0, len(self.boxes) + 1
        edges = [
            (maker - layers.start + 1 if maker in first else entry, number)
            for number, box in enumerate(self.boxes, 1)
            for maker in box.reads
        ]
        edges += [(at - layers.start + 1, leave) for at in _leaving(build, layers)]
        sizes = [_PORT, *(box.size for box in self.boxes), _PORT]
        self.inside: Drawing = draw(sizes, list(dict.fromkeys(edges)))
        self.size = (self.inside.width + 2 * _PAD, self.inside.height + 2 * _PAD + _HEAD)

    def svg(self, corner: Point) -> str:
        x, y = corner
        origin = (x + _PAD, y + _PAD + _HEAD)
        width, height = self.size
        parts = [
            f'<rect class="frame" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" rx="8"/>',
            f'<text x="{x + _PAD:.1f}" y="{y + 20:.1f}">x{self.count}</text>',
        ]
        entry, *corners, leave = self.inside.corners
        top = (x + width / 2, y)
        bottom = (x + width / 2, y + height)
        parts.append(_edge((top, (origin[0] + entry[0], origin[1] + entry[1])), (0.0, 0.0)))
        parts += [_edge(path, origin) for path in self.inside.paths]
        parts.append(_edge(((origin[0] + leave[0], origin[1] + leave[1]), bottom), (0.0, 0.0)))
        parts += [
            box.svg((origin[0] + left, origin[1] + down))
            for box, (left, down) in zip(self.boxes, corners, strict=True)
        ]
        return "".join(parts)


def _leaving(build: Build, layers: Layers) -> list[int]:
    """Positions in the first layer whose values a later layer, or something behind them, reads."""
    end = layers.start + layers.period * layers.count
    inside = range(layers.start, end)
    found: set[int] = set()
    for at, launch in enumerate(build.launches):
        turn = (at - layers.start) // layers.period
        for maker in launch.reads:
            same = at in inside and (maker - layers.start) // layers.period == turn
            if maker in inside and not same:
                found.add(layers.start + (maker - layers.start) % layers.period)
    for _, maker in build.outputs:
        if maker in inside:
            found.add(layers.start + (maker - layers.start) % layers.period)
    return sorted(found)


def _units(build: Build, colours: Mapping[str, int], prefix: str) -> Iterable[_Box | _Frame]:
    for each in parts_of(build):
        if isinstance(each, Layers):
            yield _Frame(build, each, colours, prefix)
        else:
            yield _Box(build, each, colours, prefix)


def parts_of(build: Build) -> list[int | Layers]:
    """The launches in order: positions, and repeated layers as one."""
    starts = {each.start: each for each in build.layers}
    parts: list[int | Layers] = []
    at = 0
    while at < len(build.launches):
        layers = starts.get(at)
        parts.append(at if layers is None else layers)
        at += 1 if layers is None else layers.period * layers.count
    return parts


def _edge(path: Sequence[Point], origin: Point) -> str:
    points = [(x + origin[0], y + origin[1]) for x, y in path]
    text = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for number, (start, end) in enumerate(pairwise(points)):
        if number % 2:
            text += f"L{end[0]:.1f} {end[1]:.1f}"
            continue
        middle = (start[1] + end[1]) / 2
        text += f"C{start[0]:.1f} {middle:.1f} {end[0]:.1f} {middle:.1f} {end[0]:.1f} {end[1]:.1f}"
    return f'<path class="edge" d="{text}"/>'


def headline(launch: LaunchFacts) -> str:
    """What names a launch to its user: the module, or else the first operator."""
    return launch.layer or (launch.ops[0] if launch.ops else launch.name)


def family_name(launch: LaunchFacts) -> str:
    """Its family, and that ATen runs it where it does."""
    return f"{launch.family} in ATen" if launch.kernel == "aten" else launch.family


def short(text: str, letters: int = _LETTERS) -> str:
    """The end of a long text, which tells one module from another."""
    return text if len(text) <= letters else f"…{text[1 - letters :].lstrip('.')}"
