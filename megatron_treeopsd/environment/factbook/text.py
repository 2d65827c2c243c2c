"""Raw Factbook strings to plain words."""

from __future__ import annotations

import html
import re
import unicodedata

WORD = r"\d+(?:[.,]\d+)*(?![a-z\d])|[a-z\d]+(?:'[a-z\d]+)*|[^\sa-z\d]"
"""What counts as one word in lower-case ASCII text: a number, a word with inner apostrophes, any other character."""

_WORD = re.compile(WORD, re.IGNORECASE | re.ASCII)
_LETTERS = str.maketrans(
    {"ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "ı": "i", "đ": "d", "Đ": "D", "ə": "e", "Ə": "E", "ß": "ss", "æ": "ae",
     "Æ": "Ae", "œ": "oe", "þ": "th", "Þ": "Th", "ð": "d", "ʻ": "", "ʼ": "", "’": "'", "‘": "'", "–": "-", "—": "-",
     "“": '"', "”": '"'}
)  # fmt: skip
_ROMAN = frozenset(
    {"II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XII", "XIII", "XIV", "XVI"}
)  # Xi is a name


def plain(text: str) -> str:
    """Resolve entities, drop markup and accents, collapse white space."""
    text = re.sub(r"<[^>]+>", " ", html.unescape(text))
    text = unicodedata.normalize("NFKD", text.translate(_LETTERS))
    text = "".join(character for character in text if not unicodedata.combining(character))
    return " ".join(text.split())


def words(text: str) -> list[str]:
    """Words of plain text in their own case, punctuation marks one by one."""
    return _WORD.findall(text)


def first_words(text: str, count: int) -> str:
    """The text up to the end of its `count`-th word."""
    end = 0
    for index, match in enumerate(_WORD.finditer(text)):
        if index == count:
            break
        end = match.end()
    return text[:end]


def name_case(text: str) -> str:
    """`Guy PARMELIN` to `Guy Parmelin`: the Factbook writes surnames and capitals in upper case."""

    def lower(match: re.Match[str]) -> str:
        word = match.group()
        return word if word in _ROMAN else word.capitalize()

    return re.sub(r"[A-Z']{2,}", lower, text)
