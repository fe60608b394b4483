"""The sync's client over Ray (host/engine_client.py): one payload to all, by channel or store; no wait is endless.

Stand-ins: Ray's `put` and `get` over threads, actors with real workers on the toy runtime, a process group of threads.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray
import torch
from runtime import SHAPES, Engine, Runtime

from openrlhf_logra.host import cpu

cpu.install()

from openrlhf_logra.host import engine_client  # noqa: E402
from openrlhf_logra.math.exact import Update, apply_block, quantize  # noqa: E402
from openrlhf_logra.math.projection import Projection  # noqa: E402
from openrlhf_logra.sync.trainer import LograTrainerEngine, LograTrainerInitInfo, SyncError  # noqa: E402
from openrlhf_logra.sync.worker import LograInitInfo, LograUpdateInfo  # noqa: E402

TARGET = "layers.0.q_proj.weight"
SECONDS = 20


class Stored:
    """A reference to the object store."""

    def __init__(self, value):
        self.value = value


class Method:
    def __init__(self, pool, function):
        self.pool, self.function = pool, function

    def remote(self, argument):
        assert isinstance(argument, Stored), "the argument would be pickled once per engine"
        return self.pool.submit(self.function, argument.value)


class Actor:
    """A rollout actor: each worker in a thread of its own, as each is a process in vLLM."""

    def __init__(self, pool, workers=2):
        self.engine, self.received = Engine(workers), []
        self.fault = self.fault_after = None  # called before and after an apply
        self.logra_initialise = Method(pool, self.on_initialise)
        self.logra_sync = Method(pool, self.on_sync)

    def join(self, group):
        for worker in self.engine.workers:
            worker.channel = group.member()

    def restart(self, base):
        """Another process: base weights, no layout, not in the trainer's group."""
        self.engine = Engine(len(self.engine.workers))
        self.engine.load(base)

    def on_initialise(self, info):
        if self.fault:
            self.fault()
        for worker in self.engine.workers:
            worker.init_transfer_engine(LograInitInfo(**info))
        return [worker.describe_layout() for worker in self.engine.workers]

    def on_sync(self, info):
        self.received.append(info)
        if self.fault:
            self.fault()
        with ThreadPoolExecutor(len(self.engine.workers)) as pool:
            reports = list(pool.map(lambda worker: worker.apply(LograUpdateInfo(**info)), self.engine.workers))
        if self.fault_after:
            self.fault_after()
        return reports


class Group:
    """A broadcast that ends when all members take part, and fails where a real one would wait for ever."""

    def __init__(self):
        self.members, self.sizes, self.barrier, self.buffer = 0, [], None, None

    def member(self):
        self.members += 1
        self.barrier = threading.Barrier(self.members, timeout=SECONDS)
        return SimpleNamespace(broadcast=self.broadcast, rank=self.members - 1)

    def sender(self):
        member = self.member()
        return SimpleNamespace(broadcast=lambda tensor, src: self.broadcast(tensor, src, sends=True), rank=member.rank)

    def broadcast(self, tensor, src, stream=None, sends=False):
        if sends:
            self.buffer = tensor.clone()
            self.sizes.append(tensor.numel())
        self.barrier.wait()
        if not sends:
            assert tensor.shape == self.buffer.shape
            tensor.copy_(self.buffer)
        self.barrier.wait()


@pytest.fixture
def host(monkeypatch):
    """`put` counts what it stores; `get` waits for a thread."""
    pool = ThreadPoolExecutor(16)
    stored = []

    def put(value):
        stored.append(value)
        return Stored(value)

    def get(reference, timeout):
        try:
            return reference.result(timeout)
        except TimeoutError:
            raise ray.exceptions.GetTimeoutError("Get timed out: some object(s) not ready.") from None
        except ray.exceptions.RayError:
            raise
        except Exception as error:
            raise ray.exceptions.RayTaskError("logra_sync", repr(error), error).as_instanceof_cause() from error

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    released = threading.Event()
    yield SimpleNamespace(pool=pool, stored=stored, release=released)
    released.set()
    pool.shutdown()


