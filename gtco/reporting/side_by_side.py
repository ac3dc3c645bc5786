"""Two builds of the page side by side: whole calls, then each kind of launch."""

from __future__ import annotations

from html import escape

from gtco.reporting.build import Build
from gtco.reporting.graph_svg import family_name
from gtco.reporting.markup import chained, in_us, verdict_of

LETTERS = ("A", "B")
"""What the two builds are called, which may be of one model."""


def side_by_side(one: Build, other: Build) -> str:
    """Whole calls, then the time of each kind of launch, the largest difference first."""
    rows = [
        _row("a whole call", one.total_us, other.total_us, "", ""),
        _row("its floor", one.floor_us, other.floor_us, "", ""),
    ]
    verdicts = "".join(f'<td class="number">{verdict_of(each)}</td>' for each in (one, other))
    rows.append(f"<tr><td>answers and layers</td>{verdicts}<td></td></tr>")
    for name in dict.fromkeys((*one.times, *other.times)):
        rows.append(_row(name, one.times.get(name), other.times.get(name), "", ""))
    kinds = [_kinds(build) for build in (one, other)]
    nothing = (0, 0.0)
    names = sorted(
        dict.fromkeys((*kinds[0], *kinds[1])),
        key=lambda name: -abs(kinds[0].get(name, nothing)[1] - kinds[1].get(name, nothing)[1]),
    )
    for name in names:
        (few, us), (more, later_us) = (kind.get(name, nothing) for kind in kinds)
        rows.append(_row(name, us, later_us, f"{_launches(few)}, ", f"{_launches(more)}, "))
    mixed = ""
    if bool(one.times) != bool(other.times) or one.device != other.device:
        mixed = (
            '<p class="note">The two have no clock in common: one was timed on another GPU than '
            "the other, or not at all, so that their times say nothing of each other.</p>"
        )
    heads = "".join(f'<th class="number">{name}</th>' for name in (*LETTERS, "change"))
    return (
        f"<h2>Side by side</h2>{mixed}"
        f'<div class="scroll"><table class="sides"><thead><tr><th></th>{heads}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _kinds(build: Build) -> dict[str, tuple[int, float]]:
    """Launches and their microseconds, by the operators that they run."""
    kinds: dict[str, tuple[int, float]] = {}
    for launch in build.launches:
        name = f"{family_name(launch)}: {chained(launch.ops)}"
        count, us = kinds.get(name, (0, 0.0))
        kinds[name] = (count + 1, us + (build.launch_us(launch) or 0.0))
    return kinds


def _row(name: str, one: float | None, other: float | None, before: str, after: str) -> str:
    change = "" if not one or other is None else f"{other / one - 1:+.1%}"
    return (
        f'<tr><td>{escape(name)}</td><td class="number">{before}<span>{in_us(one)}</span></td>'
        f'<td class="number">{after}<span>{in_us(other)}</span></td>'
        f'<td class="number">{change}</td></tr>'
    )


def _launches(count: int) -> str:
    return "1 launch" if count == 1 else f"{count} launches"
