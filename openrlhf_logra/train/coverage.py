"""What is trained and what it costs, before anything runs: the coverage table (docs/training.md)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ..sync.modes import compared
from ..units import bytes_text
from .targets import Target, full_shape

if TYPE_CHECKING:
    from ..strategies.base import Strategy

PROJECTION_CACHE_BYTES = 64 << 20
_GRADIENT_BYTES = 2  # of an element that DeepSpeed trains
_ADAM_BYTES = 4 + 4 + 4  # of such an element: master copy, two moments


@dataclass(frozen=True)
class Cost:
    """What a strategy needs for one target. Sizes in bytes.

    Attributes:
        sketch, gradient: where backward adds, on every rank; a strategy has one of the two.
        moments: its optimizer's state, on one rank.
        factors: of an update that engines can repeat; 0 where there are none.
        rank: of its sketch or subspace; None where there is none.
    """

    sketch: int = 0
    gradient: int = 0
    moments: int = 0
    factors: int = 0
    rank: int | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table: the targets that share a module name and a shape, or one of the two kinds of others:
    trained densely, frozen. Sizes in bytes, of all of them together; `optimizer` is moments and, of what DeepSpeed
    trains, master weights; `record` is what one update sends as factors or (mode auto, where they are larger) values.
    """

    module: str
    count: int
    shape: str
    rank: int | None
    weight: int
    sketch: int
    gradient: int
    optimizer: int
    record: int


@dataclass(frozen=True)
class Coverage:
    """The whole table.

    Attributes:
        rows: one per kind of target, then densely trained and frozen parameters.
        parameters: number of elements of the model, tied ones once.
        sketched, dense, frozen: the three parts that add up to it.
        projections: bytes of cached projections.
        sync_mode: `--logra.sync.mode`.
        full_sync: bytes of the bf16 weights that a stock sync sends.
        compared: bytes of the copy that the sync finds changed elements with, in host memory, of all ranks together.
    """

    rows: tuple[Row, ...]
    parameters: int
    sketched: int
    dense: int
    frozen: int
    projections: int
    sync_mode: str
    full_sync: int
    compared: int

    @property
    def dense_gradient(self) -> int:
        """Bytes of the bf16 gradients of the densely trained parameters, before sharding."""
        return _GRADIENT_BYTES * self.dense

    @property
    def dense_state(self) -> int:
        """Bytes of master copies and moments of the densely trained parameters, before sharding."""
        return _ADAM_BYTES * self.dense

    @property
    def dense_adam(self) -> int:
        """Bytes of gradient, fp32 master copy and two Adam moments of what is trained, under dense bf16 training."""
        return (_GRADIENT_BYTES + _ADAM_BYTES) * (self.sketched + self.dense)

    @property
    def record(self) -> int:
        """Bytes that one update sends of the targets; 0 where changed elements or all weights are sent."""
        return sum(row.record for row in self.rows)

    @property
    def sketch(self) -> int:
        """Bytes of all sketches, on every rank."""
        return sum(row.sketch for row in self.rows)

    @property
    def gradient(self) -> int:
        """Bytes of the targets' gradients where the strategy forms them, on every rank."""
        return sum(row.gradient for row in self.rows) - self.dense_gradient

    @property
    def sink(self) -> int:
        """Bytes of where backward adds: sketches or gradients."""
        return self.sketch + self.gradient

    @property
    def moments(self) -> int:
        """Bytes of the strategy's optimizer state, of all ranks together."""
        return sum(row.optimizer for row in self.rows) - self.dense_state

    @property
    def state(self) -> int:
        """Bytes of the strategy's own state, where one rank has it all: sinks, moments, cached projections."""
        return self.sink + self.moments + self.projections


