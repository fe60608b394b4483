"""Seeded fault injection between a trainer and two engines: real ends, a toy runtime between them.

Every sync of a run suffers at most one fault out of FAULTS, at a random engine, record, byte, message or worker, once
or for as long as the sync lasts. After each of them either the sync has raised, or every engine holds the trainer's
weights bit for bit. At any moment an engine that may generate holds one complete version that the trainer had.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from runtime import SHAPES, Engine, Runtime

from openrlhf_logra.math.exact import Update, apply_block, quantize
from openrlhf_logra.math.projection import Projection
from openrlhf_logra.sync import stream as stream_module
from openrlhf_logra.sync import trainer as trainer_module
from openrlhf_logra.sync import worker as worker_module
from openrlhf_logra.sync.log import RecordLog, apply_record, digests, read_log
from openrlhf_logra.sync.record import Record, decode, encode, sparse_record
from openrlhf_logra.sync.sparse import Elements
from openrlhf_logra.sync.trainer import LograTrainerEngine, LograTrainerInitInfo, SyncError, digests_of
from openrlhf_logra.train import ranks as ranks_module
from openrlhf_logra.train import shards

TARGETS = [f"layers.0.{name}_proj.weight" for name in "qvo"]  # split by rows, replicated, split by columns
UNVERIFIED = "layers.0.o_proj.weight"  # by engines whose model is Unpatchable
SYNCS_PER_MODE = 200
SEED = 0
NEVER = 10**9


class Unpatchable(Runtime):
    """o lies in columns: every sync sends it whole, in a message after the records, and nothing verifies it."""

    def __init__(self, rank=0, world=1):
        super().__init__(rank, world)
        self.layers[0].o.data = self.layers[0].o.data.t().contiguous().t()


class Rollout(Engine):
    """An engine behind the gate of host/rollout_actor.py: `may_generate` is what the actor knows."""

    def __init__(self, world, model, base):
        super().__init__(world, model)
        self.made_of, self.may_generate = (world, model, base), True
        self.load(base)

    def restart(self):
        """The process died; Ray starts another one, which loads the base model and knows nothing of us."""
        self.__init__(*self.made_of)
        self.may_generate = False

    def initialise(self, info):
        self.may_generate &= info["version"] is not None
        return super().initialise(info)

    def sync(self, info):
        if not info.get("records"):
            return super().sync(info)
        self.may_generate = False
        reports = super().sync(info)
        self.may_generate = info["last"] and not any(report["stale"] for report in reports)
        return reports

    def weights(self) -> list[bytes]:
        """All bits of each worker."""
        return [bits_of(worker.model) for worker in self.workers]


def bits_of(model) -> bytes:
    return b"".join(p.detach().contiguous().view(torch.int16).numpy().tobytes() for p in model.parameters())


def true_digests(engine, reports):
    """The reports, with digests of what the workers hold now."""
    named = [{name: p.data for name, p in worker.model.named_parameters()} for worker in engine.workers]
    found = [worker._digests(parameters) for worker, parameters in zip(engine.workers, named)]
    return [{**report, "digests": held if report["digests"] else {}} for report, held in zip(reports, found)]


class Rig:
    """A trainer, two engines, and between them a client that injects one fault per sync."""

    def __init__(self, mode, workers, model, verify_every, log_dir, seed, rank=0):
        self.random = random.Random(f"{mode} {seed}")
        generator = torch.Generator().manual_seed(seed)
        self.base = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
        self.weights = {name: tensor.clone() for name, tensor in self.base.items()}
        self.mode, self.workers, self.model, self.log_dir = mode, workers, model, log_dir
        self.settings = {"mode": mode, "verify_every": verify_every, "log_dir": log_dir}
        self.rank = rank
        self.engines = [Rollout(workers, model, self.base) for _ in range(0 if rank else 2)]
        self.version, self.branch = 0, 0
        self.history: list[dict[bytes, set]] = [{} for _ in range(workers)]  # by rank: weights -> when they were
        self.archive: list[dict] = []  # messages of earlier syncs
        self.returned = True  # whether the last sync did
        self.struck_at = Counter()
        self.fault: Callable | None = None
        self.quiet()
        self.remember()
        self.sender = self.make_sender(base_digests=digests_of(self.base))
        self.keep_checkpoint()

    def quiet(self):
        """No fault from here on."""
        self.fault, self.persistent, self.victim = None, False, None
        self.strikes, self.repaired, self.must_be_seen = 0, False, False
        self.sent, self.held, self.prelude = [], [], False
        self.kind_now = "before a sync"
        self.initialise_failures = self.unanswered_questions = self.short_answers = self.full_disk = 0
        self.after_sync: list[Callable] = []

    # ---- the trainer

    def make_sender(self, **more):
        info = LograTrainerInitInfo(
            rank=self.rank,
            trained=tuple(TARGETS),
            version=self.version,
            **{**self.settings, "log_dir": self.log_dir, **more},
        )
        return LograTrainerEngine.trainer_init(info, client=self, source=self.weights)

    def update(self):
        updates = []
        for i, name in enumerate(TARGETS):
            rows, width = SHAPES[name]
            seed = 1_000_000 * self.branch + 10 * self.version + i
            generator = torch.Generator().manual_seed(seed)
            if self.mode == "sparse":  # any optimizer at all
                step = 1e-2 * torch.randn(rows, width, generator=generator)
                chosen = torch.rand(rows, width, generator=generator) < 0.3
                self.weights[name] -= torch.where(chosen, step, 0.0).bfloat16()
                continue
            q, s = quantize(torch.randn(rows, 4, generator=generator) * 1e-2)
            updates.append(Update(Projection(self.branch, self.version, name, 4, width), self.version, q, s))
            apply_block(self.weights[name], updates[-1])
        self.version += 1
        self.remember()
        self.sender.push(tuple(updates), self.version)

    def fresh(self, weights=None) -> list[bytes]:
        """What each worker would hold after loading the trainer's weights."""
        held = []
        for rank in range(self.workers):
            model = self.model(rank, self.workers)
            model.load_weights((weights or self.weights).items())
            held.append(bits_of(model))
        return held

    def remember(self):
        for known, held in zip(self.history, self.fresh()):
            known.setdefault(held, set()).add((self.branch, self.version))

    def keep_checkpoint(self):
        weights = {name: tensor.clone() for name, tensor in self.weights.items()}
        self.checkpoint = weights, self.version, self.sender.state_dict()

    def resume(self, base_digests):
        """The trainer died; another one goes on from the checkpoint, another way."""
        weights, self.version, state = self.checkpoint
        for name, tensor in weights.items():
            self.weights[name].copy_(tensor)
        self.branch += 1
        self.remember()
        self.sender = self.make_sender(loaded_version=None, state=state, base_digests=base_digests)

    # ---- the client

    def count(self):
        return len(self.engines)

    def initialise(self, engines, info):
        answers = []
        for index in engines:
            try:
                if self.initialise_failures:
                    self.initialise_failures -= 1
                    raise RuntimeError("vLLM is not up yet")
                answers.append(self.engines[index].initialise(info))
            except Exception as error:
                answers.append(error)
        return answers

    def sync(self, engines, info):
        answers = []
        for index in engines:
            try:
                answers.append(self.deliver(index, self.engines[index], info))
            except Exception as error:
                answers.append(error)
        if info.get("records"):
            self.sent.append(info)
            if self.short_answers:
                self.short_answers -= 1
                self.strike()
                return answers[:-1]
        return answers

    def deliver(self, index, engine, info):
        for message in [held for held in self.held if held[0] is engine]:
            self.held.remove(message)
            engine.sync(message[1])
        if not info.get("records") and self.unanswered_questions:
            self.unanswered_questions -= 1
            raise GetTimeoutError("Get timed out")
        if not info.get("records") or index != self.victim:
            return engine.sync(info)
        self.kind_now = decode(info["records"][0]).header.kind
        if self.strikes and info["position"] == 0:
            self.repaired = True
        if self.prelude:
            self.prelude = False
            engine.restart()
            raise ConnectionError("the actor died")
        if self.fault is None or (self.strikes and not self.persistent):
            return engine.sync(info)
        answer = self.fault(self, engine, info)
        if self.strikes and info["last"] and self.wrong(engine):
            self.must_be_seen = True
        return answer

    def strike(self):
        self.strikes += 1
        self.struck_at[self.kind_now] += 1

    def wrong(self, engine) -> bool:
        return engine.weights() != self.fresh() or any(
            worker.stale or worker.version != self.version for worker in engine.workers
        )

    # ---- what must hold

    def check_served(self):
        """What a request would get now."""
        for engine in self.engines:
            if self.returned and engine.may_generate:
                times = [known.get(held, set()) for known, held in zip(self.history, engine.weights())]
                assert set.intersection(*times), "an engine serves weights that the trainer never had"

    def check_held(self, may_be_stale):
        """After a sync that returned."""
        expected = self.fresh()
        for engine in self.engines:
            stale = [worker.stale for worker in engine.workers]
            assert may_be_stale or engine.may_generate, f"the sync returned, and an engine cannot generate: {stale}"
            for worker, held, due in zip(engine.workers, engine.weights(), expected):
                assert worker.stale or (held == due and worker.version == self.version)

    def send(self, allowed=(SyncError,)):
        """One sync: its report, or None where it raised."""
        self.check_served()
        self.returned = False
        try:
            report = self.sender.send_weights()
        except allowed:
            report = None
        self.returned = report is not None
        return report

    def one_sync(self, name, updates):
        """Updates and a sync that suffers the named fault; whether it really happened, and whether it was noticed."""
        fault = FAULTS[name] if name else None
        self.quiet()
        print(f"- {updates} updates after version {self.version}, {name or 'no fault'}")
        if fault:
            self.victim = self.random.randrange(2)
            self.persistent = self.random.random() < 0.15
            if fault.event:
                fault.act(self)
            else:
                self.fault = fault.act
                if fault.messages > 1 and (self.model is not Unpatchable or self.random.random() < 0.5):
                    # Only a dense sync has several messages: make one necessary.
                    self.prelude = True
        for _ in range(updates):
            self.update()
        report = self.send(allowed=(SyncError, OSError) if name == "disk_full" else (SyncError,))
        struck, noticed = self.strikes > 0, self.repaired or report is None
        if report is not None:
            assert report.version == self.version
            # With nothing to send no engine is asked, not even one that a late message has closed.
            self.check_held(may_be_stale=report.mode == "none" or (fault is not None and fault.may_close))
        self.check_served()
        for later in self.after_sync:
            later()
            self.check_served()
        if struck and (fault.seen or self.must_be_seen):
            assert noticed, f"{name}: nobody saw it"
        if report is not None and self.random.random() < 0.3:
            self.keep_checkpoint()
        self.archive = (self.archive + self.sent)[-60:]
        return struck, noticed, report

    def check_log(self):
        """The log leads to the trainer's weights, whatever happened meanwhile."""
        rebuilt = {name: tensor.clone() for name, tensor in self.base.items()}
        for _, record in read_log(self.log_dir, self.version):
            assert rebuilt_by(record, rebuilt), f"{record} does not lead to the digest that it states"
        assert all(torch.equal(rebuilt[name], self.weights[name]) for name in SHAPES)


