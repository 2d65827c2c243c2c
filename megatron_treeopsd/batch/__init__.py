"""Rollout trees to micro-batches: weights of turns, pieces of trees, packed tensors."""
