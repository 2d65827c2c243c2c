"""A search agent in Search-R1's tags: queries and the answer in tags, passages back as information.

    prompt   the tokenizer's own chat template around one user message
    turn     <search> export partner Kuwait </search>
    answer   <information> <doc> Kuwait | The export partner is China. ... </information>
    turn     <answer> China </answer>                                                        the trajectory ends

A turn ends with its first closing tag, so the two closing tags must be single tokens. Only what the environment adds
is ever encoded; sampled ids go on as they were sampled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_treeopsd.environment.base import Environment, Outcome
from megatron_treeopsd.environment.retrieval.base import Passage, Retriever
from megatron_treeopsd.tree import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ACTION_TAGS = ("<search>", "</search>", "<answer>", "</answer>")
STOP_TAGS = ("</search>", "</answer>")
INFORMATION_TAGS = ("<information>", "</information>")
DOCUMENT_TAG = "<doc>"

NOTHING_FOUND = "Nothing found."
CORRECTION = (
    "That was neither a search nor an answer. "
    "Put a query between the search tags, or the final answer between the answer tags."
)

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_STOP = re.compile("|".join(STOP_TAGS))
_TAG = r"<\s*/?\s*(?:search|answer|information|doc|think)\s*>"


class TokenizerError(ValueError):
    """A tokenizer that this environment cannot be run with; the message says why and what to do."""


def parse_action(text: str) -> tuple[str, str]:
    """What a turn does: ("search", query), ("answer", answer) or ("invalid", "").

    The first action counts, and what stands behind the first closing tag is not read. An action without content is
    none.
    """
    stop = _STOP.search(text)
    match = _ACTION.search(text[: stop.end()] if stop else text)
    content = match.group(2).strip() if match else ""
    return (match.group(1), content) if match and content else ("invalid", "")


class SearchEnvironment(Environment):
    """Questions answered with a search tool. It keeps no state at all, so any turn can be continued at any time.

    Args:
        tokenizer: the checkpoint's tokenizer, with a chat template and both closing tags as single tokens. One that
            has a token `<doc>` too gets the short form of a passage, `<doc> title | text`; others get Search-R1's.
        retriever: the search tool.
        top_k: passages shown for one query.
        max_observation_tokens: longest observation, tags included; passages are cut at the end.
        user_message: the user message of the prompt; `{question}` stands for the question.

    Raises:
        TokenizerError: if the tokenizer has no chat template or eos, cannot stop at the tags, or does not keep the
            tokens of a text when something is appended to it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        retriever: Retriever,
        *,
        top_k: int,
        max_observation_tokens: int,
        user_message: str = "{question}",
    ) -> None:
        self.tokenizer = tokenizer
        self.retriever = retriever
        self.top_k = top_k
        self._user_message = user_message
        self._max_observation_tokens = max_observation_tokens

        added = {token: id for token, id in tokenizer.get_added_vocab().items() if re.search(r"[^\w\s]", token)}
        self._reserved_text = re.compile("|".join([_TAG, *map(re.escape, sorted(added, reverse=True))]), re.IGNORECASE)
        self._reserved_ids = frozenset(added.values()) - {tokenizer.unk_token_id}
        self._document = self.encode(DOCUMENT_TAG) if DOCUMENT_TAG in added else None
        self._opening, self._closing = self.encode("\n\n<information>"), self.encode("</information>\n\n")

        self._stop_ids = frozenset({self._eos(), *(self._single_token(tag) for tag in STOP_TAGS)})
        self._check_tags()
        self._check_appending()

    # -------------------------------------------------------------------------------------------------- Environment
    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    def prompt(self, question: Question) -> list[int]:
        return self.encode(self._render([self._user(question.text)], add_generation_prompt=True))

    def step(self, question: Question, state: Any, sampled_ids: Sequence[int], *, last: bool) -> Outcome:
        action, content = parse_action(self._decode(sampled_ids))
        if action == "answer":
            return Outcome([], done=True, action=action, prediction=content)
        if last:
            return Outcome([], done=True, action=action)
        if action == "invalid":
            return Outcome(self._information(self.encode(CORRECTION)), done=False, action=action)
        return Outcome(self._information(self._show(self.retriever.search(content, self.top_k))), False, action)

    def close(self) -> None:
        self.retriever.close()

    # ---------------------------------------------------------------------------------------------- text and tokens
    def encode(self, text: str) -> list[int]:
        """Token ids of `text` alone: no bos or eos is added."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def neutralise(self, text: str) -> str:
        """`text` without anything that reads as a tag or as a control token of the tokenizer.

        Passages are data: one that contains `</information><answer>42` must not close its block or open another.
        """
        while (cleaned := self._reserved_text.sub(_bare_words, text)) != text:
            text = cleaned  # what was cut apart may have joined into another tag
        return text

    def _show(self, passages: Sequence[Passage]) -> list[int]:
        ids: list[int] = []
        for number, passage in enumerate(passages, start=1):
            if self._document is None:
                ids += self._encode_data(f"Doc {number}(Title: {passage.title}) {passage.text}\n")
            else:
                ids += self._document + self._encode_data(f"{passage.title} | {passage.text}")
        return ids if passages else self.encode(NOTHING_FOUND)

    def _encode_data(self, text: str) -> list[int]:
        # by id as well: a tokenizer may fold look-alike characters into a tag after the text was cleaned
        return [token for token in self.encode(self.neutralise(text)) if token not in self._reserved_ids]

    def _information(self, body: list[int]) -> list[int]:
        """An information block, cut so that it is not longer than allowed and always closed."""
        room = self._max_observation_tokens - len(self._opening) - len(self._closing)
        return self._opening + body[:room] + self._closing

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _user(self, question: str) -> dict[str, str]:
        return {"role": "user", "content": self._user_message.replace("{question}", self.neutralise(question))}

    def _render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    # ------------------------------------------------------------------------------------------- start-up checks
    def _eos(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise TokenizerError("the tokenizer has no eos token; set eos_token in its tokenizer_config.json")
        return int(self.tokenizer.eos_token_id)

    def _single_token(self, tag: str) -> int:
        ids = self.encode(tag)
        if len(ids) != 1 or self._decode(ids).strip() != tag:
            pieces = self.tokenizer.convert_ids_to_tokens(ids)
            raise TokenizerError(
                f"the tag {tag} must be one token, because an engine stops at tokens and not at texts; this tokenizer "
                f"reads it as {pieces}. Add it with tokenizer.add_tokens([{tag!r}]), resize the model's embeddings, "
                "and save both"
            )
        return ids[0]

    def _check_tags(self) -> None:
        for tag in (*ACTION_TAGS, *INFORMATION_TAGS):
            if tag not in self._decode(self.encode(f"a {tag} b")):
                raise TokenizerError(f"the tag {tag} does not survive encoding and decoding; add it as a token")
        room = self._max_observation_tokens - len(self._opening) - len(self._closing)
        needed = len(self.encode(NOTHING_FOUND))
        if room < needed:
            raise TokenizerError(
                f"task.max_observation_tokens={self._max_observation_tokens} leaves {room} tokens between the "
                f"information tags of this tokenizer; at least {needed} are needed"
            )

    def _check_appending(self) -> None:
        """Appending must never change a token in front of it: neither by the template nor by the tokenizer."""
        if self.tokenizer.chat_template is None:
            raise TokenizerError(
                "the tokenizer has no chat template, so no prompt can be made; add chat_template.jinja"
            )
        user, turn = self._user("Where does the probe end?"), "<search> probe </search>"
        before = self._render([user], add_generation_prompt=False)
        if not self._render([user, {"role": "assistant", "content": turn}], add_generation_prompt=False).startswith(
            before
        ):
            raise TokenizerError("the chat template rewrites the user's message once an answer follows it")
        prompt = self._render([user], add_generation_prompt=True)
        text = ""
        ids: list[int] = []
        for part in (prompt, turn, "\n\n<information>", "Doc 1(Title: probe) A text.\n", "</information>\n\n", turn):
            text, ids = text + part, ids + self.encode(part)
            if self.encode(text) != ids:
                raise TokenizerError(
                    f"appending {part!r} changes tokens in front of it: this tokenizer reads the whole text "
                    f"differently from its parts, so token-in/token-out rollouts would not be what the model sees"
                )


def _bare_words(match: re.Match[str]) -> str:
    return re.sub(r"[^\w\s]+", " ", match.group())
