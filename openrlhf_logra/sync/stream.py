"""The records of a run as the trainer makes them: one after another, each naming the one before it.

Updates that an engine can repeat become factor records. Everything else (Gaussian projections, dense optimizers, or by
`--logra.sync.mode sparse`) becomes one sparse record per sync, found by comparing with a copy of the weights. Where
only some parameters are trained densely, their changes travel in the last factor record of a sync; in a log, which
promises every version, each record has its own.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..math.exact import Update
from ..train.ranks import gathered_on_rank_0
from ..train.shards import counted_elements
from ..train.targets import full_shape
from .log import RecordLog
from .record import Record, encode, factor_record, grouped, sparse_record
from .sparse import Elements, changed_elements, join

_GATHERED_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class Position:
    """Where a run's records stand: all that a checkpoint must keep of them."""

    run: str
    parent: str = ""


@dataclass(frozen=True)
class Sealed:
    """A record in the queue, and the parameters it changes."""

    record: Record
    names: list[str]


class RecordStream:
    """Makes records on the sender; `close` is a collective over the trainer's ranks.

    Args:
        position: run and last record so far.
        version: version of the weights now.
        parameters: trainer parameters by name; `compared` are those whose changes are found by comparing.
        by_factors: whether updates become factor records.
        refresh_every: K of the projections.
        limit: bytes of queued records that are kept for sending.
        every_version: whether records must lead to every version, not only to those that are synchronised.
        log: where every record is kept, or None; the sender's.
        is_sender: whether this rank makes records.
    """

    def __init__(
        self,
        position: Position,
        version: int,
        *,
        parameters: dict[str, torch.Tensor],
        compared: tuple[str, ...],
        by_factors: bool,
        refresh_every: int,
        limit: int,
        every_version: bool,
        log: RecordLog | None,
        is_sender: bool,
    ):
        self._position = position
        self.version = version
        self.form = "factor" if by_factors else "sparse"
        self._refresh_every, self._limit, self._is_sender = refresh_every, limit, is_sender
        self._every_version, self._log = every_version, log
        self._open: list[Record] = []  # not sealed yet: one, or more after an error
        self._recorded = version  # the version that the last record leads to
        self._compared_version = version  # the version up to which records hold the compared parameters' changes
        self._compared = {name: parameters[name] for name in compared}
        self._copies: dict[str, torch.Tensor] = {}
        self._starts: dict[str, int] = {}  # flat index of each copy's first element
        for name, parameter in self._compared.items():
            values, self._starts[name] = counted_elements(parameter)
            self._copies[name] = values.cpu().clone()
        self.clear()

    def position(self) -> Position:
        """Run and last record. What is still open is sealed, so that a resume continues it. A collective."""
        self._compare()
        self._seal()
        return self._position

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copies that changes are found with."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies.values())

    def clear(self) -> None:
        """Forget the queue: every engine has what it holds."""
        self.base_version = self._recorded
        self.queue: list[Sealed] = []
        self.bytes_of: dict[str, int] = {}  # payload of each parameter in the queue
        self.complete = True  # whether the queue leads from base_version to the present

    def push(self, updates: tuple[Update, ...], version: int) -> None:
        """Take the update that made `version`. A collective where records are made of every version."""
        self.version = version
        if self.form == "sparse":
            return
        try:
            if self._is_sender:
                self._take(updates)
        finally:
            if self._every_version:
                self._compare()

    def _take(self, updates: tuple[Update, ...]) -> None:
        try:
            self._seal()
        finally:
            # Kept open until the next update or sync, which knows the digest after it.
            self._open.append(factor_record(updates, self.version, self._refresh_every))

    def close(self, digests: dict[str, int]) -> None:
        """Turn everything up to the present into records. A collective.

        Args:
            digests: of all parameters at the present version, or empty.
        """
        self._compare()
        if self._open and digests:
            self._open[-1] = replace(self._open[-1], header=self._open[-1].header.with_digests(digests))
        self._seal()

    def _compare(self) -> None:
        """Let an open record hold what has changed in the compared parameters since one last did. A collective."""
        if not self._compared or self._compared_version == self.version:
            return
        own, changes = self._differences()
        if self._is_sender:
            if self.form == "sparse":
                self._open.append(sparse_record(changes, self._compared_version, self.version))
            else:
                self._open[-1] = self._open[-1].with_changes(changes)
        for name, elements in own.items():
            self._copies[name].view(torch.int16)[elements.indices - self._starts[name]] = elements.bits
        self._compared_version = self.version

    def _seal(self) -> None:
        while self._open:
            record = self._open[0]
            header = replace(record.header, run=self._position.run, parent=self._position.parent)
            record = Record(header, record.tensors)
            blob, checksum = encode(record)
            if self._log is not None:
                self._log.write(header.version, blob)
            del self._open[0]
            self._position = replace(self._position, parent=checksum)
            self._recorded = header.version
            if self.complete:
                self._keep(record)

    def _keep(self, record: Record) -> None:
        sizes = record.sizes()
        self.queue.append(Sealed(record, list(sizes)))
        for name, size in sizes.items():
            self.bytes_of[name] = self.bytes_of.get(name, 0) + size
        if sum(self.bytes_of.values()) > self._limit:
            self.queue, self.bytes_of, self.complete = [], {}, False

    def _differences(self) -> tuple[dict[str, Elements], dict[str, Elements]]:
        """Changed elements of every compared parameter: this rank's own, and on the sender everyone's. Where a rank
        fails, the sender raises."""
        own: dict[str, Elements] = {}
        joined: dict[str, Elements] = {}
        failure = None
        # In batches, the same on every rank: what is gathered at once is bounded.
        elements_of = {name: torch.Size(full_shape(p)).numel() for name, p in self._compared.items()}
        for names in grouped(elements_of, _GATHERED_ELEMENTS):
            try:
                found: Any = {name: self._difference(name) for name in names}
            except Exception as error:  # told to the sender: the others gather, and wait for this rank
                found = f"{type(error).__name__}: {error}"
            everyone = gathered_on_rank_0(found)
            failure = failure or next((rank for rank in everyone if isinstance(rank, str)), None)
            if failure or isinstance(found, str):
                continue
            own.update({name: elements for name, (_, elements) in found.items()})
            for name in names if self._is_sender else ():
                parts = sorted((rank[name] for rank in everyone), key=lambda part: part[0])
                joined[name] = join([elements for _, elements in parts])
        if failure:
            raise RuntimeError(f"changed elements could not be found: {failure}")
        return own, {name: elements for name, elements in joined.items() if len(elements.indices)}

    def _difference(self, name: str) -> tuple[int, Elements]:
        elements, start = counted_elements(self._compared[name])
        return start, changed_elements(self._copies[name], elements.cpu(), start)