def rebuilt_by(record, weights) -> bool:
    """Apply a record of the log; whether the weights then have the digest that it states, if any."""
    apply_record(record, weights)
    return record.header.digest in ("", f"{sum(digests(weights).values()) % 2**64:016x}")


# ---- the table of faults


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        act: of a message: f(rig, engine, info) delivers it, badly, and returns the answer; calls `rig.strike()` if it
            did anything. Of an event: f(rig), before the updates and the sync.
        seen: must always be noticed; others only where they leave the engine wrong.
        records, messages, workers: how many it needs.
        lie: well-formed and wrong: only digests can tell.
        may_close: leaves an engine that knows that it must not generate, although the sync returned.
        event: is no matter of a message.
    """

    act: Callable
    seen: bool = True
    records: int = 1
    messages: int = 1
    workers: int = 1
    lie: bool = False
    may_close: bool = False
    event: bool = False


FAULTS: dict[str, Fault] = {}


def fault(**properties):
    def register(function):
        FAULTS[function.__name__] = Fault(function, **properties)
        return function

    return register


def altered(rig, engine, info, records, least=1):
    """Deliver other records, where the message has enough of them."""
    if len(info["records"]) < least:
        return engine.sync(info)
    rig.strike()
    return engine.sync({**info, "records": records(info["records"])})


def one_altered(rig, engine, info, change):
    """Deliver with one record changed; `change` returns bytes, or None where there is nothing to change."""
    index = rig.random.randrange(len(info["records"]))
    other = change(info["records"][index])
    if other is None:
        return engine.sync(info)
    return altered(rig, engine, info, lambda records: [*records[:index], other, *records[index + 1 :]])


def resealed(blob, change):
    """A well-formed record with another header or other tensors: change(record) -> record."""
    return encode(change(decode(blob)))[0]


# Records of a message.


@fault(records=2)
def first_record_lost(rig, engine, info):
    return altered(rig, engine, info, lambda records: records[1:], least=2)


@fault(records=3)
def middle_record_lost(rig, engine, info):
    return altered(rig, engine, info, lambda records: [records[0], *records[2:]], least=3)


@fault(records=2)
def last_record_lost(rig, engine, info):
    return altered(rig, engine, info, lambda records: records[:-1], least=2)


@fault()
def all_records_lost(rig, engine, info):
    return altered(rig, engine, info, lambda records: [])


@fault(seen=False)
def record_repeated(rig, engine, info):
    index = rig.random.randrange(len(info["records"]))
    return altered(rig, engine, info, lambda records: [*records[: index + 1], *records[index:]])


@fault(records=2)
def records_reordered(rig, engine, info):
    def swap(records):
        one, other = rig.random.sample(range(len(records)), 2)
        records = list(records)
        records[one], records[other] = records[other], records[one]
        return records

    return altered(rig, engine, info, swap, least=2)


@fault()
def record_truncated(rig, engine, info):
    return one_altered(rig, engine, info, lambda blob: blob[: rig.random.randrange(len(blob))])


@fault()
def record_of_garbage(rig, engine, info):
    return one_altered(rig, engine, info, lambda blob: rig.random.randbytes(rig.random.randrange(2 * len(blob))))


def flipped(blob, position, rig):
    return blob[:position] + bytes([blob[position] ^ 1 << rig.random.randrange(8)]) + blob[position + 1 :]


def header_bytes(blob):
    return 8 + int.from_bytes(blob[:8], "little")


@fault()
def byte_of_a_tensor_flipped(rig, engine, info):
    return one_altered(
        rig, engine, info, lambda blob: flipped(blob, rig.random.randrange(header_bytes(blob), len(blob)), rig)
    )


@fault()
def byte_of_a_header_flipped(rig, engine, info):
    return one_altered(rig, engine, info, lambda blob: flipped(blob, rig.random.randrange(header_bytes(blob)), rig))


def other_content(rig, record):
    """A well-formed record that leads elsewhere, or None. What nothing verifies is left as it is."""
    names = [name for name in sorted(record.names()) if rig.model is Runtime or name != UNVERIFIED]
    if not names:
        return None
    name = rig.random.choice(names)
    change = dict(record.changes(SHAPES))[name]
    if isinstance(change, Update):
        wrong = {f"{name}.q": -change.q}
    elif isinstance(change, Elements):
        wrong = sparse_record({name: replace(change, bits=change.bits ^ 1)}, 0, 0).tensors
    else:
        wrong = {name: -change}
    return Record(record.header, {**record.tensors, **wrong})


@fault()
def record_of_another_run(rig, engine, info):
    def foreign(blob):
        record = other_content(rig, decode(blob))
        return record and encode(Record(replace(record.header, run="f" * 16), record.tensors))[0]

    return one_altered(rig, engine, info, foreign)


def older(rig):
    """A record of an earlier sync."""
    return rig.random.choice(rig.random.choice(rig.archive)["records"]) if rig.archive else None


@fault(seen=False)
def record_replaced_by_an_older_one(rig, engine, info):
    return one_altered(rig, engine, info, lambda blob: older(rig))


@fault(seen=False)
def older_record_inserted(rig, engine, info):
    index = rig.random.randrange(len(info["records"]) + 1)
    old = older(rig)
    if old is None:
        return engine.sync(info)
    return altered(rig, engine, info, lambda records: [*records[:index], old, *records[index:]])


@fault(seen=False)
def older_message_instead(rig, engine, info):
    if not rig.archive:
        return engine.sync(info)
    return altered(rig, engine, info, lambda records: rig.random.choice(rig.archive)["records"])


def later(record, steps):
    header = record.header
    numbers = {key: getattr(header, key) + steps for key in ("version", "base_version", "update")}
    return Record(replace(header, **numbers), record.tensors)


@fault()
def record_from_the_future(rig, engine, info):
    if decode(info["records"][0]).header.kind == "dense" and not info["last"]:
        return engine.sync(info)  # its content is right
    steps = rig.random.randint(1, 3)
    return one_altered(rig, engine, info, lambda blob: resealed(blob, lambda record: later(record, steps)))


@fault(seen=False)
def change_lost_inside_a_record(rig, engine, info):
    def without_one(record):
        return next(record.pieces({rig.random.choice(sorted(record.names()))}, NEVER)) if record.names() else None

    def change(blob):
        record = without_one(decode(blob))
        return encode(record)[0] if record else None

    return one_altered(rig, engine, info, change)


@fault()
def parameter_that_nobody_knows(rig, engine, info):
    def renamed(record):
        name = rig.random.choice(sorted(record.names()))
        return Record(record.header, {key.replace(name, "other." + name): t for key, t in record.tensors.items()})

    return one_altered(rig, engine, info, lambda blob: resealed(blob, renamed) if decode(blob).names() else None)


@fault()
def tensor_of_another_shape(rig, engine, info):
    def cut(record):
        key = rig.random.choice(sorted(record.tensors))
        return Record(record.header, {**record.tensors, key: record.tensors[key][:-1].clone()})

    return one_altered(rig, engine, info, lambda blob: resealed(blob, cut) if decode(blob).names() else None)


@fault(lie=True)
def engine_that_diverges(rig, engine, info):
    """One of the engines is told something else."""

    def other(blob):
        record = other_content(rig, decode(blob))
        return record and encode(record)[0]

    return one_altered(rig, engine, info, other)


# Messages of a sync.


def acknowledged(engine, info):
    """What an engine would answer to a message that it took."""
    records = [decode(blob) for blob in info["records"]]
    report = {
        "version": records[-1].header.version,
        "applied": sum(len(record.names()) for record in records),
        "stale": None if info["last"] else "the sync did not finish",
        "digests": {},
    }
    return [dict(report) for _ in engine.workers]


@fault(messages=2)
def message_lost_and_acknowledged(rig, engine, info):
    """One of several. (If all were, the engine would rightly go on with what it has.)"""
    if rig.strikes or (info["position"] == 0 and info["last"]) or (info["last"] and not info["verify"]):
        return engine.sync(info)
    rig.strike()
    return acknowledged(engine, info)


@fault(messages=2, seen=False)
def message_repeated(rig, engine, info):
    if info["last"]:
        return engine.sync(info)
    rig.strike()
    engine.sync(info)
    return engine.sync(info)


@fault(seen=False, may_close=True)
def last_message_repeated_after_its_answer(rig, engine, info):
    """Nobody can tell until the next sync; the engine itself knows that it must not generate."""
    if not info["last"]:
        return engine.sync(info)
    rig.strike()
    answer = engine.sync(info)
    rig.after_sync.append(lambda: engine.sync(info))
    return answer


@fault(messages=2)
def messages_swapped(rig, engine, info):
    if not info["last"]:
        rig.strike()
        stock = rig.fault

        def both(rig, engine, following):
            rig.fault, rig.persistent = stock, False
            engine.sync(following)
            return engine.sync(info)

        rig.fault, rig.persistent = both, True
        return acknowledged(engine, info)
    return engine.sync(info)


@fault(messages=2, seen=False)
def message_of_an_older_sync_between(rig, engine, info):
    if info["position"] == 0 or not rig.archive:
        return engine.sync(info)
    rig.strike()
    engine.sync(rig.random.choice(rig.archive))
    return engine.sync(info)


@fault(messages=2, seen=False)
def message_replaced_by_one_of_an_older_sync(rig, engine, info):
    olds = [old for old in rig.archive if old["position"] == info["position"]]
    if info["position"] == 0 or not olds:
        return engine.sync(info)
    rig.strike()
    return engine.sync({**info, "records": rig.random.choice(olds)["records"]})


@fault()
def end_of_the_sync_not_announced(rig, engine, info):
    if not info["last"]:
        return engine.sync(info)
    rig.strike()
    return engine.sync({**info, "last": False})


@fault(messages=2)
def end_of_the_sync_announced_too_early(rig, engine, info):
    if info["last"]:
        return engine.sync(info)
    rig.strike()
    return engine.sync({**info, "last": True})


@fault(seen=False)
def another_position_in_the_sync(rig, engine, info):
    rig.strike()
    return engine.sync({**info, "position": info["position"] + rig.random.choice([-1, 1, 2])})


class GetTimeoutError(TimeoutError):
    """As Ray's: no answer in time, whatever became of the call."""


