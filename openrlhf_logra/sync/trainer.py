"""The trainer's end: queues records of updates and brings every rollout engine to the trainer's version.

Constructed and called on every trainer rank. Rank 0 is the sender; the others take part in the collectives (digests of
shards, gathering for a dense sync) and in the verdict, so that all ranks go on or stop together.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from ..math.digest import MASK64, matrix_shape, signed64
from ..math.exact import Update
from ..train.shards import digest, gathered
from ..train.targets import full_shape
from .record import encode_dense, encode_factors, with_digest, without
from .worker import BACKEND

_DENSE_PART_BYTES = 256 << 20


class SyncError(RuntimeError):
    """Engines could not be brought to the trainer's version; training on would use wrong rollouts."""


class SyncClient(Protocol):
    """What the sender needs of the inference side. Both calls block until every engine has answered.

    A report is what `LograWeightTransferEngine` returns; each engine answers with one per worker, or with an exception
    object where it could not answer.
    """

    def initialise(self, init_info: dict[str, Any]) -> list[list[dict] | Exception]: ...

    def sync(self, engines: list[int], update_info: dict[str, Any]) -> list[list[dict] | Exception]: ...


@dataclass
class LograTrainerInitInfo(TrainerInitInfo):
    """Settings of the sync.

    Attributes:
        mode: "auto", "factor" or "dense".
        refresh_every: K of the projections.
        verify_every: compare digests every so many syncs.
        targets: names of the parameters that updates change.
        base_digests: digests of the model that the engines load by themselves, on the sender (`digests_of`), to find
            what an engine has rearranged after loading.
        version: version that the trainer's weights have now.
        loaded_version: version of the weights that the engines loaded by themselves: 0 at the start of a run, None
            after a resume, when they hold the base model and the trainer does not.
    """

    backend: ClassVar[str] = BACKEND
    mode: str = "auto"
    refresh_every: int = 1
    verify_every: int = 10
    targets: tuple[str, ...] = ()
    base_digests: dict[str, int] | None = None
    version: int = 0
    loaded_version: int | None = 0


