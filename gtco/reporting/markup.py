"""Pieces of the page: numbers, tables and lists as text that is safe in HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from gtco.reporting.build import Build, Judged


def title_of(build: Build) -> str:
    return f"{build.model} on {build.device or build.target}"


def breakable(text: str) -> str:
    """`text` for HTML, that goes on in the next line between its words alone."""
    return re.sub(r"([.:/_])(?=\w)", r"\1<wbr>", escape(text))


def chained(operators: Iterable[str]) -> str:
    """Operators in their order."""
    return " \N{RIGHTWARDS ARROW} ".join(operators)


def in_us(us: float | None) -> str:
    if us is None:
        return "no time"
    return f"{us:.2f} us" if us < 100 else f"{us:.0f} us"


def scientific(number: float | None) -> str:
    return "" if number is None else f"{number:.2e}"


def quotient(us: float | None, floor_us: float) -> str:
    return f"{us / floor_us:.2f}" if us is not None and floor_us > 0 else "no number of"


def listed(names: Iterable[str], most: int = 40) -> str:
    unique = list(dict.fromkeys(names))
    more = f", and {len(unique) - most} more" if len(unique) > most else ""
    return f"{', '.join(unique[:most])}{more}"


def tile(value: str, about: str) -> str:
    return f"<div><b>{escape(value)}</b>{escape(about)}</div>"


def paragraph(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def number_heads(*names: str) -> str:
    """Heads of columns of numbers."""
    return "".join(f'<th class="number">{escape(name)}</th>' for name in names)


def answer_cell(judged: Judged) -> str:
    if judged.ok:
        return '<td><span class="right">right</span></td>'
    return f'<td><span class="wrong">wrong</span> {escape(judged.reason)}</td>'


def verdict_of(build: Build) -> str:
    """Whether all that was checked is right."""
    if build.wrong:
        return "wrong"
    return "right" if build.answers else "not checked"


def definitions(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f"<dl>{rows}</dl>"
