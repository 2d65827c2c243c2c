"""Objectives: log-probs and a turn table to a loss. Pure functions of tensors that import torch and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_treeopsd.objective.base import Objective, Report, TurnTable
from megatron_treeopsd.objective.bernoulli_kl import BernoulliKL
from megatron_treeopsd.objective.clipped import Clipped
from megatron_treeopsd.objective.likelihood import Likelihood
from megatron_treeopsd.objective.segments import LogProbError

if TYPE_CHECKING:
    from megatron_treeopsd import config

_KINDS: dict[str, type[Objective]] = {"bernoulli_kl": BernoulliKL, "clipped": Clipped, "likelihood": Likelihood}


def build(section: config.BernoulliKL | config.Clipped | config.Likelihood) -> Objective:
    """The objective of a recipe's `objective` section, whose keys are the fields of the class it names."""
    return _KINDS[section.name](**section.model_dump(exclude={"name"}))


__all__ = ["BernoulliKL", "Clipped", "Likelihood", "LogProbError", "Objective", "Report", "TurnTable", "build"]
