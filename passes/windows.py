"""Attention of windows of equal length that lie one behind another is one node.

    %q0 = slice(%q: f16[1,16,1536,80], dim=2, start=0, end=64)   %a0 = attention(%q0, %k0, %v0)
    %q1 = slice(%q, dim=2, start=64, end=128)                    %a1 = attention(%q1, %k1, %v1)
    %y: f16[1,16,1536,80] = concat(%a0, %a1, ..., dim=2)
        ->  %w: f16[24,16,64,80] = reshape(permute(reshape(%q)))
            %y = reshape(permute(reshape(attention(%w, ...))))

Towers of images of several sizes loop over windows, and over images, so that each layer would have
as many kernels as there are windows. Those of other lengths, as at borders, stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from gtco.ir.graph import Graph, Node
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

TOKENS = 2
"""Their dimension in [batch, heads, tokens, width]."""
TURNED = (0, 2, 1, 3)
"""To [batch, tokens, heads, width], and back."""


@dataclass(frozen=True)
class _Window:
    """Attention of the tokens from `start` to `end` of `whole`, the queries, keys and values."""

    node: Node
    whole: tuple[str, str, str]
    start: int
    end: int

    def is_ahead_of(self, other: _Window) -> bool:
        """Whether one node can compute both, `other` as the next window."""
        return (
            self.whole == other.whole
            and self.end == other.start
            and self.end - self.start == other.end - other.start
            and dict(self.node.attrs) == dict(other.node.attrs)
        )


@dataclass(frozen=True)
class _Match:
    """A concat of windows.

    Args:
        concat: the node.
        runs: its operands in order, those together that one node can compute.
        turned: whether they are [batch, tokens, heads, width].
    """

    concat: Node
    runs: tuple[tuple[tuple[str, _Window | None], ...], ...]
    turned: bool


def _match(edit: Editor, node: Node) -> _Match | None:
    rank = node.outputs[0].rank
    dim = node.attrs["dim"] % rank if rank == len(TURNED) else 0
    if dim not in (TOKENS, TURNED[TOKENS]):
        return None
    turned = dim != TOKENS
    found = [(name, _window(edit, name, turned)) for name in node.inputs]
    runs = [[found[0]]]
    for before, after in pairwise(found):
        if before[1] is not None and after[1] is not None and before[1].is_ahead_of(after[1]):
            runs[-1].append(after)
        else:
            runs.append([after])
    if len(runs) == len(found):
        return None
    return _Match(node, tuple(map(tuple, runs)), turned)


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
    return _Window(node, (q, k, v), start, end)


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
    made = []
    for run in match.runs:
        windows = [window for _, window in run if window is not None]
        made.append(run[0][0] if len(run) == 1 else _joined(edit, windows, match.turned))
    return made[0] if len(made) == 1 else edit.add("concat", *made, dim=match.concat.attrs["dim"])


def _joined(edit: Editor, windows: Sequence[_Window], turned: bool) -> str:
    """What `windows` compute, by one node, as the concat reads it."""
    first = windows[0]
    count, length = len(windows), first.end - first.start
    apart = []
    for name in first.whole:
        batch, heads, tokens, width = edit.shape(name)
        if tokens != count * length:
            end = first.start + count * length
            name = edit.add("slice", name, dim=TOKENS, start=first.start, end=end)
        name = edit.add("reshape", name, shape=(batch, heads, count, length, width))
        name = edit.add("permute", name, dims=(0, 2, 1, 3, 4))
        apart.append(edit.add("reshape", name, shape=(batch * count, heads, length, width)))
    y = edit.add("attention", *apart, **first.node.attrs)
    batch = first.node.outputs[0].sizes[0]
    _, heads, _, width = edit.shape(y)
    y = edit.add("reshape", y, shape=(batch, count, heads, length, width))
    if turned:
        y = edit.add("permute", y, dims=(0, 1, 3, 2, 4))
        return edit.add("reshape", y, shape=(batch, count * length, heads, width))
    y = edit.add("permute", y, dims=(0, 2, 1, 3, 4))
    return edit.add("reshape", y, shape=(batch, heads, count * length, width))


RULES: tuple[Rule[Any], ...] = (
    Rule("concat(attention(slice(q, i), ...), attention(slice(q, i + 1), ...)) -> attention(q)",
         ("concat",), _match, _replace),
)  # fmt: skip


def join_windows(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
