"""One rollout tree as text for a terminal.

    ●   prompt  ‹bos› question : who leads the largest export partner of mali …
    ├─● 0 search ×3                                        +0.42   0.61   1.02   1.57  -0.43
    │ │   <search> mali export partners </search>
    │ │   ↳ mali | the export partners is china 33 . mali | the import …
    │ ├─● 1 answer  ✓ 1                                    +0.71   0.75   1.80   3.00  -0.20
    │ │     <answer> xi jinping </answer>
    │ └─● 5 answer  ✗ 0                                    -0.96   0.31   0.62   0.45  -0.91
    ...

The tree is indented where it forks only, so that a long trajectory stays readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from megatron_treeopsd.observe.decoder import Decode
from megatron_treeopsd.observe.turn_notes import NO_NOTE, TurnNote
from megatron_treeopsd.observe.wording import counted, shorten, signed, visible
from megatron_treeopsd.tree import ROOT, RolloutTree, Turn

GOOD, BAD = "bright_blue", "dark_orange"
"""Two colours that colour-blind readers can tell apart; a sign or a mark always says the same."""

_LEGEND = (
    ("credit", "what the turn is held responsible for"),
    ("target", "where its probability p = ratio / (1 + ratio) is to go"),
    ("ratio", "likelihood of the turn, policy after the update over policy that sampled it"),
    ("goal", "the ratio at which p is the target"),
    ("logp", "mean log-probability of a sampled token, in nats"),
)
_COLUMN = 7


def telling_order(trees: Sequence[RolloutTree]) -> list[int]:
    """Tree indices, those first whose leaves disagree most (they are what a policy learns from); then as they stand."""
    return sorted(range(len(trees)), key=lambda index: (-_variance(trees[index]), index))


def _variance(tree: RolloutTree) -> float:
    return float(tree.leaf_rewards().var()) if tree.leaf_count else 0.0


def summary_of(tree: RolloutTree) -> str:
    """12 leaves, 7 solved, mean reward 0.58, 23 turns, 118 of 412 unique tokens sampled."""
    rewards = tree.leaf_rewards()
    solved = int((rewards >= 1).sum())
    mean = f", mean reward {rewards.mean():.2f}" if len(rewards) else ""
    return (
        f"{counted(tree.leaf_count, 'leaf', 'leaves')}, {solved} solved{mean}, {counted(len(tree.turns), 'turn')}, "
        f"{tree.sampled_count} of {tree.token_count} unique tokens sampled"
    )


def render_tree(
    tree: RolloutTree,
    decode: Decode,
    *,
    notes: Sequence[TurnNote] | None = None,
    width: int = 100,
    full: bool = False,
) -> Text:
    """The tree as text of at most `width` columns, with colours for a terminal (`.plain` has none).

    Args:
        decode: token ids to text.
        notes: one a turn, in the order of `tree.turns`; columns without any number are left out.
        full: whole texts; otherwise turns take at most three lines and observations one.
    """
    return _TreeText(tree, decode, notes or [NO_NOTE] * len(tree.turns), width, full).render()


@dataclass(slots=True)
class _TreeText:
    tree: RolloutTree
    decode: Decode
    notes: Sequence[TurnNote]
    width: int
    full: bool
    out: Text = field(default_factory=Text)
    children: list[list[int]] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)

    def render(self) -> Text:
        self.children = self.tree.children()
        every = [_numbers(turn, note) for turn, note in zip(self.tree.turns, self.notes, strict=True)]
        self.columns = [name for name, _ in _LEGEND if any(numbers[name] for numbers in every)]
        self._head()
        self._node(ROOT, "", "")
        self.out.append("\n")
        for name, meaning in _LEGEND:
            if name in self.columns:
                self.out.append(f"{name:<7} {meaning}\n", style="dim")
        self.out.rstrip()
        return self.out

    def _head(self) -> None:
        question = self.tree.question
        about = "".join(f", {key} {value}" for key, value in question.metadata.items() if isinstance(value, (int, str)))
        self._labelled("question", visible(question.text), bold=True)
        self._labelled("answers", " | ".join(map(visible, question.answers)))
        self._labelled("tree", f"{visible(question.id)}{visible(shorten(about, 60))}: {summary_of(self.tree)}")
        header = "".join(f"{name:>{_COLUMN}}" for name in self.columns)
        self.out.append(header.rjust(self.width) + "\n", style="dim")

    def _labelled(self, label: str, text: str, *, bold: bool = False) -> None:
        lines = self._wrapped(text, self.width - 10)
        for number, line in enumerate(lines):
            self.out.append(f"{label if number == 0 else '':<10}", style="dim")
            self.out.append(line + "\n", style="bold" if bold else "")

    def _node(self, index: int, first: str, rest: str) -> None:
        """A turn (or the prompt) and everything below it. `first` and `rest` stand in front of its lines."""
        while True:
            below = self.children[index]
            gap = rest + ("│" if below else " ") + "   "
            if index == ROOT:
                self._prompt(first, gap)
            else:
                self._turn(index, first, gap)
            if len(below) != 1:
                break
            index, first = below[0], rest  # an only child goes on where its parent stands
        for child in below:
            last = child == below[-1]
            self._node(child, rest + ("└─" if last else "├─"), rest + ("  " if last else "│ "))

    def _prompt(self, first: str, gap: str) -> None:
        self.out.append(first, style="dim").append("● prompt", style="bold")
        self.out.append(f"  {counted(len(self.tree.prompt_ids), 'token')}\n", style="dim")
        self._block(gap, self.decode(self.tree.prompt_ids), lines=2, style="dim")

    def _turn(self, index: int, first: str, gap: str) -> None:
        turn, numbers = self.tree.turns[index], _numbers(self.tree.turns[index], self.notes[index])
        line = Text(first, style="dim")
        line.append("● ", style="dim").append(f"{index} ", style="dim")
        line.append(visible(turn.action) or "turn", style="bold")
        if turn.multiplicity > 1:
            line.append(f" ×{turn.multiplicity}")
        if turn.finish != "stop":
            line.append(f" cut off ({turn.finish})", style=BAD)
        if turn.terminal and turn.reward is not None:
            line.append(f"  {mark(turn.reward)} {turn.reward:g}", style=GOOD if turn.reward > 0 else BAD)
        room = self.width - _COLUMN * len(self.columns)
        line.truncate(room - 1, overflow="ellipsis")
        line.append(" " * (room - line.cell_len))
        for name in self.columns:
            style = "" if name != "credit" else GOOD if numbers[name].startswith("+") else BAD
            line.append(f"{numbers[name]:>{_COLUMN}}", style=style if numbers[name] not in ("", "0.00") else "dim")
        self.out.append(line).append("\n")
        self._block(gap, self.decode(turn.sampled_ids), lines=3)
        if turn.observation_ids:
            self._block(gap, self.decode(turn.observation_ids), lines=1, style="dim", arrow="↳ ")

    def _block(self, gap: str, text: str, *, lines: int, style: str = "", arrow: str = "") -> None:
        if not self.full:
            text = text[: (lines + 2) * self.width]
        wrapped = self._wrapped(visible(text), self.width - cell_len(gap + arrow))
        shown = wrapped if self.full else wrapped[:lines]
        if len(shown) < len(wrapped):
            shown[-1] = set_cell_size(shown[-1], self.width - cell_len(gap + arrow) - 1).rstrip() + "…"
        for number, line in enumerate(shown):
            self.out.append(gap, style="dim")
            self.out.append((arrow if number == 0 else " " * len(arrow)) + line + "\n", style=style)

    @staticmethod
    def _wrapped(text: str, width: int) -> list[str]:
        """Lines of at most `width` cells, broken at blanks where that is possible."""
        width = max(width, 16)
        lines, line = [], ""
        for word in text.split():
            if line and cell_len(line) + 1 + cell_len(word) > width:
                lines.append(line)
                line = ""
            *whole, word = chop_cells(word, width)
            lines += whole
            line = f"{line} {word}" if line else word
        return [*lines, line]


def mark(reward: float) -> str:
    """✓ for a full reward, ✗ for none, ~ for anything between."""
    return "✓" if reward >= 1 else "✗" if reward <= 0 else "~"


def _numbers(turn: Turn, note: TurnNote) -> dict[str, str]:
    """What stands in each column for a turn; empty where there is nothing."""
    values = {
        "credit": None if note.credit is None else signed(note.credit),
        "target": None if note.target is None else f"{note.target:.2f}",
        "ratio": None if note.ratio is None else f"{note.ratio:.2f}",
        "goal": None if note.target_ratio is None else f"{note.target_ratio:.2f}",
        "logp": signed(turn.mean_logprob) if turn.sampled_logprobs else None,
    }
    return {name: value or "" for name, value in values.items()}