@dataclass
class SyncReport:
    """What one sync did; the metrics of section 11.

    Attributes:
        version: version that every engine now holds.
        sync_bytes: payload sent to each engine.
        dense_bytes: what all parameters in bf16 would have been.
        seconds: wall time on the sender.
        digest_ok: None where digests were not compared, False where one differed (even if a dense sync repaired it).
        digest: of all verified parameters together, where they were compared.
        mode: "none", "factor" or "dense".
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
    """What the sender decided. `dense_names`: parameters sent whole, all of them or those that cannot be patched."""

    mode: str
    verify: bool = False
    engines: list[int] = field(default_factory=list)
    dense_names: list[str] = field(default_factory=list)


@dataclass
class _Message:
    """One RPC: encoded records, the number of matrices that an apply of them writes, and whether it ends the sync."""

    records: list[bytes]
    matrices: int
    last: bool


class LograTrainerEngine(TrainerWeightTransferEngine[LograTrainerInitInfo]):
    """Sender of records; `push` after every update, `send_weights` once per sync, both on every rank."""

    init_info_cls = LograTrainerInitInfo

    def __init__(self, init_info: LograTrainerInitInfo, *, client: SyncClient, parameters: dict[str, torch.Tensor]):
        super().__init__(client=client, source=None, is_sender=init_info.is_sender)
        self._info = init_info
        self._parameters = parameters
        self._shapes = {name: full_shape(parameter) for name, parameter in parameters.items()}
        self._dense_bytes = 2 * sum(torch.Size(shape).numel() for shape in self._shapes.values())
        self._queue: list[bytes] = []
        self._queue_is_exact = True
        self._version = init_info.version
        self._engine_versions: list[int | None] | None = None
        self._unknown: list[str] = []
        self._rearranged: list[str] = []
        self._workers = 0
        self._targets = list(init_info.targets)
        self._syncs = 0
        self._failure: Exception | None = None

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        """Called by vLLM's factory on every rank; `source` is the mapping from names to trainer parameters."""
        return cls(init_info, client=client, parameters=source)

    def push(self, updates: tuple[Update, ...], version: int) -> None:
        """Queue the update that made `version`. Gaussian updates cannot be repeated by an engine: they go dense."""
        self._version = version
        if not self.is_sender or self._info.mode == "dense":
            return
        if updates[0].s is None:
            self._queue_is_exact = False
        if not self._queue_is_exact:
            return
        self._queue.append(encode_factors(updates, version, self._info.refresh_every))
        if self._info.mode == "auto" and sum(map(len, self._queue)) > self._dense_bytes:
            self._queue, self._queue_is_exact = [], False

    def send_weights(self) -> SyncReport:
        """Bring every engine to the trainer's version. A collective over the trainer's ranks.

        Raises:
            SyncError: an engine could not be repaired by a dense sync, or its digest still differs after one.
        """
        start = time.perf_counter()
        self._failure = None
        plan = self._shared(self._plan)
        report = SyncReport(self._version, dense_bytes=self._dense_bytes, mode=plan.mode)
        if plan.mode == "none":
            return report
        problem = self._attempt(plan, report)
        if problem:
            if self.is_sender:
                print(f"[logra] sync to version {self._version}: {problem}; repairing with a dense sync", flush=True)
            plan = self._shared(self._repair_plan)
            report.mode = "dense"
            problem = self._attempt(plan, report)
        if problem:
            raise SyncError(f"LoGRA sync to version {self._version} failed: {problem}")
        self._queue, self._queue_is_exact = [], True
        self._syncs += 1
        report.seconds = time.perf_counter() - start
        return report

    # ---- planning, on the sender ------------------------------------------------------------------------------------

    def _plan(self) -> _Plan:
        if self._engine_versions is None:
            self._initialise()
        engines = list(range(len(self._engine_versions)))
        if all(version == self._version for version in self._engine_versions):
            return _Plan("none")
        base = self._version - len(self._queue)
        if not self._queue or any(version != base for version in self._engine_versions):
            if self._info.loaded_version is None and self._syncs == 0:
                print(f"[logra] resumed at version {self._version}: the first sync is dense", flush=True)
            return _Plan("dense", True, engines, self._sendable)
        verify = self._syncs % self._info.verify_every == 0
        return _Plan("factor", verify, engines, self._unknown)

    def _repair_plan(self) -> _Plan:
        stale = [i for i, version in enumerate(self._engine_versions) if version != self._version]
        return _Plan("dense", True, stale, self._sendable)

    def _initialise(self) -> None:
        """First contact: layouts of all workers; what some engine cannot patch is sent dense in every sync."""
        shapes = {name: list(shape) for name, shape in self._shapes.items()}
        answers = self.client.initialise({"shapes": shapes, "version": self._info.loaded_version or 0})
        if not answers or not all(answers):
            raise SyncError("no engine, or one without workers, answered")
        unknown: dict[str, str] = {}
        for engine, workers in enumerate(answers):
            if isinstance(workers, Exception):
                raise SyncError(f"engine {engine} did not start its LoGRA end: {workers}")
            for worker in workers:
                unknown.update(worker["unknown"])
            for name, shape in self._shapes.items():
                places = {tuple(place) for worker in workers for place in worker["places"].get(name, ())}
                if name not in unknown and sum(r * c for _, r, _, c in places) != torch.Size(shape).numel():
                    unknown[name] = "the workers' blocks do not cover it"
        self._unknown = list(unknown)
        if self._unknown:
            print(
                f"[logra] the place of {len(self._unknown)} parameters in the rollout engine could not be learnt; "
                "they are sent whole in every sync and not verified: "
                + "; ".join(f"{name} ({reason})" for name, reason in unknown.items()),
                flush=True,
            )
        self._workers = max(len(workers) for workers in answers)
        self._find_rearranged(len(answers))
        self._engine_versions = [self._info.loaded_version] * len(answers)

    def _find_rearranged(self, engines: int) -> None:
        """Engines still hold the model they loaded. What differs from it was rearranged after loading (experts packed
        for a kernel, say): the loader's layout is not the runtime's, and a write would damage it."""
        if self._info.base_digests is None:
            return
        different = set()
        for engine, workers in self._ask(list(range(engines)), [], verify=True):
            if isinstance(workers, Exception):
                raise SyncError(f"engine {engine} did not say what it has loaded: {workers}")
            for name, value in self._info.base_digests.items():
                if name not in self._unknown and self._combined_digest(name, workers) != value:
                    different.add(name)
        trained = sorted(different & set(self._targets))
        if trained:
            raise SyncError(
                f"the engine does not hold {trained[0]} ({len(trained)} targets in all) as its checkpoint does: it "
                "loads another model, or rearranges the weight after loading; leave such modules out of "
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
    def _unverified(self) -> set[str]:
        return {*self._unknown, *self._rearranged}

    @property
    def _sendable(self) -> list[str]:
        return [name for name in self._shapes if name not in self._rearranged]

    def _ask(self, engines: list[int], records: list[bytes], verify: bool) -> list[tuple[int, list[dict] | Exception]]:
        info = {"records": records, "verify": verify, "unpatched": self._unknown}
        answers = self.client.sync(engines, info)
        if len(answers) != len(engines):
            raise SyncError(f"{len(answers)} answers came from {len(engines)} engines")
        return list(zip(engines, answers))

    # ---- one attempt, on all ranks ----------------------------------------------------------------------------------

    def _attempt(self, plan: _Plan, report: SyncReport) -> str | None:
        """Send, check and verify; returns the first problem, the same on every rank."""
        expected = digests_of(self._parameters) if plan.verify else {}
        problem = None
        for message in self._messages(plan, expected):
            problem = self._shared(partial(self._transmit, plan, message, expected, report))
            if problem:
                break
        return problem

    def _messages(self, plan: _Plan, expected: dict[str, int]) -> Iterator["_Message"]:
        """What goes into one RPC each. Ranks that do not send yield empty records in step."""
        parts = self._split(plan.dense_names)
        if plan.mode == "factor":
            queue = [without(blob, self._unknown) for blob in self._queue] if self._unknown else [*self._queue]
            if expected and self.is_sender:
                queue[-1] = with_digest(queue[-1], self._total(expected))
            patched = sum(name not in self._unknown for name in self._targets)
            dense = [self._encode_dense(names, index, parts) for index, names in enumerate(parts)]
            yield _Message([*queue, *dense], len(queue) * patched + len(plan.dense_names), last=True)
            return
        for index, names in enumerate(parts):
            record = self._encode_dense(names, index, parts)
            yield _Message([record], len(names), last=index + 1 == len(parts))

    def _split(self, names: list[str]) -> list[list[str]]:
        parts: list[list[str]] = []
        size = 0
        for name in names:
            length = 2 * torch.Size(self._shapes[name]).numel()
            if not parts or size + length > _DENSE_PART_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(name)
            size += length
        return parts

    def _encode_dense(self, names: list[str], part: int, parts: list[list[str]]) -> bytes:
        """One dense record, on the sender. A failure there waits for `_transmit`: the other ranks are gathering."""
        tensors = {}
        for name in names:
            with gathered(self._parameters[name]) as tensor:
                if self.is_sender and self._failure is None:
                    try:
                        tensors[name] = tensor.detach().clone().cpu()
                    except Exception as error:
                        self._failure = error
        if not self.is_sender or self._failure is not None:
            return b""
        return encode_dense(tensors, self._version, part, len(parts))

    def _transmit(self, plan: _Plan, message: "_Message", expected: dict[str, int], report: SyncReport) -> str | None:
        if self._failure is not None:
            raise self._failure
        report.sync_bytes += sum(map(len, message.records))
        problem = None
        for engine, workers in self._ask(plan.engines, message.records, plan.verify and message.last):
            fault = self._fault(workers, message)
            if not fault and message.last:
                fault = self._mismatch(workers, expected, report)
            if fault:
                self._engine_versions[engine] = None
                problem = problem or f"engine {engine}: {fault}"
            elif message.last:
                self._engine_versions[engine] = self._version
        return problem

    def _fault(self, workers: list[dict] | Exception, message: "_Message") -> str | None:
        """Why an engine's answer is not the one that was due, or None."""
        if isinstance(workers, Exception):
            return f"{type(workers).__name__}: {workers}"
        if len(workers) != self._workers:
            return f"{len(workers)} of {self._workers} workers answered"
        for worker in workers:
            if worker["stale"] and message.last:
                return worker["stale"]
            if worker["applied"] != message.matrices:
                return f"{worker['applied']} of {message.matrices} matrices were applied ({worker['stale']})"
            if message.last and worker["version"] != self._version:
                return f"reports version {worker['version']} where {self._version} was sent"
        return None

    def _mismatch(self, workers: list[dict], expected: dict[str, int], report: SyncReport) -> str | None:
        """The first parameter whose digest is not the trainer's, or None; `expected` is empty when not verified."""
        compared = [name for name in expected if name not in self._unverified]
        for name in compared:
            value = expected[name]
            found = self._combined_digest(name, workers)
            if found != value:
                report.digest_ok = False
                shown = found if isinstance(found, str) else f"{found:016x}"
                return f"digest of {name}: {shown}, the trainer's is {value:016x}"
        if compared:
            report.digest_ok = report.digest_ok is not False
            report.digest = self._total(expected)
        return None

    def _total(self, digests: dict[str, int]) -> int:
        """Digest of all parameters that are verified."""
        return sum(value for name, value in digests.items() if name not in self._unverified) & MASK64

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

    def _shared(self, compute: Callable[[], Any]) -> Any:
        """The sender's result on every rank; where it raises, every rank does."""
        result: list[Any] = [None, None]
        if self.is_sender:
            try:
                result[0] = compute()
            except Exception as error:
                if not _several_ranks():
                    raise
                result[1] = f"{type(error).__name__}: {error}"
        if _several_ranks():
            dist.broadcast_object_list(result, src=0)
        if result[1] is not None:
            raise SyncError(f"LoGRA sync to version {self._version} failed on the sender: {result[1]}")
        return result[0]


def digests_of(parameters: dict[str, torch.Tensor]) -> dict[str, int]:
    """Digest of every parameter, complete on every rank. A collective over the trainer's ranks."""
    values = [digest(name, parameter) for name, parameter in parameters.items()]
    if _several_ranks():
        device = next(iter(parameters.values())).device
        sums = torch.tensor([signed64(value) for value in values], dtype=torch.int64, device=device)
        dist.all_reduce(sums)
        values = [value & MASK64 for value in sums.tolist()]
    return dict(zip(parameters, values))


def _several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
