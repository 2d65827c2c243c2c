"""Hugging Face <-> Megatron: one name map for initial loading, publishing to engines, and saving.

    folder ─► Source ─► slices ─► shard() ─► Megatron parameters ─► join() ─► stream of (name, tensor) ─► engine, folder
                                   └────────── one `Weight` per parameter, listed by the family ──────────┘

No rank ever holds the whole model. A folder is a Hugging Face checkpoint, or Megatron's `torch_dist` (torch_dist/),
which `convert` makes from one and back.
"""

from megatron_treeopsd.weights.families import weights_of
from megatron_treeopsd.weights.load import load_pretrained
from megatron_treeopsd.weights.rules import WeightsError
from megatron_treeopsd.weights.save import save_pretrained
from megatron_treeopsd.weights.streaming import stream

__all__ = ["WeightsError", "load_pretrained", "save_pretrained", "stream", "weights_of"]
