"""The policy as a Megatron model: configuration from a Hugging Face config, layer spec, `PolicyModel`.

    PackedTrees ─► embedding ─► layers (tree attention) ─► norm ─► hidden states of `edge_rows` ─► log-probs [E]

Supported families: Qwen3 (dense), Qwen3-MoE, and Llama 3.x.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from megatron_treeopsd.backend.attention import (
    AttentionKernel,
    TreeAttention,
    TreeSequence,
    choose_kernel,
    rotary_table,
)
from megatron_treeopsd.backend.logprob import token_logprobs
from megatron_treeopsd.backend.parallel import ParallelState
from megatron_treeopsd.backend.rope import ROPE_TYPES, scaling_of
from megatron_treeopsd.backend.rows import GatherRows, JoinEdges
from megatron_treeopsd.batch.context import share_rows
from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.config import Layout, RecipeError

FAMILIES = ("llama", "qwen3", "qwen3_moe")


def read_config(folder: Path) -> PretrainedConfig:
    """The Hugging Face config of a checkpoint folder.

    Raises FileNotFoundError if there is none, `RecipeError` if it is damaged or of another family.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"model.checkpoint={folder}: no config.json there; it must be a Hugging Face folder")
    try:
        family = json.loads(path.read_text())["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{path}: not a model configuration: {error!r}") from None
    if family not in FAMILIES:
        raise RecipeError(f"{path}: model_type={family!r} is not supported; supported: {', '.join(FAMILIES)}")
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def check_model(hf: PretrainedConfig, layout: Layout) -> None:
    """Raise `RecipeError`, naming the key and its value, for a model or a split of it that cannot be trained here."""
    expected = {
        "hidden_act": (hf.hidden_act, "silu"),
        "attention_bias": (hf.attention_bias, False),
        "mlp_bias": (getattr(hf, "mlp_bias", False), False),
        "use_sliding_window": (getattr(hf, "use_sliding_window", False), False),
        "decoder_sparse_step": (getattr(hf, "decoder_sparse_step", 1), 1),
        "mlp_only_layers": (getattr(hf, "mlp_only_layers", []), []),
    }
    for key, (value, supported) in expected.items():
        if value != supported:
            raise RecipeError(f"{hf.model_type}: {key}={value!r} is not supported, only {supported!r}")
    if (rope_type := hf.rope_parameters["rope_type"]) not in ROPE_TYPES:
        raise RecipeError(f"{hf.model_type}: rope_type={rope_type!r} is not supported, only {', '.join(ROPE_TYPES)}")

    divisions = [
        ("num_attention_heads", hf.num_attention_heads, "tp", layout.tp),
        ("num_key_value_heads", hf.num_key_value_heads, "tp", layout.tp),
        ("vocab_size", hf.vocab_size, "tp", layout.tp),
        ("num_hidden_layers", hf.num_hidden_layers, "pp", layout.pp),
    ]
    if hf.model_type == "qwen3_moe":
        divisions.append(("num_experts", hf.num_experts, "ep", layout.ep))
        divisions.append(("moe_intermediate_size", hf.moe_intermediate_size, "etp", layout.etp))
        if layout.etp > 1 and layout.pp > 1 and not torch.cuda.is_available():
            raise RecipeError(
                f"layout.etp={layout.etp} with layout.pp={layout.pp} needs a GPU: gloo lacks a collective"
            )
        if layout.etp > 1 and layout.etp * layout.ep > layout.tp * layout.cp and not torch.cuda.is_available():
            raise RecipeError(
                f"layout.etp={layout.etp} with layout.ep={layout.ep} spreads experts over ranks with other "
                f"micro-batches: only tp * cp = {layout.tp * layout.cp} ranks share one. That needs a GPU, since gloo "
                "does not gather parts of unequal size; set layout.etp=1"
            )
    else:
        divisions.append(("intermediate_size", hf.intermediate_size, "tp", layout.tp))
        for name, size in (("ep", layout.ep), ("etp", layout.etp)):
            if size > 1:
                raise RecipeError(
                    f"layout.{name}={size}: {hf.model_type} has no experts to divide; set layout.{name}=1"
                )
    for key, value, name, size in divisions:
        if value % size:
            raise RecipeError(f"layout.{name}={size} does not divide the model's {key}={value}")


def uses_transformer_engine(layout: Layout) -> bool:
    """Which layer spec to build. Raises `RecipeError` if Transformer Engine is asked for and is not there."""
    available = HAVE_TE and torch.cuda.is_available()
    if layout.spec == "transformer_engine" and not available:
        raise RecipeError("layout.spec=transformer_engine: Transformer Engine or CUDA is missing; use layout.spec=auto")
    return available and layout.spec != "local"


