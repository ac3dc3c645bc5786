"""The page of `gtco report`: one build, or two side by side, in one file that needs nothing else.

All text comes from models and files, which nobody vouches for: each piece is escaped where it
enters the page, and the page's own policy runs no script but the template's.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template

from gtco.reporting.build import Build, KernelFacts, Layers
from gtco.reporting.graph_svg import family_name, graph_svg, headline, parts_of, short

_COLOURS = 8
"""In the template; further families take the last one."""
_FLOOR = (
    "Of a call: weights, inputs and outputs once from device memory, or the products alone, "
    "whichever takes longer. Of a kernel: its weights from device memory, all that it reads and "
    "writes through L2, or its products alone."
)


def page(builds: Sequence[Build]) -> str:
    """The HTML of one build, or of several to compare.

    Args:
        builds: at least one.
    """
    families = Counter(each.family for build in builds for each in build.launches)
    colours = {
        name: min(number, _COLOURS - 1) for number, (name, _) in enumerate(families.most_common())
    }
    titles = [_title(build) for build in builds]
    head = f"<h1>{' and '.join(escape(each) for each in titles)}</h1>"
    longest = max(_length(build) for build in builds)
    heads = [escape(each) for each in titles] if len(builds) > 1 else ["Summary"]
    sections = [
        f"<section><h2>{name}</h2>{_Section(build, colours, f'b{number}-', longest).html()}"
        "</section>"
        for number, (name, build) in enumerate(zip(heads, builds, strict=True))
    ]
    two = " two" if len(builds) > 1 else ""
    difference = _difference(builds[0], builds[1]) if len(builds) > 1 else ""
    body = f'{head}{difference}<main class="builds{two}">{"".join(sections)}</main>'
    template = files("gtco.reporting").joinpath("page.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)
    assert script is not None, "the template has its script"
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    return Template(template).substitute(
        title=escape(f"gtco: {' and '.join(titles)}"), body=body, script_hash=f"sha256-{digest}"
    )


def _title(build: Build) -> str:
    return f"{build.model} on {build.device or build.target}"


def _length(build: Build) -> float:
    return sum(build.launch_us(each) or 0.0 for each in build.launches)


class _Section:
    """One build.

    Args:
        build: the build.
        colours: family to the number of its colour.
        prefix: of its ids.
        longest: microseconds that the width of a timeline stands for.
    """

    def __init__(self, build: Build, colours: dict[str, int], prefix: str, longest: float) -> None:
        self.build = build
        self.colours = colours
        self.prefix = prefix
        self.longest = longest
        self.parts = parts_of(build)
        self.kernels = {kernel.name: kernel for kernel in build.kernels}

    def html(self) -> str:
        parts = (
            self._summary(),
            self._timeline(),
            self._graph(),
            self._launches(),
            self._errors(),
        )
        return "".join(parts)

    # -- summary -----------------------------------------------------------------------------------

    def _summary(self) -> str:
        build = self.build
        total = build.total_us
        kind = "back to back, measured" if build.times else "a call, predicted"
        generated = sum(each.kernel != "aten" for each in build.launches)
        tiles = [
            (_us(total), kind),
            (_us(build.floor_us), "floor of a call"),
            (_ratio(total, build.floor_us), "times the floor"),
            (str(len(build.launches)), f"launches, {generated} of them generated"),
        ]
        facts = [
            ("made by", f"gtco {build.gtco_version}"),
            *(("GPU", build.device) for _ in build.device[:1]),
            *((name, text) for name, text in build.options.items() if name != "target"),
            *((name, _us(us)) for name, us in build.times.items()),
            *build.summary,
        ]
        return (
            f'<p class="note">{escape(build.clock)}</p>'
            f'<div class="tiles">{"".join(_tile(*each) for each in tiles)}</div>'
            f'{_facts(facts)}<p class="soft">Floor: {_FLOOR}</p>'
        )

    # -- timeline ----------------------------------------------------------------------------------

    def _timeline(self) -> str:
        build = self.build
        bars = []
        for part in self.parts:
            if isinstance(part, Layers):
                inside = range(part.start, part.start + part.period * part.count)
                us = sum(build.launch_us(build.launches[at]) or 0.0 for at in inside)
                bars.append(
                    f'<span class="layers" title="x{part.count}" style="flex-grow:{us:.4f}">'
                    f"{''.join(map(self._bar, inside))}</span>"
                )
            else:
                bars.append(self._bar(part))
        rest = self.longest - _length(build)
        if rest > 1e-6:
            bars.append(f'<span style="flex-grow:{rest:.4f}"></span>')
        used = dict.fromkeys(each.family for each in build.launches)
        legend = "".join(
            f'<li class="c{self.colours[name]}"><i></i>{escape(name)}</li>' for name in used
        )
        return (
            "<h2>Timeline</h2>"
            '<p class="soft">Launches in order, as wide as their times; a line above marks '
            "repeated layers. The arrow keys walk along it, Enter goes to a launch.</p>"
            '<div class="line" tabindex="0" role="group" aria-label="timeline">'
            f"{''.join(bars)}</div>"
            f'<p class="soft" aria-live="polite">&nbsp;</p><ul class="legend">{legend}</ul>'
        )

    def _bar(self, at: int) -> str:
        launch = self.build.launches[at]
        us = self.build.launch_us(launch)
        about = f"{at + 1}. {headline(launch)}, {family_name(launch)}: {_us(us)}"
        return (
            f'<a class="c{self.colours[launch.family]}" tabindex="-1" title="{escape(about)}" '
            f'style="flex-grow:{us or 0.0:.4f}" href="#{self.prefix}launch-{self._card(at)}"></a>'
        )

    def _card(self, at: int) -> int:
        """The launch that stands for launch `at`: the one of the first of its layers."""
        for each in self.build.layers:
            if each.start <= at < each.start + each.period * each.count:
                return each.start + (at - each.start) % each.period
        return at

    # -- graph -------------------------------------------------------------------------------------

    def _graph(self) -> str:
        buttons = "".join(
            f'<button type="button" data-zoom="{what}" aria-label="{about}">{text}</button>'
            for what, about, text in (
                ("in", "zoom in", "+"),
                ("out", "zoom out", "&minus;"),
                ("fit", "fit the width", "fit"),
                ("full", "actual size", "1:1"),
            )
        )
        return (
            "<h2>Fused graph</h2>"
            '<p class="soft">A box is a launch and leads to its kernel; a dashed frame holds the '
            "first of repeated layers. Zoom with the buttons, two fingers, Ctrl and the wheel, or "
            "the keys +, - and f.</p>"
            f'<div class="tools">{buttons}</div>'
            '<div class="graph" tabindex="0" role="region" aria-label="fused graph, scrolls">'
            f"{graph_svg(self.build, self.colours, self.prefix)}</div>"
        )

    # -- launches ----------------------------------------------------------------------------------

    def _launches(self) -> str:
        build = self.build
        parts = []
        for part in self.parts:
            if isinstance(part, Layers):
                inside = range(part.start, part.start + part.period * part.count)
                cards = "".join(
                    self._launch(inside[place :: part.period]) for place in range(part.period)
                )
                us = sum(build.launch_us(build.launches[at]) or 0.0 for at in inside)
                parts.append(
                    f'<section class="layers"><h3>x{part.count}: layers of {part.period} '
                    f"launches, {_us(us)} together</h3>{cards}</section>"
                )
            else:
                parts.append(self._launch(range(part, part + 1)))
        return f"<h2>Kernels</h2>{''.join(parts)}"

    def _launch(self, positions: range) -> str:
        """One launch, or those that stand at the same place of repeated layers."""
        build = self.build
        alike = [build.launches[at] for at in positions]
        first = alike[0]
        times = [us for us in map(build.launch_us, alike) if us is not None]
        total = sum(times) if len(times) == len(alike) else None
        each = _us(times[0]) if times else "no time"
        if len(alike) > 1 and times:
            low, high = min(times), max(times)
            spread = _us(low) if low == high else f"{low:.2f} to {_us(high)}"
            each = f"{spread} each, {_us(total)} together"
        kind = "measured" if build.is_measured else "predicted"
        schedule = ", ".join(f"{name}={value}" for name, value in first.schedule.items())
        facts = [
            ("operators", " -> ".join(first.ops)),
            (f"time, {kind}", each),
            ("floor", f"{_us(first.floor_us)}; {_ratio(_first(times), first.floor_us)} times it"),
            ("moves", f"{first.nbytes / 1e6:.2f} MB"),
            ("kernel", ", ".join(dict.fromkeys(each.kernel for each in alike))),
            ("sketch", first.sketch),
            ("schedule", schedule),
            ("schedule from", ", ".join(dict.fromkeys(each.source for each in alike))),
            ("why ATen", first.reason),
            ("group", ", ".join(each.name for each in alike)),
            ("modules", f"{_listed(first.modules)}{', and alike' * (len(alike) > 1)}"),
        ]
        if build.is_measured and first.predicted_us is not None:
            facts.insert(2, ("predicted", _us(first.predicted_us)))
        kernels = dict.fromkeys(each.kernel for each in alike)
        known = [self.kernels[name] for name in kernels if name in self.kernels]
        apart = self._apart(positions)
        mark = f'<i class="c{self.colours[first.family]}"></i>'
        count = f" x{len(alike)}" if len(alike) > 1 else ""
        us = f'<span class="us">{_us(total)}</span>'
        return (
            f'<details id="{self.prefix}launch-{positions[0]}"><summary>'
            f'<span class="c{self.colours[first.family]}">{mark}</span>{us}'
            f"{positions[0] + 1}. {escape(headline(first))}{count} "
            f'<span class="soft">{escape(family_name(first))}</span></summary>'
            f"{_facts([(name, text) for name, text in facts if text])}"
            f"{apart}{''.join(map(_kernel, known))}</details>"
        )

    def _apart(self, positions: range) -> str:
        """Why the launches next to these are not fused with them."""
        lines = []
        for each in self.build.apart:
            if each.producer == each.consumer:
                continue
            if positions[0] in (each.producer, each.consumer):
                ahead = each.consumer == positions[0]
                other = each.producer if ahead else each.consumer
                where = "apart from the one ahead" if ahead else "apart from the one behind"
                name = headline(self.build.launches[other])
                lines.append(
                    f'<li>{where}, <a href="#{self.prefix}launch-{self._card(other)}">'
                    f"{other + 1}. {escape(name)}</a>: {escape(each.reason)} "
                    f'<span class="soft">({escape(each.edge)})</span></li>'
                )
        return f"<ul>{''.join(lines)}</ul>" if lines else ""

    # -- errors ------------------------------------------------------------------------------------

    def _errors(self) -> str:
        head = "<h2>Errors by layer</h2>"
        if not any(each.error for each in self.build.launches):
            return f'{head}<p class="soft">Nothing was checked: no kernel ran.</p>'
        rows = []
        for part in self.parts:
            if isinstance(part, Layers):
                end = part.start + part.period * part.count
                starts = range(part.start, part.start + part.period)
                rows += [self._error_row(range(at, end, part.period)) for at in starts]
            else:
                rows.append(self._error_row(range(part, part + 1)))
        return (
            f'{head}<p class="soft">Each group was given the values that the interpreter has '
            "there, and its outputs were held against the interpreter in fp64: the root of the "
            "mean squared error, of repeated layers that of the worst, and a bar for each, as high "
            "as its share of the limit.</p>"
            '<div class="scroll"><table><thead><tr><th>layer</th><th class="number">RMSE</th>'
            '<th class="number">limit</th><th>share of the limit</th><th>answer</th></tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div>"
        )

    def _error_row(self, positions: range) -> str:
        first = self.build.launches[positions[0]]
        errors = [self.build.launches[at].error for at in positions]
        known = [each for each in errors if each is not None]
        if not known:
            return ""
        shares = [
            1.0 if not each.limit or each.rmse is None else each.rmse / each.limit for each in known
        ]
        at = max(range(len(known)), key=lambda i: (not known[i].ok, shares[i]))
        worst = known[at]
        bars = "".join(
            f'<i{"" if each.ok else " class=wrong"} style="height:{min(1.0, share):.1%}"></i>'
            for each, share in zip(known, shares, strict=True)
        )
        count = f" x{len(known)}" if len(known) > 1 else ""
        answer = (
            '<span class="right">right</span>'
            if worst.ok
            else f'<span class="wrong">wrong</span> {escape(worst.reason)}'
        )
        return (
            f'<tr><td><a href="#{self.prefix}launch-{positions[0]}">{positions[0] + 1}. '
            f"{escape(short(headline(first), 40))}</a>{count}</td>"
            f'<td class="number">{_small(worst.rmse)}</td>'
            f'<td class="number">{_small(worst.limit)}</td>'
            f'<td><span class="bars">{bars}</span></td><td>{answer}</td></tr>'
        )


def _kernel(kernel: KernelFacts) -> str:
    numbers = [
        ("registers", kernel.registers, ""),
        ("shared memory", kernel.smem_bytes, " B"),
        ("spilled", kernel.spill_bytes, " B"),
        ("cubin", kernel.cubin_bytes, " B"),
    ]
    facts = [(name, f"{value}{unit}") for name, value, unit in numbers if value is not None]
    return (
        f"<details><summary>CUDA source of {escape(kernel.name)}</summary>{_facts(facts)}"
        f'<pre tabindex="0"><code>{escape(kernel.code)}</code></pre></details>'
    )


# -- two builds ------------------------------------------------------------------------------------


def _difference(one: Build, other: Build) -> str:
    """Whole calls, then the time of each kind of launch, the largest difference first."""
    rows = [
        _row("a whole call", one.total_us, other.total_us, "", ""),
        _row("its floor", one.floor_us, other.floor_us, "", ""),
    ]
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
    heads = "".join(f'<th class="number">{escape(_title(each))}</th>' for each in (one, other))
    return (
        f"<h2>Side by side</h2>{mixed}"
        f'<div class="scroll"><table><thead><tr><th></th>{heads}<th class="number">change</th></tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _kinds(build: Build) -> dict[str, tuple[int, float]]:
    """Launches and their microseconds, by the operators that they run."""
    kinds: dict[str, tuple[int, float]] = {}
    for launch in build.launches:
        name = f"{family_name(launch)}: {' -> '.join(launch.ops)}"
        count, us = kinds.get(name, (0, 0.0))
        kinds[name] = (count + 1, us + (build.launch_us(launch) or 0.0))
    return kinds


def _row(name: str, one: float | None, other: float | None, before: str, after: str) -> str:
    change = "" if not one or other is None else f"{other / one - 1:+.1%}"
    return (
        f'<tr><td>{escape(name)}</td><td class="number">{before}{_us(one)}</td>'
        f'<td class="number">{after}{_us(other)}</td><td class="number">{change}</td></tr>'
    )


def _launches(count: int) -> str:
    return "1 launch" if count == 1 else f"{count} launches"


# -- text ------------------------------------------------------------------------------------------


def _us(us: float | None) -> str:
    if us is None:
        return "no time"
    return f"{us:.2f} us" if us < 100 else f"{us:.0f} us"


def _small(number: float | None) -> str:
    return "" if number is None else f"{number:.2e}"


def _ratio(us: float | None, floor_us: float) -> str:
    return f"{us / floor_us:.2f}" if us is not None and floor_us > 0 else "no number of"


def _first(times: Sequence[float]) -> float | None:
    return times[0] if times else None


def _listed(names: Iterable[str], most: int = 40) -> str:
    unique = list(dict.fromkeys(names))
    more = f", and {len(unique) - most} more" if len(unique) > most else ""
    return f"{', '.join(unique[:most])}{more}"


def _tile(value: str, about: str) -> str:
    return f"<div><b>{escape(value)}</b>{escape(about)}</div>"


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f"<dl>{rows}</dl>"
