"""Records: what crosses the wire and what a log keeps. One safetensors blob each, no pickle (docs/bits.md).

A record holds changes of parameters, each in one of three forms, told apart by their keys:

    factors    `<name>.q` int16 [d, r] and `<name>.s` float32 [d]: one update, repeated exactly by every holder
    elements   `<name>.gaps` and `<name>.bits`, uint8: changed elements, compressed (sync/sparse.py)
    whole      `<name>`, bf16: all values

The header is the blob's string-to-string metadata; `checksum` in it covers every byte of the blob.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ..math.digest import total_digest
from ..math.exact import ROUNDINGS, Update, apply_block, max_quantum
from ..math.projection import Projection, projection_index
from .sparse import Elements, compress, decompress

FORMAT = "logra/1"
KINDS = ("factor", "sparse", "dense")
Change = Update | Elements | torch.Tensor
_OTHER_HALF = {"q": "s", "s": "q", "gaps": "bits", "bits": "gaps"}
_UNSEALED = "0" * 32
_CHECKSUM_KEY = b'"checksum":"'


class RecordError(ValueError):
    """A blob that is not a record, one whose header and tensors contradict each other, or one in the wrong place."""


@dataclass(frozen=True)
class Header:
    """Metadata of a record.

    Attributes:
        format: FORMAT.
        kind: "factor": one update of the targets, with the changes of densely trained parameters where there are any.
            "sparse": the net change of parameters from base_version to version (where the two are equal: what
            completes that version). "dense": parameters as they are at version, whatever an engine holds.
        version: version of the weights after this record.
        base_version: version it applies to.
        update: index of the update, base_version again for factors; addresses projection and dither.
        seed, rank, distribution, refresh_every: which projection; empty or 0 where there are no factors.
        rounding: "stochastic" or "nearest"; empty where there are no factors.
        run: names the run that wrote the record, across resumes.
        parent: checksum of the record before it in the run's log; empty in the first one.
        digest: hexadecimal digest of all parameters after this record, or "" where it was not computed.
        digests: the same by parameter, as a JSON object; "" where it was not computed.
        checksum: BLAKE2b (16 bytes, hexadecimal) of the blob with zeros in this place.
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
    run: str = ""
    parent: str = ""
    digest: str = ""
    digests: str = ""
    checksum: str = _UNSEALED

    def with_digests(self, digests: dict[str, int]) -> "Header":
        """The same header, stating the digests of all parameters after the record."""
        table = json.dumps({name: f"{value:016x}" for name, value in digests.items()})
        return replace(self, digest=f"{total_digest(digests):016x}", digests=table)


