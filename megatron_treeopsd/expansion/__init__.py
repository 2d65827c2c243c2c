"""How trees grow."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron_treeopsd import config
from megatron_treeopsd.engine.base import Engine, Sampling
from megatron_treeopsd.environment.base import Environment
from megatron_treeopsd.episode import Budgets
from megatron_treeopsd.expansion.base import Expansion, Ground
from megatron_treeopsd.expansion.chains import ChainsExpansion
from megatron_treeopsd.expansion.initialize_then_expand import InitializeThenExpand


def build(
    section: config.Expansion, *, engine: Engine, environment: Environment, sampling: Sampling, task: config.Task
) -> Expansion:
    """The expansion of a recipe. `sampling` gives temperature and stop ids; the budgets are the task's."""
    sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, task.max_turn_tokens))
    budgets = Budgets(max_turns=task.max_turns, max_context_tokens=task.max_context_tokens)
    ground = partial(Ground, engine, environment, sampling, budgets)
    match section:
        case config.Chains():
            return ChainsExpansion(ground(section.merge_siblings), chains=section.chains)
        case config.InitializeThenExpand():
            return InitializeThenExpand(
                ground(section.merge_siblings),
                trunks=section.trunks,
                forks=section.forks,
                fork_fallback=section.fork_fallback,
            )
        case config.Demonstrations():
            from megatron_treeopsd.expansion.demonstrations import DemonstrationsExpansion

            return DemonstrationsExpansion(section, environment=environment, task=task)
