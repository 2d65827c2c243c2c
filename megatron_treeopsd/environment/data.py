"""Questions and passages on disk: one JSON object a line.

train.jsonl, dev.jsonl, test.jsonl   {"id", "question", "answers": [...], "metadata": {...}}
passages.jsonl                       {"id", "contents"}, contents = '"Title"\\ntext' (the Search-R1 corpus)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron_treeopsd.environment.retrieval.base import Passage
from megatron_treeopsd.tree import Question

Item = TypeVar("Item", Question, Passage)


class DataError(ValueError):
    """A data file that cannot be used; the message names file and line and says what is wrong."""


def load_questions(path: Path) -> list[Question]:
    """Read questions. Raises `DataError` for a missing or empty file, a broken line, missing keys, repeated ids."""
    return _load(path, _question)


def load_passages(path: Path) -> list[Passage]:
    """Read passages. Raises `DataError` for a missing or empty file, a broken line, missing keys, repeated ids."""
    return _load(path, _passage)


def question_row(question: Question) -> dict[str, Any]:
    """The line of `question`; `load_questions` reads it back equal."""
    return {
        "id": question.id,
        "question": question.text,
        "answers": list(question.answers),
        "metadata": question.metadata,
    }


def passage_row(passage: Passage) -> dict[str, str]:
    """The line of `passage`; `load_passages` reads it back equal (with score 0)."""
    return {"id": passage.id, "contents": f'"{passage.title}"\n{passage.text}'}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _load(path: Path, read: Callable[[dict[str, Any], str], Item]) -> list[Item]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; `treeopsd prepare` makes a data folder, with the same task=NAME")
    items: list[Item] = []
    seen: dict[str, int] = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            item = read(_object(line, place), place)
            if item.id in seen:
                raise DataError(f"{place}: id {item.id!r} is already used in line {seen[item.id]}")
            seen[item.id] = number
            items.append(item)
    if not items:
        raise DataError(f"{path}: the file is empty")
    return items


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected a JSON object, found {type(row).__name__}")
    return row


def _string(row: Mapping[str, Any], key: str, place: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        found = f"found {value!r}" if key in row else f"the keys are {', '.join(row) or 'none'}"
        raise DataError(f"{place}: {key!r} must be a text that is not empty; {found}")
    return value


def _question(row: dict[str, Any], place: str) -> Question:
    answers = row.get("answers")
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        found = f"found {answers!r}" if "answers" in row else f"the keys are {', '.join(row) or 'none'}"
        raise DataError(f"{place}: 'answers' must be a list of at least one text; {found}")
    metadata = row.get("metadata", {})
    if not isinstance(metadata, dict):
        raise DataError(f"{place}: 'metadata' must be an object; found {metadata!r}")
    return Question(_string(row, "id", place), _string(row, "question", place), tuple(answers), metadata)


def _passage(row: dict[str, Any], place: str) -> Passage:
    title, separator, text = _string(row, "contents", place).partition("\n")
    if not separator:
        raise DataError(f"{place}: 'contents' must be a title in double quotes, a new line, and the text")
    return Passage(_string(row, "id", place), title.removeprefix('"').removesuffix('"'), text)
