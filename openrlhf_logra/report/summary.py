"""The figures of a run in words: the rows of the summary table, the facts beside it, human units."""

from openrlhf_logra.units import bytes_text, seconds_text

SUMMARY_KEYS = (
    "pass1_before",
    "pass1_after",
    "pass4_before",
    "pass4_after",
    "sync_bytes",
    "full_bytes",
    "state_bytes",
    "dense_state_bytes",
    "updates",
    "seconds",
    "seed",
)

HEADER = ("Measure", "Before / full", "After / LoGRA", "Change")

SCORES = (
    ("Held-out pass@1", "pass1_before", "pass1_after"),
    ("Held-out pass@4", "pass4_before", "pass4_after"),
)
SIZES = (
    ("Weight sync", "full_bytes", "sync_bytes"),
    ("Trainer state", "dense_state_bytes", "state_bytes"),
)


def summary_rows(summary: dict) -> list[tuple[str, str, str, str]]:
    """Rows (measure, before or full, after or LoGRA, change) of the summary table, in the order of `HEADER`.

    Args:
        summary: contents of summary.json. Scores are fractions (0 to 1), sizes are bytes. A row whose figures are
            absent or null is left out.
    """
    rows = []
    for measure, before_key, after_key in SCORES:
        before, after = summary.get(before_key), summary.get(after_key)
        if before is not None and after is not None:
            change = f"{100 * (after - before):+.1f} points"
            rows.append((measure, f"{100 * before:.1f}%", f"{100 * after:.1f}%", change))
    for measure, full_key, logra_key in SIZES:
        full, logra = summary.get(full_key), summary.get(logra_key)
        if full is not None and logra is not None:
            rows.append((measure, bytes_text(full), bytes_text(logra), ratio_text(full, logra)))
    return rows


def summary_facts(summary: dict) -> list[tuple[str, str]]:
    """Facts of the run that have no before and after: (name, value), those that summary.json has."""
    facts = []
    if summary.get("seed") is not None:
        facts.append(("Seed", f"{summary['seed']:.0f}"))
    if summary.get("updates") is not None:
        facts.append(("Updates", f"{summary['updates']:,.0f}"))
    if summary.get("seconds") is not None:
        facts.append(("Time", seconds_text(summary["seconds"])))
    return facts


def summary_table(rows: list[tuple[str, str, str, str]]) -> str:
    """The rows under `HEADER` as plain text of at most 80 columns, figures aligned to the right."""
    widths = [max(len(row[column]) for row in [HEADER, *rows]) for column in range(len(HEADER))]

    def line(row: tuple[str, ...]) -> str:
        figures = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))
        return "   ".join([row[0].ljust(widths[0]), *figures])

    rule = "-" * (sum(widths) + 3 * (len(widths) - 1))
    return "\n".join([line(HEADER), rule, *map(line, rows)])


def ratio_text(full: float, part: float) -> str:
    """How `part` compares with `full`: 26x smaller, 1.2x larger, same."""
    if full == part:
        return "same"
    if min(full, part) <= 0:
        return "-"
    ratio = max(full, part) / min(full, part)
    return f"{ratio:,.{0 if ratio >= 9.95 else 1}f}x {'smaller' if part < full else 'larger'}"
