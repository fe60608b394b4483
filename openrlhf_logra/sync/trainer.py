"""The trainer's end: brings every rollout engine to the trainer's version with the records of the run.

Constructed and called on every trainer rank. Rank 0 is the sender; the others take part in the collectives (digests of
shards, changed elements, gathering for a dense sync) and in the verdict, so that all ranks go on or stop together.
"""

import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from ..math.digest import MASK64, matrix_shape, signed64, total_digest
from ..math.exact import Update
from ..train.ranks import world_size
from ..train.shards import digest, gathered
from ..train.targets import full_shape
from .log import RecordLog
from .modes import SYNC_MODES, by_factors, compared, keeps_records
from .record import dense_record, encode, grouped, sparse_record
from .stream import Position, RecordStream
from .worker import BACKEND

_PART_BYTES = 256 << 20


class SyncError(RuntimeError):
    """Engines could not be brought to the trainer's version; training on would use wrong rollouts."""


class SyncClient(Protocol):
    """What the sender needs of the inference side. Both calls block until every engine has answered, or given up.

    A report is what `LograWeightTransferEngine` returns; each engine answers with one per worker, or with an exception
    object where it could not answer. `engines` are numbers from 0.
    """

    def count(self) -> int: ...

    def initialise(self, engines: list[int], init_info: dict[str, Any]) -> list[list[dict] | Exception]: ...

    def sync(self, engines: list[int], update_info: dict[str, Any]) -> list[list[dict] | Exception]: ...


@dataclass
class LograTrainerInitInfo(TrainerInitInfo):
    """Settings of the sync.

    Attributes:
        mode: "auto", "factor", "sparse" or "dense".
        exact_updates: whether engines can repeat the updates bit for bit.
        refresh_every: K of the projections.
        verify_every: compare digests every so many syncs.
        log_dir: where to keep every record, or None.
        trained: names of the parameters that training changes; None means all of them.
        dense: those among them that no update pushed covers; their changes are found by comparing.
        base_digests: digests of the model that the engines load by themselves (`digests_of`), to find what an engine
            has rearranged after loading.
        version: version that the trainer's weights have now.
        loaded_version: version of the weights that the engines loaded by themselves: 0 at the start of a run, None
            after a resume, when they hold the base model and the trainer does not.
        state: `LograTrainerEngine.state_dict()` of the run that is resumed.
    """

    backend: ClassVar[str] = BACKEND
    mode: str = "auto"
    exact_updates: bool = True
    refresh_every: int = 1
    verify_every: int = 10
    log_dir: str | None = None
    trained: tuple[str, ...] | None = None
    dense: tuple[str, ...] = ()
    base_digests: dict[str, int] | None = None
    version: int = 0
    loaded_version: int | None = 0
    state: dict[str, str] | None = None


@dataclass
class SyncReport:
    """What one sync did; the metrics of section 11.

    Attributes:
        version: version that every engine now holds.
        sync_bytes: payload sent to each engine.
        dense_bytes: what all parameters in bf16 would have been.
        seconds: wall time on the sender.
        digest_ok: None where digests were not compared, False where one differed (even if a dense sync repaired it).
        digest: of all parameters together, where they were compared.
        mode: "none", "factor", "sparse" or "dense".
    """

    version: int
    sync_bytes: int = 0
    dense_bytes: int = 0
    seconds: float = 0.0
    digest_ok: bool | None = None
    digest: int | None = None
    mode: str = "none"


@dataclass
class _Plan:
    """What the sender decided. `messages`: how many the queued records take. `whole`: parameters that are sent whole,
    all of them (mode dense) or those for which records would not do."""

    mode: str
    verify: bool = False
    engines: list[int] = field(default_factory=list)
    messages: int = 0
    whole: list[str] = field(default_factory=list)


@dataclass
class _Message:
    """One RPC: encoded records, the number of changes that an apply of them writes, and whether it ends the sync."""

    records: list[bytes]
    changes: int
    last: bool


