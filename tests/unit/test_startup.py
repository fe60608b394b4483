"""What the stock parser says of arguments that do not parse, once it has our flags."""

import argparse

import pytest

from openrlhf_logra.host import startup


def refused(arguments, capsys) -> str:
    parser = argparse.ArgumentParser(prog="stock")
    parser.add_argument("--actor.rank", type=int)
    with pytest.raises(SystemExit) as stop:
        startup._parse(parser, arguments, None)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--logra.rank", "many"], "argument --logra.rank: invalid int value: 'many'"),
        (["--logra.rnak", "8"], "unrecognized arguments: --logra.rnak 8"),
        (["--logra.method"], "argument --logra.method: expected one argument"),
    ],
)
def test_of_our_flags_one_line(arguments, problem, capsys):
    assert refused(arguments, capsys) == f"openrlhf_logra: error: {problem}\n"


def test_of_stock_flags_what_it_said_without_us(capsys):
    said = refused(["--logra.enable", "--actor.rank", "many"], capsys)
    assert said.startswith("usage: stock ") and said.endswith(
        "stock: error: argument --actor.rank: invalid int value: 'many'\n"
    )
