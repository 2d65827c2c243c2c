"""One rollout tree as a drawing: time runs to the right, one box a turn, rewards at the leaves.

     ┌─────────────┐   ┌─────────────┐   ┌─────────────┐
     │ question    │──▶│ search  +0.4│──▶│ answer  +1.0│ ✓ 1
     │ answers     │   │ text        │   │ text        │
     └─────────────┘   │ ↳ observed  │   │ ──┼───●──◇─ │   gauge: ratio now (●), where the target puts it (◇)
                       └─────────────┘   └─────────────┘

A box is tinted by the turn's credit. Boxes carry `data-turn`, by which the report's script shows their whole text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.cells import cell_len, set_cell_size

from megatron_treeopsd.observe.decoder import Decode
from megatron_treeopsd.observe.style import standalone
from megatron_treeopsd.observe.tree_view import mark
from megatron_treeopsd.observe.turn_notes import NO_NOTE, TurnNote
from megatron_treeopsd.observe.wording import counted, signed, visible
from megatron_treeopsd.tree import ROOT, RolloutTree, Turn

BOX, GAP, PAD = 184, 26, 9
COLUMN = BOX + GAP
CHARACTER = 6.63
"""Width of one character of the 11 px monospace font, rounded up over common fonts."""
ROOM = int((BOX - 2 * PAD) / CHARACTER)
LINE = 14
MARGIN = 12
FOOT = 40
"""Room for the legend below the tree."""
BADGE = 74
"""Room for reward and multiplicity to the right of the last column."""


@dataclass(frozen=True, slots=True)
class _Box:
    """What stands in the box of a turn: lines of its text and of what it observed."""

    text: list[str]
    observed: list[str]
    gauge: bool

    @property
    def height(self) -> float:
        return 2 * 7 + LINE * (1 + len(self.text) + len(self.observed)) + (12 if self.gauge else 0)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Left edge and vertical middle of each turn's box (the prompt's are the last entries), and the whole size."""

    x: list[float]
    y: list[float]
    width: float
    height: float


def tree_svg(tree: RolloutTree, notes: Sequence[TurnNote] | None, decode: Decode) -> str:
    """The drawing as a file of its own, for instance for a README."""
    return standalone(draw_tree(tree, notes, decode))


def draw_tree(tree: RolloutTree, notes: Sequence[TurnNote] | None, decode: Decode) -> str:
    """The drawing as an `<svg>` element for a page that has the styles of `style.DRAWING`.

    `notes`: one a turn in the order of `tree.turns`; boxes without a credit are not tinted, and those without a ratio
    have no gauge.
    """
    noted = list(notes or [NO_NOTE] * len(tree.turns))
    boxes = [_content(turn, note, decode) for turn, note in zip(tree.turns, noted, strict=True)]
    layout = _lay_out(tree, boxes)
    credit_scale = max((abs(note.credit) for note in noted if note.credit is not None), default=0.0) or 1.0
    reach = max((abs(v) for note in noted for v in (note.log_ratio, note.target_log_ratio) if v is not None), default=1)
    parts = [_edge(layout, turn.parent, index, turn.multiplicity) for index, turn in enumerate(tree.turns)]
    parts.append(_prompt(tree, layout))
    for index, turn in enumerate(tree.turns):
        parts.append(_turn(layout, index, turn, noted[index], boxes[index], credit_scale, min(reach or 1.0, 5.0)))
    parts.append(_legend(noted, layout))
    label = f"rollout tree of the question: {visible(tree.question.text)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {layout.width:g} {layout.height:g}" '
        f'width="{layout.width:g}" height="{layout.height:g}" role="group" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _content(turn: Turn, note: TurnNote, decode: Decode) -> _Box:
    observed = _unwrapped(decode(turn.observation_ids), "") if turn.observation_ids else ""
    return _Box(
        text=_lines(_unwrapped(decode(turn.sampled_ids), turn.action), 2),
        observed=_lines("↳ " + observed, 2) if observed else [],
        gauge=note.log_ratio is not None,
    )