@dataclass(frozen=True)
class Record:
    """A decoded record: its header and its tensors by key, on the CPU."""

    header: Header
    tensors: dict[str, torch.Tensor]

    def __str__(self) -> str:
        header = self.header
        return f"{header.kind} record {header.base_version} -> {header.version}"

    def names(self) -> list[str]:
        """Parameters that the record changes."""
        return list(self._keys())

    def sizes(self) -> dict[str, int]:
        """Bytes of each parameter's change."""
        return {name: sum(self.tensors[key].nbytes for key in keys) for name, keys in self._keys().items()}

    def _keys(self) -> dict[str, list[str]]:
        """The keys that make up each parameter's change."""
        keys: dict[str, list[str]] = {}
        for key in self.tensors:
            keys.setdefault(self._name(key), []).append(key)
        return keys

    def _name(self, key: str) -> str:
        name, _, form = key.rpartition(".")
        other = _OTHER_HALF.get(form)
        paired = other is not None and self.header.kind != "dense" and f"{name}.{other}" in self.tensors
        return name if paired else key

    def changes(self, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Change]]:
        """The change of each parameter, decoded one at a time.

        Args:
            shapes: full shape of every parameter that may occur.

        Raises:
            RecordError: a change lacks its other half, does not have the parameter's shape, belongs to none, or is
                there twice.
        """
        self._check_header()
        if not self.tensors and self.header.kind != "sparse":  # an optimizer's step may be too small for any bit
            raise RecordError(f"{self}: holds no change")
        for name, keys in self._keys().items():
            if name not in shapes:
                raise RecordError(f"{self}: unknown parameter {name}")
            yield name, self._change(name, keys, tuple(shapes[name]))

    def with_changes(self, changes: dict[str, Elements | torch.Tensor]) -> "Record":
        """The record with changes of further parameters, as elements or whole."""
        tensors = dict(self.tensors)
        for name, change in changes.items():
            if isinstance(change, Elements):
                tensors.update({f"{name}.{form}": tensor for form, tensor in compress(change).items()})
            else:
                tensors[name] = change.contiguous().cpu()
        return Record(self.header, tensors)

    def _check_header(self) -> None:
        header = self.header
        if header.kind not in KINDS:
            raise RecordError(f"record of kind {header.kind!r}; this version reads {', '.join(KINDS)}")
        steps = header.version - header.base_version
        if header.kind == "factor":
            possible = header.distribution == "rademacher" and header.rounding in ROUNDINGS and header.rank > 0
            possible &= steps == 1 and header.update == header.base_version
        else:
            possible = steps >= 0 if header.kind == "sparse" else steps == 0
        if not possible or min(header.base_version, header.refresh_every) < 0:
            raise RecordError(f"{self}: its header contradicts itself: {header}")

    def _change(self, name: str, keys: list[str], shape: tuple[int, ...]) -> Change:
        held = self.tensors
        if set(keys) == {f"{name}.q", f"{name}.s"}:
            return self._factors(name, held[f"{name}.q"], held[f"{name}.s"], shape)
        if set(keys) == {f"{name}.gaps", f"{name}.bits"}:
            try:
                return decompress(held[f"{name}.gaps"], held[f"{name}.bits"], torch.Size(shape).numel())
            except ValueError as error:
                raise RecordError(f"{self}: {name}: {error}") from error
        if keys != [name]:
            raise RecordError(f"{self}: holds the change of {name} in two forms")
        whole = held[name]
        if tuple(whole.shape) != shape or whole.dtype is not torch.bfloat16:
            raise RecordError(f"{self}: {name} is {whole.dtype} {tuple(whole.shape)}, expected bf16 {shape}")
        return whole

    def _factors(self, name: str, q: torch.Tensor, s: torch.Tensor, shape: tuple[int, ...]) -> Update:
        header = self.header
        if self.header.kind != "factor":
            raise RecordError(f"{self}: holds factors of {name}")
        if len(shape) != 2 or q.dtype is not torch.int16 or q.shape != (shape[0], header.rank) or s.shape != shape[:1]:
            raise RecordError(f"{self}: factors of {name} have shapes {tuple(q.shape)} and {tuple(s.shape)}")
        # Scales are powers of two or 0: frexp gives them a half or 0, and NaN, infinity and negatives something else.
        fraction = torch.frexp(s).mantissa if s.dtype is torch.float32 else torch.tensor(torch.nan)
        if not ((fraction == 0.5) | (fraction == 0)).all():
            raise RecordError(f"{self}: the row scales of {name} are damaged")
        quantum = max_quantum(header.rank)
        if (q > quantum).any() or (q < -quantum).any():
            raise RecordError(f"{self}: factors of {name} leave the range in which their product is exact")
        index = projection_index(header.update, header.refresh_every)
        draw = Projection(header.seed, index, name, header.rank, shape[1], header.distribution)
        return Update(draw, header.update, q, s, header.rounding)

    def pieces(self, without: set[str], limit: int) -> Iterator["Record"]:
        """The record, but for some parameters, in pieces of at most `limit` bytes or one parameter. Each is a record
        between the same versions that changes other parameters. One without changes is a piece too."""
        kept = {name: size for name, size in self.sizes().items() if name not in without}
        for names in grouped(kept, limit):
            yield Record(self.header, {key: tensor for name in names for key, tensor in self._keys_of(name)})
        if not self.tensors:
            yield self

    def _keys_of(self, name: str) -> list[tuple[str, torch.Tensor]]:
        keys = [name, *(f"{name}.{form}" for form in _OTHER_HALF)]
        return [(key, self.tensors[key]) for key in keys if key in self.tensors and self._name(key) == name]


def grouped(sizes: dict[str, int], most: int) -> list[list[str]]:
    """The names in order, in groups whose sizes add up to at most `most`, or of one name."""
    groups: list[list[str]] = []
    total = 0
    for name, size in sizes.items():
        if not groups or total + size > most:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    return groups


def write_change(change: Change, block: torch.Tensor, row0: int, col0: int, width: int) -> None:
    """Bring a block of one parameter from the version before a record to the one after it, in place.

    Args:
        block: bf16 [n, m], any strides: W[row0:row0 + n, col0:col0 + m].
        width: columns of the whole matrix (`matrix_shape`).
    """
    if isinstance(change, Update):
        apply_block(block, change, row0, col0)
    elif isinstance(change, Elements):
        change.write(block, row0, col0, width)
    else:
        rows, cols = block.shape
        block.copy_(change.view(-1, width)[row0 : row0 + rows, col0 : col0 + cols])


