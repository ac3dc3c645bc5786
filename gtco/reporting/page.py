"""The page of `gtco report`: one build, or two side by side, in one file that needs nothing else.

All text comes from models and files, which nobody vouches for: each piece is escaped where it
enters the page, and the page's own policy runs no script but the template's.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from gtco.reporting.build import Build, KernelFacts, Layers
from gtco.reporting.graph_svg import family_name, graph_svg, headline, parts_of, short
from gtco.reporting.markup import (
    answer_cell,
    breakable,
    chained,
    definitions,
    in_us,
    listed,
    number_heads,
    paragraph,
    quotient,
    scientific,
    tile,
    title_of,
    verdict_of,
)
from gtco.reporting.side_by_side import LETTERS, side_by_side

_COLOURS = 8
"""In the template; further families take the last one."""
_FLOOR = (
    "Of a call: weights, inputs and outputs once from device memory, or the products alone, "
    "whichever takes longer. Of a kernel: its weights from device memory, all that it reads and "
    "writes through L2, or its products alone."
)
_ATEN = (
    "These launches call torch's own operators, inside the same CUDA graph as the kernels where "
    "nothing above says otherwise."
)
_KERNELS = "The time of each launch, and how many times its floor that is."
_BY_LINEAR = (
    "How far calibration saw the model's outputs off, in relation to their size, with one linear "
    "(or convolution, or sum) in 8 bits and all others in 16. As much work as fits the budget runs "
    "in 8 bits."
)
_BY_LAYER = (
    "Each group was given the values that the interpreter has there, and its outputs were held "
    "against the interpreter in fp64: the root of the mean squared error, of repeated layers that "
    "of the worst, and a bar for each below a line that is the limit."
)
_UNCHECKED = "Nothing was checked: no kernel ran."


def page(builds: Sequence[Build]) -> str:
    """The HTML of one build, or of two to compare.

    Args:
        builds: one or two.
    """
    families = Counter(each.family for build in builds for each in build.launches)
    colours = {
        name: min(number, _COLOURS - 1) for number, (name, _) in enumerate(families.most_common())
    }
    titles = [title_of(build) for build in builds]
    if len(builds) > 1:
        titles = [f"{letter}: {each}" for letter, each in zip(LETTERS, titles, strict=True)]
    head = f"<h1>{'<br>'.join(map(breakable, titles))}</h1>"
    longest = max(_length(build) for build in builds)
    heads = [breakable(each) for each in titles] if len(builds) > 1 else ["Summary"]
    sections = [
        f"<section><h2>{name}</h2>{_Section(build, colours, f'b{number}-', longest).html()}"
        "</section>"
        for number, (name, build) in enumerate(zip(heads, builds, strict=True))
    ]
    two = " two" if len(builds) > 1 else ""
    difference = side_by_side(builds[0], builds[1]) if len(builds) > 1 else ""
    body = f'{head}{difference}<main class="builds{two}">{"".join(sections)}</main>'
    template = files("gtco.reporting").joinpath("page.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)
    assert script is not None, "the template has its script"
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    return Template(template).substitute(
        title=escape(f"gtco: {' and '.join(titles)}"), body=body, script_hash=f"sha256-{digest}"
    )


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
            self._answers(),
            self._in_aten(),
            self._timeline(),
            self._graph(),
            self._launches(),
            self._errors(),
            self._linears(),
        )
        return "".join(parts)

    # -- summary -----------------------------------------------------------------------------------

    def _summary(self) -> str:
        build = self.build
        total = build.total_us
        kind = "back to back, measured" if build.times else "a call, predicted"
        generated = sum(each.kernel != "aten" for each in build.launches)
        tiles = [
            (in_us(total), kind),
            (in_us(build.floor_us), "floor of a call"),
            (quotient(total, build.floor_us), "times the floor"),
            (str(len(build.launches)), f"launches, {generated} of them generated"),
            (verdict_of(build), "answers and layers"),
        ]
        facts = [
            ("made by", f"gtco {build.gtco_version}"),
            *(("GPU", build.device) for _ in build.device[:1]),
            *((name, text) for name, text in build.options.items() if name != "target"),
            *((name, in_us(us)) for name, us in build.times.items()),
            *build.summary,
        ]
        return (
            f'<p class="note">{escape(build.clock)}</p>'
            f'<div class="tiles">{"".join(tile(*each) for each in tiles)}</div>'
            f'{definitions(facts)}<p class="soft">Floor: {_FLOOR}</p>'
        )

    # -- answers -----------------------------------------------------------------------------------

    def _answers(self) -> str:
        build = self.build
        if not build.answers:
            return f"<h2>Answers</h2>{paragraph(build.reference or _UNCHECKED)}"
        rows = [
            f"<tr><td>{escape(each.output)}, inputs: {escape(each.inputs)}</td>"
            f"{answer_cell(each.judged)}"
            f'<td class="number">{scientific(each.judged.rmse)}</td>'
            f'<td class="number">{scientific(each.judged.limit)}</td>'
            f'<td class="number">{scientific(each.eager_rmse)}</td>'
            f'<td class="number">{scientific(each.judged.max_abs)}</td></tr>'
            for each in build.answers
        ]
        heads = number_heads("RMSE", "limit", "torch's RMSE", "largest error")
        return (
            f"<h2>Answers</h2>{paragraph(build.reference)}"
            f'<div class="scroll"><table><thead><tr><th>output</th><th>answer</th>{heads}</tr>'
            f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
        )

    # -- what ATen runs ----------------------------------------------------------------------------

    def _in_aten(self) -> str:
        """Launches that are no kernels of gtco's, by reason, and what the user may change."""
        build = self.build
        kinds: dict[str, list[int]] = {}
        for at, launch in enumerate(build.launches):
            if launch.kernel == "aten":
                kinds.setdefault(launch.reason, []).append(at)
        hints = "".join(f'<p class="note">{escape(each)}</p>' for each in build.hints)
        head = f"<h2>What ATen runs</h2>{hints}"
        if not kinds:
            return f"{head}{paragraph('Nothing: gtco generated the kernel of every launch.')}"
        parts = []
        for reason, positions in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
            ops = Counter(chained(build.launches[at].ops) for at in positions)
            times = [build.launch_us(build.launches[at]) for at in positions]
            known = [us for us in times if us is not None]
            links = [
                f'<a href="#{self.prefix}launch-{card}">{card + 1}</a>'
                for card in dict.fromkeys(map(self._card, positions))
            ]
            facts = [
                ("operators", listed(f"{count} x {name}" for name, count in ops.most_common())),
                ("time", in_us(sum(known) if len(known) == len(times) else None)),
                ("why", reason),
            ]
            parts.append(
                f'<section class="aten">{definitions(facts)}<p class="soft">'
                f"launches {', '.join(links)} below</p></section>"
            )
        return f"{head}{paragraph(_ATEN)}{''.join(parts)}"

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
        about = f"{at + 1}. {headline(launch)}, {family_name(launch)}: {in_us(us)}"
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
                    f"launches, {in_us(us)} together</h3>{cards}</section>"
                )
            else:
                parts.append(self._launch(range(part, part + 1)))
        return f"<h2>Kernels</h2>{paragraph(_KERNELS)}{''.join(parts)}"

    def _launch(self, positions: range) -> str:
        """One launch, or those that stand at the same place of repeated layers."""
        build = self.build
        alike = [build.launches[at] for at in positions]
        first = alike[0]
        times = [us for us in map(build.launch_us, alike) if us is not None]
        total = sum(times) if len(times) == len(alike) else None
        over = quotient(times[0] if times else None, first.floor_us)
        each = in_us(times[0]) if times else "no time"
        if len(alike) > 1 and times:
            low, high = min(times), max(times)
            spread = in_us(low) if low == high else f"{low:.2f} to {in_us(high)}"
            each = f"{spread} each, {in_us(total)} together"
        kind = "measured" if build.is_measured else "predicted"
        schedule = ", ".join(f"{name}={value}" for name, value in first.schedule.items())
        facts = [
            ("operators", chained(first.ops)),
            (f"time, {kind}", each),
            ("floor", f"{in_us(first.floor_us)}; {over} times it"),
            ("moves", f"{first.nbytes / 1e6:.2f} MB"),
            ("kernel", ", ".join(dict.fromkeys(each.kernel for each in alike))),
            ("sketch", first.sketch),
            ("schedule", schedule),
            ("schedule from", ", ".join(dict.fromkeys(each.source for each in alike))),
            ("why ATen", first.reason),
            ("group", ", ".join(each.name for each in alike)),
            ("modules", f"{listed(first.modules)}{', and alike' * (len(alike) > 1)}"),
        ]
        if build.is_measured and first.predicted_us is not None:
            facts.insert(2, ("predicted", in_us(first.predicted_us)))
        kernels = dict.fromkeys(each.kernel for each in alike)
        known = [self.kernels[name] for name in kernels if name in self.kernels]
        apart = self._apart(positions)
        mark = f'<i class="c{self.colours[first.family]}"></i>'
        count = f" x{len(alike)}" if len(alike) > 1 else ""
        slow = ""
        if times and first.floor_us:
            slow = f', <span class="soft">{times[0] / first.floor_us:.1f}x</span>'
        us = f'<span class="us">{in_us(total)}{slow}</span>'
        return (
            f'<details id="{self.prefix}launch-{positions[0]}"><summary>'
            f'<span class="c{self.colours[first.family]}">{mark}</span>{us}'
            f"{positions[0] + 1}. {breakable(headline(first))}{count} "
            f'<span class="soft">{escape(family_name(first))}</span></summary>'
            f"{definitions([(name, text) for name, text in facts if text])}"
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
            return f"{head}{paragraph(_UNCHECKED)}"
        rows = []
        for part in self.parts:
            if isinstance(part, Layers):
                end = part.start + part.period * part.count
                starts = range(part.start, part.start + part.period)
                rows += [self._error_row(range(at, end, part.period)) for at in starts]
            else:
                rows.append(self._error_row(range(part, part + 1)))
        return (
            f"{head}{paragraph(_BY_LAYER)}"
            '<div class="scroll"><table><thead><tr><th>layer</th><th>answer</th>'
            f"{number_heads('RMSE', 'limit')}<th>share of the limit</th></tr></thead>"
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
        return (
            f'<tr><td><a href="#{self.prefix}launch-{positions[0]}">{positions[0] + 1}. '
            f"{escape(short(headline(first), 40))}</a>{count}</td>{answer_cell(worst)}"
            f'<td class="number">{scientific(worst.rmse)}</td>'
            f'<td class="number">{scientific(worst.limit)}</td>'
            f'<td>{shares[at]:.0%} <span class="bars">{bars}</span></td></tr>'
        )

    # -- 8 bits ------------------------------------------------------------------------------------

    def _linears(self) -> str:
        linears = self.build.linears
        if not linears:
            return ""
        rows = [
            f"<tr><td>{escape(short(each.layer or each.name, 40))}</td>"
            f"<td>{escape(each.shape)}</td>"
            f'<td class="number">{each.error:.2%}</td>'
            f"<td>{escape(f'16 bits: {each.kept}' if each.kept else each.dtype)}</td></tr>"
            for each in linears
        ]
        return (
            f"<h2>Errors of 8 bits by linear</h2>{paragraph(_BY_LINEAR)}"
            '<div class="scroll"><table><thead><tr><th>linear</th><th>operands</th>'
            f"{number_heads('error')}<th>runs in</th></tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table></div>"
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
        f"<details><summary>CUDA source of {escape(kernel.name)}</summary>{definitions(facts)}"
        f'<pre tabindex="0"><code>{escape(kernel.code)}</code></pre></details>'
    )
