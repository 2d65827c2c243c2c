"""The word-level tokenizer and its vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from factbook_data import prepared, questions, search_environment
from transformers import AutoTokenizer

from megatron_treeopsd import config, reward
from megatron_treeopsd.environment.factbook.questions import chain_of
from megatron_treeopsd.environment.factbook.tokenizer import CONTROL, TAGS, build_tokenizer, vocabulary

pytestmark = pytest.mark.fast


def test_vocabulary_takes_what_is_required_and_then_the_most_frequent() -> None:
    fixed = [*CONTROL, *TAGS]
    optional = ["red red blue", "red blue green", "green", "Bern"]
    words = vocabulary(["The capital is Bern."], optional, size=len(fixed) + 7)
    # red comes three times, blue and green twice each
    assert words == [*fixed, ".", "bern", "blue", "capital", "is", "red", "the"]
    assert words == vocabulary(["The capital is Bern."], optional[::-1], size=len(fixed) + 7)


@pytest.mark.parametrize("size", [4, 1000])
def test_vocabulary_of_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"a vocabulary of {size} tokens"):
        vocabulary(["The capital is Bern."], ["red"], size=size)


def test_words_numbers_accents_and_tags(tmp_path: Path) -> None:
    words = [*CONTROL, *TAGS, "n'djamena", "k2", "1,234.5", "zurich", "is", ".", "<", ">", "/", "search"]
    build_tokenizer(words).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    def tokens(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])

    assert tokens("N'Djamena is ZÜRICH.K2") == ["n'djamena", "is", "zurich", ".", "k2"]
    assert tokens("1,234.5 is 1") == ["1,234.5", "is", "<unk>"]
    assert tokens("<search>zurich</search><eos>") == ["<search>", "zurich", "</search>", "<eos>"]
    # only the tags as they stand in the text are tags, not what becomes one by folding
    assert tokens("＜search＞ <Search> < search >") == ["<", "search", ">"] * 3
    assert len(tokenizer) == len(words)
    assert [tokenizer.convert_tokens_to_ids(word) for word in words] == list(range(len(words)))


def test_the_template_is_bos_and_the_question() -> None:
    tokenizer = search_environment("factbook").tokenizer
    messages = [{"role": "user", "content": "What is"}, {"role": "assistant", "content": "<answer> x"}]
    assert tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True) == "<bos>What is"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<bos>What is<answer> x"


def test_both_tasks_share_one_tokenizer() -> None:
    (short, summary), (long, _) = prepared("factbook"), prepared("factbook_long")
    assert summary.vocabulary == len(AutoTokenizer.from_pretrained(short / "tokenizer")) == 3520
    assert 3520 % 64 == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (short / "tokenizer" / name).read_bytes() == (long / "tokenizer" / name).read_bytes()


@pytest.mark.parametrize("name", ["factbook", "factbook_long"])
def test_questions_queries_and_answers_hold_no_unknown_word(name: str) -> None:
    environment = search_environment(name)
    tokenizer, exact_match = environment.tokenizer, reward.build(config.Reward())
    for question in questions(name, "dev") + questions(name, "test")[::20] + questions(name, "train")[::80]:
        texts = [question.text, *(hop.query for hop in chain_of(question)), question.answers[0]]
        ids = [environment.encode(text) for text in texts]
        assert all(tokenizer.unk_token_id not in item for item in ids), question
        assert exact_match.score(question, tokenizer.decode(ids[-1])) == 1, question
