"""Which exceptions are mistakes in what was asked, shown in plain words and without a traceback."""

from __future__ import annotations


def is_user_error(error: BaseException) -> bool:
    """True for errors whose message alone says what to do.

    Every exception type of this package is raised with such a message, on purpose and in one place; anything else
    that escapes is a fault and deserves its traceback.
    """
    return isinstance(error, (FileNotFoundError, PermissionError)) or type(error).__module__.startswith(__package__)