def _lay_out(tree: RolloutTree, boxes: Sequence[_Box]) -> _Layout:
    """One row a leaf, in the order of a walk through the tree; a parent stands in the middle of its children.

    A row is as high as the highest box that has it for itself: the leaf, and those in front of it since the last fork.
    """
    children = tree.children()
    count = len(tree.turns)
    x, y = [0.0] * (count + 1), [0.0] * (count + 1)
    x[ROOT] = MARGIN
    for index, turn in enumerate(tree.turns):  # parents precede their children
        x[index] = x[turn.parent] + COLUMN
    top, stack = float(MARGIN), [ROOT]
    while stack:
        index = stack.pop()
        if not children[index]:
            alone, highest = index, 0.0
            while alone != ROOT and len(children[alone]) < 2:
                highest = max(highest, boxes[alone].height)
                alone = tree.turns[alone].parent
            y[index] = top + highest / 2
            top += highest + 12
        stack += reversed(children[index])
    bottom = max(top - 12, 2 * MARGIN + _prompt_height(tree))
    for index in [*reversed(range(count)), ROOT]:
        if below := children[index]:
            y[index] = (y[below[0]] + y[below[-1]]) / 2
    y[ROOT] = min(max(y[ROOT], MARGIN + _prompt_height(tree) / 2), bottom - _prompt_height(tree) / 2)
    return _Layout(x, y, max(x) + BOX + BADGE, bottom + FOOT)


def _edge(layout: _Layout, parent: int, child: int, draws: int) -> str:
    """A curve from the parent's right side to the child's left; thicker where several draws took it."""
    x0, y0, x1, y1 = layout.x[parent] + BOX, layout.y[parent], layout.x[child], layout.y[child]
    middle = (x0 + x1) / 2
    width = min(1.25 + 0.75 * (draws - 1), 6)
    return f'<path class="edge" d="M{x0} {y0}C{middle} {y0} {middle} {y1} {x1} {y1}" stroke-width="{width}"/>'


def _prompt_lines(tree: RolloutTree) -> list[tuple[str, str]]:
    """Style and text of each line of the prompt's box."""
    question = tree.question
    answers = _lines("= " + " | ".join(map(visible, question.answers)), 2)
    return [
        *(("mono", line) for line in _lines(visible(question.text), 5)),
        *(("mono quiet", line) for line in answers),
        ("quiet", f"{counted(tree.leaf_count, 'trajectory', 'trajectories')}, {counted(len(tree.turns), 'turn')}"),
    ]


def _prompt_height(tree: RolloutTree) -> float:
    return 2 * 9 + LINE * len(_prompt_lines(tree))


def _prompt(tree: RolloutTree, layout: _Layout) -> str:
    x, height = layout.x[ROOT], _prompt_height(tree)
    y = layout.y[ROOT] - height / 2
    text = "".join(
        f'<text class="{style}" x="{x + PAD}" y="{y + 9 + LINE * number + 10}">{escape(line)}</text>'
        for number, (style, line) in enumerate(_prompt_lines(tree))
    )
    box = f'<rect class="box" x="{x}" y="{y}" width="{BOX}" height="{height}" rx="6"/>'
    return f'<g class="node" tabindex="0" data-turn="prompt">{box}{text}</g>'


def _turn(layout: _Layout, index: int, turn: Turn, note: TurnNote, box: _Box, credit_scale: float, reach: float) -> str:
    x, y = layout.x[index], layout.y[index] - box.height / 2
    size = f'x="{x}" y="{y}" width="{BOX}" height="{box.height}" rx="6"'
    parts = [f'<rect class="box" {size}/>']
    top = y + 7 + 10
    if note.credit is not None:
        tone, depth = "good" if note.credit > 0 else "bad", 0.34 * min(abs(note.credit) / credit_scale, 1)
        parts.append(f'<rect class="{tone}" {size} fill-opacity="{depth:.2f}"/>')
        credit = f'x="{x + BOX - PAD}" y="{top}" text-anchor="end">{signed(note.credit)}'
        parts.append(f'<text class="label" {credit}</text>')
    draws = f" ×{turn.multiplicity}" if turn.multiplicity > 1 else ""
    cut = "" if turn.finish == "stop" else f" ({turn.finish})"
    title = _cut(f"{index} {visible(turn.action) or 'turn'}{draws}{cut}", ROOM - 7)
    parts.append(f'<text class="label" x="{x + PAD}" y="{top}">{escape(title)}</text>')
    rows = [("mono", line) for line in box.text] + [("mono quiet", line) for line in box.observed]
    for number, (style, line) in enumerate(rows, start=1):
        parts.append(f'<text class="{style}" x="{x + PAD}" y="{top + LINE * number}">{escape(line)}</text>')
    parts.append(_gauge(note, x + PAD, y + box.height - 9, reach))
    if turn.terminal and turn.reward is not None:
        parts.append(_badge(x + BOX + 17, layout.y[index], turn.reward))
    return f'<g class="node" tabindex="0" data-turn="{index}">{"".join(parts)}</g>'


