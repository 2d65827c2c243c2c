"""Which questions a step trains on: a pure function of seed and step, so that resuming needs no state."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence

from megatron_treeopsd.tree import Question


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts, the same in every process and on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class QuestionSource:
    """Draws questions, by shares of hops if given, else through one shuffled pass after the other."""

    def __init__(self, questions: Sequence[Question], *, seed: int) -> None:
        if not questions:
            raise ValueError("there are no questions to draw from")
        self._questions = questions
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []
        self._by_hops: dict[int, list[Question]] = {}
        for question in questions:
            self._by_hops.setdefault(int(question.metadata.get("hops", 0)), []).append(question)

    def draw(self, step: int, count: int, hop_weights: Mapping[int, float] | None) -> list[Question]:
        """`count` questions for a step.

        Raises `ValueError` if a share is asked for a number of hops that no question has.
        """
        if hop_weights is None:
            return [self._nth(step * count + i) for i in range(count)]
        wanted = {hops: weight for hops, weight in hop_weights.items() if weight > 0}
        missing = sorted(set(wanted) - set(self._by_hops))
        if missing:
            raise ValueError(
                f"task.hop_weights asks for questions of {missing} hops; there are {sorted(self._by_hops)}"
            )
        rng = random.Random(stable_seed("questions", self._seed, step))
        hops = rng.choices(list(wanted), list(wanted.values()), k=count)
        return [rng.choice(self._by_hops[h]) for h in hops]

    def _nth(self, position: int) -> Question:
        epoch, index = divmod(position, len(self._questions))
        if epoch != self._epoch:  # kept, because shuffling is slow; still a function of seed and epoch
            self._order = list(range(len(self._questions)))
            random.Random(stable_seed("epoch", self._seed, epoch)).shuffle(self._order)
            self._epoch = epoch
        return self._questions[self._order[index]]
