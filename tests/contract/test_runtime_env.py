"""What Ray makes of the job's runtime environment, OpenRLHF's and ours (host/runtime_env.py), with Ray's own merge."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
from ray.job_config import JobConfig
from ray.runtime_env.runtime_env import _merge_runtime_env

from openrlhf_logra.host import runtime_env

OPENRLHF = {"env_vars": {"NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "true"}}
JOBS = {
    "nothing": {},
    "a variable of OpenRLHF's": {"env_vars": {"NCCL_DEBUG": "INFO", "MINE": "1"}},
    "a variable of ours": {"env_vars": {"OURS": "raw"}},
    "a hook": {"worker_process_setup_hook": "job_hook.setup", "env_vars": {"MINE": "1"}},
    "a folder": {"working_dir": "gcs://a.zip", "worker_process_setup_hook": "job_hook.setup"},
}


def as_ray_init(ours: dict) -> dict | None:
    """What `ray.init` makes of it in a job's driver; None is its ValueError."""
    job = JobConfig.from_json(json.loads(os.environ[runtime_env.JOB]))
    return _merge_runtime_env(job.runtime_env, ours)


@pytest.mark.parametrize("job", JOBS.values(), ids=list(JOBS))
def test_whatever_the_job_names_is_merged(job, monkeypatch):
    monkeypatch.setenv(runtime_env.JOB, json.dumps({"runtime_env": job, "metadata": {"job_name": "x"}}))
    ours = {"env_vars": {**OPENRLHF["env_vars"], "OURS": "processed"}, runtime_env.HOOK: runtime_env.OUR_HOOK}
    assert (as_ray_init(ours) is None) == bool(job), "what this is about: Ray refuses the two together"
    merged = as_ray_init(runtime_env.extended(OPENRLHF, {"OURS": "processed"}))
    variables = merged.pop("env_vars")
    assert variables.pop(runtime_env.JOB_HOOK, None) == job.get("worker_process_setup_hook")
    assert variables == {**job.get("env_vars", {}), **OPENRLHF["env_vars"], "OURS": "processed"}
    rest = {field: value for field, value in job.items() if field != "env_vars"}
    assert merged == {**rest, "worker_process_setup_hook": runtime_env.OUR_HOOK}
    assert json.loads(os.environ[runtime_env.JOB])["metadata"] == {"job_name": "x"}


def test_without_a_job(monkeypatch):
    monkeypatch.delenv(runtime_env.JOB, raising=False)
    extended = runtime_env.extended({}, {})
    assert extended == {"env_vars": {}, "worker_process_setup_hook": runtime_env.OUR_HOOK}
    assert runtime_env.JOB not in os.environ


def test_our_hook_calls_the_jobs(monkeypatch):
    called = []
    monkeypatch.setitem(sys.modules, "job_hook", SimpleNamespace(setup=lambda: called.append(True)))
    monkeypatch.delenv(runtime_env.JOB_HOOK, raising=False)
    runtime_env.call_job_hook()
    assert not called
    monkeypatch.setenv(runtime_env.JOB_HOOK, "job_hook.setup")
    runtime_env.call_job_hook()
    assert called == [True]
