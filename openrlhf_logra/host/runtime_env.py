"""The runtime environment of our Ray processes: OpenRLHF's, ours and, under `ray job submit`, the job's own.

Ray refuses what both the job and `ray.init` name, even with equal values.
"""

import json
import os
import pkgutil

from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR as JOB

HOOK = "worker_process_setup_hook"
OUR_HOOK = "openrlhf_logra.host.ray_worker.setup"
JOB_HOOK = "OPENRLHF_LOGRA_JOB_HOOK"  # the job's own hook, which ours calls


def extended(openrlhf: dict, variables: dict[str, str]) -> dict:
    """The runtime environment for `ray.init`: that of OpenRLHF's call with our hook and `variables`.

    What the job names too is taken out of the configuration that the job gave this process. Its values stay: OpenRLHF
    reads those variables from the environment, which has the job's, and our hook calls the job's.
    """
    variables = {**openrlhf.get("env_vars", {}), **variables}
    if JOB in os.environ:
        job = json.loads(os.environ[JOB])
        theirs = job.get("runtime_env") or {}
        if HOOK in theirs:
            variables[JOB_HOOK] = theirs.pop(HOOK)
        for name in variables:
            theirs.get("env_vars", {}).pop(name, None)
        os.environ[JOB] = json.dumps(job)
    return {**openrlhf, "env_vars": variables, HOOK: OUR_HOOK}


def call_job_hook() -> None:
    """In a worker: the setup hook of the job, if it has one."""
    if hook := os.environ.get(JOB_HOOK):
        pkgutil.resolve_name(hook)()
