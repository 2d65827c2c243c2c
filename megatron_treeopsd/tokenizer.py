"""The tokenizer of a policy, from its own checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(checkpoint: Path) -> PreTrainedTokenizerFast:
    """Load from a local folder, never from a hub. Raises `FileNotFoundError` naming what is missing."""
    from transformers import AutoTokenizer

    for name in ("config.json", "tokenizer_config.json"):
        if not (checkpoint / name).is_file():
            raise FileNotFoundError(
                f"{checkpoint / name} does not exist: model.checkpoint must be a Hugging Face folder "
                "with config.json, safetensors weights and tokenizer files"
            )
    return AutoTokenizer.from_pretrained(str(checkpoint), local_files_only=True, trust_remote_code=False)