@fault()
def no_answer_in_time_and_never_taken(rig, engine, info):
    rig.strike()
    return GetTimeoutError("Get timed out")


@fault()
def no_answer_in_time_but_taken(rig, engine, info):
    rig.strike()
    engine.sync(info)
    return GetTimeoutError("Get timed out")


@fault()
def no_answer_in_time_and_taken_before_the_repair(rig, engine, info):
    rig.strike()
    rig.held.append((engine, info))
    return GetTimeoutError("Get timed out")


@fault(may_close=True)
def no_answer_in_time_and_taken_after_the_repair(rig, engine, info):
    rig.strike()
    rig.after_sync.append(lambda: engine.sync(info))
    return GetTimeoutError("Get timed out")


# Exceptions in an engine.


@fault()
def exception_before_the_apply(rig, engine, info):
    rig.strike()
    raise RuntimeError("CUDA error")


@fault()
def exception_after_the_apply(rig, engine, info):
    rig.strike()
    engine.sync(info)
    raise ConnectionError("the answer got lost")


@fault()
def exception_in_the_middle_of_the_changes(rig, engine, info):
    stock, left = worker_module.write_change, rig.random.randrange(3)

    def failing(*arguments):
        nonlocal left
        if left == 0:
            rig.strike()
            raise MemoryError("out of memory")
        left -= 1
        return stock(*arguments)

    worker_module.write_change = failing
    try:
        return engine.sync(info)
    finally:
        worker_module.write_change = stock


