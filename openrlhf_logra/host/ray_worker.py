"""Runs in every Ray worker of a LoGRA job before anything else (`worker_process_setup_hook`)."""

from . import cpu, runtime_env
from .imports import before_import


def setup() -> None:
    """CPU stand-ins right before OpenRLHF is imported, where there is no GPU. Costs nothing until then.
    Then the setup hook of the job, if it has one."""
    before_import("openrlhf", cpu.install)
    runtime_env.call_job_hook()
