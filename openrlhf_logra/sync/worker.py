"""The rollout engine's end: applies records to a vLLM worker's weights in place.

vLLM creates one `LograWeightTransferEngine` per worker (backend "logra"). `init_transfer_engine` and `receive_weights`
are called by vLLM on every worker of an engine, in the worker's process; both block until the weights are in place.
"""

from dataclasses import dataclass, field

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ..math.digest import digest_block, matrix_shape
from ..math.exact import Update
from .layout import Block, discover_layout
from .record import Change, Record, RecordError, decode, write_change
from .transport import Channel, receive

BACKEND = "logra"


@dataclass
class LograInitInfo(WeightTransferInitInfo):
    """What a worker must know before the first record.

    Attributes:
        shapes: full shape of every trainer parameter by Hugging Face name.
        version: version of the weights that the worker has loaded; None where they are none that records follow
            (a resumed run's engine, or one that was started again), so that only a dense sync can come first.
    """

    shapes: dict[str, list[int]] = field(default_factory=dict)
    version: int | None = 0


@dataclass
class LograUpdateInfo(WeightTransferUpdateInfo):
    """One message of a sync.

    Attributes:
        records: encoded records in order.
        sizes: their lengths, where the bytes come by the channel instead.
        position, last: place of the message in its sync. From the first message to the end of the last the weights
            belong to no version.
        verify: whether to return digests of all weights afterwards.
        unpatched: names that some worker cannot patch, so that all take them whole.
    """

    records: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    position: int = 0
    last: bool = True
    verify: bool = False
    unpatched: list[str] = field(default_factory=list)


class LograWeightTransferEngine(WeightTransferEngine[LograInitInfo, LograUpdateInfo]):
    """Holds the layout and the version of one worker's weights.

    A worker whose weights are not a known version is *stale*: `stale` says why, and only a dense sync ends it.
    """

    init_info_cls = LograInitInfo
    update_info_cls = LograUpdateInfo
    supports_draft_weight_update = False
    channel: Channel | None = None

    def init_transfer_engine(self, init_info: LograInitInfo) -> None:
        self._shapes = {name: tuple(shape) for name, shape in init_info.shapes.items()}
        self._layout, self._unknown = discover_layout(self.model, self._shapes, self.model.load_weights)
        self._matrices = {name: matrix_shape(shape) for name, shape in self._shapes.items()}
        self.version = init_info.version
        self.stale = None if init_info.version is not None else "its weights are no version of this run"
        self.run: str | None = None
        self._next_position = 0
        self._step: tuple[int, int] | None = None  # versions of the record before, in a sync under way
        self._changed: set[str] = set()  # what that step has changed so far
        self._unpatched: set[str] = set()

    def describe_layout(self) -> dict:
        """Places in the checkpoint matrices that this worker holds, by name, and why it cannot patch the others."""
        places = {name: [block.place for block in blocks] for name, blocks in self._layout.items()}
        return {"places": places, "unknown": self._unknown}

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: LograUpdateInfo) -> None:
        """Apply the records.

        Raises:
            RuntimeError: the records do not fit this worker's version, or an apply failed; the worker is then stale.
        """
        report = self.apply(update_info)
        if report["stale"] and update_info.last:
            raise RuntimeError(report["stale"])

    def apply(self, info: LograUpdateInfo) -> dict:
        """Apply the records of one message and report.

        Returns:
            {"version", "applied" (changes written), "stale" (None or the reason), "digests" (by name, a list of
            [row, rows, column, columns, hexadecimal digest], when asked for, even if stale)}.
        """
        applied = 0
        self._unpatched = set(info.unpatched)
        parameters = {name: parameter.data for name, parameter in self.model.named_parameters()}
        try:
            # The bytes are taken in any case: others of the channel wait for us.
            blobs = receive(self.channel, info.sizes, self.device) if info.sizes else info.records
            records = [decode(blob) for blob in blobs]  # all of them, before any is written
            if records:
                self._begin(info, records)
                with torch.inference_mode():
                    for record in records:
                        applied += self._apply_record(record, parameters)
                self._end(info)
        except Exception as error:  # reported to the trainer, which repairs or stops; the weights are a mixture now
            self.stale, self._next_position = f"{type(error).__name__}: {error}", 0
        digests = self._digests(parameters) if info.verify else {}
        return {"version": self.version, "applied": applied, "stale": self.stale, "digests": digests}

    def _begin(self, info: LograUpdateInfo, records: list[Record]) -> None:
        first = records[0]
        if info.position == 0 and first.header.kind == "dense":
            self.run = first.header.run  # whatever was before
        elif info.position != self._next_position:
            raise RecordError(f"message {info.position} of a sync came where {self._next_position} was due")
        elif info.position == 0 and self.stale:
            raise RecordError(f"only a dense sync can follow ({self.stale})")
        if info.position == 0:
            self._step, self._changed = None, set()
        for record in records:
            self._check_place(record)
        self.stale = f"the sync to version {records[-1].header.version} did not finish"

    def _end(self, info: LograUpdateInfo) -> None:
        self._next_position = 0 if info.last else info.position + 1
        if info.last:
            self.stale = None

    def _check_place(self, record: Record) -> None:
        """Whether a record follows those before it in this sync: a further step, or a piece of the same one."""
        header, names = record.header, set(record.names())
        step = header.base_version, header.version
        if self.run is not None and header.run != self.run:
            raise RecordError(f"{record} is of run {header.run!r}; this engine follows run {self.run!r}")
        at = self.version if self._step is None else self._step[1]
        begins = header.kind == "dense" and self._step is None
        if not begins and step != self._step and header.base_version != at:
            raise RecordError(f"{record} does not follow version {at}")
        if not begins and header.kind == "dense" and header.version != at:
            raise RecordError(f"{record} does not belong to version {at}")
        if step != self._step:
            self._step, self._changed = step, set()
        repeated = names & self._changed
        if repeated:
            raise RecordError(f"{record} changes {min(repeated)} again")
        self._changed |= names

    def _apply_record(self, record: Record, parameters: dict[str, torch.Tensor]) -> int:
        count = 0
        for name, change in record.changes(self._shapes):
            self._write(name, change, record, parameters)
            count += 1
        self.run, self.version = record.header.run, record.header.version
        return count

    def _write(self, name: str, change: Change, record: Record, parameters: dict[str, torch.Tensor]) -> None:
        if name in self._layout and name not in self._unpatched:
            if isinstance(change, Update):
                change = change.to(self.device)
            for block in self._layout[name]:
                write_change(change, block.view(parameters), block.hf_row0, block.hf_col0, self._matrices[name][1])
        elif isinstance(change, torch.Tensor):
            self.model.load_weights([(name, change.to(self.device))])
        else:
            raise RecordError(f"{record}: the place of {name} in this engine is not known")

    def _digests(self, parameters: dict[str, torch.Tensor]) -> dict[str, list[list]]:
        with torch.inference_mode():
            return {
                name: [[*block.place, f"{self._digest(name, block, parameters):016x}"] for block in blocks]
                for name, blocks in self._layout.items()
                if name not in self._unpatched
            }

    def _digest(self, name: str, block: Block, parameters: dict[str, torch.Tensor]) -> int:
        return digest_block(block.view(parameters), name, self._matrices[name][1], block.hf_row0, block.hf_col0)

    def shutdown(self) -> None:
        pass
