"""The record log: every record of a run, one file each, and how weights are rebuilt from it (docs/sync.md).

Files are named by the version they lead to. A log is read strictly: a record that is damaged, missing, of another run
or of an abandoned branch of the same run is named, and nothing after it is used.
"""

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from ..math.digest import as_matrix, digest_block, matrix_shape
from .record import Header, Record, RecordError, decode, read_header, write_change

_SUFFIX = ".safetensors"
_ABANDONED = "abandoned-"


class RecordLog:
    """Writes the log of one run.

    Args:
        folder: made if needed.
        run: name of the run.
        parent: checksum of the run's last record; empty where there is none.
        version: version at which the run begins, or goes on after a resume.

    Raises:
        RecordError: the folder holds the records of another run, or some that do not lead to where this one stands.
    """

    def __init__(self, folder: str | Path, run: str, parent: str, version: int):
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        abandoned, last = [], None
        for path in record_files(self._folder):
            try:
                header = read_header(path)
            except RecordError as error:
                raise RecordError(f"{path}: {error}; give --logra.sync.log_dir another directory") from error
            if header.run != run:
                raise RecordError(
                    f"{path} is of run {header.run}, this is run {run}; give --logra.sync.log_dir another directory"
                )
            if header.version > version:
                abandoned.append(path)
                continue
            if last is not None and header.parent != last.checksum:
                raise RecordError(f"{path}: does not continue the record before it; this log cannot be gone on with")
            last = header
        if last is not None and (last.version, last.checksum) != (version, parent):
            raise RecordError(
                f"{self._folder}: its records end at version {last.version} and do not lead to this run's checkpoint, "
                f"version {version} (was it resumed without its log, or from an abandoned branch?); give "
                "--logra.sync.log_dir another one"
            )
        if abandoned:
            # A resumed run goes another way from here. The old way is kept, apart.
            numbers = [int(path.name.removeprefix(_ABANDONED)) for path in self._folder.glob(f"{_ABANDONED}[0-9]*")]
            aside = self._folder / f"{_ABANDONED}{max(numbers, default=-1) + 1:03d}"
            aside.mkdir()
            for path in abandoned:
                path.rename(aside / path.name)
            print(f"[logra] {len(abandoned)} records past version {version} were moved to {aside}", flush=True)

    def write(self, version: int, blob: bytes) -> None:
        """Keep the record that leads to `version`; a reader sees all of it or nothing."""
        path = self._folder / f"{version:09d}{_SUFFIX}"
        partial = path.with_suffix(".partial")
        try:
            partial.write_bytes(blob)
            os.replace(partial, path)
        except OSError as error:
            raise RecordError(f"{path}: cannot be written: {error.strerror or error}") from error


def record_files(folder: str | Path) -> list[Path]:
    """Files of a log in order of their versions."""
    return sorted(Path(folder).glob(f"*{_SUFFIX}"), key=lambda path: (len(path.name), path.name))


def read_log(folder: str | Path, last: int | None = None) -> Iterator[tuple[Path, Record]]:
    """Records of a log in order, each checked against the one before it.

    Args:
        last: version to stop at: one that a record leads to, or the one that the first record leads from, which takes
            no record. None is the end of the log.

    Raises:
        RecordError: no records, none that leads to `last`, or one that cannot be read, is damaged, missing, renamed,
            of another run or of another branch.
    """
    if not Path(folder).is_dir():
        raise RecordError(f"{folder}: no such directory")
    before: Header | None = None
    for path in record_files(folder):
        record = _read(path)
        header = record.header
        if path.name != f"{header.version:09d}{_SUFFIX}":
            raise RecordError(f"{path}: holds the record of version {header.version}; was it renamed?")
        if before is not None:
            if header.run != before.run:
                raise RecordError(f"{path}: belongs to run {header.run}, the records before it to run {before.run}")
            if header.base_version != before.version:
                raise RecordError(f"{path}: a record that leads from version {before.version} is missing before it")
            if header.parent != before.checksum:
                raise RecordError(f"{path}: does not continue the record before it; a resumed run left it behind")
        if last is not None and header.version > last:
            if before is None and header.base_version == last:
                return
            if before is None:
                raise RecordError(
                    f"{folder}: has no record that ends at version {last}; the first leads from version "
                    f"{header.base_version} to {header.version}"
                )
            break
        yield path, record
        before = header
        if header.version == last:
            return
    if before is None:
        raise RecordError(f"{folder}: holds no records")
    if last is not None:
        raise RecordError(
            f"{folder}: has no record that ends at version {last}; the last before it is {before.version}"
        )


