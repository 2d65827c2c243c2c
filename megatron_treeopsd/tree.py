"""Questions, turns and rollout trees: the one thing that rollout hands to training.

A `RolloutTree` holds everything sampled for one question. The root is the prompt; every other node is a *turn*: the
tokens the policy sampled, followed by the tokens the environment answered with (ALGORITHMS.md, notation). The
observation belongs to the turn that caused it, so forks of one turn share it and no token is stored twice.

Worked example, a prompt `[1, 7]`, one search turn and two answers that fork after it:

    turns[0]  parent -1  sampled [5, 8, 6]  observation [9, 9]     depth 2   (tokens 2..7 of the path)
    turns[1]  parent  0  sampled [3, 4]     observation []         depth 7   terminal, reward 1.0
    turns[2]  parent  0  sampled [3, 2]     observation []         depth 7   terminal, reward 0.0

    path_ids(1) == [1, 7, 5, 8, 6, 9, 9, 3, 4]

A GRPO group is the special case of a tree that forks at the root only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

ROOT = -1
"""Parent index of the turns that follow the prompt directly."""

Finish = Literal["stop", "length", "abort"]
"""How the sampling of a turn ended: at a stop token, at its token limit, or cut off by the engine."""

FORMAT = "megatron_treeopsd.trees/1"


class TreeError(ValueError):
    """A tree that contradicts itself, or a tree file that cannot be read."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a task.

    `metadata` carries what a task wants to report by (for instance `{"hops": 2}`) and what a method may need
    (supporting documents, sub-questions); the loop never looks into it.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Turn:
    """One node of a tree: what the policy sampled and what the environment answered.

    Attributes:
        parent: index of the turn before this one in `RolloutTree.turns`, or `ROOT`.
        sampled_ids: token ids sampled by the policy; these and only these are trained.
        sampled_logprobs: the engine's log-probabilities of `sampled_ids` in nats, at the sampling temperature.
        observation_ids: token ids that the environment or the chat template put behind the turn; never trained.
            Empty for a terminal turn.
        version: weight version of the policy that sampled the turn.
        finish: how sampling ended.
        action: what the environment took the turn for ("search", "answer", "invalid", ...).
        terminal: True if the trajectory ends here.
        reward: score of the trajectory; set on terminal turns only, by the reward.
        prediction: the final answer as text, None where the trajectory gave none.
        multiplicity: how many draws from the parent gave exactly these tokens (merged identical siblings).
        chain: index of the rollout that first sampled this turn (trunks first, then forks): turns of one chain are
            one contiguous piece of a trajectory, which is what sequence-level objectives call a sequence.
        routes: int8/int16 [len(turn), layers, experts a token], the experts that each token went to in the engine
            (see `routes.py`); None where they were not asked for.
    """

    parent: int
    sampled_ids: list[int]
    sampled_logprobs: list[float]
    observation_ids: list[int] = field(default_factory=list)
    version: int = 0
    finish: Finish = "stop"
    action: str = ""
    terminal: bool = False
    reward: float | None = None
    prediction: str | None = None
    multiplicity: int = 1
    chain: int = 0
    routes: np.ndarray | None = field(default=None, compare=False)

    def __len__(self) -> int:
        """Number of tokens that the turn adds to its path."""
        return len(self.sampled_ids) + len(self.observation_ids)

    @property
    def mean_logprob(self) -> float:
        """lambda_v of ALGORITHMS.md §1.2: the mean behaviour log-probability of the sampled tokens (nan if none)."""
        return float(np.mean(self.sampled_logprobs)) if self.sampled_logprobs else float("nan")