# Answers.


@fault()
def answer_of_nobody(rig, engine, info):
    rig.strike()
    engine.sync(info)
    return []


@fault()
def answer_of_fewer_workers(rig, engine, info):
    rig.strike()
    return engine.sync(info)[:-1]


@fault()
def answer_of_more_workers(rig, engine, info):
    rig.strike()
    return [*engine.sync(info), *engine.sync({**info, "records": []})]


def some_worker(rig, reports, **changes):
    rig.strike()
    index = rig.random.randrange(len(reports))
    return [{**report, **changes} if i == index else report for i, report in enumerate(reports)]


@fault()
def wrong_count_of_changes(rig, engine, info):
    reports = engine.sync(info)
    return some_worker(rig, reports, applied=reports[0]["applied"] + rig.random.choice([-1, 1]))


@fault()
def wrong_version_in_the_answer(rig, engine, info):
    reports = engine.sync(info)
    if not info["last"]:
        return reports
    return some_worker(rig, reports, version=rig.version + rig.random.choice([-1, 1]))


@fault()
def prefix_cache_not_reset(rig, engine, info):
    reports = engine.sync(info)
    if not info["last"]:
        return reports
    rig.strike()
    engine.may_generate = False
    return [{**report, "stale": "vLLM refused to reset its prefix cache"} for report in reports]