def _read(path: Path) -> Record:
    try:
        return decode(path.read_bytes())
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from error


def apply_record(record: Record, weights: dict[str, torch.Tensor]) -> None:
    """Bring whole weights from the record's base version to its version, in place.

    Args:
        weights: bf16 tensors by Hugging Face name, contiguous.

    Raises:
        RecordError: the record does not fit the weights.
    """
    for name, change in record.changes({name: tuple(tensor.shape) for name, tensor in weights.items()}):
        matrix = as_matrix(weights[name])
        write_change(change, matrix, 0, 0, matrix.shape[1])


def digests(weights: dict[str, torch.Tensor]) -> dict[str, int]:
    """Digest of every whole bf16 tensor."""
    return {
        name: digest_block(as_matrix(tensor), name, matrix_shape(tuple(tensor.shape))[1])
        for name, tensor in weights.items()
    }


def stated_digests(record: Record) -> dict[str, int]:
    """Digest of every parameter after the record; empty where it does not state them."""
    table = json.loads(record.header.digests or "{}")
    return {name: int(value, 16) for name, value in table.items()}


def differences(stated: dict[str, int], found: dict[str, int]) -> list[str]:
    """Parameters whose digests differ, or that only one side has, in the order of `found`."""
    return [name for name in {**found, **stated} if stated.get(name) != found.get(name)]


@dataclass(frozen=True)
class Route:
    """The records from the beginning of a log to one version, every one of them checked (`find_route`).

    Attributes:
        folder: the log.
        run: name of the run.
        base_version: version at which the log begins.
        version: version that the route leads to.
        records: how many records that takes.
        stated: versions on the way whose records state digests, in order.
    """

    folder: Path
    run: str
    base_version: int
    version: int
    records: int
    stated: tuple[int, ...]


def find_route(folder: str | Path, last: int | None = None) -> Route:
    """Check every record that leads to a version; nothing is applied.

    Args:
        last: the version, as in `read_log`.

    Raises:
        RecordError: as `read_log`.
    """
    stated, records, version = [], 0, last
    for _, record in read_log(folder, last):
        records += 1
        version = record.header.version
        if record.header.digests:
            stated.append(version)
    first = _read(record_files(folder)[0]).header
    return Route(Path(folder), first.run, first.base_version, version, records, tuple(stated))


def first_stated(folder: str | Path) -> int | None:
    """The first version of a log whose record states digests, or None.

    Raises:
        RecordError: as `read_log`, for the records up to there.
    """
    return next((record.header.version for _, record in read_log(folder) if record.header.digests), None)


def replay(weights: dict[str, torch.Tensor], route: Route) -> dict[str, int]:
    """Bring weights from the beginning of a log to the end of a route, in place.

    Digests are compared at the first record that states them, which shows whether the weights were the right ones to
    begin with, and at the last.

    Args:
        weights: bf16 tensors by Hugging Face name, contiguous, as they were at `route.base_version`.

    Returns:
        Digests at `route.version`.

    Raises:
        RecordError: as `read_log`; a record does not fit the weights; or digests differ.
    """
    found = None
    records = read_log(route.folder, route.version)
    for path, record in tqdm(records, total=route.records, unit=" records", disable=None):
        try:
            apply_record(record, weights)
        except RecordError as error:
            raise RecordError(f"{path}: does not fit the weights of --base: {error}") from error
        found = None
        if record.header.version in (*route.stated[:1], *route.stated[-1:]):
            found = digests(weights)
            _compare(path, record, found, route)
    return found or digests(weights)


def _compare(path: Path, record: Record, found: dict[str, int], route: Route) -> None:
    stated = stated_digests(record)
    differing = differences(stated, found)
    if not differing:
        return
    said = f"{path}: its digest of {differing[0]} does not hold ({len(differing)} of {len(stated)} parameters differ)"
    if record.header.version == route.stated[0]:
        said += f"; --base is not the model that this log begins with, version {route.base_version} of run {route.run}"
    raise RecordError(said)


def closest(found: dict[str, int], folder: str | Path, among: Collection[int]) -> tuple[int, list[str]]:
    """The version whose digests agree best with those of some weights; of equals the latest.

    Args:
        found: digests of the weights.
        among: versions of the log whose records state digests, at least one.

    Returns:
        The version, and the parameters that differ: none where the weights are that version.

    Raises:
        RecordError: as `read_log`.
    """
    compared = (
        (record.header.version, differences(stated_digests(record), found))
        for _, record in read_log(folder)
        if record.header.version in among
    )
    return min(compared, key=lambda pair: (len(pair[1]), -pair[0]))
