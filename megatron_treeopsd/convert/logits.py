"""Logits of a Megatron model beside those of transformers, in float32 on the CPU or GPU at hand."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.config import Layout, RecipeError
from megatron_treeopsd.objective.base import TurnTable
from megatron_treeopsd.weights import load_pretrained
from megatron_treeopsd.weights.torch_dist.source import find_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MAX_PARAMETERS = 200_000_000
"""Larger models should not be run: both are held in float32 at once."""
TOKENS = 48
TOLERANCE = 1e-5
"""Largest difference, relative to the largest logit, of two float32 computations of one model."""


class NotComparable(RuntimeError):
    """Why logits are not compared; the tensors are, in any case."""


def difference(hf: Path, megatron: Path, hf_config: PreTrainedConfig, dtype: torch.dtype | None, *, own: bool) -> float:
    """Largest difference of the two models' logits on random tokens, over the largest logit.

    hf, megatron: the folders. dtype: what the Megatron side was rounded to, if it was. own: read the Megatron side by
    Megatron's own reader, which unpickles what it finds: for folders that this program wrote. Raises `NotComparable`.
    """
    with _quiet():
        return _difference(hf, megatron, hf_config, dtype, own=own)


def _difference(
    hf: Path, megatron: Path, hf_config: PreTrainedConfig, dtype: torch.dtype | None, *, own: bool
) -> float:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    with torch.no_grad():
        if dtype is not None:
            for parameter in reference.parameters():
                parameter.copy_(parameter.to(dtype))
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, hf_config.vocab_size, (TOKENS,), generator=generator)
        expected = reference(ids[None]).logits[0]
        found = _megatron_logits(megatron, hf_config, ids, own=own)
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        raise NotComparable("a model with values that are not finite has no logits")
    return float((found - expected).abs().max() / expected.abs().max())


@contextmanager
def _quiet() -> Iterator[None]:
    """What two libraries have to say about loading a model would bury what we have to say."""
    from transformers.utils import logging as transformers_logging

    megatron = logging.getLogger("megatron.core.dist_checkpointing")
    level = megatron.level
    bars = transformers_logging.is_progress_bar_enabled()
    megatron.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        megatron.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _megatron_logits(folder: Path, hf_config: PreTrainedConfig, ids: Tensor, *, own: bool) -> Tensor:
    from megatron_treeopsd.backend import parallel
    from megatron_treeopsd.backend.model import build_model

    layout = Layout()
    state = parallel.initialize(layout, seed=0)
    try:
        model = build_model(hf_config, layout, state, dtype=torch.float32)
        if own:
            load_by_megatron(model, folder)
        else:
            load_pretrained(model, folder, hf_config)
        found = logits(model.eval(), ids.to(state.device))
        assert found is not None
        return found.cpu()
    except RecipeError as error:
        raise NotComparable(f"the trainer does not build this model: {error}") from None
    finally:
        parallel.shutdown()


def load_by_megatron(model: nn.Module, folder: Path) -> None:
    """Fill this rank's part of a model with what Megatron reads in a `torch_dist` folder; collective."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu

    checkpoint = find_checkpoint(folder)
    settings = dist_checkpointing.load_content_metadata(str(checkpoint)) or {}
    settings["dp_cp_group"] = mpu.get_data_parallel_group(with_context_parallel=True)
    wanted: dict[str, Any] = {"model": model.sharded_state_dict(metadata=settings)}
    model.load_state_dict(dist_checkpointing.load(wanted, str(checkpoint))["model"])


def logits(model: Any, ids: Tensor, run: Callable[[PackedTrees], Any] | None = None) -> Tensor | None:
    """Logits [T, vocabulary] of one sequence, on ranks of the last pipeline stage; None on others.

    run: a forward pass of the model at its layout, where calling `model` itself is not enough (pipeline parallelism).
    """
    from megatron.core import tensor_parallel

    hidden: list[Tensor] = []
    hook = model.decoder.register_forward_hook(lambda _, __, output: hidden.append(output))
    try:
        (run or model)(_one_sequence(ids))
    finally:
        hook.remove()
    if not model.post_process:
        return None
    rows = hidden[-1]
    group = model.pg_collection.tp
    if model.config.sequence_parallel:
        rows = tensor_parallel.gather_from_sequence_parallel_region(rows, group=group)
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    found = rows[: len(ids), 0] @ weight.T
    return tensor_parallel.gather_from_tensor_model_parallel_region(found, group=group)


def _one_sequence(ids: Tensor) -> PackedTrees:
    """A chain of tokens, the last of which is a turn of its own."""
    count = len(ids)
    one = torch.ones(1, device=ids.device)
    turns = TurnTable(
        offsets=torch.tensor([0, 1], device=ids.device),
        behaviour=torch.zeros_like(one),
        credit=one,
        weight=one,
        leaves=torch.ones(1, dtype=torch.int64, device=ids.device),
        peak=one,
        sequence=torch.zeros(1, dtype=torch.int64, device=ids.device),
    )
    order = torch.arange(count, device=ids.device)
    ends = torch.tensor([0, count], device=ids.device)
    return PackedTrees(
        ids=ids,
        positions=order,
        query_offsets=ends,
        key_rows=order,
        key_offsets=ends,
        edge_rows=order[-2:-1],
        edge_labels=ids[-1:],
        turns=turns,
        origin=((0, 0),),
        questions=("",),
    )
