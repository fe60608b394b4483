"""The records of a run as the trainer makes them: one after another, each naming the one before it.

Updates that an engine can repeat become factor records. Everything else (Gaussian projections, dense optimizers, or by
`--logra.sync.mode sparse`) becomes one sparse record per sync, found by comparing with a copy of the weights.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ..math.exact import Update
from ..train.shards import counted_elements
from .log import RecordLog
from .record import Record, encode, factor_record, sparse_record
from .sparse import Elements, changed_elements, join


@dataclass(frozen=True)
class Position:
    """Where a run's records stand: all that a checkpoint must keep of them."""

    run: str
    parent: str = ""


@dataclass(frozen=True)
class Sealed:
    """A record in the queue: its blob, and the parameters it changes."""

    blob: bytes
    names: list[str]


class RecordStream:
    """Makes records on the sender; `close` is a collective over the trainer's ranks.

    Args:
        position: run and last record so far.
        version: version of the weights now.
        parameters: trainer parameters by name; `changing` are those that training changes.
        by_factors: whether updates become factor records.
        refresh_every: K of the projections.
        limit: bytes of queued records that are kept for sending.
        log: where every record is kept, or None.
        is_sender: whether this rank makes records.
    """

    def __init__(
        self,
        position: Position,
        version: int,
        *,
        parameters: dict[str, torch.Tensor],
        changing: tuple[str, ...],
        by_factors: bool,
        refresh_every: int,
        limit: int,
        log: RecordLog | None,
        is_sender: bool,
    ):
        self.position = position
        self.version = version
        self.form = "factor" if by_factors else "sparse"
        self._refresh_every, self._limit, self._is_sender = refresh_every, limit, is_sender
        self._log = log
        self._pending: Record | None = None
        self._recorded = version  # the version that the last record leads to
        self._changing = {} if by_factors else {name: parameters[name] for name in changing}
        self._copies = {name: counted_elements(p)[0].cpu().clone() for name, p in self._changing.items()}
        self.clear()

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copies that sparse records are found with."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies.values())

    def clear(self) -> None:
        """Forget the queue: every engine has what it holds."""
        self.base_version = self._recorded
        self.queue: list[Sealed] = []
        self.bytes_of: dict[str, int] = {}  # payload of each parameter in the queue
        self.complete = True  # whether the queue leads from base_version to the present

    def push(self, updates: tuple[Update, ...], version: int) -> None:
        """Take the update that made `version`."""
        self.version = version
        if self.form == "factor" and self._is_sender:
            self._seal()
            # Kept open until the next update or sync, which knows the digest after it.
            self._pending = factor_record(updates, version, self._refresh_every)

    def close(self, digests: dict[str, int]) -> None:
        """Turn everything up to the present into records. A collective in sparse form.

        Args:
            digests: of all parameters at the present version, or empty.
        """
        if self.form == "sparse" and self.version != self._recorded:
            changes = self._differences()
            if self._is_sender:
                self._pending = sparse_record(changes, self._recorded, self.version)
            self._recorded = self.version
        if self._pending is not None and digests:
            self._pending = replace(self._pending, header=self._pending.header.with_digests(digests))
        self._seal()

    def _seal(self) -> None:
        if self._pending is None:
            return
        record, self._pending = self._pending, None
        header = replace(record.header, run=self.position.run, parent=self.position.parent)
        record = Record(header, record.tensors)
        blob, checksum = encode(record)
        self.position = replace(self.position, parent=checksum)
        self._recorded = header.version
        if self._log is not None:
            self._log.write(header.version, blob)
        if self.complete:
            self._keep(record, blob)

    def _keep(self, record: Record, blob: bytes) -> None:
        sizes = record.sizes()
        self.queue.append(Sealed(blob, list(sizes)))
        for name, size in sizes.items():
            self.bytes_of[name] = self.bytes_of.get(name, 0) + size
        if sum(self.bytes_of.values()) > self._limit:
            self.queue, self.bytes_of, self.complete = [], {}, False

    def _differences(self) -> dict[str, Elements]:
        """Changed elements of every changing parameter since the last record, on the sender."""
        found: dict[str, tuple[int, Elements]] = {}
        for name, parameter in self._changing.items():
            elements, start = counted_elements(parameter)
            now = elements.cpu()
            found[name] = start, changed_elements(self._copies[name], now, start)
            self._copies[name].copy_(now)
        everyone = [found]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = [{}] * dist.get_world_size()
            dist.gather_object(found, everyone if self._is_sender else None, dst=0)
        if not self._is_sender:
            return {}
        joined = {}
        for name in self._changing:
            parts = sorted((rank[name] for rank in everyone), key=lambda part: part[0])
            joined[name] = join([elements for _, elements in parts])
        return {name: elements for name, elements in joined.items() if len(elements.indices)}
