"""Independent full trajectories: a tree that forks at the root only."""

from __future__ import annotations

from megatron_treeopsd.engine.base import Engine, Sampling
from megatron_treeopsd.environment.base import Environment
from megatron_treeopsd.episode import Budgets
from megatron_treeopsd.expansion.base import Growth, SampledExpansion, together
from megatron_treeopsd.tree import ROOT


class ChainsExpansion(SampledExpansion):
    """`chains` trajectories from the prompt, all at once (ALGORITHMS.md §3)."""

    def __init__(
        self,
        *,
        engine: Engine,
        environment: Environment,
        sampling: Sampling,
        budgets: Budgets,
        merge: bool,
        chains: int,
    ) -> None:
        super().__init__(
            engine=engine,
            environment=environment,
            sampling=sampling,
            budgets=budgets,
            merge=merge,
            trajectories=chains,
        )
        self._chains = chains

    async def _expand(self, growth: Growth) -> None:
        await together(growth.play(ROOT, chain=chain) for chain in range(self._chains))
