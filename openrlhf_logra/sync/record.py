"""Records: what crosses the wire and what a log keeps. One safetensors blob each, no pickle (spec section 7).

A factor record holds one update as `<name>.q` (int16 [d, r]) and `<name>.s` (float32 [d]) per target. A dense record
holds whole bf16 parameters under their own names. The header is the blob's string-to-string metadata.
"""

import json
from dataclasses import asdict, dataclass, fields, replace

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ..math.exact import ROUNDINGS, Update
from ..math.projection import Projection, projection_index

FORMAT = "logra/1"


class RecordError(ValueError):
    """A blob that is not a record, or one whose header and tensors do not belong together."""


@dataclass(frozen=True)
class Header:
    """Metadata of a record.

    Attributes:
        format: FORMAT.
        kind: "factor" or "dense".
        version: version of the weights after this record.
        base_version: version it applies to (a dense record applies to any).
        update: index of the update, base_version again for factors; addresses projection and dither.
        seed, rank, distribution, refresh_every: which projection; empty or 0 in a dense record.
        rounding: "stochastic" or "nearest".
        part, parts: position of a dense record in the sequence that carries one version.
        digest: hexadecimal digest of all weights after this record, or "" where it was not computed.
    """

    format: str
    kind: str
    version: int
    base_version: int
    update: int
    seed: int = 0
    rank: int = 0
    distribution: str = ""
    refresh_every: int = 0
    rounding: str = ""
    part: int = 0
    parts: int = 1
    digest: str = ""


@dataclass(frozen=True)
class Record:
    """A decoded record: its header and its tensors by key, on the CPU."""

    header: Header
    tensors: dict[str, torch.Tensor]

    def factors(self, shapes: dict[str, tuple[int, int]]) -> dict[str, Update]:
        """The updates of a factor record by parameter name.

        Args:
            shapes: (d, k) of every parameter that may occur.

        Raises:
            RecordError: a factor lacks its other half, has the wrong shape, or belongs to no known parameter.
        """
        header = self.header
        known = header.distribution == "rademacher" and header.rounding in ROUNDINGS and header.kind == "factor"
        if not known or header.version != header.base_version + 1 or header.update != header.base_version:
            raise RecordError(f"record {header.version}: its header contradicts itself: {header}")
        if not self.tensors:
            raise RecordError(f"record {header.version}: holds no factors")
        updates = {}
        for key in self.tensors:
            name, _, part = key.rpartition(".")
            if part == "s" and f"{name}.q" in self.tensors:
                continue
            if part != "q" or f"{name}.s" not in self.tensors:
                raise RecordError(f"record {header.version}: {key} has no counterpart")
            if name not in shapes:
                raise RecordError(f"record {header.version}: unknown parameter {name}")
            q, s = self.tensors[key], self.tensors[f"{name}.s"]
            rows, width = shapes[name]
            if q.dtype is not torch.int16 or q.shape != (rows, header.rank) or s.shape != (rows,):
                raise RecordError(f"record {header.version}: factors of {name} have shapes {q.shape} and {s.shape}")
            if s.dtype is not torch.float32 or not torch.isfinite(s).all() or (s < 0).any():
                raise RecordError(f"record {header.version}: the row scales of {name} are damaged")
            index = projection_index(header.update, header.refresh_every)
            draw = Projection(header.seed, index, name, header.rank, width, header.distribution)
            updates[name] = Update(draw, header.update, q, s, header.rounding)
        return updates


def encode_factors(updates: tuple[Update, ...], version: int, refresh_every: int) -> bytes:
    """One update of all targets as a factor record.

    Args:
        updates: quantised updates (`s` is not None) of one step.
        version: version of the weights after it.
        refresh_every: K, with which the projection's index follows from the update's.
    """
    first = updates[0]
    header = Header(
        FORMAT,
        "factor",
        version=version,
        base_version=version - 1,
        update=first.update,
        seed=first.projection.seed,
        rank=first.projection.rank,
        distribution=first.projection.distribution,
        refresh_every=refresh_every,
        rounding=first.rounding,
    )
    tensors = {}
    for update in updates:
        tensors[f"{update.projection.name}.q"] = update.q.cpu()
        tensors[f"{update.projection.name}.s"] = update.s.cpu()
    return _encode(header, tensors)


def encode_dense(tensors: dict[str, torch.Tensor], version: int, part: int, parts: int) -> bytes:
    """Whole parameters as one of `parts` dense records that together carry `version`."""
    header = Header(FORMAT, "dense", version=version, base_version=version, update=version, part=part, parts=parts)
    return _encode(header, {name: tensor.contiguous().cpu() for name, tensor in tensors.items()})


def with_digest(blob: bytes, digest: int) -> bytes:
    """The same record, stating the digest of all weights after it."""
    record = decode(blob)
    return _encode(replace(record.header, digest=f"{digest:016x}"), record.tensors)


def without(blob: bytes, names: list[str]) -> bytes:
    """The same factor record, lacking the factors of some parameters."""
    record = decode(blob)
    dropped = {f"{name}.{part}" for name in names for part in "qs"}
    return _encode(record.header, {key: tensor for key, tensor in record.tensors.items() if key not in dropped})


def _encode(header: Header, tensors: dict[str, torch.Tensor]) -> bytes:
    return save(tensors, metadata={key: str(value) for key, value in asdict(header).items()})


def decode(blob: bytes) -> Record:
    """Inverse of the encoders.

    Raises:
        RecordError: the blob is truncated, is no safetensors, or is no record of this format.
    """
    try:
        tensors = load(blob)
        length = int.from_bytes(blob[:8], "little")
        metadata = json.loads(blob[8 : 8 + length]).get("__metadata__", {})
        header = Header(**{f.name: f.type(metadata[f.name]) for f in fields(Header)})
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"not a record ({len(blob)} bytes): {error}") from error
    if header.format != FORMAT:
        raise RecordError(f"record format {header.format!r}; this version reads {FORMAT!r}")
    return Record(header, tensors)