class Trainer:
    """A real sender of one target's updates, over RayEngines."""

    def __init__(self, host, engines=2, channel=True, seconds=SECONDS):
        generator = torch.Generator().manual_seed(0)
        self.weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
        self.base = {name: tensor.clone() for name, tensor in self.weights.items()}
        self.actors = [Actor(host.pool) for _ in range(engines)]
        self.group = Group()
        sender = self.group.sender() if channel else None
        for actor in self.actors:
            actor.engine.load(self.base)
            if channel:
                actor.join(self.group)
        self.client = engine_client.RayEngines(self.actors, sender, seconds)
        info = LograTrainerInitInfo(rank=0, mode="factor", trained=(TARGET,), verify_every=1)
        self.sender = LograTrainerEngine.trainer_init(info, client=self.client, source=self.weights)
        self.version = 0

    def sync(self):
        rows, width = SHAPES[TARGET]
        generator = torch.Generator().manual_seed(self.version)
        q, s = quantize(1e-2 * torch.randn(rows, 4, generator=generator))
        update = Update(Projection(0, self.version, TARGET, 4, width), self.version, q, s)
        apply_block(self.weights[TARGET], update)
        self.version += 1
        self.sender.push((update,), self.version)
        return self.sender.send_weights()

    def held(self) -> bool:
        """Whether every worker holds the trainer's weights."""
        for actor in self.actors:
            for rank, worker in enumerate(actor.engine.workers):
                fresh = Runtime(rank, len(actor.engine.workers))
                fresh.load_weights(self.weights.items())
                if not all(torch.equal(a, b) for a, b in zip(worker.model.parameters(), fresh.parameters())):
                    return False
        return True


def payloads(host):
    """Stored arguments that carry records."""
    return [value for value in host.stored if value.get("records")]


def test_one_broadcast_carries_the_records_to_all_workers(host):
    trainer = Trainer(host)
    for count in (1, 2, 3):
        report = trainer.sync()
        assert report.mode == "factor" and report.digest_ok and trainer.held()
        assert len(trainer.group.sizes) == count and trainer.group.sizes[-1] == report.sync_bytes
    assert not payloads(host)
    assert all(actor.received[-1]["sizes"] == [report.sync_bytes] for actor in trainer.actors)


def test_without_a_channel_the_payload_is_stored_once(host):
    trainer = Trainer(host, engines=3, channel=False)
    for count in (1, 2):
        report = trainer.sync()
        assert report.mode == "factor" and report.digest_ok and trainer.held()
        assert len(payloads(host)) == count
    assert not trainer.group.sizes and not any(actor.received[-1].get("sizes") for actor in trainer.actors)


def test_the_repair_of_some_engines_goes_through_the_object_store(host):
    trainer = Trainer(host)
    trainer.sync()
    trainer.actors[1].engine.workers[0].version = 77  # it refuses the record, and takes the bytes all the same
    report = trainer.sync()
    assert report.mode == "dense" and trainer.held() and len(trainer.group.sizes) == 2
    assert len(payloads(host)) == 1
    assert not trainer.actors[0].received[-1].get("records") and trainer.actors[1].received[-1]["records"]
    assert trainer.sync().mode == "factor" and trainer.held() and len(trainer.group.sizes) == 3


def test_stale_workers_take_part_in_a_broadcast(host):
    """Whoever did not would leave the others waiting."""
    trainer = Trainer(host)
    trainer.sync()
    for actor in trainer.actors:
        actor.engine.workers[0].stale = "damaged"
    report = trainer.sync()
    assert report.mode == "dense" and trainer.held()


def test_a_question_is_no_broadcast(host):
    trainer = Trainer(host)
    trainer.sync()
    before = list(trainer.group.sizes)
    answers = trainer.client.sync([0, 1], {"verify": True})
    assert [len(workers) for workers in answers] == [2, 2] and answers[0][0]["digests"]
    assert trainer.group.sizes == before


@pytest.mark.parametrize("channel", [False, True])
def test_answers_come_in_the_order_of_the_engines(host, channel):
    trainer = Trainer(host, engines=4, channel=channel)
    trainer.sync()
    for delay, actor in zip((0.2, 0.0, 0.1, 0.0), trainer.actors):
        actor.fault = lambda delay=delay: time.sleep(delay)
    trainer.actors[2].engine.workers[1].version = 5
    answers = trainer.client.sync([2, 0, 3], {"verify": False})
    assert [[worker["version"] for worker in workers] for workers in answers] == [[1, 5], [1, 1], [1, 1]]


