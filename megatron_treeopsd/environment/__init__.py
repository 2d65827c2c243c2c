"""What the agent acts on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_treeopsd import config
from megatron_treeopsd.environment import retrieval
from megatron_treeopsd.environment.base import Environment
from megatron_treeopsd.environment.data import load_passages
from megatron_treeopsd.environment.search import SearchEnvironment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build(task: config.Task, tokenizer: PreTrainedTokenizerBase) -> Environment:
    """The environment that the recipe names, over the passages of its data folder.

    Raises `DataError` for passages that cannot be read and `TokenizerError` for an unsuitable tokenizer.
    """
    retriever = retrieval.build(task.retrieval, load_passages(task.data / "passages.jsonl"))
    return SearchEnvironment(
        tokenizer,
        retriever,
        top_k=task.retrieval.top_k,
        max_observation_tokens=task.max_observation_tokens,
    )