@fault(lie=True)
def digest_that_is_not_true(rig, engine, info):
    reports = engine.sync(info)
    if not reports[0]["digests"]:
        return reports
    name = rig.random.choice(sorted(reports[0]["digests"]))
    wrong = {**reports[0]["digests"]}
    wrong[name] = [[*place, f"{int(value, 16) ^ 1:016x}"] for *place, value in wrong[name]]
    rig.strike()
    return [{**reports[0], "digests": wrong}, *reports[1:]]


@fault(lie=True)
def digest_of_a_parameter_missing(rig, engine, info):
    reports = engine.sync(info)
    if not reports[0]["digests"]:
        return reports
    name = rig.random.choice(sorted(reports[0]["digests"]))
    rig.strike()
    return [{**r, "digests": {n: d for n, d in r["digests"].items() if n != name}} for r in reports]


@fault(lie=True)
def digests_missing(rig, engine, info):
    reports = engine.sync(info)
    return some_worker(rig, reports, digests={}) if reports[0]["digests"] else reports


@fault(lie=True)
def digests_of_the_weights_before(rig, engine, info):
    before = engine.sync({**info, "records": []})
    reports = engine.sync(info)
    late = [{**report, "digests": old["digests"]} for report, old in zip(reports, before)]
    if late != reports:
        rig.strike()
    return late


# Weights.


def flip_one(rig, engine):
    """One bit of one element that belongs to the checkpoint (not to padding)."""
    worker = rig.random.choice(engine.workers)
    name, parameter = rig.random.choice(sorted(worker.model.named_parameters()))
    bits = parameter.data.view(torch.int16).view(-1)
    count = SHAPES["embed.weight"][0] * SHAPES["embed.weight"][1] if name == "embed" else bits.numel()
    bit = 1 << rig.random.randrange(16)
    bits[rig.random.randrange(count)] ^= bit if bit < 2**15 else -(2**15)


@fault(seen=False, lie=True)
def bit_flipped_before_the_apply(rig, engine, info):
    """Need not be seen where the apply overwrites it."""
    rig.strike()
    flip_one(rig, engine)
    return engine.sync(info)


@fault(lie=True)
def bit_flipped_after_the_apply(rig, engine, info):
    reports = engine.sync(info)
    if not info["last"]:
        return reports
    rig.strike()
    flip_one(rig, engine)
    return true_digests(engine, reports)


def kept(workers):
    return [{name: p.detach().clone() for name, p in worker.model.named_parameters()} for worker in workers]


def put_back(workers, held):
    for worker, weights in zip(workers, held):
        for name, parameter in worker.model.named_parameters():
            parameter.data.copy_(weights[name])


@fault(lie=True)
def worker_that_did_not_apply(rig, engine, info):
    """It says that it did."""
    workers = [rig.random.choice(engine.workers)] if rig.random.random() < 0.5 else engine.workers
    before = kept(workers)
    reports = engine.sync(info)
    if kept(workers) and all(torch.equal(a[n], b[n]) for a, b in zip(before, kept(workers)) for n in a):
        return reports
    rig.strike()
    put_back(workers, before)
    return true_digests(engine, reports)


@fault(lie=True)
def worker_that_applied_some_of_the_changes(rig, engine, info):
    worker = rig.random.choice(engine.workers)
    before = kept([worker])
    reports = engine.sync(info)
    changed = [name for name, p in worker.model.named_parameters() if not torch.equal(p, before[0][name])]
    if not changed:
        return reports
    rig.strike()
    name = rig.random.choice(changed)
    dict(worker.model.named_parameters())[name].data.copy_(before[0][name])
    return true_digests(engine, reports)


@fault(seen=False, lie=True)
def rows_exchanged(rig, engine, info):
    reports = engine.sync(info)
    if not info["last"]:
        return reports
    rig.strike()
    weight = rig.random.choice(engine.workers).model.layers[0].qkv.data
    weight[[0, 1]] = weight[[1, 0]].clone()
    return true_digests(engine, reports)


@fault(workers=2)
def worker_at_another_version(rig, engine, info):
    worker = rig.random.choice(engine.workers)
    if info["position"] or worker.version is None or decode(info["records"][0]).header.kind == "dense":
        return engine.sync(info)
    rig.strike()
    worker.version += rig.random.choice([-1, 1])
    return engine.sync(info)