@dataclass(slots=True)
class RolloutTree:
    """All turns sampled for one question. Parents precede their children in `turns`.

    `prompt_routes` are the prompt's, as `Turn.routes` are a turn's.
    """

    question: Question
    prompt_ids: list[int]
    turns: list[Turn] = field(default_factory=list)
    prompt_routes: np.ndarray | None = field(default=None, compare=False)

    def add(self, turn: Turn, *, merge: bool = True) -> int:
        """Append a turn and return its index.

        With `merge`, a sibling with the same sampled tokens is counted once more instead (ALGORITHMS.md §1.1), and
        its index is returned. Raises `TreeError` if the two draws were answered differently: they are then different
        nodes, which only a random environment can cause, and merging must be switched off.
        """
        if not ROOT <= turn.parent < len(self.turns):
            raise TreeError(f"question {self.question.id}: parent {turn.parent} of a new turn does not exist")
        if turn.parent != ROOT and self.turns[turn.parent].terminal:
            raise TreeError(f"question {self.question.id}: turn {turn.parent} is terminal and cannot be continued")
        if len(turn.sampled_ids) != len(turn.sampled_logprobs):
            raise TreeError(
                f"question {self.question.id}: a turn has {len(turn.sampled_ids)} sampled tokens "
                f"but {len(turn.sampled_logprobs)} log-probabilities"
            )
        if merge:
            for index, other in enumerate(self.turns):
                if other.parent == turn.parent and other.sampled_ids == turn.sampled_ids:
                    if other.observation_ids != turn.observation_ids or other.terminal != turn.terminal:
                        raise TreeError(
                            f"question {self.question.id}: turn {index} was sampled twice and answered differently; "
                            "set expansion.merge_siblings=false for an environment that is not deterministic"
                        )
                    other.multiplicity += turn.multiplicity
                    if other.routes is not None and turn.routes is not None:  # the first ones stay
                        other.routes = np.where(other.routes < 0, turn.routes, other.routes)
                    return index
        self.turns.append(turn)
        return len(self.turns) - 1

    def children(self) -> list[list[int]]:
        """Child indices of every turn; the last entry holds the children of the root, so `children()[ROOT]` works."""
        out: list[list[int]] = [[] for _ in range(len(self.turns) + 1)]
        for index, turn in enumerate(self.turns):
            out[turn.parent].append(index)
        return out

    def path(self, index: int) -> list[int]:
        """Turn indices from the first turn to `index`, both included; empty for `ROOT`."""
        out: list[int] = []
        while index != ROOT:
            out.append(index)
            index = self.turns[index].parent
        return out[::-1]

    def path_ids(self, index: int) -> list[int]:
        """All token ids from the start of the prompt to the end of the observation of turn `index`."""
        ids = list(self.prompt_ids)
        for i in self.path(index):
            ids += self.turns[i].sampled_ids
            ids += self.turns[i].observation_ids
        return ids

    def depth(self, index: int) -> int:
        """Number of tokens in front of the first sampled token of turn `index`."""
        return len(self.prompt_ids) + sum(len(self.turns[i]) for i in self.path(self.turns[index].parent))

    def turn_depths(self) -> list[int]:
        """`depth` of every turn, in one pass."""
        out: list[int] = []
        for turn in self.turns:
            base = len(self.prompt_ids) if turn.parent == ROOT else out[turn.parent] + len(self.turns[turn.parent])
            out.append(base)
        return out

    def terminals(self) -> list[int]:
        """Indices of the turns at which trajectories end."""
        return [i for i, turn in enumerate(self.turns) if turn.terminal]

    @property
    def leaf_count(self) -> int:
        """Number of trajectories: terminal turns counted with their multiplicity."""
        return sum(turn.multiplicity for turn in self.turns if turn.terminal)

    def leaf_rewards(self) -> np.ndarray:
        """float64 [leaf_count]: one reward a trajectory, merged ones repeated.

        Raises `TreeError` naming the question and turn if a terminal turn has no reward.
        """
        out: list[float] = []
        for index in self.terminals():
            turn = self.turns[index]
            if turn.reward is None:
                raise TreeError(f"question {self.question.id}: terminal turn {index} has no reward")
            out += [turn.reward] * turn.multiplicity
        return np.asarray(out, dtype=np.float64)

    @property
    def token_count(self) -> int:
        """Number of unique tokens: the prompt and every turn once."""
        return len(self.prompt_ids) + sum(len(turn) for turn in self.turns)

    @property
    def sampled_count(self) -> int:
        """Number of unique sampled (trained) tokens."""
        return sum(len(turn.sampled_ids) for turn in self.turns)

    def check(self) -> None:
        """Raise `TreeError` unless parents precede children and exactly the turns without children are terminal."""
        with_children = {turn.parent for turn in self.turns}
        for index, turn in enumerate(self.turns):
            if not ROOT <= turn.parent < index:
                raise TreeError(f"question {self.question.id}: turn {index} has parent {turn.parent}")
            if turn.terminal == (index in with_children):
                raise TreeError(
                    f"question {self.question.id}: turn {index} is {'' if turn.terminal else 'not '}terminal "
                    f"but {'has' if index in with_children else 'has no'} children"
                )


