"""Independent full trajectories: a tree that forks at the root only."""

from __future__ import annotations

from megatron_treeopsd.expansion.base import Ground, Growth, SampledExpansion, together
from megatron_treeopsd.tree import ROOT


class ChainsExpansion(SampledExpansion):
    """`chains` trajectories from the prompt, all at once (ALGORITHMS.md §3)."""

    def __init__(self, ground: Ground, *, chains: int) -> None:
        super().__init__(ground, trajectories=chains)
        self._chains = chains

    async def _expand(self, growth: Growth) -> None:
        await together(growth.play(ROOT, chain=chain) for chain in range(self._chains))