def test_answers_that_never_come_are_exceptions_in_time(host):
    """One deadline for all of them together."""
    trainer = Trainer(host, engines=4, channel=False, seconds=0.4)
    trainer.client.initialise([0, 1, 2, 3], {"shapes": {}, "version": 0})
    for actor in trainer.actors[:3]:
        actor.fault = lambda: host.release.wait(SECONDS)
    start = time.monotonic()
    for call in (trainer.client.sync, trainer.client.initialise):
        start = time.monotonic()
        answers = call([0, 1, 2, 3], {"shapes": {}} if call == trainer.client.initialise else {"verify": False})
        assert 0.3 < time.monotonic() - start < 1.2
        assert [isinstance(answer, ray.exceptions.GetTimeoutError) for answer in answers] == [True] * 3 + [False]
        assert len(answers[3]) == 2


def test_exceptions_in_engines_are_answers(host):
    trainer = Trainer(host, engines=3, channel=False)
    trainer.sync()

    def broken():
        raise MemoryError("out of memory")

    def dead():
        raise ray.exceptions.ActorDiedError()

    trainer.actors[0].fault, trainer.actors[1].fault = broken, dead
    answers = trainer.client.sync([0, 1, 2], {"verify": False})
    assert isinstance(answers[0], ray.exceptions.RayTaskError) and "out of memory" in str(answers[0])
    assert isinstance(answers[1], ray.exceptions.ActorDiedError) and len(answers[2]) == 2
    with pytest.raises(SyncError, match="engine 0"):
        trainer.sync()
    trainer.actors[0].fault = trainer.actors[1].fault = None
    assert trainer.sync().mode == "dense" and trainer.held()


class Clock:
    """Time that passes by sleeping only."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize("refusals", [0, 1, 5, 10**6])
def test_an_actor_that_is_being_started_is_waited_for(host, monkeypatch, refusals):
    clock = Clock()
    monkeypatch.setattr(engine_client, "time", clock)
    trainer = Trainer(host, channel=False, seconds=30)
    left = refusals

    def starting():
        nonlocal left
        if left:
            left -= 1
            raise ray.exceptions.ActorUnavailableError("restarting", None)

    trainer.actors[1].fault = starting
    shapes = {name: list(shape) for name, shape in SHAPES.items()}
    monkeypatch.setattr(engine_client, "_result", eventually(engine_client._result, host))
    answers = trainer.client.initialise([0, 1], {"shapes": shapes, "version": 0})
    assert len(answers[0]) == 2
    if refusals < 30:
        assert len(answers[1]) == 2 and clock.now == refusals
    else:
        assert isinstance(answers[1], ray.exceptions.ActorUnavailableError) and 30 <= clock.now <= 31


def eventually(result, host):
    """With a clock that stands still, results are waited for in real time."""

    def wait(reference, deadline):
        try:
            reference.exception(SECONDS)
        except TimeoutError:
            pass
        return result(reference, deadline)

    return wait


def test_an_engine_that_was_started_again_comes_back_through_the_object_store(host):
    trainer = Trainer(host, channel=False)
    trainer.sync()
    trainer.actors[1].restart(trainer.base)
    report = trainer.sync()
    assert report.mode == "dense" and trainer.held()
    assert trainer.sync().mode == "factor" and trainer.held()


def test_an_engine_that_was_started_again_is_in_no_group(host):
    """With NCCL the sender and the healthy workers would wait for ever, in the sync after the one that repaired it."""
    trainer = Trainer(host)
    trainer.sync()
    actor = trainer.actors[1]

    def dies():
        actor.fault_after = None
        actor.restart(trainer.base)
        raise ray.exceptions.ActorDiedError()

    actor.fault_after = dies
    assert trainer.sync().mode == "dense" and trainer.held()  # by the object store
    trainer.group.barrier = threading.Barrier(trainer.group.members, timeout=1)
    assert trainer.sync().mode == "factor" and trainer.held()
