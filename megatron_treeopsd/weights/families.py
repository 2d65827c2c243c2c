"""Which architectures there is a name map for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_treeopsd.weights import llama, qwen3, qwen3_moe
from megatron_treeopsd.weights.rules import Weight, WeightsError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES = {"llama": llama, "qwen3": qwen3, "qwen3_moe": qwen3_moe}
"""`model_type` of a Hugging Face configuration -> its module of rules."""


def weights_of(hf_config: PreTrainedConfig) -> list[Weight]:
    """The whole name map of a model, in the order of a forward pass.

    Raises `WeightsError` for an architecture without a map.
    """
    check_architecture(hf_config.model_type, hf_config.architectures, "the given configuration")
    return list(FAMILIES[hf_config.model_type].weights(hf_config))


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a Hugging Face folder. Raises `WeightsError` if there is none, no valid one, or no map."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig  # takes seconds to import

    _check_architecture_of(folder)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise WeightsError(f"{folder / 'config.json'}: not a valid configuration: {error}") from None


def check_folder(folder: Path, hf_config: PreTrainedConfig) -> None:
    """Raise `WeightsError` unless `folder` holds the architecture that `hf_config` describes."""
    found = _check_architecture_of(folder)
    if found != hf_config.model_type:
        raise WeightsError(
            f"{folder / 'config.json'}: model_type {found!r}, but the model is a {hf_config.model_type!r}"
        )


def _check_architecture_of(folder: Path) -> str:
    """`model_type` of a folder's config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise WeightsError(f"{folder}: no config.json, so this is not a Hugging Face checkpoint folder")
    try:
        values = json.loads(path.read_text())
        model_type, architectures = values.get("model_type"), values.get("architectures")
    except (ValueError, AttributeError) as error:
        raise WeightsError(f"{path}: not valid JSON: {error}") from None
    check_architecture(model_type, architectures, str(path))
    return model_type


def check_architecture(model_type: str | None, architectures: list[str] | None, where: str) -> None:
    family = FAMILIES.get(model_type or "")
    if family is None or (architectures and family.ARCHITECTURE not in architectures):
        found = ", ".join(architectures or []) or f"model_type {model_type!r}"
        known = ", ".join(sorted(module.ARCHITECTURE for module in FAMILIES.values()))
        raise WeightsError(f"{where}: architecture {found} is not supported. Supported: {known}.")
