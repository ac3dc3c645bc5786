"""Attention of windows of equal length that lie one behind another is one node.

    %q0 = slice(%q: f16[1,16,1536,80], dim=2, start=0, end=64)   %a0 = attention(%q0, %k0, %v0)
    %q1 = slice(%q, dim=2, start=64, end=128)                    %a1 = attention(%q1, %k1, %v1)
    %y: f16[1,16,1536,80] = concat(%a0, %a1, ..., dim=2)
        ->  %w: f16[24,16,64,80] = reshape(permute(reshape(%q)))
            %y = reshape(permute(reshape(attention(%w, ...))))

Towers of images of several sizes loop over windows, and over images, so that each layer would have
as many kernels as there are windows. Where an image is no multiple of a window, those at its right
border are shorter and stand behind each row of the others: the whole windows of all rows are one
node then, and the short ones of all rows another. Windows of other lengths stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from gtco.ir.graph import Graph, Node
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

TOKENS = 2
"""Their dimension in [batch, heads, tokens, width]."""
TURNED = (0, 2, 1, 3)
"""To [batch, tokens, heads, width], and back."""
IN_ROW = 3
"""The dimension of a row's tokens in [batch, heads, rows, tokens, width]."""
MOST_RUNS = 4
"""Of a row: whole windows and one cut at the border, twice where rows at the border are cut too."""


@dataclass(frozen=True)
class _Window:
    """Attention of the tokens from `start` to `end` of `whole`, the queries, keys and values.

    Args:
        node: the attention.
        whole: of `tokens` each.
    """

    node: Node
    whole: tuple[str, str, str]
    tokens: int
    start: int
    end: int

    def is_ahead_of(self, other: _Window) -> bool:
        """Whether `other` is the next window of the same, and computed alike."""
        return (
            self.whole == other.whole
            and self.end == other.start
            and dict(self.node.attrs) == dict(other.node.attrs)
        )


def _length(window: _Window) -> int:
    return window.end - window.start


Run = tuple[_Window, ...]
"""Windows of one length, one behind another, which one node can compute."""


@dataclass(frozen=True)
class _Rows:
    """Operands of a concat that are windows, or one that is none.

    Args:
        operands: of the concat, in order.
        runs: of a row of windows, of the first one; none of an operand that is no window.
        count: of rows, in which runs are alike.
    """

    operands: tuple[str, ...]
    runs: tuple[Run, ...]
    count: int


@dataclass(frozen=True)
class _Match:
    """A concat of windows.

    Args:
        concat: the node.
        rows: its operands in order, those together that one node can compute for each run.
        turned: whether they are [batch, tokens, heads, width].
    """

    concat: Node
    rows: tuple[_Rows, ...]
    turned: bool


def _match(edit: Editor, node: Node) -> _Match | None:
    rank = node.outputs[0].rank
    dim = node.attrs["dim"] % rank if rank == len(TURNED) else 0
    if dim not in (TOKENS, TURNED[TOKENS]):
        return None
    turned = dim != TOKENS
    rows = tuple(_in_rows([(name, _window(edit, name, turned)) for name in node.inputs]))
    if all(len(row.operands) == 1 for row in rows):
        return None
    return _Match(node, rows, turned)


def _in_rows(operands: Sequence[tuple[str, _Window | None]]) -> Iterator[_Rows]:
    """Those together that leave the fewest nodes."""
    at = 0
    while at < len(operands):
        windows: list[_Window] = []  # one behind another
        for _, window in operands[at:]:
            if window is None or (windows and not windows[-1].is_ahead_of(window)):
                break
            windows.append(window)
        best, saved = _Rows((operands[at][0],), (), 1), 0
        runs: tuple[Run, ...] = ()
        for _, run in itertools.islice(itertools.groupby(windows, _length), MOST_RUNS):
            runs = (*runs, tuple(run))
            length = sum(map(len, runs))
            count = _repeats(windows, length)
            all_tokens = (
                windows[0].start == 0 and windows[count * length - 1].end == windows[0].tokens
            )
            if len(runs) > 1 and all_tokens:
                # Rows of all tokens would be another view of what those are a view of, and no value
                # would be left that is rotated as a whole (passes/rotary.py).
                count -= 1
            if (count > 1 or len(runs) == 1) and count * length - len(runs) > saved:
                saved = count * length - len(runs)
                names = tuple(name for name, _ in operands[at : at + count * length])
                best = _Rows(names, runs, count)
        yield best
        at += len(best.operands)


def _repeats(windows: Sequence[_Window], length: int) -> int:
    """How often as many windows come as the first `length` are."""
    lengths = list(map(_length, windows))
    count = 1
    while lengths[count * length : (count + 1) * length] == lengths[:length]:
        count += 1
    return count