def measure(
    strategy: "Strategy",
    model: nn.Module,
    *,
    dense: tuple[str, ...] | None = None,
    targets: list[Target] = (),
    cost: Callable[[Target], Cost] | None = None,
    projections: int = 0,
) -> Coverage:
    """Coverage of `model` by what a strategy trains; needs shapes only, so that a model on the meta device will do.

    Args:
        dense: names of the densely trained parameters of the model; the strategy's unless given.
        targets: what the strategy trains itself; `cost` says what it needs for one.
        projections: bytes of cached projections.

    Raises:
        AssertionError: the parts do not add up to the model.
    """
    config, dense = strategy.config, strategy.dense if dense is None else dense
    kinds: dict[tuple[str, int, int], list[Target]] = {}
    for target in targets:
        kinds.setdefault((target.name.split(".")[-2], target.rows, target.width), []).append(target)
    rows = []
    for (module, d, k), members in kinds.items():
        one, count, weight = cost(members[0]), len(members), 2 * d * k
        record = {"auto": min(one.factors, weight), "factor": one.factors}.get(config.sync_mode, 0)
        sizes = (weight, one.sketch, one.gradient, one.moments, record)
        rows.append(Row(module, count, f"{d} x {k}", one.rank, *(count * size for size in sizes)))
    sizes = {name: _numel(full_shape(parameter)) for name, parameter in model.named_parameters()}
    names = {target.name for target in targets}
    sketched = sum(sizes[name] for name in names)
    trained = [sizes[name] for name in dense]
    frozen = [size for name, size in sizes.items() if name not in names and name not in dense]
    for label, others, gradient, adam in (
        ("(dense)", trained, _GRADIENT_BYTES, _ADAM_BYTES),
        ("(frozen)", frozen, 0, 0),
    ):
        if others:
            elements = sum(others)
            rows.append(Row(label, len(others), "", None, 2 * elements, 0, gradient * elements, adam * elements, 0))
    total = sum(sizes.values())
    assert sketched + sum(trained) + sum(frozen) == total, "sketched, dense and frozen must add up to the model"
    synced = {name: 2 * _numel(full_shape(parameter)) for name, parameter in strategy.parameters().items()}
    found_by_comparing = compared(
        config.sync_mode,
        bool(config.sync_log_dir),
        strategy.exact_updates,
        trained=strategy.trained,
        dense=strategy.dense,
    )
    return Coverage(
        rows=tuple(rows),
        parameters=total,
        sketched=sketched,
        dense=sum(trained),
        frozen=sum(frozen),
        projections=projections,
        sync_mode=config.sync_mode,
        full_sync=sum(synced.values()),
        compared=sum(synced[name] for name in found_by_comparing),
    )


def projection_cache_bytes(targets: list[Target], rank: int) -> int:
    """Bytes of all projections in float32 where they are kept between forwards; 0 where that exceeds the limit and
    each is drawn again when it is needed."""
    needed = 4 * rank * sum(target.width for target in targets)
    return needed if needed <= PROJECTION_CACHE_BYTES else 0


def render(coverage: Coverage) -> str:
    """The table as text, 100 columns at most: what has no meaning for a strategy is left out."""
    header = ("module", "count", "shape", "rank", "weight", "sketch", "gradient", "optimizer", "record")
    body = [
        (
            row.module,
            str(row.count),
            row.shape,
            "" if row.rank is None else str(row.rank),
            *(
                bytes_text(size) if size else "-"
                for size in (row.weight, row.sketch, row.gradient, row.optimizer, row.record)
            ),
        )
        for row in coverage.rows
    ]
    shown = [i for i in range(len(header)) if any(line[i] not in ("", "-") for line in body)]
    widths = {i: max(len(line[i]) for line in (header, *body)) for i in shown}
    lines = [
        "  ".join(line[i].ljust(widths[i]) if i == 0 else line[i].rjust(widths[i]) for i in shown)
        for line in (header, *body)
    ]
    parts = [
        (coverage.sketched, "sketched" if coverage.sketch else "targets"),
        (coverage.dense, "dense"),
        (coverage.frozen, "frozen"),
    ]
    counted = " + ".join(f"{name} {count:,}" for count, name in parts if count)
    return "\n".join(
        [*lines, f"{counted} = all {coverage.parameters:,} parameters", *_state(coverage), _sync(coverage)]
    )


def _state(coverage: Coverage) -> list[str]:
    """What the trainer keeps: a line for the sum, one for each part of it, and one for what is in host memory."""
    kept = [
        (coverage.sketch, "sketches, on every rank"),
        (coverage.gradient, "gradients, on every rank"),
        (coverage.moments, "moments, each on one rank"),
        (coverage.projections, "cached projections, on every rank"),
        (coverage.dense_gradient, "bf16 gradients of (dense), sharded by DeepSpeed"),
        (coverage.dense_state, "master weights and moments of (dense), sharded by DeepSpeed"),
    ]
    adam = f" (dense Adam on the same parameters {bytes_text(coverage.dense_adam)})" if coverage.sketched else ""
    lines = [f"trainer state {bytes_text(sum(size for size, _ in kept))} on a single rank{adam}"]
    lines += [f"{bytes_text(size):>10}  {what}" for size, what in kept if size]
    if coverage.compared:
        lines.append(
            f"host memory {bytes_text(coverage.compared)}: a copy of weights that changed elements are found with"
        )
    return lines


def _sync(coverage: Coverage) -> str:
    """What is sent to each engine."""
    full = bytes_text(coverage.full_sync)
    if coverage.sync_mode == "dense":
        return f"sync all weights, {full}"
    sent = [f"{bytes_text(coverage.record)} an update"] * bool(coverage.record)
    sent += ["changed elements, 2 to 4 bytes each"] * bool(coverage.compared)
    most = f"at most the full weights, {full}" if coverage.sync_mode == "auto" else f"full weights {full}"
    return f"sync {' + '.join(sent)} ({most})"


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total
