"""recipes/cpu/compare.py: its configurations are ones that can be trained, and its table says what the runs say."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from openrlhf_logra.config import add_flags, from_flat

FILE = Path(__file__).parents[2] / "recipes/cpu/compare.py"


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("compare", FILE)
    module = sys.modules["compare"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["compare"]


def test_every_configuration_is_valid(compare):
    assert len(compare.METHODS) == 6 and len(compare.STUDY) == 3 * 3 * 3 * 2
    parser = argparse.ArgumentParser()
    add_flags(parser)
    seen = set()
    for name, flags in {**compare.METHODS, **compare.STUDY}.items():
        parsed, _ = parser.parse_known_args(flags)
        config = from_flat(parsed)
        config.validate()
        seen.add(config)
        assert name.startswith((config.method, config.optimizer))
    assert len(seen) == 6 + 54


def test_the_table_has_mean_and_deviation(compare):
    results = [compare.Result(0.3, pass1, 0.8, 2e6, 3e9, 1.5, 4e6) for pass1 in (0.5, 0.6)]
    head, _, row = compare.table({"logra": results}).splitlines()
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        *("logra", "30.0 ± 0.0", "55.0 ± 7.1", "80.0 ± 0.0", "2 MB", "3 GB", "1.50", "4 MB")
    ]
    assert head.count("|") == row.count("|")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--seeds", "1", "1"], "each given once"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--only", "adam"], "--only adam: is none of logra"),
        (["--out", __file__], "is not a directory"),
    ],
)
def test_bad_arguments_are_named(compare, arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        compare.main()
    assert stop.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("script, words", [("exit 3", "demo.sh ended with 3; see "), ("exit 0", "has no figures")])
def test_a_run_without_figures_ends_it(compare, script, words, monkeypatch, tmp_path, capsys):
    (tmp_path / "demo.sh").write_text(f'mkdir -p "$RUN"; {script}\n')
    monkeypatch.setattr(compare, "HERE", tmp_path / "cpu")
    monkeypatch.setattr(sys, "argv", ["compare.py", "--out", str(tmp_path / "out"), "--only", "logra"])
    assert compare.main() == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("compare.py: logra with seed 1: ") and words in last
    made = tmp_path / "out/logra-1-16/flags.json"
    assert made.is_file() == (script == "exit 0")
    if made.is_file():
        assert "--data.max_samples" in json.loads(made.read_text())