@fault(workers=2, seen=False)
def worker_that_took_the_message_already(rig, engine, info):
    rig.strike()
    rig.random.choice(engine.workers).apply(worker_module.LograUpdateInfo(**info))
    return engine.sync(info)


@fault(workers=2)
def worker_that_fails_alone(rig, engine, info):
    worker = rig.random.choice(engine.workers)
    stock = worker._apply_record

    def failing(*arguments):
        rig.strike()
        stock(*arguments)
        raise RuntimeError("NCCL error")

    worker._apply_record = failing
    try:
        return engine.sync(info)
    finally:
        del worker._apply_record


# Processes, disks: before the sync.


@fault(event=True)
def engine_restarted(rig):
    rig.strike()
    rig.engines[rig.victim].restart()


@fault(event=True)
def worker_that_lost_its_weights(rig):
    """It knows, as after a call that failed; nobody has asked it."""
    rig.strike()
    engine = rig.engines[rig.victim]
    engine.may_generate = False
    worker = rig.random.choice(engine.workers)
    worker.stale = "woken up without its weights"
    for parameter in worker.model.parameters():
        parameter.data.zero_()


@fault(event=True)
def both_engines_restarted(rig):
    rig.strike()
    for engine in rig.engines:
        engine.restart()


@fault(event=True)
def engine_restarted_and_not_up_at_once(rig):
    rig.strike()
    rig.engines[rig.victim].restart()
    rig.initialise_failures = 1


@fault()
def engine_restarted_in_a_sync(rig, engine, info):
    rig.strike()
    if rig.random.random() < 0.5:
        engine.sync(info)
    engine.restart()
    raise ConnectionError("the actor died")


@fault(messages=2)
def engine_restarted_between_two_messages(rig, engine, info):
    answer = engine.sync(info)
    if not info["last"]:
        rig.strike()
        engine.restart()
    return answer


@fault(event=True, seen=False, records=0)
def trainer_and_engines_restarted(rig):
    """The usual resume: everything starts again, the engines with the base model."""
    rig.strike()
    for engine in rig.engines:
        engine.restart()
    rig.resume(digests_of(rig.base))


@fault(event=True, seen=False, records=0)
def trainer_and_engines_restarted_and_one_not_up_at_once(rig):
    trainer_and_engines_restarted(rig)
    rig.initialise_failures = 1


@fault(event=True, seen=False, records=0)
def trainer_and_engines_restarted_and_a_question_unanswered(rig):
    trainer_and_engines_restarted(rig)
    rig.unanswered_questions = 1


@fault(event=True, seen=False, records=0)
def trainer_restarted_before_engines_with_later_weights(rig):
    rig.strike()
    for engine in rig.engines:
        engine.may_generate = False  # their actors belonged to the run that died
    rig.resume(None)


@fault(event=True)
def answer_of_fewer_engines(rig):
    rig.short_answers = 1


@fault(event=True)
def disk_full(rig):
    rig.full_disk = 1


@pytest.fixture
def failing_disk(monkeypatch):
    """`RecordLog.write` fails while `rig.full_disk` is set; returns where to put the rig."""
    rigs = []
    stock = RecordLog.write

    def write(log, version, blob):
        rig = rigs[-1]
        if rig.full_disk:
            rig.full_disk -= 1
            rig.strike()
            raise OSError(28, "No space left on device")
        return stock(log, version, blob)

    monkeypatch.setattr(RecordLog, "write", write)
    return rigs


# ---- the runs


def possible(fault, workers, model, verify_every, mode):
    if fault.workers > workers or (fault.records > 1 and mode == "sparse"):
        return False
    return not fault.lie or (verify_every == 1 and model is Runtime)


def test_the_table_is_a_table():
    assert len(FAULTS) >= 50 and all(fault.act.__name__ == name for name, fault in FAULTS.items())


@pytest.mark.parametrize("mode", ["factor", "sparse", "auto"])
def test_nothing_wrong_survives_a_sync(mode, tmp_path, monkeypatch, failing_disk, capsys):
    # The last run has no digests to help it (but for dense syncs), and messages in every sync.
    runs = [(1, Runtime, 1, 75), (2, Runtime, 1, 75), (2, Unpatchable, NEVER, 50)]
    assert sum(count for *_, count in runs) == SYNCS_PER_MODE
    chooser = random.Random(f"{mode} {SEED}")
    tried, happened, seen, modes, struck_at = (Counter() for _ in range(5))
    for number, (workers, model, verify_every, count) in enumerate(runs):
        rig = Rig(mode, workers, model, verify_every, str(tmp_path / str(number)), len(runs) * SEED + number)
        failing_disk.append(rig)
        ready = [name for name, fault in FAULTS.items() if possible(fault, workers, model, verify_every, mode)]
        for _ in range(count):
            # The fault that happened least so far; now and then none, more often where only a dense sync can follow.
            name = None
            if chooser.random() < (0.97 if rig.returned else 0.8):
                name = min(ready, key=lambda n: (happened[n] + tried[n] / 3, chooser.random()))
            several = name and FAULTS[name].messages > 1
            together = name and FAULTS[name].records > 1  # several records in one message
            sizes = [1 << 20] if together else [600, 1200, 600 if several else 1 << 20]
            monkeypatch.setattr(trainer_module, "_PART_BYTES", chooser.choice(sizes))
            needed = FAULTS[name].records if name else chooser.randint(0, 1)
            struck, noticed, report = rig.one_sync(name, chooser.randint(needed, max(needed, 2)))
            modes[report.mode if report else "error"] += 1
            tried[name] += 1
            happened[name] += struck
            seen[name] += struck and noticed
        rig.quiet()
        rig.one_sync(None, 1)
        rig.one_sync(None, 1)
        if not rig.returned:  # a first contact that showed other weights than the base model's: a person starts again
            for engine in rig.engines:
                engine.restart()
            rig.resume(digests_of(rig.base))
            rig.one_sync(None, 1)
        assert rig.returned
        rig.check_log()
        struck_at += rig.struck_at
    capsys.readouterr()
    table = {name: (happened[name], seen[name]) for name in FAULTS}
    print(f"{mode}: {sum(happened.values())} of {SYNCS_PER_MODE} syncs suffered a fault, {sum(seen.values())} noticed")
    print(f"  ended as {dict(modes)}; faults in messages of {dict(struck_at)}")
    print("\n".join(f"  {name}: {count[0]}, noticed {count[1]}" for name, count in table.items()))
    due = [name for name, fault in FAULTS.items() if any(possible(fault, *run[:3], mode) for run in runs)]
    assert len(due) >= 25
    assert not (rare := [name for name in due if happened[name] < 2]), f"hardly ever happened: {rare}"
    assert all(seen[name] == happened[name] for name in due if FAULTS[name].seen)