def factor_record(updates: tuple[Update, ...], version: int, refresh_every: int) -> Record:
    """One update of all targets.

    Args:
        updates: quantised updates (`s` is not None) of one step.
        version: version of the weights after it.
        refresh_every: K, with which the projection's index follows from the update's.

    Raises:
        ValueError: there are none, or they are not one step's as a reader of the header would repeat it.
    """
    if not updates:
        raise ValueError(
            f"no updates lead to version {version}; push those of the step (a skipped step is not pushed)"
        )
    first = updates[0]
    for update in updates:
        name, index = update.projection.name, projection_index(update.update, refresh_every)
        if update.s is None:
            raise ValueError(f"the update of {name} is not exact; set exact_updates=False")
        if update.projection.index != index:
            raise ValueError(
                f"{name}: update {update.update} was made with projection {update.projection.index}, with "
                f"refresh_every {refresh_every} it is number {index}; give the sync the strategy's refresh_every"
            )
        if _common(update) != _common(first):
            raise ValueError(f"{name} and {first.projection.name} are of different steps or runs")
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
        tensors[f"{update.projection.name}.q"] = update.q.contiguous().cpu()
        tensors[f"{update.projection.name}.s"] = update.s.contiguous().cpu()
    return Record(header, tensors)


def _common(update: Update) -> tuple:
    """What the header says once for all updates."""
    draw = update.projection
    return update.update, update.rounding, draw.seed, draw.rank, draw.distribution


def sparse_record(changes: dict[str, Elements | torch.Tensor], base_version: int, version: int) -> Record:
    """The net change of some parameters between two versions; each as elements or whole, whichever was given."""
    return Record(Header(FORMAT, "sparse", version, base_version, base_version), {}).with_changes(changes)


def dense_record(tensors: dict[str, torch.Tensor], version: int) -> Record:
    """Whole parameters at one version."""
    held = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    return Record(Header(FORMAT, "dense", version, version, version), held)


def encode(record: Record) -> tuple[bytes, str]:
    """The record's blob and the checksum that its header now states."""
    header = replace(record.header, checksum=_UNSEALED)
    blob = save(record.tensors, metadata={key: str(value) for key, value in asdict(header).items()})
    checksum = _checksum(blob)
    return _with_checksum(blob, checksum.encode()), checksum


def decode(blob: bytes) -> Record:
    """Inverse of `encode`.

    Raises:
        RecordError: the blob is truncated or damaged, is no safetensors, or is no record of this format.
    """
    try:
        tensors = load(blob)
        header = _header(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
        found = _checksum(_with_checksum(blob, _UNSEALED.encode()))
    except RecordError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:  # all safetensors'
        raise RecordError(f"not a record, or a damaged one ({len(blob)} bytes): {error}") from error
    if found != header.checksum:
        raise RecordError(f"damaged record {header.base_version} -> {header.version}: its checksum does not hold")
    return Record(header, tensors)


def read_header(path: str | Path) -> Header:
    """The header of a record in a file, without reading the rest; its checksum is not looked at.

    Raises:
        RecordError: it is no record of this format.
    """
    try:
        with open(path, "rb") as file:
            return _header(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, OverflowError, MemoryError) as error:
        raise RecordError(f"not a record: {str(error) or type(error).__name__}") from error


def _header(encoded: bytes) -> Header:
    try:
        metadata = json.loads(encoded).get("__metadata__", {})
        if metadata.get("format") != FORMAT:
            raise RecordError(f"record format {metadata.get('format')!r}; this version reads {FORMAT!r}")
        return Header(**{f.name: f.type(metadata[f.name]) for f in fields(Header)})
    except RecordError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"not a record: {error}") from error


def _checksum(blob: bytes) -> str:
    return hashlib.blake2b(blob, digest_size=16).hexdigest()


def _with_checksum(blob: bytes, checksum: bytes) -> bytes:
    # Quotes in names are escaped in JSON, so that only the header's own key can match.
    place = blob.index(_CHECKSUM_KEY, 0, 8 + int.from_bytes(blob[:8], "little")) + len(_CHECKSUM_KEY)
    return blob[:place] + checksum + blob[place + len(checksum) :]
