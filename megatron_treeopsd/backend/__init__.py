"""Megatron: parallel state, model, tree attention, log-probs, step, optimizer, checkpoint, CPU support.

    PackedTrees ─► PolicyModel (tree attention, edges gathered) ─► log-probs [E] ─► objective ─► backward ─► optimizer

Importing this package prepares megatron-core for the machine at hand, before any module of it is imported.
"""

from megatron_treeopsd.backend import cpu

cpu.install()
