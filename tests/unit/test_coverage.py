"""The coverage table: its lines add up, and it shows what a method has and what a sync sends."""

import re

import pytest
from test_sketch import NAMES
from toy import Toy, batch, loss_of

from openrlhf_logra.config import LograConfig
from openrlhf_logra.math.subspace import MatrixRule
from openrlhf_logra.strategies import strategy_class
from openrlhf_logra.strategies.gradient import GradientStrategy
from openrlhf_logra.sync.record import factor_record
from openrlhf_logra.train import coverage

METHODS = ("logra", "galore", "fira", "flora", "dense")


def build(method="logra", cls=None, **options):
    config = LograConfig(method=method, **{"rank": 8, "target_modules": NAMES, **options})
    return (cls or strategy_class(method))(config, Toy().bfloat16())


def text(strategy) -> str:
    return coverage.render(strategy.coverage())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("non_target", ["freeze", "adamw"])
def test_the_lines_add_up(monkeypatch, method, non_target):
    """Those of the trainer's state to its sum, and the columns of the table to those lines."""
    monkeypatch.setattr(coverage, "bytes_text", lambda size: f"{size} B")
    strategy = build(method, non_target=non_target)
    table, lines = strategy.coverage(), text(strategy).splitlines()
    parts = [(int(size), what) for line in lines for size, what in re.findall(r"^ +(\d+) B  (.*)", line)]
    (total,) = [int(size) for line in lines for size in re.findall(r"^trainer state (\d+) B", line)]
    assert total == sum(size for size, _ in parts) > 0
    for word, column in (("sketches", "sketch"), ("gradients", "gradient"), ("moments", "optimizer")):
        assert sum(size for size, what in parts if word in what) == sum(getattr(row, column) for row in table.rows)
    assert sum(size for size, what in parts if "projections" in what) == table.projections
    counts = [int(count.replace(",", "")) for count in re.findall(r"(?<= )[\d,]+(?= )", lines[len(table.rows) + 1])]
    assert sum(counts[:-1]) == counts[-1] == table.parameters


def test_dense_shows_nothing_of_sketches_and_counts_gradients_in_both_figures():
    strategy = build("dense")
    table, shown = strategy.coverage(), text(strategy)
    assert shown.splitlines()[0].split() == ["module", "count", "weight", "gradient", "optimizer"]
    assert table.dense_gradient + table.dense_state == table.dense_adam
    assert not re.search("sketch|frozen|rank|dense Adam", shown.replace("on a single rank", ""))


class SignStrategy(GradientStrategy):
    def make_rule(self, target):
        class Sign(MatrixRule):
            def step(self, gradient, state):
                return gradient.sign()

            def state_bytes(self, rows, cols):
                return 0

        return Sign()


def test_a_strategy_without_a_rank_shows_none():
    assert text(build(cls=SignStrategy)).splitlines()[0].split() == ["module", "count", "shape", "weight", "gradient"]
    assert all("rank" in text(build(method)).splitlines()[0] for method in METHODS[:-1])


@pytest.mark.parametrize("rank", [8, 24])
def test_the_record_is_what_an_update_sends(rank):
    """Mode auto takes a target's values where its factors are larger."""
    for mode in ("auto", "factor"):
        strategy = build(rank=rank, sync_mode=mode)
        strategy.attach()
        strategy.bind("cpu")
        loss_of(strategy._model, batch()).backward()
        sizes = factor_record(strategy.step(1.0, 0.0).updates, 1, 1).sizes()
        values = {target.name: 2 * target.rows * target.width for target in strategy.targets}
        sent = sum(min(size, values[name]) if mode == "auto" else size for name, size in sizes.items())
        assert strategy.coverage().record == sent
        larger = [name for name, size in sizes.items() if size > values[name]]
        assert bool(larger) == (rank == 24)


@pytest.mark.parametrize(
    "options, line",
    [
        ({}, r"sync [\d.]+ kB an update \(at most the full weights, [\d.]+ kB\)"),
        ({"sync_mode": "factor"}, r"sync [\d.]+ kB an update \(full weights [\d.]+ kB\)"),
        ({"sync_mode": "sparse"}, r"sync changed elements, 2 to 4 bytes each \(full weights [\d.]+ kB\)"),
        ({"sync_mode": "dense"}, r"sync all weights, [\d.]+ kB"),
        ({"non_target": "adamw"}, r"sync [\d.]+ kB an update \+ changed elements, .* \(at most .*\)"),
        ({"distribution": "gaussian"}, r"sync changed elements, 2 to 4 bytes each \(at most .*\)"),
        ({"method": "galore"}, r"sync changed elements, 2 to 4 bytes each \(at most .*\)"),
    ],
)
def test_the_line_of_the_sync(options, line):
    shown = text(build(**options)).splitlines()
    assert re.fullmatch(line, shown[-1])
    assert ("record" in shown[0]) == ("an update" in shown[-1])
    assert max(map(len, shown)) <= 100
