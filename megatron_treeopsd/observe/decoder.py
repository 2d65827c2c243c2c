"""Token ids to text for trees that are shown long after the policy that wrote them was in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from tokenizers import Tokenizer

from megatron_treeopsd.observe.run_folder import RunPaths

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""


def load_decoder(checkpoint: Path) -> Decode:
    """Decoder from a Hugging Face folder's `tokenizer.json`; loads nothing else of it."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def decode_as_ids(ids: Sequence[int]) -> str:
    """What is left without a tokenizer."""
    return " ".join(map(str, ids))


def decoder_of(run: RunPaths) -> tuple[Decode, str | None]:
    """The decoder of a run's policy, and what to tell people if it is gone and only ids can be shown."""
    recipe = yaml.safe_load(run.recipe.read_text(encoding="utf-8")) if run.recipe.exists() else {}
    checkpoint = Path((recipe.get("model") or {}).get("checkpoint", ""))
    if (checkpoint / "tokenizer.json").is_file():
        return load_decoder(checkpoint), None
    return decode_as_ids, (
        f"{checkpoint}/tokenizer.json is not there (model.checkpoint of {run.recipe}), so tokens are shown as ids; "
        "run the command where that path leads to the checkpoint"
    )
