"""Reinforcement learning of mixture-of-experts search agents on tree rollouts, trained with Megatron."""

__version__ = "0.1.0"
