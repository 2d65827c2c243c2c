"""Megatron's distributed checkpoint format `torch_dist`, read and written without Megatron and in bounded memory.

folder/latest_checkpointed_iteration.txt   "release"
folder/release/.metadata                   which box of which global tensor is where        (metadata.py)
               __0_0.distcp, __1_0.distcp  tensors, each rank's in a file or a few           (blob.py)
               metadata.json, common.pt    format and settings

Hugging Face tensors ─► rows of global tensors (grid.py) ─► boxes of the layout's ranks ─► files
"""
