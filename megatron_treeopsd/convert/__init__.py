"""Conversion between Hugging Face folders and Megatron's distributed checkpoints (`treeopsd convert`).

    Source ─► rows of global tensors ─► pieces of the layout's ranks ─► torch_dist folder     to_megatron.py
    torch_dist folder ─► rows of Hugging Face tensors ─► sharded safetensors                  to_hf.py
                    both: run.py (checks, staging, verification, rename), cli.py

The map between the two is `weights`.
"""
