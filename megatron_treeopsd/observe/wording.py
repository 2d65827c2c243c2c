"""Numbers and foreign text made fit for people: one way to write each quantity, everywhere."""

from __future__ import annotations

import math
import re
import unicodedata


def duration(seconds: float) -> str:
    """0.42 s · 38 s · 4 min 12 s · 3 h 05 min."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def compact(value: float) -> str:
    """Counts and rates in at most five characters: 7 · 950 · 1.9k · 24k · 3.1M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 0.9995:
            scaled = value / unit
            return f"{scaled:.1f}".removesuffix(".0") + name if abs(scaled) < 9.95 else f"{scaled:.0f}{name}"
    if value == int(value) or abs(value) >= 99.5:
        return f"{value:.0f}"
    return f"{value:.1f}"


def number(value: float) -> str:
    """A measured number with three significant digits: 0.412 · -0.0123 · 4.2e-05 · 1234."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:.0f}" if abs(value) < 1e6 else f"{value:.2e}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def signed(value: float) -> str:
    """A credit: +0.42 · −1.30 · 0.00 (never a negative zero)."""
    text = f"{value:+.2f}"
    return "0.00" if text in ("+0.00", "-0.00") else text.replace("-", "−")


def counted(count: int, one: str, many: str = "") -> str:
    """1 step · 2 steps · 3 leaves."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def printable(text: str) -> str:
    """Foreign text (what a tool or a model wrote) without anything that steers a terminal or breaks a parser.

    New lines stay, other white space becomes a blank, invisible formatting characters go, and what else cannot be
    printed becomes ·.
    """
    return _UNUSUAL.sub(lambda found: _printable(found[0]), text)


_UNUSUAL = re.compile(r"[^\n\x20-\x7e]")


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    if character.isspace():
        return " "
    return "" if unicodedata.category(character) == "Cf" else "·"


def visible(text: str) -> str:
    """`printable` text on one line, its new lines shown as ⏎."""
    return printable(text).strip().replace("\n", " ⏎ ")


def shorten(text: str, length: int) -> str:
    """At most `length` characters; what is cut off at the end is shown as …"""
    return text if len(text) <= length else text[: max(0, length - 1)].rstrip() + "…"