class LograTrainerEngine(TrainerWeightTransferEngine[LograTrainerInitInfo]):
    """Sender of records; `push` after every update, `send_weights` once per sync, both on every rank."""

    init_info_cls = LograTrainerInitInfo

    def __init__(self, init_info: LograTrainerInitInfo, *, client: SyncClient, parameters: dict[str, torch.Tensor]):
        super().__init__(client=client, source=None, is_sender=init_info.is_sender)
        self._info = replace(init_info, trained=tuple(parameters) if init_info.trained is None else init_info.trained)
        _check(self._info, parameters)
        self._parameters = parameters
        self._shapes = {name: full_shape(parameter) for name, parameter in parameters.items()}
        self._dense_bytes = 2 * sum(map(self._numel, self._shapes))
        self._version = init_info.version
        self._engine_versions: list[int | None] | None = None
        self._lost: set[int] = set()  # engines that did not answer: they may have been started again
        self._unknown_of: dict[int, dict[str, str]] = {}  # by engine: parameters it cannot place, and why
        self._rearranged: list[str] = []
        self._workers: dict[int, int] = {}  # of each engine
        self._syncs = 0
        self._failure: Exception | None = None
        self._log: RecordLog | None = None
        self._position = Position(**init_info.state) if init_info.state else Position(run=secrets.token_hex(8))
        self._shared(self._open_log)
        self._stream = self._make_stream() if keeps_records(init_info.mode, bool(init_info.log_dir)) else None

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        """Called by vLLM's factory on every rank; `source` is the mapping from names to trainer parameters."""
        return cls(init_info, client=client, parameters=source)

    def _open_log(self) -> None:
        if self._info.log_dir:
            self._log = RecordLog(self._info.log_dir, self._position.run, self._position.parent, self._version)

    def _make_stream(self) -> RecordStream:
        info, logged = self._info, bool(self._info.log_dir)
        return RecordStream(
            self._position,
            self._version,
            parameters=self._parameters,
            compared=compared(info.mode, logged, info.exact_updates, trained=info.trained, dense=info.dense),
            by_factors=by_factors(info.mode, info.exact_updates),
            refresh_every=info.refresh_every,
            # A queue larger than the model is of no use; in mode factor it was asked for.
            limit=sys.maxsize if info.mode == "factor" else self._dense_bytes,
            every_version=logged,
            log=self._log,
            is_sender=self.is_sender,
        )

    def state_dict(self) -> dict[str, str]:
        """Where the run's records stand, for `LograTrainerInitInfo.state` of the run that resumes. A collective."""
        return asdict(self._stream.position() if self._stream else self._position)

    @property
    def state_bytes(self) -> int:
        """Bytes of this rank's copy of weights whose changes are found by comparing; in host memory."""
        return self._stream.copy_bytes if self._stream else 0

    def push(self, updates: tuple[Update, ...], version: int) -> None:
        """Take the update that made `version`, on every rank; `updates` may be empty where they are not exact."""
        self._version = version
        if self._stream:
            self._guarded(partial(self._stream.push, updates, version))

    def send_weights(self) -> SyncReport:
        """Bring every engine to the trainer's version. A collective over the trainer's ranks.

        Raises:
            SyncError: an engine could not be repaired by a dense sync, or its digest still differs after one.
        """
        start = time.perf_counter()
        report = SyncReport(self._version, dense_bytes=self._dense_bytes)
        verify = self._shared(self._begin)
        if verify is None:
            return report
        digests = digests_of(self._parameters) if verify or self._info.log_dir else {}
        if self._stream:
            self._guarded(partial(self._stream.close, digests))
        plan = self._shared(partial(self._plan, verify))
        report.mode = plan.mode
        problem = self._attempt(plan, digests, report)
        if problem:
            if self.is_sender:
                print(f"[logra] sync to version {self._version}: {problem}; repairing with a dense sync", flush=True)
            plan = self._shared(self._repair_plan)
            report.mode = "dense"
            problem = self._attempt(plan, digests, report)
        if problem:
            raise SyncError(f"LoGRA sync to version {self._version} failed: {problem}")
        if self._stream:
            self._stream.clear()
        self._syncs += 1
        report.seconds = time.perf_counter() - start
        return report

    # ---- planning, on the sender ------------------------------------------------------------------------------------

    def _begin(self) -> bool | None:
        """First contact if needed. None: every engine is at the trainer's version; else whether digests are due."""
        if self._engine_versions is None:
            self._initialise()
        if all(version == self._version for version in self._engine_versions) and self._still_there():
            return None
        return self._syncs % self._info.verify_every == 0

    def _still_there(self) -> bool:
        """Whether every engine is what it was: one that was started again in the meantime has to be brought here."""
        for engine, workers in self._ask(list(range(len(self._engine_versions))), {}):
            if isinstance(workers, Exception):
                self._lost.add(engine)
            elif all(worker["version"] == self._version and not worker["stale"] for worker in workers):
                continue
            self._engine_versions[engine] = None
        return all(version == self._version for version in self._engine_versions)

    def _plan(self, verify: bool) -> _Plan:
        self._find_lost()
        engines, stream = list(range(len(self._engine_versions))), self._stream
        follows = stream is not None and all(version == stream.base_version for version in self._engine_versions)
        if self._info.mode == "dense" or not follows or not stream.complete:
            if self._info.loaded_version is None and self._syncs == 0:
                print(f"[logra] resumed at version {self._version}: the first sync is dense", flush=True)
            return _Plan("dense", True, engines, whole=self._sendable)
        unknown = self._unknown
        whole = [name for name in self._info.trained if name in unknown]
        if self._info.mode == "auto":
            whole += [n for n, size in stream.bytes_of.items() if size > 2 * self._numel(n) and n not in whole]
        messages = sum(1 for _ in self._pieces(set(whole), measure=True))
        return _Plan(stream.form, verify, engines, messages, whole)

    def _repair_plan(self) -> _Plan:
        self._find_lost()
        stale = [i for i, version in enumerate(self._engine_versions) if version != self._version]
        return _Plan("dense", True, stale, whole=self._sendable)

    def _initialise(self) -> None:
        """First contact: layouts of all workers; what some engine cannot patch is sent whole."""
        engines = list(range(self.client.count()))
        self._engine_versions = [self._info.loaded_version] * len(engines)
        try:
            self._introduce(engines, self._info.loaded_version)
            self._find_rearranged(engines)
        except Exception:
            self._engine_versions = None
            raise

    def _introduce(self, engines: list[int], version: int | None) -> None:
        """Tell engines the shapes and learn where they hold them."""
        shapes = {name: list(shape) for name, shape in self._shapes.items()}
        answers = self.client.initialise(engines, {"shapes": shapes, "version": version})
        if not engines or len(answers) != len(engines) or not all(answers):
            raise SyncError("no engine, or one without workers, answered")
        known = self._unknown
        for engine, workers in zip(engines, answers):
            if isinstance(workers, Exception):
                raise SyncError(f"engine {engine} did not start its LoGRA end: {workers}")
            self._workers[engine] = len(workers)
            unknown = self._unknown_of[engine] = {}
            for worker in workers:
                unknown.update(worker["unknown"])
            for name in self._shapes:
                places = {tuple(place) for worker in workers for place in worker["places"].get(name, ())}
                if name not in unknown and sum(r * c for _, r, _, c in places) != self._numel(name):
                    unknown[name] = "the workers' blocks do not cover it"
        new = {name: reason for name, reason in self._unknown.items() if name not in known}
        if new:
            reasons: dict[str, list[str]] = {}
            for name, reason in new.items():
                reasons.setdefault(reason, []).append(name)
            print(
                f"[logra] the place of {len(new)} parameters in the rollout engine could not be learnt; "
                "they are sent whole when they change, and not verified: "
                + "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items()),
                flush=True,
            )

    def _find_lost(self) -> None:
        """Engines that did not answer may have been started again, with the base model: introduce us anew."""
        lost = sorted(self._lost)
        if not lost:
            return
        self._introduce(lost, None)
        self._lost.clear()
        for engine in lost:
            print(f"[logra] engine {engine} answers again; it takes a dense sync", flush=True)

    def _find_rearranged(self, engines: list[int]) -> None:
        """Engines still hold the model they loaded. What differs from it was rearranged after loading (experts packed
        for a kernel, say): the loader's layout is not the runtime's, and a write would damage it."""
        if self._info.base_digests is None:
            return
        different = set()
        for engine, workers in self._ask(engines, {"verify": True}):
            if isinstance(workers, Exception):
                raise SyncError(f"engine {engine} did not say what it has loaded: {workers}")
            for name, value in self._info.base_digests.items():
                if name not in self._unknown and self._combined_digest(name, workers) != value:
                    different.add(name)
        trained = sorted(different & set(self._info.trained))
        if trained:
            raise SyncError(
                f"the engine does not hold {trained[0]} ({len(trained)} trained parameters in all) as its checkpoint "
                "does: it loads another model, or rearranges the weight after loading; leave such modules out of "
                "--logra.target_modules"
            )
        self._rearranged = sorted(different)
        if different:
            print(
                f"[logra] {len(different)} frozen parameters are arranged differently in the engine, and left alone: "
                + ", ".join(self._rearranged),
                flush=True,
            )

    @property
    def _unknown(self) -> dict[str, str]:
        """Parameters that some engine cannot place, and why."""
        return {name: reason for unknown in self._unknown_of.values() for name, reason in unknown.items()}

    @property
    def _sendable(self) -> list[str]:
        """What a dense sync sends: what an engine has arranged its own way, and no training changes, it keeps."""
        left_alone = {*self._rearranged, *(name for name in self._unknown if name not in self._info.trained)}
        return [name for name in self._shapes if name not in left_alone]

    def _numel(self, name: str) -> int:
        return torch.Size(self._shapes[name]).numel()

    def _ask(self, engines: list[int], info: dict[str, Any]) -> list[tuple[int, list[dict] | Exception]]:
        answers = self.client.sync(engines, {**info, "unpatched": list(self._unknown)})
        if len(answers) != len(engines):
            raise SyncError(f"{len(answers)} answers came from {len(engines)} engines")
        return list(zip(engines, answers))

    # ---- one attempt, on all ranks ----------------------------------------------------------------------------------

    def _attempt(self, plan: _Plan, digests: dict[str, int], report: SyncReport) -> str | None:
        """Send, check and verify; returns the first problem, the same on every rank."""
        expected = {}
        if plan.verify:
            expected = digests or digests_of(self._parameters)
        for position, message in enumerate(self._messages(plan)):
            problem = self._shared(partial(self._transmit, plan, position, message, expected, report))
            if problem:
                return problem
        return None

    def _messages(self, plan: _Plan) -> Iterator[_Message]:
        """What goes into one RPC each. Ranks that do not send yield empty records in step."""
        parts = grouped({name: 2 * self._numel(name) for name in plan.whole}, _PART_BYTES)
        pieces = self._pieces(set(plan.whole)) if self.is_sender else iter([])
        for index in range(plan.messages):
            records, changes = self._guarded(partial(next, pieces, None)) or ([], 0)
            yield _Message(records, changes, last=index + 1 == plan.messages and not parts)
        # Without the queue the parts lead to the present version by themselves.
        base_version = self._version if plan.messages or plan.mode == "dense" else self._stream.base_version
        for index, names in enumerate(parts):
            blob = self._encode_whole(plan.mode, names, base_version if index == 0 else self._version)
            yield _Message([blob], len(names), last=index + 1 == len(parts))

    def _pieces(self, whole: set[str], measure: bool = False) -> Iterator[tuple[list[bytes], int]]:
        """Queued records without what goes whole, as the messages that carry them: records and number of changes each.
        A record that is too large for one goes in pieces. `measure`: only as many, without their bytes."""
        records: list[bytes] = []
        changes, size = 0, 0
        for sealed in self._stream.queue:
            for piece in sealed.record.pieces(whole, _PART_BYTES):
                length = sum(piece.sizes().values())
                if records and size + length > _PART_BYTES:
                    yield records, changes
                    records, changes, size = [], 0, 0
                records.append(b"" if measure else encode(piece)[0])
                changes += len(piece.names())
                size += length
        if records:
            yield records, changes

    def _encode_whole(self, mode: str, names: list[str], base_version: int) -> bytes:
        """Whole parameters as a record, on the sender. A failure there waits for `_transmit`: the other ranks are
        gathering."""
        tensors = {}
        for name in names:
            with gathered(self._parameters[name]) as tensor:
                if self.is_sender:
                    tensors[name] = self._guarded(partial(_copied, tensor))
        if not self.is_sender:
            return b""
        return self._guarded(partial(self._whole_record, mode, tensors, base_version)) or b""

    def _whole_record(self, mode: str, tensors: dict[str, torch.Tensor], base_version: int) -> bytes:
        if mode == "dense":
            record = dense_record(tensors, self._version)
        else:
            record = sparse_record(tensors, base_version, self._version)
        return encode(replace(record, header=replace(record.header, run=self._position.run)))[0]

    def _transmit(
        self, plan: _Plan, position: int, message: _Message, expected: dict[str, int], report: SyncReport
    ) -> str | None:
        report.sync_bytes += sum(map(len, message.records))
        problem = None
        info = {
            "records": message.records,
            "position": position,
            "last": message.last,
            "verify": bool(expected) and message.last,
        }
        for engine in plan.engines:  # until it has ended well they are at none
            self._engine_versions[engine] = None
        for engine, workers in self._ask(plan.engines, info):
            if isinstance(workers, Exception) or len(workers) != self._workers[engine]:
                self._lost.add(engine)
            fault = self._fault(engine, workers, message)
            if not fault and message.last and expected:
                fault = self._mismatch(workers, expected, report)
            if fault:
                problem = problem or f"engine {engine}: {fault}"
            elif message.last:
                self._engine_versions[engine] = self._version
        return problem

    def _fault(self, engine: int, workers: list[dict] | Exception, message: "_Message") -> str | None:
        """Why an engine's answer is not the one that was due, or None."""
        if isinstance(workers, Exception):
            return f"{type(workers).__name__}: {workers}"
        if len(workers) != self._workers[engine]:
            return f"{len(workers)} of {self._workers[engine]} workers answered"
        for worker in workers:
            if worker["stale"] and message.last:
                return worker["stale"]
            if worker["applied"] != message.changes:
                return f"{worker['applied']} of {message.changes} changes were applied ({worker['stale']})"
            if message.last and worker["version"] != self._version:
                return f"reports version {worker['version']} where {self._version} was sent"
        return None

    def _mismatch(self, workers: list[dict], expected: dict[str, int], report: SyncReport) -> str | None:
        """The first parameter whose digest is not the trainer's, or None."""
        checked = [name for name in expected if name not in self._unknown and name not in self._rearranged]
        for name in checked:
            value = expected[name]
            found = self._combined_digest(name, workers)
            if found != value:
                report.digest_ok = False
                shown = found if isinstance(found, str) else f"{found:016x}"
                return f"digest of {name}: {shown}, the trainer's is {value:016x}"
        if checked:
            report.digest_ok = report.digest_ok is not False
            report.digest = total_digest(expected)
        return None

    def _combined_digest(self, name: str, workers: list[dict]) -> int | str:
        """Sum over the workers' blocks, replicated ones counted once; a text where replicas differ or blocks lack."""
        blocks: dict[tuple[int, ...], int] = {}
        for worker in workers:
            for *place, value in worker["digests"].get(name, ()):
                known = blocks.setdefault(tuple(place), int(value, 16))
                if known != int(value, 16):
                    return f"workers hold different copies of {tuple(place)}"
        rows, cols = matrix_shape(self._shapes[name])
        if sum(place[1] * place[3] for place in blocks) != rows * cols:
            return "the workers' blocks do not cover it"
        return sum(blocks.values()) & MASK64

    def _guarded(self, compute: Callable[[], Any]) -> Any:
        """Do something between collectives. An error of the sender's is kept, and None returned: the next `_shared`
        raises it on every rank, none of which is left waiting."""
        try:
            return compute()
        except Exception as error:
            if not self.is_sender:
                raise
            self._failure = self._failure or error

    def _shared(self, compute: Callable[[], Any]) -> Any:
        """The sender's result on every rank; where it raises, every rank does."""
        result: list[Any] = [None, None]
        if self.is_sender:
            try:
                if self._failure is not None:
                    error, self._failure = self._failure, None
                    raise error
                result[0] = compute()
            except Exception as error:
                if world_size() == 1:
                    raise
                result[1] = f"{type(error).__name__}: {error}"
        if world_size() > 1:
            dist.broadcast_object_list(result, src=0)
        if result[1] is not None:
            raise SyncError(f"LoGRA sync to version {self._version} failed on the sender: {result[1]}")
        return result[0]