def save_trees(path: Path, trees: Sequence[RolloutTree]) -> None:
    """Write trees to one safetensors file: flat token arrays, their lengths and the rest as JSON in the header.

    Routes are not written. The file is written under a temporary name and renamed, so a reader never sees half of it.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    records = []
    for tree in trees:
        ids += tree.prompt_ids
        turns = []
        for turn in tree.turns:
            ids += turn.sampled_ids
            ids += turn.observation_ids
            logprobs += turn.sampled_logprobs
            record = asdict(replace(turn, routes=None))
            del record["routes"]
            record["sampled_ids"] = len(turn.sampled_ids)
            record["observation_ids"] = len(turn.observation_ids)
            del record["sampled_logprobs"]
            turns.append(record)
        records.append({"question": asdict(tree.question), "prompt_ids": len(tree.prompt_ids), "turns": turns})
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    save_file(
        {"ids": np.asarray(ids, dtype=np.int32), "logprobs": np.asarray(logprobs, dtype=np.float64)},
        temporary,
        metadata={"format": FORMAT, "trees": json.dumps(records)},
    )
    temporary.replace(path)


def load_trees(path: Path) -> list[RolloutTree]:
    """Read what `save_trees` wrote. Raises `TreeError` naming the file if it is not such a file or is damaged."""
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise TreeError(f"{path}: not a tree file (format {metadata.get('format')!r}, expected {FORMAT!r})")
            ids = iter(file.get_tensor("ids").tolist())
            logprobs = iter(file.get_tensor("logprobs").tolist())
            records = json.loads(metadata["trees"])
        trees = [_tree_from_record(record, ids, logprobs) for record in records]
        if [*ids, *logprobs]:
            raise TreeError(f"{path}: damaged: it holds more tokens than its header accounts for")
    except TreeError:
        raise
    except Exception as error:  # safetensors raises its own type without a common base
        raise TreeError(f"{path}: cannot be read as a tree file: {error}") from error
    return trees


def _tree_from_record(record: dict[str, Any], ids: Iterator[int], logprobs: Iterator[float]) -> RolloutTree:
    question = dict(record["question"])
    question["answers"] = tuple(question["answers"])
    tree = RolloutTree(Question(**question), _take(ids, record["prompt_ids"]))
    for fields in record["turns"]:
        sampled = _take(ids, fields["sampled_ids"])
        observation = _take(ids, fields["observation_ids"])
        fields = {**fields, "sampled_ids": sampled, "observation_ids": observation}
        tree.turns.append(Turn(sampled_logprobs=_take(logprobs, len(sampled)), **fields))
    return tree


def _take(source: Iterator[Any], count: int) -> list[Any]:
    out = list(islice(source, count))
    if len(out) != count:
        raise ValueError("it holds fewer tokens than its header accounts for")
    return out
