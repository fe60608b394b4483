"""The rollout actor's gate: requests wait for a sync, and for a stale engine's repair. (A stub stands for vLLM.)"""

import asyncio
from types import SimpleNamespace

import pytest

from openrlhf_logra.host import cpu

cpu.install()

from openrlhf_logra.host import rollout_actor  # noqa: E402

SYNC = {"records": [b"..."], "position": 0, "last": True}


class Engine:
    """Answers RPCs when told to; generates one word."""

    def __init__(self, stale=None, reset=True):
        self.go, self.stale, self.reset = asyncio.Event(), stale, reset

    async def collective_rpc(self, method, args):
        await self.go.wait()
        return [{"version": 1, "applied": 1, "stale": self.stale, "digests": {}}]

    async def reset_prefix_cache(self, reset_running_requests):
        assert reset_running_requests, "blocks of kept requests would survive"
        return self.reset

    def generate(self, *arguments, **named):
        async def outputs():
            yield "text"

        return outputs()


def actor(engine, prefix_caching=False):
    made = rollout_actor.LograRolloutRayActor.__new__(rollout_actor.LograRolloutRayActor)
    made.llm, made.kwargs, made._mm_pad_token_ids = engine, {"enable_prefix_caching": prefix_caching}, None
    made._stale, made._closed, made._known_version = None, 0, asyncio.Event()
    made._known_version.set()
    return made


def generate(made):
    return asyncio.create_task(made.generate([1, 2], SimpleNamespace()))


def test_a_request_during_a_sync_waits_for_its_end():
    async def scenario():
        engine = Engine()
        made = actor(engine)
        assert await generate(made) == "text"
        sync = asyncio.create_task(made.logra_sync(SYNC))
        await asyncio.sleep(0)
        request = generate(made)
        await asyncio.sleep(0.05)
        assert not request.done()
        engine.go.set()
        assert (await sync)[0]["stale"] is None and await request == "text"

    asyncio.run(scenario())


@pytest.mark.parametrize("stale, reset", [("half applied", True), (None, False)])
def test_a_stale_engine_does_not_generate(stale, reset, monkeypatch):
    async def scenario():
        engine = Engine(stale, reset)
        made = actor(engine, prefix_caching=True)
        engine.go.set()
        reports = await made.logra_sync(SYNC)
        assert reports[0]["stale"]
        monkeypatch.setattr(rollout_actor, "_REPAIR_SECONDS", 0.05)
        with pytest.raises(RuntimeError, match="no known version .(half applied|vLLM refused)"):
            await generate(made)
        waiting = generate(made)
        engine.stale, engine.reset = None, True
        await made.logra_sync(SYNC)
        assert await waiting == "text"

    asyncio.run(scenario())


def test_a_sync_that_raises_leaves_the_engine_stale(monkeypatch):
    async def scenario():
        engine = Engine()

        async def broken(method, args):
            raise OSError("the engine core died")

        engine.collective_rpc = broken
        made = actor(engine)
        with pytest.raises(OSError):
            await made.logra_sync(SYNC)
        monkeypatch.setattr(rollout_actor, "_REPAIR_SECONDS", 0.05)
        with pytest.raises(RuntimeError, match="a sync did not finish"):
            await generate(made)

    asyncio.run(scenario())
