"""What is trained and what it costs, before anything runs: the coverage table (spec section 8)."""

from dataclasses import dataclass

from torch import nn

from ..config import LograConfig
from ..math.direction import state_bytes
from .targets import Target, full_shape

PROJECTION_CACHE_BYTES = 64 << 20
_ADAM_BYTES = 4 + 4 + 4  # of an element: master copy, two moments


@dataclass(frozen=True)
class Row:
    """One line of the table: the targets that share a module name and a shape, or one of the two kinds of others:
    trained densely, frozen. Sizes in bytes."""

    module: str
    count: int
    shape: str
    rank: int | None
    weight: int
    sketch: int
    moments: int
    record: int


@dataclass(frozen=True)
class Coverage:
    """The whole table.

    Attributes:
        rows: one per kind of target, then densely trained and frozen parameters.
        parameters: number of elements of the model, tied ones once.
        sketched, dense, frozen: the three parts that add up to it.
        full_sync: bytes of the bf16 weights that a stock sync sends.
        dense_adam: bytes of gradient, fp32 master copy and two Adam moments of what is trained, under dense bf16
            training.
        dense_state: bytes of master copies and moments of the densely trained parameters, before sharding.
        projections: bytes of cached projections.
    """

    rows: tuple[Row, ...]
    parameters: int
    sketched: int
    dense: int
    frozen: int
    full_sync: int
    dense_adam: int
    dense_state: int
    projections: int

    @property
    def record(self) -> int:
        """Bytes of one update's record: int16 factors and float32 row scales."""
        return sum(row.record for row in self.rows)

    @property
    def state(self) -> int:
        """Bytes of the strategy's own state on rank 0: sketch, moments, cached projections."""
        return sum(row.sketch + row.moments for row in self.rows) - self.dense_state + self.projections


def measure(model: nn.Module, targets: list[Target], config: LograConfig, dense: tuple[str, ...] = ()) -> Coverage:
    """Coverage of `model` by `targets` and densely trained parameters; needs shapes only, so that a model on the meta
    device will do.

    Raises:
        AssertionError: the parts do not add up to the model.
    """
    rank = config.rank
    kinds: dict[tuple[str, int, int], int] = {}
    for target in targets:
        kind = (target.name.split(".")[-2], target.rows, target.width)
        kinds[kind] = kinds.get(kind, 0) + 1
    rows = [
        Row(
            module,
            count,
            f"{d} x {k}",
            rank,
            weight=2 * count * d * k,
            sketch=4 * count * d * rank,
            moments=count * state_bytes(config.optimizer, d, rank),
            record=count * (2 * d * rank + 4 * d),
        )
        for (module, d, k), count in kinds.items()
    ]
    sizes = {name: _numel(full_shape(parameter)) for name, parameter in model.named_parameters()}
    names = {target.name for target in targets}
    sketched = sum(sizes[name] for name in names)
    trained = [sizes[name] for name in dense]
    frozen = [size for name, size in sizes.items() if name not in names and name not in dense]
    dense_state = _ADAM_BYTES * sum(trained)
    for label, others, moments in (("(dense)", trained, dense_state), ("(frozen)", frozen, 0)):
        if others:
            rows.append(Row(label, len(others), "", None, 2 * sum(others), 0, moments, 0))
    total = sum(sizes.values())
    assert sketched + sum(trained) + sum(frozen) == total, "sketched, dense and frozen must add up to the model"
    return Coverage(
        rows=tuple(rows),
        parameters=total,
        sketched=sketched,
        dense=sum(trained),
        frozen=sum(frozen),
        full_sync=2 * total,
        dense_adam=(2 + _ADAM_BYTES) * (sketched + sum(trained)),
        dense_state=dense_state,
        projections=projection_cache_bytes(targets, rank),
    )


def projection_cache_bytes(targets: list[Target], rank: int) -> int:
    """Bytes of all projections in float32 where they are kept between forwards; 0 where that exceeds the limit and
    each is drawn again when it is needed."""
    needed = 4 * rank * sum(target.width for target in targets)
    return needed if needed <= PROJECTION_CACHE_BYTES else 0


def render(coverage: Coverage) -> str:
    """The table as text, 100 columns at most."""
    header = ("module", "count", "shape", "rank", "weight", "sketch", "moments", "record")
    body = [
        (
            row.module,
            str(row.count),
            row.shape,
            "" if row.rank is None else str(row.rank),
            *(human_bytes(size) if size else "-" for size in (row.weight, row.sketch, row.moments, row.record)),
        )
        for row in coverage.rows
    ]
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        for line in (header, *body)
    ]
    lines.append(
        f"sketched {coverage.sketched:,} + dense {coverage.dense:,} + frozen {coverage.frozen:,} "
        f"= all {coverage.parameters:,} parameters"
    )
    states = [human_bytes(coverage.state)] * bool(coverage.sketched)
    states += [f"{human_bytes(coverage.dense_state)} sharded by DeepSpeed"] * bool(coverage.dense)
    adam = human_bytes(coverage.dense_adam)
    lines.append(f"trainer state {' + '.join(states)} (dense Adam on the same parameters {adam})")
    synced = [f"{human_bytes(coverage.record)} an update"] * bool(coverage.sketched)
    synced += ["changed elements"] * bool(coverage.dense)
    lines.append(f"sync {' + '.join(synced)} (full weights {human_bytes(coverage.full_sync)})")
    return "\n".join(lines)


def human_bytes(size: float) -> str:
    """1536 -> "1.5 kB" (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total