def _window(edit: Editor, value: str, turned: bool) -> _Window | None:
    if not edit.read_once(value):
        return None
    if turned:
        permute = edit.producer(value, "permute")
        if permute is None or tuple(permute.attrs["dims"]) != TURNED:
            return None
        (value,) = permute.inputs
    node = edit.producer(value, "attention")
    if node is None or len(node.inputs) != 3 or not edit.read_once(value):
        return None
    cuts = [edit.producer(name) for name in node.inputs]
    found = [
        (cut.inputs[0], cut.attrs["start"], cut.attrs["end"]) for cut in cuts if cuts_tokens(cut)
    ]
    if len(found) < len(cuts) or len({(start, end) for _, start, end in found}) > 1:
        return None
    q, k, v = (whole for whole, _, _ in found)
    _, start, end = found[0]
    return _Window(node, (q, k, v), edit.shape(q)[TOKENS], start, end)


def cuts_tokens(node: Node | None) -> TypeGuard[Node]:
    """Whether `node` takes neighbouring tokens out of [batch, heads, tokens, width]."""
    return (
        node is not None
        and node.op == "slice"
        and node.outputs[0].rank == len(TURNED)
        and node.attrs["dim"] % len(TURNED) == TOKENS
        and node.attrs.get("step", 1) == 1
    )


def _replace(edit: Editor, match: _Match) -> str:
    made: list[str] = []
    for row in match.rows:
        made += row.operands if len(row.operands) == 1 else _joined(edit, row, match.turned)
    return made[0] if len(made) == 1 else edit.add("concat", *made, dim=match.concat.attrs["dim"])


def _joined(edit: Editor, row: _Rows, turned: bool) -> list[str]:
    """What the windows of all rows compute, by a node for each run, as the concat reads it: all
    tokens, or where there are several runs those of each by itself."""
    first = row.runs[0][0]
    period = sum(_length(window) for run in row.runs for window in run)
    made = []
    for run in row.runs:
        count, length = len(run), _length(run[0])
        at = run[0].start - first.start
        apart = []
        for name in first.whole:
            batch, heads, tokens, width = edit.shape(name)
            if tokens != row.count * period:
                end = first.start + row.count * period
                name = edit.add("slice", name, dim=TOKENS, start=first.start, end=end)
            if len(row.runs) > 1:
                name = edit.add("reshape", name, shape=(batch, heads, row.count, period, width))
                name = edit.add("slice", name, dim=IN_ROW, start=at, end=at + count * length)
            apart_shape = (batch, heads, row.count, count, length, width)
            name = edit.add("reshape", name, shape=apart_shape)
            name = edit.add("permute", name, dims=(0, 2, 3, 1, 4, 5))
            shape = (batch * row.count * count, heads, length, width)
            apart.append(edit.add("reshape", name, shape=shape))
        y = edit.add("attention", *apart, **first.node.attrs)
        batch = first.node.outputs[0].sizes[0]
        _, heads, _, width = edit.shape(y)
        y = edit.add("reshape", y, shape=(batch, row.count, count, heads, length, width))
        if turned:
            y = edit.add("permute", y, dims=(0, 1, 2, 4, 3, 5))
        else:
            y = edit.add("permute", y, dims=(0, 3, 1, 2, 4, 5))
        made.append(y)
    if len(made) == 1:
        return [_tokens_of(edit, made[0], turned)]
    rows = 1 if turned else 2
    return [
        _tokens_of(edit, edit.add("slice", y, dim=rows, start=i, end=i + 1), turned)
        for i in range(row.count)
        for y in made
    ]


def _tokens_of(edit: Editor, value: str, turned: bool) -> str:
    """[batch, rows, windows, tokens, heads, width], or with the heads ahead of the rows where it is
    not turned, as of rank four."""
    shape = edit.shape(value)
    if turned:
        batch, rows, windows, tokens, heads, width = shape
        return edit.add("reshape", value, shape=(batch, rows * windows * tokens, heads, width))
    batch, heads, rows, windows, tokens, width = shape
    return edit.add("reshape", value, shape=(batch, heads, rows * windows * tokens, width))


def whole_of_windows(edit: Editor, value: str) -> str | None:
    """[batch, heads, tokens, width] of which `value` has some tokens, as windows or as this pass
    takes rows of them."""
    view = _behind_turns(edit, value)
    if view is not None and view.op == "slice" and view.outputs[0].rank == IN_ROW + 2:
        rows = edit.producer(view.inputs[0], "reshape")
        if rows is None or view.attrs["dim"] != IN_ROW:
            return None
        (whole,) = rows.inputs
        view = edit.producer(whole)
        return view.inputs[0] if cuts_tokens(view) else whole
    return view.inputs[0] if cuts_tokens(view) else None


def _behind_turns(edit: Editor, value: str) -> Node | None:
    """The first node ahead of `value` that is neither a reshape nor a permute."""
    node = edit.producer(value)
    while node is not None and node.op in ("reshape", "permute"):
        node = edit.producer(node.inputs[0])
    return node


RULES: tuple[Rule[Any], ...] = (
    Rule("concat(attention(slice(q, i), ...), attention(slice(q, i + 1), ...)) -> attention(q)",
         ("concat",), _match, _replace),
)  # fmt: skip


def join_windows(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
