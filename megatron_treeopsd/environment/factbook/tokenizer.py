"""A word-level tokenizer for the Factbook: lower case, one token a word, tags as single tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_treeopsd.environment.factbook.text import WORD, words
from megatron_treeopsd.environment.factbook.world import Facts
from megatron_treeopsd.environment.search import CORRECTION, NOTHING_FOUND

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTROL = ("<pad>", "<unk>", "<bos>", "<eos>")
TAGS = (
    "<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>", "<doc>", "<think>", "</think>",
)  # fmt: skip

QUESTION_WORDS = "What is the of country whose ?"
PUNCTUATION = "| . , : ; ( ) \" ' - in and to a"

CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The question behind bos, then everything else as it comes."""


def vocabulary(required: Iterable[str], optional: Iterable[str], *, size: int) -> list[str]:
    """`size` tokens: control tokens and tags, the words of the `required` texts, and the most frequent others.

    Raises `ValueError` if the required words alone are more, or all words together fewer.
    """
    must = {word for text in required for word in lower_words(text)}
    counts = Counter(word for text in optional for word in lower_words(text) if word not in must)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    room = size - len(CONTROL) - len(TAGS) - len(must)
    if not 0 <= room <= len(frequent):
        raise ValueError(f"a vocabulary of {size} tokens leaves room for {room} of {len(frequent)} optional words")
    return [*CONTROL, *TAGS, *sorted(must.union(frequent[:room]))]


def structural_text(facts: Facts) -> str:
    """All words that give a question, a query or a passage its form and carry no content of their own."""
    fields = {field for values in facts.by_country.values() for field in values}
    return " ".join([QUESTION_WORDS, PUNCTUATION, NOTHING_FOUND, CORRECTION, *sorted(fields)])


def lower_words(text: str) -> list[str]:
    """Words of plain text as the tokenizer sees them."""
    return words(text.lower())


def build_tokenizer(vocabulary: list[str]) -> PreTrainedTokenizerFast:
    """The tokenizer of a vocabulary: ids in the order of the list, unknown words `<unk>`."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    # tags are found in the raw text, before it is split into words, and only there
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
