"""Colours and type of everything drawn: the report and the stand-alone pictures, in light and dark mode.

The six series colours were chosen so that each pair stays apart under normal, protan, deutan and tritan vision
(OKLab difference of at least 0.1 in both modes). Blue and orange mean good and bad; a sign or a mark says it too.
"""

from __future__ import annotations

SERIES = 6
"""Number of series colours: --s1 ... --s6."""

_LIGHT = {
    "page": "#f6f6f4", "surface": "#ffffff", "ink": "#1d1e20", "muted": "#66686d", "line": "#dddeda",
    "s1": "#1c5ccc", "s2": "#e07b00", "s3": "#2aa38e", "s4": "#8f2464", "s5": "#5c4d00", "s6": "#b48cf5",
    "rest": "#b9bab5", "good": "#1c5ccc", "bad": "#d06a00", "onmark": "#ffffff", "faint": "#eeeeea",
}  # fmt: skip
_DARK = {
    "page": "#131416", "surface": "#1b1c1e", "ink": "#e9e9e6", "muted": "#9fa1a6", "line": "#37393d",
    "s1": "#4a84ee", "s2": "#f09a4a", "s3": "#76edca", "s4": "#b0557f", "s5": "#ecd915", "s6": "#b9aefc",
    "rest": "#5c5f65", "good": "#5b92f2", "bad": "#f09a4a", "onmark": "#131416", "faint": "#26282b",
}  # fmt: skip

SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',Arial,sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


THEME = (
    f":root{{color-scheme:light dark;{_variables(_LIGHT)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
)

DRAWING = (
    f"svg text{{font-family:{SANS};font-size:11px;fill:var(--muted)}}"
    "svg .grid{stroke:var(--faint);stroke-width:1}"
    "svg .axis{stroke:var(--line);stroke-width:1}"
    "svg .curve{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}"
    "svg .raw{fill:none;stroke-width:1;opacity:.35}"
    "svg .band{opacity:.16;stroke:none}"
    "svg .dot{stroke:var(--surface);stroke-width:1.5}"
    "svg .area{stroke:var(--surface);stroke-width:1}"
    "svg .label{fill:var(--ink);font-weight:600}"
    "svg .cross{stroke:var(--muted);stroke-width:1;visibility:hidden}"
    f"svg .mono{{font-family:{MONO};font-size:11px;fill:var(--ink)}}"
    "svg .quiet{fill:var(--ink);opacity:.7}"
    "svg .edge{fill:none;stroke:var(--line)}"
    "svg .box{fill:var(--surface);stroke:var(--line);stroke-width:1}"
    "svg .good{fill:var(--good)}svg .bad{fill:var(--bad)}svg .even{fill:var(--rest)}"
    "svg .onmark{fill:none;stroke:var(--onmark);stroke-width:2;stroke-linecap:round;stroke-linejoin:round}"
    "svg .rail{stroke:var(--ink);opacity:.22;stroke-width:2;stroke-linecap:round}"
    "svg .goal{fill:none;stroke:var(--ink);stroke-width:1.5}"
    "svg .now{fill:var(--ink)}"
    "svg .node{cursor:pointer}svg .node:hover .box,svg .node:focus-visible .box,svg .node.chosen .box"
    "{stroke:var(--ink);stroke-width:2}svg .node{outline:none}"
)


def standalone(svg: str) -> str:
    """A drawing of this package as a file of its own: with its styles and a background, following the reader's mode."""
    head, _, body = svg.partition(">")
    background = '<rect width="100%" height="100%" rx="8" style="fill:var(--surface)"/>'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}><style>{THEME}{DRAWING}</style>{background}{body}\n'
