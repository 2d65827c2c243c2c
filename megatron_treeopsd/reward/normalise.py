"""When two answers are the same: Search-R1's normalisation (its `qa_em`, after SQuAD)."""

from __future__ import annotations

import re
import string

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, ASCII punctuation deleted, articles left out, white space collapsed.

    `The U.S.A.` gives `usa`; `A-Team` gives `ateam`. Accents and typographic quotes stay as they are.
    """
    text = text.lower().translate(_PUNCTUATION)
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(text.split())