LIES = [
    engine_that_diverges,
    bit_flipped_after_the_apply,
    worker_that_did_not_apply,
    worker_that_applied_some_of_the_changes,
    rows_exchanged,
]


@pytest.mark.parametrize("mode", ["factor", "sparse", "auto"])
def test_what_only_digests_can_tell_is_found_at_the_next_verified_sync(mode):
    """Between two verified syncs nobody can know; a sparse record may put right what was wrong."""
    rig = Rig(mode, 2, Runtime, 3, None, 7)
    found = 0
    for lie in LIES * 2:
        rig.quiet()
        for _ in range(3):
            rig.update()
            if (report := rig.sender.send_weights()).digest_ok is not None:
                break
        assert report.digest_ok
        rig.victim, rig.fault = rig.random.randrange(2), lie
        rig.update()
        report = rig.sender.send_weights()
        assert rig.strikes and report.digest_ok is None and report.mode == ("sparse" if mode == "sparse" else "factor")
        assert rig.must_be_seen
        rig.quiet()
        for _ in range(3):
            rig.update()
            if (report := rig.sender.send_weights()).digest_ok is not None:
                break
        found += report.digest_ok is False and report.mode == "dense"
        rig.check_held(may_be_stale=False)
    assert found == 2 * len(LIES) if mode != "sparse" else found >= len(LIES)


def test_engines_of_another_run_stop_a_resumed_trainer():
    """Engines start anew with the trainer. Those that hold later weights are no engines of this model's base."""
    rig = Rig("factor", 2, Runtime, 1, None, 0)
    rig.update()
    rig.sender.send_weights()
    rig.keep_checkpoint()
    rig.resume(digests_of(rig.base))
    with pytest.raises(SyncError, match="does not hold .* as its checkpoint does"):
        rig.sender.send_weights()


# ---- several trainer ranks


class Ranks:
    """torch.distributed for threads. A rank that waits alone, or in another collective than the others, fails."""

    def __init__(self, count):
        self.count, self.here = count, threading.local()
        self.barrier = threading.Barrier(count, timeout=10)
        self.given = [None] * count

    def is_initialized(self):
        return True

    def get_world_size(self, group=None):
        return self.count

    def get_rank(self, group=None):
        return self.here.rank

    def meet(self, collective, value):
        self.given[self.here.rank] = collective, value
        self.barrier.wait()
        names, values = zip(*self.given)
        self.barrier.wait()
        assert set(names) == {collective}
        return values

    def broadcast_object_list(self, objects, src):
        objects[:] = self.meet("broadcast", list(objects))[src]

    def all_reduce(self, tensor):
        tensor.copy_(torch.stack(self.meet("all_reduce", tensor.clone())).sum(0))

    def gather_object(self, value, values, dst):
        given = self.meet("gather", value)
        if self.here.rank == dst:
            values[:] = given


def fails_once(monkeypatch, place, name, error):
    stock, left = getattr(place, name), [error]

    def failing(*arguments, **named):
        if left:
            raise left.pop()
        return stock(*arguments, **named)

    monkeypatch.setattr(place, name, failing)


def engine_dies(monkeypatch, rig):
    rig.victim, rig.persistent, rig.fault = 1, True, exception_before_the_apply


def client_breaks(monkeypatch, rig):
    fails_once(monkeypatch, rig, "sync", RuntimeError("Ray is gone"))


def disk_is_full(monkeypatch, rig):
    fails_once(monkeypatch, RecordLog, "write", OSError(28, "No space left on device"))


def record_cannot_be_made(monkeypatch, rig):
    fails_once(monkeypatch, stream_module, "encode", MemoryError("out of memory"))


def changes_cannot_be_found(monkeypatch, rig):
    """On whichever rank looks first."""
    fails_once(monkeypatch, stream_module, "changed_elements", MemoryError("out of memory"))


def repair_cannot_be_made(monkeypatch, rig):
    rig.victim, rig.fault = 1, exception_before_the_apply
    fails_once(monkeypatch, trainer_module, "dense_record", MemoryError("out of memory"))


ON_THE_SENDER = [engine_dies, client_breaks, disk_is_full, record_cannot_be_made, repair_cannot_be_made]


