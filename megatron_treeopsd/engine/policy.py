"""The policy inside the embedded engine: a transformers model, loaded strictly and replaced all or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from megatron_treeopsd.engine.base import EngineError

FAMILIES = ("llama", "qwen3", "qwen3_moe")
"""`model_type` values whose modules the embedded engine is tested with."""

MEGATRON = "latest_checkpointed_iteration.txt"
"""The file by which a folder in Megatron's distributed format is known."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_policy(checkpoint: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """Load a Hugging Face folder. Of a folder in Megatron's format only the shape: its weights must be published first.

    Raises `EngineError` if there is none, if it is of another architecture than the engine serves, or if it does not
    hold exactly the weights that its config asks for.
    """
    if not (checkpoint / "config.json").is_file():
        raise EngineError(f"{checkpoint}: not a Hugging Face checkpoint folder (there is no config.json in it)")
    config = AutoConfig.from_pretrained(checkpoint)
    check_family(config)
    if (checkpoint / MEGATRON).is_file() and not any(checkpoint.glob("*.safetensors")):
        return _without_weights(config, dtype)
    model, report = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, output_loading_info=True)
    wrong = {kind: names for kind, names in report.items() if names}
    if wrong:
        raise EngineError(f"{checkpoint}: the weights do not fit config.json: {wrong}")
    return model


def _without_weights(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model that raises `EngineError` until it is given weights."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.requires_grad_(False)
    embedding = model.get_input_embeddings()
    embedding.weight.fill_(float("nan"))

    def refuse(*_: object) -> None:
        if embedding.weight[0, 0].isnan():
            raise EngineError("no weights were published yet, and the checkpoint folder is in Megatron's format, which "
                              "engines do not read")  # fmt: skip

    model.model.register_forward_pre_hook(refuse)
    return model


def check_family(config: PretrainedConfig) -> None:
    """Raise `EngineError` for architectures whose attention the engine does not reproduce."""
    if config.model_type not in FAMILIES:
        raise EngineError(f"the embedded engine serves {', '.join(FAMILIES)}; this checkpoint is {config.model_type}")
    if (window := getattr(config, "sliding_window", None)) is not None:
        raise EngineError(
            f"the embedded engine has no sliding-window attention; the checkpoint sets sliding_window={window}"
        )


def replace_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Give `model` new weights under Hugging Face names, all or nothing.

    Experts may come one by one, as checkpoints store them (`...experts.3.gate_proj.weight`), or fused, as transformers
    holds them (`...experts.gate_up_proj`). With tied embeddings a `lm_head.weight` may come along if it equals the
    embedding. Raises `EngineError` listing the names that are unknown, given twice, missing, or of a wrong shape;
    the model then still has its old weights.
    """
    parameters = dict(model.named_parameters())
    staged = {name: torch.empty_like(parameter) for name, parameter in parameters.items()}
    arriving = targets(staged)
    missing = {part for _, parts in arriving.values() for part in parts}
    problems: list[str] = []
    tied_head: Tensor | None = None
    for name, tensor in weights:
        if name == _HEAD and name not in arriving:
            tied_head = tensor.detach()
        elif name not in arriving:
            problems.append(f"unknown name {name}")
        else:
            target, parts = arriving[name]
            if target.shape != tensor.shape:
                problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(target.shape)}")
            elif not parts <= missing:
                problems.append(f"{name} was given twice")
            else:
                target.copy_(tensor.detach())
            missing -= parts
    problems += [f"missing {name}" for name in sorted(missing)]
    if tied_head is not None and not torch.equal(tied_head.to(staged[_EMBEDDING]), staged[_EMBEDDING]):
        problems.append(f"{_HEAD} differs from {_EMBEDDING}, but the checkpoint ties them")
    if problems:
        raise EngineError(f"the weights were not taken, {len(problems)} problems: " + "; ".join(problems))
    for name, parameter in parameters.items():
        parameter.data = staged[name]


def targets(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, frozenset[str]]]:
    """Every name that may arrive: where it goes, and which parts of the model it covers.

    A part is a whole tensor, or one matrix of one expert; a fused tensor covers the parts of all its experts.
    """
    out: dict[str, tuple[Tensor, frozenset[str]]] = {}
    for name, tensor in tensors.items():
        parts: dict[str, Tensor] = {}
        if name.endswith(".experts.gate_up_proj"):  # [experts, 2 * intermediate, hidden], gate first
            prefix = name.removesuffix(".gate_up_proj")
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                parts[f"{prefix}.{expert}.gate_proj.weight"] = gate
                parts[f"{prefix}.{expert}.up_proj.weight"] = up
        elif name.endswith(".experts.down_proj"):  # [experts, hidden, intermediate]
            prefix = name.removesuffix(".down_proj")
            for expert, down in enumerate(tensor):
                parts[f"{prefix}.{expert}.down_proj.weight"] = down
        out[name] = (tensor, frozenset(parts or [name]))
        out.update({part: (view, frozenset([part])) for part, view in parts.items()})
    return out
