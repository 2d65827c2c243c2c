"""Credit: rewards at the leaves of one tree become one number per turn. Pure functions of a tree, numpy only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from megatron_treeopsd import config
from megatron_treeopsd.credit.outcome import Outcome
from megatron_treeopsd.credit.tree_backup import TreeBackup
from megatron_treeopsd.tree import RolloutTree

Credit: TypeAlias = Callable[[RolloutTree], np.ndarray]
"""A scored tree to float64 [n_turns], in the order of `RolloutTree.turns`."""


def build(section: config.Outcome | config.TreeBackup) -> Credit:
    """The credit rule of a recipe's `credit` section."""
    if isinstance(section, config.Outcome):
        return Outcome(section.baseline)
    return TreeBackup(section.backup, section.mode)


__all__ = ["Credit", "Outcome", "TreeBackup", "build"]
