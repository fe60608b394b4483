"""Activation: from `--logra.` on the command line to a host that trains with LoGRA.

The `.pth` line imports this module at interpreter start, only when an argument starts with `--logra.`; a patched fork
does so in its first lines (patches/). It watches for the import of `openrlhf`; then, in order: the version gate, the
CPU stand-ins, and the one parser of the stock module, whose `parse_args` adds our flags, checks everything that can be
checked before Ray starts, and installs the plugin.
"""

import argparse
import sys

from .imports import before_import

STOCK_MODULE = "openrlhf.cli.train_ppo_ray"
_activated = False


def on_interpreter_start() -> None:
    """Called by the `.pth` line. Activates for `python -m openrlhf.cli.train_ppo_ray ... --logra.*` only."""
    # `-m NAME`, `-mNAME` and combined short options such as `-um NAME`.
    for option, value in zip(sys.orig_argv[1:], [*sys.orig_argv[2:], ""]):
        if option.startswith("-") and not option.startswith("--") and "m" in option:
            if STOCK_MODULE in (value, option.partition("m")[2]):
                activate()
            return


def activate() -> None:
    """Watch for OpenRLHF in this process; idempotent."""
    global _activated
    if not _activated:
        _activated = True
        before_import("openrlhf", _before_openrlhf)


def fail(message: str) -> None:
    """One line on stderr and exit code 2."""
    print(f"openrlhf_logra: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _before_openrlhf() -> None:
    from . import cpu, versions

    problem = versions.gate(allow_untested=versions.OVERRIDE_FLAG in sys.argv)
    if problem:
        fail(problem)
    cpu.install()
    _watch_parser()


def _watch_parser() -> None:
    """Replace `ArgumentParser.parse_args` until the stock module's own parser calls it."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_with_logra(parser, args=None, namespace=None):
        if not _is_stock_parser(parser):
            return parse_args(parser, args, namespace)
        argparse.ArgumentParser.parse_args = parse_args
        return _parse(parser, args, namespace)

    argparse.ArgumentParser.parse_args = parse_with_logra


def _is_stock_parser(parser: argparse.ArgumentParser) -> bool:
    main_spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return (
        main_spec is not None
        and main_spec.name == STOCK_MODULE
        and "--actor.model_name_or_path" in (parser._option_string_actions)
    )


def _parse(parser: argparse.ArgumentParser, args, namespace) -> argparse.Namespace:
    from ..config import ConfigError, add_flags

    add_flags(parser)
    stock_error = parser.error

    def error(message):
        if "--logra." in message:
            fail(message)  # without the usage, which is hundreds of lines
        stock_error(message)

    parser.error = error
    parsed = parser.parse_args(args, namespace)
    from . import plugin

    try:
        plugin.enable(parsed, sys.modules["__main__"])
    except ConfigError as error:
        fail(str(error))
    return parsed