@pytest.mark.parametrize(
    "mode, breaks",
    [
        *((mode, breaks) for mode in ("factor", "sparse") for breaks in ON_THE_SENDER),
        ("sparse", changes_cannot_be_found),
    ],
)
def test_all_ranks_go_on_or_stop_together(mode, breaks, tmp_path, monkeypatch):
    """What only the sender can meet raises on every rank, in the same sync, with its reason; then it goes on."""
    ranks = Ranks(2)
    for module in (trainer_module, ranks_module, shards):
        monkeypatch.setattr(module, "dist", ranks)
    rigs = {}

    def run(rank):
        ranks.here.rank = rank
        rig = rigs[rank] = Rig(mode, 1, Runtime, 1, str(tmp_path / "log"), 0, rank)
        ended = []
        for step in range(5):
            rig.quiet()
            if step == 2 and rank == 0:
                breaks(monkeypatch, rig)
            rig.update()
            try:
                ended.append(rig.sender.send_weights().mode)
            except SyncError as error:
                ended.append(str(error))
        return ended

    with ThreadPoolExecutor(2) as pool:
        one, other = [future.result(60) for future in [pool.submit(run, rank) for rank in range(2)]]
    assert one == other and one[:2] == [mode] * 2 and one[-1] == mode
    reasons = "CUDA error|Ray is gone|No space left|out of memory"
    assert len(one) == 5 and any(word in one[2] for word in reasons.split("|"))
    rigs[0].check_held(may_be_stale=False)


@pytest.mark.parametrize("most", [600, 1 << 20])
@pytest.mark.parametrize("model", [Runtime, Unpatchable])
@pytest.mark.parametrize("mode", ["factor", "sparse", "auto", "dense"])
def test_all_ranks_take_part_in_every_message(mode, model, most, monkeypatch):
    """However a sync is made up: records, pieces of them, whole parameters after them or alone."""
    ranks = Ranks(2)
    for module in (trainer_module, ranks_module, shards):
        monkeypatch.setattr(module, "dist", ranks)
    monkeypatch.setattr(trainer_module, "_PART_BYTES", most)
    rigs = {}

    def run(rank):
        ranks.here.rank = rank
        rig = rigs[rank] = Rig(mode, 2, model, 1, None, 0, rank)
        modes = []
        for updates in (1, 2, 3, 6, 1):
            for _ in range(updates):
                rig.update()
            modes.append(rig.sender.send_weights().mode)
            if rank == 0:
                rig.check_held(may_be_stale=False)
        return modes

    with ThreadPoolExecutor(2) as pool:
        one, other = [future.result(60) for future in [pool.submit(run, rank) for rank in range(2)]]
    assert one == other


def test_a_log_that_cannot_be_opened_stops_all_ranks(tmp_path, monkeypatch):
    ranks = Ranks(2)
    for module in (trainer_module, ranks_module, shards):
        monkeypatch.setattr(module, "dist", ranks)
    (tmp_path / "log").write_text("a file in its place")

    def run(rank):
        ranks.here.rank = rank
        with pytest.raises(SyncError, match="FileExistsError"):
            Rig("factor", 1, Runtime, 1, str(tmp_path / "log"), 0, rank)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(run, rank) for rank in range(2)]:
            future.result(60)


# ---- faults that these runs, or thinking about them, have found


def test_a_sync_that_is_tried_again_leaves_no_engine_in_its_middle(monkeypatch):
    """Engine 0 was repaired, engine 1 was not. The second try sends everything to both, and fails at engine 1 again:
    the repair must take engine 0 along, which has received a part."""
    monkeypatch.setattr(trainer_module, "_PART_BYTES", 600)
    rig = Rig("factor", 1, Runtime, 1, None, 0)
    rig.update()
    rig.send()
    rig.update()
    rig.victim, rig.persistent, rig.fault = 1, True, exception_before_the_apply
    assert rig.send() is None
    rig.quiet()
    rig.victim, rig.fault = 1, exception_before_the_apply
    assert rig.send().mode == "dense"
    rig.check_held(may_be_stale=False)


def test_changes_whose_record_could_not_be_made_are_not_forgotten(monkeypatch):
    """The sync raises; the next one would send only what has changed since, and no version says so."""
    rig = Rig("sparse", 1, Runtime, NEVER, None, 0)
    rig.update()
    rig.send()
    rig.update()
    fails_once(monkeypatch, stream_module, "sparse_record", MemoryError("out of memory"))
    assert rig.send(allowed=(SyncError, MemoryError)) is None
    rig.update()
    rig.send()
    rig.check_held(may_be_stale=False)


def test_parts_of_two_dense_syncs_are_no_version(monkeypatch):
    """A part of an earlier dense sync in the place of the same part: digests do not cover what cannot be patched."""
    monkeypatch.setattr(trainer_module, "_PART_BYTES", 600)
    rig = Rig("dense", 1, Unpatchable, 1, None, 0)
    rig.update()
    rig.send()
    earlier = list(rig.sent)

    def mixed(rig, engine, info):
        held = {name for blob in info["records"] for name in decode(blob).names()}
        if rig.strikes or UNVERIFIED not in held:
            return engine.sync(info)
        rig.strike()
        return engine.sync(earlier[info["position"]])

    rig.update()
    rig.quiet()
    rig.victim, rig.fault = 0, mixed
    rig.send()
    assert rig.strikes
    rig.check_held(may_be_stale=False)


def test_an_engine_that_came_back_with_fewer_workers_can_come_back_whole():
    rig = Rig("factor", 2, Runtime, 1, None, 0)
    rig.update()
    rig.send()
    engine = rig.engines[0]
    engine.restart()
    whole = engine.initialise
    engine.initialise = lambda info: whole(info)[:1]
    rig.update()
    assert rig.send() is None
    engine.initialise = whole
    rig.update()
    assert rig.send() is not None and not rig.sender._unknown
    rig.check_held(may_be_stale=False)


def test_the_log_goes_on_from_a_checkpoint_between_an_update_and_its_sync(tmp_path):
    """OpenRLHF saves after a sync. (Should it save before, the replay of the resumed run is refused.)"""
    rig = Rig("factor", 1, Runtime, 1, str(tmp_path), 0)
    rig.update()
    rig.send()
    rig.update()
    rig.keep_checkpoint()
    rig.send()
    for engine in rig.engines:
        engine.restart()
    rig.resume(digests_of(rig.base))
    rig.update()
    rig.send()
    rig.check_log()
