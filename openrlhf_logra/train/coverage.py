"""What is trained and what it costs, before anything runs: the coverage table (docs/training.md)."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ..units import bytes_text
from .targets import Target, full_shape

PROJECTION_CACHE_BYTES = 64 << 20
_ADAM_BYTES = 4 + 4 + 4  # of an element: master copy, two moments


@dataclass(frozen=True)
class Cost:
    """Bytes that a strategy needs for one target: where backward adds, on every rank; its optimizer's state, on one;
    an update's record, 0 where changed elements are sent."""

    sink: int
    moments: int
    record: int


@dataclass(frozen=True)
class Row:
    """One line of the table: the targets that share a module name and a shape, or one of the two kinds of others:
    trained densely, frozen. Sizes in bytes, of all of them together."""

    module: str
    count: int
    shape: str
    rank: int | None
    weight: int
    sink: int
    moments: int
    record: int


@dataclass(frozen=True)
class Coverage:
    """The whole table.

    Attributes:
        sinks: what backward adds up: "sketch" or "gradient".
        rows: one per kind of target, then densely trained and frozen parameters.
        parameters: number of elements of the model, tied ones once.
        sketched, dense, frozen: the three parts that add up to it.
        full_sync: bytes of the bf16 weights that a stock sync sends.
        dense_adam: bytes of gradient, fp32 master copy and two Adam moments of what is trained, under dense bf16
            training.
        dense_state: bytes of master copies and moments of the densely trained parameters, before sharding.
        projections: bytes of cached projections.
    """

    sinks: str
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
    def sink(self) -> int:
        """Bytes of all sinks, on every rank."""
        return sum(row.sink for row in self.rows)

    @property
    def moments(self) -> int:
        """Bytes of the strategy's optimizer state, of all ranks together."""
        return sum(row.moments for row in self.rows) - self.dense_state

    @property
    def state(self) -> int:
        """Bytes of the strategy's own state, where one rank has it all: sinks, moments, cached projections."""
        return self.sink + self.moments + self.projections


def measure(
    model: nn.Module,
    dense: tuple[str, ...] = (),
    *,
    targets: list[Target] = (),
    cost: Callable[[Target], Cost] | None = None,
    rank: int | None = None,
    sinks: str = "sketch",
    projections: int = 0,
) -> Coverage:
    """Coverage of `model` by densely trained parameters and targets; needs shapes only, so that a model on the meta
    device will do.

    Args:
        dense: names of the densely trained parameters.
        targets: what the strategy trains itself; `cost` says what it needs for one.
        rank: of their sketches or subspaces.
        sinks, projections: as in Coverage.

    Raises:
        AssertionError: the parts do not add up to the model.
    """
    kinds: dict[tuple[str, int, int], list[Target]] = {}
    for target in targets:
        kinds.setdefault((target.name.split(".")[-2], target.rows, target.width), []).append(target)
    rows = []
    for (module, d, k), members in kinds.items():
        one, count = cost(members[0]), len(members)
        sizes = (2 * d * k, one.sink, one.moments, one.record)
        rows.append(Row(module, count, f"{d} x {k}", rank, *(count * size for size in sizes)))
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
        sinks=sinks,
        rows=tuple(rows),
        parameters=total,
        sketched=sketched,
        dense=sum(trained),
        frozen=sum(frozen),
        full_sync=2 * total,
        dense_adam=(2 + _ADAM_BYTES) * (sketched + sum(trained)),
        dense_state=dense_state,
        projections=projections,
    )


def projection_cache_bytes(targets: list[Target], rank: int) -> int:
    """Bytes of all projections in float32 where they are kept between forwards; 0 where that exceeds the limit and
    each is drawn again when it is needed."""
    needed = 4 * rank * sum(target.width for target in targets)
    return needed if needed <= PROJECTION_CACHE_BYTES else 0


def render(coverage: Coverage) -> str:
    """The table as text, 100 columns at most."""
    header = ("module", "count", "shape", "rank", "weight", coverage.sinks, "moments", "record")
    body = [
        (
            row.module,
            str(row.count),
            row.shape,
            "" if row.rank is None else str(row.rank),
            *(bytes_text(size) if size else "-" for size in (row.weight, row.sink, row.moments, row.record)),
        )
        for row in coverage.rows
    ]
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        for line in (header, *body)
    ]
    kind = "sketched" if coverage.sinks == "sketch" else "low-rank"
    lines.append(
        f"{kind} {coverage.sketched:,} + dense {coverage.dense:,} + frozen {coverage.frozen:,} "
        f"= all {coverage.parameters:,} parameters"
    )
    if coverage.sinks == "sketch":
        states = [bytes_text(coverage.state)] * bool(coverage.sketched)
    else:
        states = [f"{bytes_text(coverage.sink)} of gradients on every rank"]
        states += [f"{bytes_text(coverage.moments)} of moments spread over the ranks"]
    states += [f"{bytes_text(coverage.dense_state)} sharded by DeepSpeed"] * bool(coverage.dense)
    adam = bytes_text(coverage.dense_adam)
    lines.append(f"trainer state {' + '.join(states)} (dense Adam on the same parameters {adam})")
    synced = [f"{bytes_text(coverage.record)} an update"] * bool(coverage.record)
    synced += ["changed elements"] * bool(coverage.dense or not coverage.record)
    lines.append(f"sync {' + '.join(synced)} (full weights {bytes_text(coverage.full_sync)})")
    return "\n".join(lines)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total
