"""The rollout engines' Ray actor, with the gate that keeps an engine of unknown weights from generating."""

import asyncio
import os

import ray
from openrlhf.trainer.ray import vllm_engine
from vllm.v1.engine.exceptions import EngineDeadError

from . import cpu, log_probs
from .engine_client import ANSWER_SECONDS
from .stock import plain, report_active
from .vllm_plugin import ENABLED

_RESTARTS = 3
_REPAIR_SECONDS = 3 * ANSWER_SECONDS  # how long a request waits: a sync that fails, a restart, a dense sync
_COPIED_TO_RAY_WORKERS = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


class LograRolloutRayActor(plain(vllm_engine.RolloutRayActor)):
    """Rollout actor whose workers hold a LoGRA weight-transfer engine; a stale engine does not generate."""

    async def __init__(self, *args, **kwargs):
        report_active("rollout actor")
        os.environ[ENABLED] = "1"  # inherited by the engine core and its workers, copied to Ray workers
        copied = os.environ.get(_COPIED_TO_RAY_WORKERS, "")
        os.environ[_COPIED_TO_RAY_WORKERS] = ",".join(filter(None, (copied, ENABLED)))
        self._stale: str | None = None
        self._closed = 0  # how often the gate was
        self._known_version = asyncio.Event()
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._stale = "it was started again, with the base model"
        else:
            self._known_version.set()
        self._log_probs = os.environ.get(log_probs.VARIABLE)
        if self._log_probs:
            kwargs["logprobs_mode"] = self._log_probs
        kwargs["weight_transfer_config"] = {"backend": "logra"}
        kwargs["worker_extension_cls"] = "openrlhf_logra.host.vllm_worker.LograWorkerExtension"
        if not cpu.has_gpu():
            kwargs["enable_sleep_mode"] = False  # refused there; sleep and wake_up still pause and resume scheduling
            kwargs["distributed_executor_backend"] = cpu.EXECUTORS[kwargs["distributed_executor_backend"]]
            if kwargs["tensor_parallel_size"] > 1:
                cpu.give_each_worker_a_core(kwargs["tensor_parallel_size"])
        await super().__init__(*args, **kwargs)

    async def logra_initialise(self, init_info: dict) -> list[dict]:
        """Layouts of all workers (`LograWeightTransferEngine.describe_layout`)."""
        if init_info["version"] is None:
            self._close("its weights are no version of this run")
        return await self._on_workers("logra_initialise", init_info)

    async def logra_sync(self, update_info: dict) -> list[dict]:
        """Apply the records of one message on all workers; their reports. The engine generates again once a sync has
        ended and no worker is stale."""
        asks_only = not (update_info.get("records") or update_info.get("sizes"))
        if not asks_only:
            self._close("a sync did not finish")
        closed = self._closed
        reports = await self._on_workers("logra_sync", update_info)
        if asks_only or not update_info["last"]:
            return reports
        stale = next((report["stale"] for report in reports if report["stale"]), None)
        if stale is None and self.kwargs.get("enable_prefix_caching"):
            # Requests that a partial rollout keeps hold blocks of the old weights: they start again from their tokens.
            if not await self.llm.reset_prefix_cache(reset_running_requests=True):
                stale = "vLLM refused to reset its prefix cache"
                reports = [{**report, "stale": stale} for report in reports]
        if closed == self._closed:  # otherwise the trainer has given this sync up, and another one is under way
            self._stale = stale
            if stale is None:
                self._known_version.set()
        return reports

    def _close(self, reason: str) -> None:
        self._closed += 1
        self._known_version.clear()
        self._stale = reason

    async def _on_workers(self, method: str, argument: dict) -> list[dict]:
        try:
            return await self.llm.collective_rpc(method, args=(argument,))
        except EngineDeadError:
            # Nothing brings an engine core back but a new actor: leave, so that Ray starts one.
            print("[logra] the engine core died; this rollout actor ends, to be started again", flush=True)
            os._exit(1)

    async def generate_responses(self, *args, sampling_params, **kwargs):
        if self._log_probs and sampling_params.logprobs is None:
            sampling_params.logprobs = 0  # of the sampled token only
        return await super().generate_responses(*args, sampling_params=sampling_params, **kwargs)

    async def generate(self, *args, **kwargs):
        # Requests that arrive during a sync wait for its end; those at a stale engine, for its repair.
        while not self._known_version.is_set():  # again after a wait, which others may have closed meanwhile
            try:
                await asyncio.wait_for(self._known_version.wait(), _REPAIR_SECONDS)
            except asyncio.TimeoutError:
                raise RuntimeError(f"LoGRA: this engine's weights are no known version ({self._stale})") from None
        return await super().generate(*args, **kwargs)


def restarted_by_ray():
    """The actor class for Ray. One that dies is started again, with the base model; it serves nothing until a dense
    sync has reached it."""
    return ray.remote(max_restarts=_RESTARTS)(LograRolloutRayActor)
