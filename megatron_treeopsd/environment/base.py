"""The contract between rollout and what the agent acts on.

State is a value carried by the node, never hidden in the environment, so that any intermediate turn can be continued
by any number of forks at any time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_treeopsd.tree import Question


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a turn led to.

    Attributes:
        observation_ids: tokens put behind the turn, up to and including everything that must stand in front of the
            next turn. Empty if `done`.
        done: the trajectory ends with this turn.
        action: what the turn was taken for: "answer", "search", "invalid", ...
        prediction: the final answer as text; None if the turn gave none.
        state: the environment's state after the turn, to be handed back with the next one.
    """

    observation_ids: list[int]
    done: bool
    action: str
    prediction: str | None = None
    state: Any = None


class Environment(ABC):
    """Turns token ids of the policy into observations. Deterministic for a given (question, state, turn)."""

    @property
    @abstractmethod
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a turn."""

    @abstractmethod
    def prompt(self, question: Question) -> list[int]:
        """Token ids in front of the first turn."""

    @abstractmethod
    def step(self, question: Question, state: Any, sampled_ids: Sequence[int], *, last: bool) -> Outcome:
        """Act on one turn. `state` is None before the first turn.

        `last` says that the budget allows no further turn: a turn that is not a final answer then ends the
        trajectory without a prediction, and no tool is called for it.
        """

    def close(self) -> None:
        """Free what the environment holds (connections, indexes)."""
