"""The shell of `report.html`: one file, styles and script inside, nothing fetched (the page forbids itself to)."""

from __future__ import annotations

from html import escape

from megatron_treeopsd.observe.style import DRAWING, MONO, SANS, THEME

_STYLE = f"""
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 {SANS}}}
main{{max-width:1120px;margin:0 auto;padding:28px 20px 60px}}
h1{{font-size:26px;line-height:1.2;margin:0 0 4px;letter-spacing:-.01em}}
h2{{font-size:17px;margin:0 0 2px}}
h3{{font-size:14px;margin:0 0 2px}}
p{{margin:0 0 10px}}
.quiet{{color:var(--muted)}}
.note{{color:var(--muted);font-size:13px;margin:0 0 12px;max-width:88ch}}
code,pre{{font-family:{MONO};font-size:12.5px}}
section{{background:var(--surface);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin-top:16px}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:12px;margin-top:18px}}
.tile{{background:var(--surface);border:1px solid var(--line);border-radius:10px;padding:12px 16px}}
.tile b{{display:block;font-size:24px;line-height:1.25;font-weight:650;letter-spacing:-.01em}}
.tile span{{font-size:13px;color:var(--muted)}}
svg{{display:block;max-width:100%;height:auto}}
.scroll{{overflow-x:auto}}.scroll svg{{min-width:min(100%,880px)}}
.wide{{width:min(calc(100vw - 40px),1480px);margin-left:50%;transform:translateX(-50%)}}
.columns{{display:grid;grid-template-columns:minmax(0,1fr) max-content;gap:28px;align-items:start}}
.small{{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:18px 22px}}
.small .note{{margin:0 0 4px;min-height:2.9em;line-height:1.35}}
@media(max-width:820px){{.columns{{grid-template-columns:1fr}}}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}}
th{{font-weight:500;color:var(--muted);text-align:left}}
th,td{{padding:4px 18px 4px 0;white-space:nowrap;border-bottom:1px solid var(--faint)}}
td.n,th.n{{text-align:right}}td.strong{{font-weight:650}}
tr.detail td:first-child{{padding-left:18px;color:var(--muted)}}
.up{{color:var(--good)}}.down{{color:var(--bad)}}
.key{{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:7px}}
dl{{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:2px 14px;margin:0;font-size:13.5px}}
dt{{color:var(--muted)}}dd{{margin:0;overflow-wrap:anywhere}}
details{{margin-top:10px}}summary{{cursor:pointer;color:var(--muted);font-size:13.5px}}
.tree+.tree{{margin-top:26px;border-top:1px solid var(--line);padding-top:20px}}
article{{border:1px solid var(--line);border-radius:8px;padding:10px 14px;margin-top:10px}}
article h4{{margin:0;font-size:14px}}article p{{font-size:13px;color:var(--muted);margin:0 0 6px}}
article pre,.recipe{{white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0 0;max-height:340px;overflow:auto}}
article pre.observed{{color:var(--muted);border-left:3px solid var(--line);padding-left:10px;margin-top:8px}}
.panel:empty{{display:none}}
#tip{{position:fixed;pointer-events:none;background:var(--surface);border:1px solid var(--line);border-radius:8px;
box-shadow:0 4px 16px rgb(0 0 0/.16);padding:7px 11px;font-size:12.5px;visibility:hidden;white-space:nowrap;z-index:9}}
#tip i{{display:inline-block;width:9px;height:9px;border-radius:3px;margin-right:6px}}
#tip b{{float:right;margin-left:16px;font-variant-numeric:tabular-nums}}
"""

_SCRIPT = """
const tip = document.getElementById("tip");
for (const svg of document.querySelectorAll("svg[data-points]")) {
  const points = JSON.parse(svg.dataset.points), cross = svg.querySelector(".cross");
  if (!points.length) continue;
  svg.addEventListener("pointermove", (event) => {
    const place = svg.getBoundingClientRect();
    const x = (event.clientX - place.left) * svg.viewBox.baseVal.width / place.width;
    const near = points.reduce((a, b) => Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a);
    cross.setAttribute("x1", near.x); cross.setAttribute("x2", near.x); cross.style.visibility = "visible";
    const title = document.createElement("div");
    title.textContent = near.t;
    tip.replaceChildren(title, ...near.v.map(([name, value, colour]) => {
      const [row, key, number] = ["div", "i", "b"].map((name) => document.createElement(name));
      key.style.background = colour; number.textContent = value;
      row.append(number, key, name);
      return row;
    }));
    const left = event.clientX + 16 + tip.offsetWidth > innerWidth;
    tip.style.left = (left ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16) + "px";
    tip.style.top = Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8) + "px";
    tip.style.visibility = "visible";
  });
  svg.addEventListener("pointerleave", () => { tip.style.visibility = cross.style.visibility = "hidden"; });
}
for (const tree of document.querySelectorAll(".tree")) {
  const panel = tree.querySelector(".panel"), nodes = tree.querySelectorAll(".node");
  const choose = (node) => {
    const again = node.classList.contains("chosen");
    nodes.forEach((other) => other.classList.remove("chosen"));
    panel.replaceChildren();
    if (again) return;
    node.classList.add("chosen");
    panel.append(tree.querySelector(`article[data-turn="${node.dataset.turn}"]`).cloneNode(true));
  };
  nodes.forEach((node) => {
    node.addEventListener("click", () => choose(node));
    node.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(node); });
  });
}
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, body: str) -> str:
    """A whole HTML document around `body`. The title is escaped here; the body must be."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{THEME}{DRAWING}{_STYLE}</style></head>"
        f'<body><main>{body}</main><div id="tip"></div><script>{_SCRIPT}</script></body></html>\n'
    )


def section(title: str, note: str, content: str, *, wide: bool = False) -> str:
    """A card; nothing if there is no content. `note` is plain text, `content` HTML. `wide`: as wide as the window."""
    if not content:
        return ""
    explained = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section{' class=wide' if wide else ''}><h2>{escape(title)}</h2>{explained}{content}</section>"


def tile(label: str, value: str, detail: str) -> str:
    """A headline figure with what it is above and one line below."""
    return f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b><span>{escape(detail)}</span></div>'


def table(head: list[str], rows: list[list[str]], *, words: tuple[int, ...] = (0,)) -> str:
    """A table of HTML cells; numbers stand right, the columns `words` left."""
    titles = "".join(f"<th{_side(i, words)}>{escape(name)}</th>" for i, name in enumerate(head))
    lines = ("".join(f"<td{_side(i, words)}>{cell}</td>" for i, cell in enumerate(row)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _side(column: int, words: tuple[int, ...]) -> str:
    return "" if column in words else " class=n"
