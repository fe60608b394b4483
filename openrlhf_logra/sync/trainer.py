"""The trainer's end: queues records of updates and brings every rollout engine to the trainer's version.

Constructed and called on every trainer rank. Rank 0 is the sender; the others take part in the collectives (digests of
shards, gathering for a dense sync) and in the verdict, so that all ranks go on or stop together.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from ..math.exact import Update
from ..train.shards import digest, gathered
from ..train.targets import full_shape
from .layout import matrix_shape
from .record import encode_dense, encode_factors
from .worker import BACKEND

_DENSE_PART_BYTES = 256 << 20
_MASK64 = (1 << 64) - 1


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
        loaded_version: version of the weights that the engines loaded by themselves: 0 at the start of a run, None
            after a resume, when they hold the base model and the trainer does not.
    """

    backend: ClassVar[str] = BACKEND
    mode: str = "auto"
    refresh_every: int = 1
    verify_every: int = 10
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
        self._version = init_info.loaded_version or 0
        self._engine_versions: list[int | None] | None = None
        self._unknown: list[str] = []
        self._syncs = 0

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
        if sum(map(len, self._queue)) > self._dense_bytes:  # dense is smaller by now
            self._queue, self._queue_is_exact = [], False

    def send_weights(self) -> SyncReport:
        """Bring every engine to the trainer's version. A collective over the trainer's ranks.

        Raises:
            SyncError: an engine could not be repaired by a dense sync, or its digest still differs after one.
        """
        start = time.perf_counter()
        plan = self._shared(self._plan)
        report = SyncReport(self._version, dense_bytes=self._dense_bytes, mode=plan.mode)
        if plan.mode == "none":
            return report
        problem = self._attempt(plan, report)
        if problem and plan.mode == "factor":
            if self.is_sender:
                print(f"[logra] {problem}; repairing with a dense sync", flush=True)
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
            return _Plan("dense", True, engines, list(self._shapes))
        verify = self._syncs % self._info.verify_every == 0
        return _Plan("factor", verify, engines, self._unknown)

    def _repair_plan(self) -> _Plan:
        stale = [i for i, version in enumerate(self._engine_versions) if version != self._version]
        return _Plan("dense", True, stale, list(self._shapes))

    def _initialise(self) -> None:
        """First contact: layouts of all workers; what some engine cannot patch is sent dense in every sync."""
        shapes = {name: list(shape) for name, shape in self._shapes.items()}
        answers = self.client.initialise({"shapes": shapes, "version": self._info.loaded_version or 0})
        unknown: dict[str, None] = {}
        for engine, workers in enumerate(answers):
            if isinstance(workers, Exception):
                raise SyncError(f"engine {engine} did not start its LoGRA end: {workers}")
            unknown.update(dict.fromkeys(n for worker in workers for n in worker["unknown"]))
            for name, shape in self._shapes.items():
                places = {tuple(place) for worker in workers for place in worker["places"].get(name, ())}
                if sum(rows * cols for _, rows, _, cols in places) != torch.Size(shape).numel():
                    unknown[name] = None
        self._unknown = list(unknown)
        if self._unknown:
            print(
                f"[logra] the place of {len(self._unknown)} parameters in the rollout engine could not be learnt; "
                f"they are sent whole in every sync and not verified: {', '.join(self._unknown)}",
                flush=True,
            )
        self._engine_versions = [self._info.loaded_version] * len(answers)

    # ---- one attempt, on all ranks ----------------------------------------------------------------------------------

    def _attempt(self, plan: _Plan, report: SyncReport) -> str | None:
        """Send, check and verify; returns the first problem, the same on every rank."""
        expected = self._digests() if plan.verify else {}
        problem = None
        for records, last in self._payloads(plan):
            problem = self._shared(partial(self._transmit, plan, records, last, expected, report))
            if problem:
                break
        return problem

    def _payloads(self, plan: _Plan) -> Iterator[tuple[list[bytes], bool]]:
        """Lists of records for one RPC each, and whether it is the last. Non-senders yield empty lists in step."""
        parts = self._split(plan.dense_names)
        dense = (self._encode_dense(names, index, len(parts)) for index, names in enumerate(parts))
        if plan.mode == "factor":
            yield [*self._queue, *dense], True
            return
        for index, record in enumerate(dense):
            yield [record], index + 1 == len(parts)

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

    def _encode_dense(self, names: list[str], part: int, parts: int) -> bytes:
        tensors = {}
        for name in names:
            with gathered(self._parameters[name]) as tensor:
                if self.is_sender:
                    tensors[name] = tensor.detach().clone()
        return encode_dense(tensors, self._version, part, parts) if self.is_sender else b""

    def _digests(self) -> dict[str, int]:
        """Digest of every parameter at the trainer's version, complete on the sender."""
        values = [digest(name, parameter) for name, parameter in self._parameters.items()]
        if dist.is_initialized() and dist.get_world_size() > 1:
            device = next(iter(self._parameters.values())).device
            sums = torch.tensor([_signed(value) for value in values], dtype=torch.int64, device=device)
            dist.all_reduce(sums)
            values = [value & _MASK64 for value in sums.tolist()]
        return dict(zip(self._parameters, values))

    def _transmit(
        self, plan: _Plan, records: list[bytes], last: bool, expected: dict[str, int], report: SyncReport
    ) -> str | None:
        report.sync_bytes += sum(map(len, records))
        answers = self.client.sync(plan.engines, {"records": records, "verify": plan.verify and last})
        problem = None
        for engine, workers in zip(plan.engines, answers):
            fault = self._fault(workers, last) or (last and self._mismatch(workers, expected, report))
            if fault:
                self._engine_versions[engine] = None
                problem = problem or f"engine {engine}: {fault}"
            elif last:
                self._engine_versions[engine] = self._version
        return problem

    def _fault(self, workers: list[dict] | Exception, last: bool) -> str | None:
        """Why an engine's answer is not the one that was due, or None."""
        if isinstance(workers, Exception):
            return f"{type(workers).__name__}: {workers}"
        for worker in workers:
            if last and worker["stale"]:
                return worker["stale"]
            if last and worker["version"] != self._version:
                return f"reports version {worker['version']} where {self._version} was sent"
            if worker["applied"] == 0:
                return "applied nothing"
        return None

    def _mismatch(self, workers: list[dict], expected: dict[str, int], report: SyncReport) -> str | None:
        """The first parameter whose digest is not the trainer's, or None; `expected` is empty when not verified."""
        for name, value in expected.items():
            if name in self._unknown:
                continue
            found = self._combined_digest(name, workers)
            if found != value:
                report.digest_ok = False
                shown = found if isinstance(found, str) else f"{found:016x}"
                return f"digest of {name}: {shown}, the trainer's is {value:016x}"
        if expected:
            report.digest_ok = report.digest_ok is not False
            report.digest = sum(value for name, value in expected.items() if name not in self._unknown) & _MASK64
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
        return sum(blocks.values()) & _MASK64

    def _shared(self, compute):
        """The sender's result on every rank; an exception there is raised everywhere."""
        result: list[Any] = [None]
        if self.is_sender:
            try:
                result = [compute()]
            except Exception as error:
                result = [error]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(result, src=0)
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
