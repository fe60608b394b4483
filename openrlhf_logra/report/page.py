"""The report as one HTML file: no scripts, nothing loaded from elsewhere, light and dark."""

from html import escape

from openrlhf_logra.report.panels import COLORS
from openrlhf_logra.report.summary import HEADER

STYLE = """
:root { color-scheme: light dark; %(light)s }
@media (prefers-color-scheme: dark) { :root { %(dark)s } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 40px 24px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { margin: 0 0 4px; font-size: 24px; font-weight: 650; overflow-wrap: anywhere; }
dl { display: flex; flex-wrap: wrap; gap: 4px 28px; margin: 0 0 28px; color: var(--muted); }
dl div { display: flex; gap: 8px; }
dd { margin: 0; color: var(--ink); font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 0 0 36px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 0 7px 40px; border-bottom: 1px solid var(--grid); text-align: right; white-space: nowrap; }
th { font-weight: 500; color: var(--muted); }
tbody th { color: var(--ink); }
th:first-child { padding-left: 0; text-align: left; }
td:last-child { font-weight: 600; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%%), 1fr)); gap: 36px 40px; }
figure { margin: 0; min-width: 0; }
h2 { margin: 0; font-size: 16px; font-weight: 600; }
figcaption p { margin: 2px 0 10px; color: var(--muted); font-size: 13.5px; }
svg { display: block; width: 100%%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif !important; }
footer { margin-top: 36px; color: var(--muted); font-size: 13.5px; }
""".strip()


def render_page(
    title: str,
    facts: list[tuple[str, str]],
    rows: list[tuple[str, str, str, str]],
    figures: list[tuple[str, str, str]],
) -> str:
    """The whole page.

    Args:
        title: name of the run.
        facts: (name, value) pairs for the line below it.
        rows: the summary table (`summary_rows`); without rows there is no table.
        figures: (title, note, svg) per panel; the SVG goes in as it is, everything else is escaped.
    """
    light, dark = (" ".join(f"--{role}: {pair[side]};" for role, pair in COLORS.items()) for side in (0, 1))
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}: LoGRA run</title>",
        f"<style>\n{STYLE % {'light': light, 'dark': dark}}\n</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(title)}</h1>",
        "<dl>",
        *(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts),
        "</dl>",
    ]
    if rows:
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in HEADER)
        parts += ['<div class="wide"><table>', f"<thead><tr>{head}</tr></thead>", "<tbody>"]
        for measure, *cells in rows:
            figures_html = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            parts.append(f'<tr><th scope="row">{escape(measure)}</th>{figures_html}</tr>')
        parts += ["</tbody>", "</table></div>"]
    parts.append("<main>")
    for name, note, svg in figures:
        caption = f"<figcaption><h2>{escape(name)}</h2><p>{escape(note)}</p></figcaption>"
        parts.append(f"<figure>{caption}{svg}</figure>")
    parts += [
        "</main>",
        "<footer>Faint lines show every step, strong lines over them a running mean over about a tenth of the run."
        "</footer>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"