def digests_of(parameters: dict[str, torch.Tensor]) -> dict[str, int]:
    """Digest of every parameter, complete on every rank. A collective over the trainer's ranks."""
    values = [digest(name, parameter) for name, parameter in parameters.items()]
    if world_size() > 1:
        device = next(iter(parameters.values())).device
        sums = torch.tensor([signed64(value) for value in values], dtype=torch.int64, device=device)
        dist.all_reduce(sums)
        values = [value & MASK64 for value in sums.tolist()]
    return dict(zip(parameters, values))


def _check(info: LograTrainerInitInfo, parameters: dict[str, torch.Tensor]) -> None:
    """Raise ValueError where settings or parameters cannot be."""
    if info.mode not in SYNC_MODES:
        raise ValueError(f"mode {info.mode!r}: must be one of {', '.join(SYNC_MODES)}")
    if info.mode == "factor" and not info.exact_updates:
        raise ValueError("mode 'factor' needs updates that engines can repeat (exact_updates)")
    if info.verify_every < 1 or info.refresh_every < 0:
        raise ValueError(f"verify_every {info.verify_every}, refresh_every {info.refresh_every}: out of range")
    strange = [name for name in (*info.trained, *info.dense) if name not in parameters]
    if strange:
        raise ValueError(f"trained names {strange[0]}, which is no parameter of the model ({len(strange)} such names)")
    for name, parameter in parameters.items():
        if parameter.dtype is not torch.bfloat16:
            raise ValueError(f"{name} is {parameter.dtype}: only bf16 parameters are synchronised")


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
