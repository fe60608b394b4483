"""The flag reference says what the parser does (`python tests/unit/test_docs.py` writes it anew), links of the pages
lead somewhere, and their tables are tables."""

import argparse
import re
from pathlib import Path

import pytest

from openrlhf_logra.config import add_flags

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("patches/*.md")]
REFERENCE = ROOT / "docs" / "flags.md"
HEADER = """# Flags

All flags begin with `--logra.`; `--logra.enable` turns the plugin on. Made from `openrlhf_logra/config.py` by
`python tests/unit/test_docs.py`.

| flag | default | accepts | meaning |
|---|---|---|---|
"""


def reference() -> str:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    rows = []
    for action in parser._actions:
        if not action.dest.startswith("logra."):
            continue
        if action.const is True:
            default, accepts = "off", "switch"
        else:
            default = " ".join(action.default) if isinstance(action.default, tuple) else str(action.default)
            default = {"None": "see meaning", "": "none"}.get(default, default)
            accepts = (
                ", ".join(action.choices) if action.choices else {"+": "names"}.get(action.nargs, action.type.__name__)
            )
        meaning = action.help.split(" Default: ")[0] if action.default is not None else action.help
        meaning = meaning.replace("|", "\\|")
        rows.append(f"| `{action.option_strings[0]}` | {default} | {accepts} | {meaning.strip()} |")
    return HEADER + "\n".join(rows) + "\n"


def test_the_flag_reference_is_current():
    assert REFERENCE.read_text() == reference(), "run: python tests/unit/test_docs.py"


def prose(page: Path) -> list[str]:
    """The page's lines, empty ones in place of fenced and indented code."""
    text = re.sub(r"^```.*?^```$", lambda code: "\n" * code[0].count("\n"), page.read_text(), flags=re.DOTALL | re.M)
    return re.sub(r"(?<=\n\n)(    .*\n)+", lambda code: "\n" * code[0].count("\n"), text).splitlines()


def anchors(page: Path) -> set[str]:
    """What GitHub calls the page's headings."""
    headings = [line.lstrip("#").strip().lower() for line in prose(page) if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", "\n".join(prose(page))))
    broken = []
    for link in (link for link in links if not link.startswith("https://")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def broken_lines(page: Path) -> list[str]:
    """Headings that stick to the line before, rows outside of a table, rows of another width than their table's."""
    broken, width, before = [], 0, ""
    for line in prose(page):
        cells = len(re.findall(r"(?<!\\)\|", line))
        if line.startswith("|"):
            width = width or cells
            good = line.endswith("|") and cells == width and (before.startswith("|") or not before)
        else:
            width = 0
            good = not re.match(r"[-:| ]+\|[-:| ]*$", line) and not (line.startswith("#") and before)
        broken += [] if good else [line]
        before = line
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_hold_together(page):
    assert not broken_links(page)
    assert not broken_lines(page)


def test_what_is_broken_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` c: d\n\n[good](#a-b-c-d) [good](page.md#a-b-c-d) [web](https://a.b/#c) `[code](no.md)`\n"
        "[bad](no.md) [bad](#a-b)\n\n| a | b |\n|---|---|\n| `\\|` | 2 |\n\n```\n[code](no.md)\n# code\n```\n"
    )
    assert broken_links(page) == ["no.md", "#a-b"] and not broken_lines(page)
    page.write_text("# A\ntext\n## B\n\n| a | b |\n|---|---|\n| 1 |\n\na | b\n---|---\n\ntext\n| a |\n")
    assert broken_lines(page) == ["## B", "| 1 |", "---|---", "| a |"]


if __name__ == "__main__":
    REFERENCE.write_text(reference())
