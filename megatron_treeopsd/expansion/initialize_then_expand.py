"""A few full trajectories, then forks from the turns they visited (ALGORITHMS.md §1.1).

trunk  o──o──o──o        fork turns of each trunk are drawn uniformly, with replacement, from its intermediate
          └──o──o        turns; a trunk of T turns is forked after turn k ~ Unif{1, ..., T-1}, which costs 1/2 of
             └──o        a trajectory on average: 4 trunks with 2 forks each cost as much as 8 trajectories
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megatron_treeopsd.expansion.base import Ground, Growth, SampledExpansion, together
from megatron_treeopsd.questions import stable_seed
from megatron_treeopsd.tree import ROOT


class InitializeThenExpand(SampledExpansion):
    """`trunks` trajectories from the prompt, and `forks` continuations of each as soon as it has ended.

    A trunk of one turn has no intermediate turn: with `fork_fallback="root"` it is forked at the prompt, so that the
    number of leaves stays trunks * (1 + forks); with "none" it has no forks.
    """

    def __init__(self, ground: Ground, *, trunks: int, forks: int, fork_fallback: Literal["root", "none"]) -> None:
        super().__init__(ground, trajectories=trunks * (1 + forks))
        self._trunks = trunks
        self._forks = forks
        self._fork_fallback = fork_fallback

    async def _expand(self, growth: Growth) -> None:
        await together(self._trunk_and_forks(growth, trunk) for trunk in range(self._trunks))

    async def _trunk_and_forks(self, growth: Growth, trunk: int) -> None:
        leaf = await growth.play(ROOT, chain=trunk)
        first_chain = self._trunks + trunk * self._forks
        nodes = self._fork_nodes(growth.tree.path(leaf), seed=stable_seed(growth.seed, "forks", trunk))
        await together(growth.play(node, chain=first_chain + fork) for fork, node in enumerate(nodes))

    def _fork_nodes(self, path: Sequence[int], *, seed: int) -> list[int]:
        """The turns behind which the trunk `path` (turn indices) is continued, one for each fork."""
        intermediate = path[:-1]
        if not intermediate:
            return [ROOT] * self._forks if self._fork_fallback == "root" else []
        # A 63-bit hash modulo a number of turns is uniform to within 1e-16.
        return [intermediate[stable_seed(seed, fork) % len(intermediate)] for fork in range(self._forks)]