def transformer_config(hf: PretrainedConfig, layout: Layout, *, dtype: torch.dtype, recompute: bool) -> Any:
    """Megatron's `TransformerConfig` of a Hugging Face config, checked by `check_model`."""
    check_model(hf, layout)
    cuda = torch.cuda.is_available()
    engine = uses_transformer_engine(layout)
    options: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_dim(hf),
        "ffn_hidden_size": hf.intermediate_size,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "qk_layernorm": hf.model_type != "llama",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        # Megatron refuses to train experts under tensor parallelism without it.
        "sequence_parallel": layout.tp > 1,
        # Micro-batches have any number of rows, so pipeline stages exchange shapes first.
        "variable_seq_lengths": layout.pp > 1,
        # Its default refuses variable lengths, in models without experts too.
        "moe_token_dispatcher_type": "alltoall",
        # Losses and gradients are summed, never averaged: weights are normalised over the whole mini-batch.
        "calculate_per_token_loss": True,
        # Every weight is read from the checkpoint.
        "perform_initialization": False,
        "use_cpu_initialization": not cuda,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": engine,
        "bias_dropout_fusion": engine,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": False,
    }
    if hf.model_type == "qwen3_moe":
        options |= {
            "num_moe_experts": hf.num_experts,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
            # Softmax over the chosen experts equals softmax over all, renormalised over the chosen.
            "moe_router_pre_softmax": not hf.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": engine,
            "moe_permute_fusion": engine,
            # gloo lacks the uneven gather that all-to-all needs inside divided experts.
            "moe_token_dispatcher_type": "allgather" if layout.etp > 1 and not cuda else "alltoall",
        }
    if recompute:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(**options)


def head_dim(hf: PretrainedConfig) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


class RMSNorm(nn.Module):
    """Root mean square norm for the local spec. Megatron's own refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Every tensor-parallel rank sees a part of the rows (or heads), so Megatron must sum this gradient.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def layer_spec(config: TransformerConfig, *, kernel: AttentionKernel, transformer_engine: bool) -> Any:
    """Megatron's layer spec with `TreeAttention` as its core attention."""
    shape = {"num_experts": config.num_moe_experts, "qk_layernorm": config.qk_layernorm}
    attention = functools.partial(TreeAttention, kernel=kernel)
    if transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(**shape, moe_grouped_gemm=config.moe_grouped_gemm)
        spec.submodules.self_attention.submodules.core_attention = attention
        return spec
    layer = get_gpt_layer_local_submodules(**shape, normalization="RMSNorm")
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    inner = layer.self_attention.submodules
    inner.core_attention = attention
    if config.qk_layernorm:
        inner.q_layernorm = inner.k_layernorm = RMSNorm
    layers = [ModuleSpec(module=TransformerLayer, submodules=layer)] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


class PolicyModel(GPTModel):
    """This rank's part of the policy. A micro-batch of trees in, log-probs of its trained tokens out."""

    def __init__(
        self,
        config: TransformerConfig,
        hf: PretrainedConfig,
        parallel: ParallelState,
        *,
        kernel: AttentionKernel,
        transformer_engine: bool,
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=layer_spec(config, kernel=kernel, transformer_engine=transformer_engine),
            vocab_size=hf.vocab_size,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel.is_first_stage,
            post_process=parallel.is_last_stage,
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            position_embedding_type="none",
        )
        self.kernel = kernel
        self.rope_base = float(hf.rope_parameters["rope_theta"])
        self.rope_scaling = scaling_of(hf)

    def forward(self, packed: PackedTrees, temperature: float = 1.0) -> Tensor:
        """Log-probs [E] (float32, or float64 in a float64 model) of `edge_labels` on the last pipeline stage.

        Earlier stages return the hidden states for the next one. `temperature` divides the logits.
        """
        config = self.config
        context = self.pg_collection.cp
        share = share_rows(
            packed, ranks=context.size(), rank=context.rank(), multiple=config.tensor_model_parallel_size
        )
        rows = share.packed
        cos, sin = rotary_table(
            rows.positions,
            dim=config.kv_channels,
            base=self.rope_base,
            dtype=config.params_dtype,
            scaling=self.rope_scaling,
        )
        plan = self.kernel.plan(rows, config.params_dtype)
        routes = rows.routes
        if routes is not None and config.sequence_parallel:
            tp = self.pg_collection.tp
            routes = routes.chunk(tp.size())[tp.rank()]
        sequence = TreeSequence(qkv_format="thd", plan=plan, cos=cos, sin=sin, routes=routes)
        hidden = self.embedding(rows.ids[None], rows.positions[None]) if self.pre_process else None
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=sequence)
        if not self.post_process:
            return hidden
        group = None
        if config.sequence_parallel:
            group = self.pg_collection.tp
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=group)
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        # One row may predict several labels, where a tree forks.
        predicting = GatherRows.apply(hidden[:, 0], rows.edge_rows)
        logprobs, _ = token_logprobs(predicting, weight, rows.edge_labels, group, temperature=temperature)
        if share.edges is None:
            return logprobs
        return JoinEdges.apply(logprobs, share.edges, packed.edge_labels.numel(), context)


def build_model(
    hf: PretrainedConfig, layout: Layout, parallel: ParallelState, *, dtype: torch.dtype, recompute: bool = False
) -> PolicyModel:
    """This rank's part of a policy of shape `hf`, on its device. Its weights are not set: load a checkpoint.

    Raises `RecipeError` if the family, or its split by `layout`, is not supported.
    """
    config = transformer_config(hf, layout, dtype=dtype, recompute=recompute)
    engine = uses_transformer_engine(layout)
    kernel = choose_kernel(parallel.device, dtype)
    return PolicyModel(config, hf, parallel, kernel=kernel, transformer_engine=engine).to(parallel.device)
