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
from ..math.exact import apply_block
from .layout import Block, discover_layout
from .record import Record, RecordError, decode

BACKEND = "logra"


@dataclass
class LograInitInfo(WeightTransferInitInfo):
    """What a worker must know before the first record.

    Attributes:
        shapes: full shape of every trainer parameter by Hugging Face name.
        version: version of the weights that the worker has loaded.
    """

    shapes: dict[str, list[int]] = field(default_factory=dict)
    version: int = 0


@dataclass
class LograUpdateInfo(WeightTransferUpdateInfo):
    """One sync.

    Attributes:
        records: encoded records in order.
        verify: whether to return digests of all weights afterwards.
        unpatched: names that some worker cannot patch, so that all take them whole.
    """

    records: list[bytes] = field(default_factory=list)
    verify: bool = False
    unpatched: list[str] = field(default_factory=list)


class LograWeightTransferEngine(WeightTransferEngine[LograInitInfo, LograUpdateInfo]):
    """Holds the layout and the version of one worker's weights.

    A worker whose weights are not a known version is *stale*: `stale` says why, and only a dense sync ends it.
    """

    init_info_cls = LograInitInfo
    update_info_cls = LograUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: LograInitInfo) -> None:
        self._shapes = {name: tuple(shape) for name, shape in init_info.shapes.items()}
        self._layout, self._unknown = discover_layout(self.model, self._shapes, self.model.load_weights)
        self._matrices = {name: matrix_shape(shape) for name, shape in self._shapes.items()}
        self.version = init_info.version
        self.stale: str | None = None
        self._dense_parts = 0  # parts of a dense sync that have come, and the version they carry
        self._dense_version: int | None = None

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
        if report["stale"]:
            raise RuntimeError(report["stale"])

    def apply(self, update_info: LograUpdateInfo) -> dict:
        """Apply the records and report.

        Returns:
            {"version", "applied" (matrices written), "stale" (None or the reason), "digests" (by name, a list of
            [row, rows, column, columns, hexadecimal digest], when asked for and not stale)}.
        """
        applied = 0
        for name in update_info.unpatched:
            self._layout.pop(name, None)
        parameters = {name: parameter.data for name, parameter in self.model.named_parameters()}
        try:
            with torch.inference_mode():
                for blob in update_info.records:
                    applied += self._apply_record(decode(blob), parameters)
        except Exception as error:  # reported to the trainer, which repairs or stops; the weights are a mixture now
            self.stale = f"{type(error).__name__}: {error}"
        digests = self._digests(parameters) if update_info.verify and not self.stale else {}
        return {"version": self.version, "applied": applied, "stale": self.stale, "digests": digests}

    def _apply_record(self, record: Record, parameters: dict[str, torch.Tensor]) -> int:
        if record.header.kind == "dense":
            return self._apply_dense(record, parameters)
        return self._apply_factors(record, parameters)

    def _apply_factors(self, record: Record, parameters: dict[str, torch.Tensor]) -> int:
        header = record.header
        if self.stale:
            raise RecordError(f"only a dense sync can follow ({self.stale})")
        if header.base_version != self.version:
            raise RecordError(
                f"record {header.base_version} -> {header.version} does not follow version {self.version}"
            )
        updates = record.factors(self._matrices)
        missing = [name for name in updates if name not in self._layout]
        if missing:
            raise RecordError(f"record {header.version}: the place of {missing[0]} in this engine is not known")
        # Until the last matrix is written the weights belong to no version.
        self.stale = f"the apply of version {header.version} did not finish"
        for name, update in updates.items():
            update = update.to(self.device)
            for block in self._layout[name]:
                apply_block(block.view(parameters), update, block.hf_row0, block.hf_col0)
        self.stale = None
        self.version = header.version
        return len(updates)

    def _apply_dense(self, record: Record, parameters: dict[str, torch.Tensor]) -> int:
        header = record.header
        if header.part != 0 and (header.part, header.version) != (self._dense_parts, self._dense_version):
            raise RecordError(f"dense part {header.part} of {header.parts} came where {self._dense_parts} was due")
        if header.kind != "dense" or not record.tensors:
            raise RecordError(f"dense record of version {header.version}: is empty, or is of kind {header.kind}")
        reason = self.stale or f"the dense sync to version {header.version} did not finish"
        self.stale, self._dense_parts, self._dense_version = reason, 0, header.version
        for name, tensor in record.tensors.items():
            if tuple(tensor.shape) != self._shapes.get(name) or tensor.dtype is not torch.bfloat16:
                raise RecordError(
                    f"dense record of version {header.version}: {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"expected bf16 {self._shapes.get(name)}"
                )
            if name in self._layout:
                matrix = tensor.view(self._matrices[name])
                for block in self._layout[name]:
                    row, rows, col, cols = block.place
                    block.view(parameters).copy_(matrix[row : row + rows, col : col + cols])
            else:
                self.model.load_weights([(name, tensor.to(self.device))])
        if header.part + 1 == header.parts:
            self.stale, self.version = None, header.version
        else:
            self._dense_parts = header.part + 1
        return len(record.tensors)

    def _digests(self, parameters: dict[str, torch.Tensor]) -> dict[str, list[list]]:
        with torch.inference_mode():
            return {
                name: [[*block.place, f"{self._digest(name, block, parameters):016x}"] for block in blocks]
                for name, blocks in self._layout.items()
            }

    def _digest(self, name: str, block: Block, parameters: dict[str, torch.Tensor]) -> int:
        return digest_block(block.view(parameters), name, self._matrices[name][1], block.hf_row0, block.hf_col0)

    def shutdown(self) -> None:
        pass
