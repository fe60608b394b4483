"""The flag reference says what the parser does. `python tests/unit/test_docs.py` writes it anew."""

import argparse
from pathlib import Path

from openrlhf_logra.config import add_flags

REFERENCE = Path(__file__).parents[2] / "docs" / "flags.md"
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


if __name__ == "__main__":
    REFERENCE.write_text(reference())
