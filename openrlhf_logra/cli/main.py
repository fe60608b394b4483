"""The entry of `openrlhf-logra`: subcommands, each imported only when called.

Every subcommand is a module with `add_arguments(parser)` and `run(args) -> exit code`; the first line of its docstring
is the help text shown here. Exit codes: 0 all right, 1 a finding, 2 bad input, 130 Ctrl-C.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from openrlhf_logra import __version__
from openrlhf_logra.host import versions

COMMANDS = ("train", "describe", "doctor", "report", "replay", "verify")
# What follows these is for another program, `--help` included.
PASSED_THROUGH = ("train",)
# What these need of the host. (doctor looks, train has the host's own gate, and report its own extra.)
NEEDED_BY = ("describe", "replay", "verify")
NEEDED = ("torch", "transformers", "safetensors")


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with arguments, as subcommands say everything else; the usage is in --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser with every subcommand's name, and with the arguments of `chosen` alone."""
    parser = _Parser(prog="openrlhf-logra", description="LoGRA for OpenRLHF.")
    parser.add_argument("--version", action="version", version=f"openrlhf-logra {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = commands.add_parser(name, help=help_text(name), description=help_text(name))
        if name == chosen:
            load(name).add_arguments(command)
    return parser


def load(name: str) -> ModuleType:
    """The module of a subcommand."""
    return importlib.import_module(f"openrlhf_logra.cli.{name}")


def help_text(name: str) -> str:
    """The first line of a subcommand's docstring, from its source: importing all of them would take seconds."""
    with open(Path(__file__).with_name(f"{name}.py"), encoding="utf-8") as source:
        return source.readline().strip().strip('"')


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code.

    Raises:
        SystemExit: with code 2 for arguments that do not parse, 0 after --help and --version.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen = argv[0] if argv and argv[0] in COMMANDS else None
    problem = versions.missing(NEEDED) if chosen in NEEDED_BY else None
    if problem:
        print(f"openrlhf-logra {chosen}: {problem}", file=sys.stderr)
        return 2
    if chosen in PASSED_THROUGH:
        args = argparse.Namespace(command=chosen, flags=argv[1:])
    else:
        parser = build_parser(chosen)
        args, unknown = parser.parse_known_args(argv)
        if unknown:  # which argparse would put down to `openrlhf-logra` itself
            parser.prog += f" {args.command}"
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return load(args.command).run(args)
    except KeyboardInterrupt:
        print(f"openrlhf-logra {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