def _legend(notes: Sequence[TurnNote], layout: _Layout) -> str:
    """One line below the tree that says how to read the numbers it has."""
    y, parts = layout.height - 14, []
    if any(note.credit is not None for note in notes):
        parts.append("tint and number at the upper right: credit of the turn")
    if any(note.log_ratio is not None for note in notes):
        parts.append("● log-ratio of the turn after the update (middle: unchanged)")
    if any(note.log_ratio is not None and note.target is not None for note in notes):
        parts.append("◇ where its target is")
    return f'<text x="{MARGIN}" y="{y}">{escape("   ·   ".join(parts))}</text>'


def _gauge(note: TurnNote, left: float, y: float, reach: float) -> str:
    """Log-ratios on a rail from -reach to reach, ratio one in the middle: a dot for now, a diamond for the target."""
    if note.log_ratio is None:
        return ""
    half = (BOX - 2 * PAD) / 2

    def at(value: float) -> float:
        return round(left + half * (1 + max(-1.0, min(1.0, value / reach))), 1)

    middle = at(0.0)
    parts = [
        f'<line class="rail" x1="{left}" x2="{left + 2 * half}" y1="{y}" y2="{y}"/>',
        f'<line class="rail" x1="{middle}" x2="{middle}" y1="{y - 3}" y2="{y + 3}"/>',
    ]
    if note.target_log_ratio is not None:
        goal = at(note.target_log_ratio)
        parts.append(f'<path class="goal" d="M{goal - 5} {y}L{goal} {y - 5}L{goal + 5} {y}L{goal} {y + 5}Z"/>')
    parts.append(f'<circle class="now" cx="{at(note.log_ratio)}" cy="{y}" r="3"/>')
    return "".join(parts)


def _badge(x: float, y: float, reward: float) -> str:
    """The reward of a trajectory: a mark in a disc and the number."""
    tone, stroke = {
        "✓": ("good", "M-4 0.5L-1 3.5L4.5 -3"),
        "✗": ("bad", "M-3.2 -3.2L3.2 3.2M3.2 -3.2L-3.2 3.2"),
        "~": ("even", "M-4 1C-2.5 -2.5 -1 -1.5 0 0S2.5 2.5 4 -1"),
    }[mark(reward)]
    return (
        f'<g transform="translate({x} {y})"><circle class="{tone}" r="9"/><path class="onmark" d="{stroke}"/>'
        f'<text class="label" x="14" y="4">{reward:.3g}</text></g>'
    )


def _unwrapped(text: str, action: str) -> str:
    """The text of a turn on one line, without the pair of tags around it, which repeats what the turn is."""
    line = visible(text[:2000])
    inner = re.fullmatch(r"<(\w+)>(.*)</\1>", line)
    return inner[2].strip() if inner and action in ("", inner[1]) else line


def _lines(text: str, limit: int) -> list[str]:
    """Text broken at blanks into at most `limit` lines of the box's width; … where it goes on."""
    lines: list[str] = []
    rest = text
    while rest and len(lines) < limit:
        line = _cut(rest, ROOM)
        if len(lines) < limit - 1 and line != rest:
            whole = set_cell_size(rest, ROOM).rstrip()
            blank = whole.rfind(" ")
            line = whole if rest[len(whole) : len(whole) + 1] in ("", " ") or blank <= 0 else whole[:blank]
            rest = rest[len(line) :].lstrip()
        else:
            rest = ""
        lines.append(line)
    return lines


def _cut(text: str, room: int) -> str:
    return text if cell_len(text) <= room else set_cell_size(text, room - 1).rstrip() + "…"
