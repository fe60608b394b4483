"""Two engines, one or two workers each: faults on either side are seen, repaired or end the sync."""

import pytest
import torch
from runtime import SHAPES, Client, Engine, Runtime
from torch import nn

from openrlhf_logra.config import LograConfig
from openrlhf_logra.math.digest import as_matrix
from openrlhf_logra.math.exact import Update, apply_block, quantize
from openrlhf_logra.math.projection import Projection
from openrlhf_logra.strategies import strategy_class
from openrlhf_logra.sync import record as record_module
from openrlhf_logra.sync.log import record_files
from openrlhf_logra.sync.trainer import LograTrainerEngine, LograTrainerInitInfo, SyncError, digests_of

TARGETS = [name for name in SHAPES if name.endswith("_proj.weight")]


class Trainer:
    def __init__(self, client, seed=0, **settings):
        generator = torch.Generator().manual_seed(seed)
        self.weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
        self.client = client
        for engine in client.engines:
            engine.load(self.weights)
        settings.setdefault("base_digests", digests_of(self.weights) if settings.pop("compare", True) else None)
        info = LograTrainerInitInfo(rank=0, **{"trained": tuple(TARGETS), "verify_every": 1, **settings})
        self.sender = LograTrainerEngine.trainer_init(info, client=client, source=self.weights)
        self.version = 0

    def update(self, count=1):
        for _ in range(count):
            updates = []
            for i, name in enumerate(TARGETS):
                rows, width = SHAPES[name]
                generator = torch.Generator().manual_seed(100 * self.version + i)
                q, s = quantize(torch.randn(rows, 4, generator=generator) * 1e-2)
                updates.append(Update(Projection(0, self.version, name, 4, width), self.version, q, s))
                apply_block(self.weights[name], updates[-1])
            self.version += 1
            self.sender.push(tuple(updates), self.version)


def held_equals(trainer) -> bool:
    """Every worker holds what a fresh load of the trainer's weights would give it."""
    for engine in trainer.client.engines:
        for rank, worker in enumerate(engine.workers):
            fresh = Runtime(rank, len(engine.workers))
            fresh.load_weights(trainer.weights.items())
            for held, loaded in zip(worker.model.parameters(), fresh.parameters()):
                if not torch.equal(held, loaded):
                    return False
    return True


@pytest.fixture(params=[1, 2], ids=["1-worker", "2-workers"])
def trainer(request):
    # The model is so small that three updates are larger: auto would choose dense.
    return Trainer(Client([Engine(request.param), Engine(request.param)]), mode="factor")


def test_many_syncs(trainer):
    for count in (1, 2, 3, 1):
        trainer.update(count)
        report = trainer.sender.send_weights()
        assert report.mode == "factor" and report.digest_ok and held_equals(trainer)
    assert not trainer.sender._unknown


def test_padding_is_left_alone(trainer):
    trainer.update(3)
    trainer.sender.send_weights()
    assert all(not w.model.embed[10:].any() for engine in trainer.client.engines for w in engine.workers)


def fails(index, engine, info):
    if index == 1:
        raise RuntimeError("engine process died")
    return engine.sync(info)


def forgets(index, engine, info):
    """Answers without having applied anything."""
    answer = engine.sync(info if index == 0 else {**info, "records": []})
    return answer


def lies(index, engine, info):
    """Says that it did, and did not."""
    if index == 0:
        return engine.sync(info)
    before = [{n: p.clone() for n, p in w.model.named_parameters()} for w in engine.workers]
    answer = engine.sync(info)
    for worker, held in zip(engine.workers, before):
        for name, parameter in worker.model.named_parameters():
            parameter.data.copy_(held[name])
    for worker, report in zip(engine.workers, answer):
        report["digests"] = worker._digests({n: p.data for n, p in worker.model.named_parameters()})
    return answer


def flips(index, engine, info):
    answer = engine.sync(info)
    if index == 1:
        worker = engine.workers[-1]
        worker.model.layers[0].qkv.data.view(torch.int16)[-1, 3] ^= 1
        for held, report in zip(engine.workers, answer):
            report["digests"] = held._digests({n: p.data for n, p in held.model.named_parameters()})
    return answer


def half(index, engine, info):
    """An exception after two of four targets, in one engine."""
    if index == 0:
        return engine.sync(info)
    calls = []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise MemoryError("out of memory")
        return apply_block(*arguments)

    record_module.apply_block = failing
    try:
        return engine.sync(info)
    finally:
        record_module.apply_block = apply_block


@pytest.mark.parametrize("fault", [fails, forgets, lies, flips, half])
def test_one_engine_of_two_is_repaired(trainer, fault, capsys):
    trainer.update(2)
    trainer.sender.send_weights()
    trainer.update(2)
    trainer.client.faults[trainer.client.calls] = fault
    report = trainer.sender.send_weights()
    assert report.mode == "dense" and report.digest_ok is not None and held_equals(trainer)
    said = capsys.readouterr().out
    assert "engine 1: " in said and "repairing with a dense sync" in said
    trainer.update()
    assert trainer.sender.send_weights().mode == "factor" and held_equals(trainer)


def test_the_first_wrong_matrix_is_named(trainer, capsys):
    trainer.update()
    trainer.client.faults[0] = flips
    trainer.sender.send_weights()
    said = capsys.readouterr().out
    # With two workers the flipped copy of v_proj differs from the other worker's.
    assert "digest of layers.0.v_proj.weight" in said


@pytest.mark.parametrize("fault", [fails, flips, lies])
def test_two_failures_in_a_row_stop(trainer, fault):
    trainer.update()
    for call in range(10):
        trainer.client.faults[call] = fault
    with pytest.raises(SyncError, match=r"sync to version 1 failed: engine 1"):
        trainer.sender.send_weights()


def test_a_stale_worker_takes_no_factors():
    trainer = Trainer(Client([Engine()]))
    trainer.update()
    trainer.client.faults[0] = lambda index, engine, info: half(1, engine, info)
    trainer.client.faults[1] = fails_always
    with pytest.raises(SyncError):
        trainer.sender.send_weights()
    (worker,) = trainer.client.engines[0].workers
    assert "MemoryError" in worker.stale
    trainer.update()
    report = trainer.sender.send_weights()
    assert report.mode == "dense" and held_equals(trainer)


def fails_always(index, engine, info):
    raise RuntimeError("no answer")


def test_a_record_of_another_shape_is_refused():
    trainer = Trainer(Client([Engine()]))
    trainer.update()
    name = TARGETS[0]
    q, s = quantize(torch.randn(7, 4))
    wrong = (Update(Projection(0, 0, name, 4, 24), 0, q, s),)
    trainer.sender._stream._open.clear()
    trainer.sender.push(wrong, 1)
    report = trainer.sender.send_weights()
    assert report.mode == "dense" and held_equals(trainer)


class Interleaved(Runtime):
    """q in every other row: no whole runs, so that it cannot be patched row by row."""

    def load_weights(self, weights):
        weights = dict(weights)
        super().load_weights((n, v) for n, v in weights.items() if not n.endswith("q_proj.weight"))
        if "layers.0.q_proj.weight" in weights:
            value = weights["layers.0.q_proj.weight"]
            self.layers[0].qkv.data[: self.part].copy_(value.t() if value.shape[0] == value.shape[1] else value)


def test_what_cannot_be_learnt_goes_dense_and_is_named_once(capsys):
    trainer = Trainer(Client([Engine(model=Interleaved)]), mode="factor")
    for _ in range(3):
        trainer.update()
        report = trainer.sender.send_weights()
        assert report.mode == "factor" and report.digest_ok
    said = capsys.readouterr().out
    assert said.count("layers.0.q_proj.weight") == 1 and "sent whole when they change" in said
    (worker,) = trainer.client.engines[0].workers
    expected = Interleaved()
    expected.load_weights(trainer.weights.items())
    assert torch.equal(worker.model.layers[0].qkv, expected.layers[0].qkv)


class Packed(Runtime):
    """Rearranges some parameters after loading, as fused kernels want them: same shape, other rows."""

    packed = ("norm",)

    def pack(self):
        for name in self.packed:
            parameter = getattr(self.layers[0], name)
            parameter.data.copy_(parameter.data.flip(0))


def packed_trainer(names):
    model = type("Packed", (Packed,), {"packed": names})
    trainer = Trainer(Client([Engine(model=model)]), mode="factor")
    for worker in trainer.client.engines[0].workers:
        worker.model.pack()
    return trainer


def test_a_frozen_parameter_that_the_engine_rearranged_is_left_alone(capsys):
    trainer = packed_trainer(("norm",))
    (worker,) = trainer.client.engines[0].workers
    before = worker.model.layers[0].norm.clone()
    trainer.update()
    assert trainer.sender.send_weights().digest_ok
    trainer.update()
    trainer.client.faults[1] = lambda index, engine, info: half(1, engine, info)
    assert trainer.sender.send_weights().mode == "dense"
    assert torch.equal(worker.model.layers[0].norm, before)
    assert "left alone: layers.0.norm.weight" in capsys.readouterr().out


def test_a_target_that_the_engine_rearranged_stops_the_run():
    trainer = packed_trainer(("qkv",))
    trainer.update()
    with pytest.raises(SyncError, match=r"does not hold layers\.0\.k_proj\.weight"):
        trainer.sender.send_weights()


class HalfFloat(Runtime):
    """The bias of q lives in float32: it cannot be patched; nothing else is touched by that."""

    def __init__(self, rank=0, world=1):
        super().__init__(rank, world)
        self.layers[0].qkv_bias.data = self.layers[0].qkv_bias.data.float()


def test_a_parameter_of_another_dtype_is_loaded_whole_and_not_verified():
    trainer = Trainer(Client([Engine(model=HalfFloat)]), mode="factor")
    for _ in range(2):
        trainer.update()
        assert trainer.sender.send_weights().digest_ok
    (worker,) = trainer.client.engines[0].workers
    assert torch.equal(worker.model.layers[0].qkv_bias, trainer.weights["layers.0.q_proj.bias"].float())


def test_half_a_matrix_that_can_be_patched_is_not_patched_at_all():
    """Worker 1 of 2 cannot patch its part of q: both take it whole."""

    class Mixed(Engine):
        def __init__(self):
            super().__init__(2)
            odd = self.workers[1].model.layers[0]
            odd.o.data = odd.o.data.t().contiguous().t()  # not contiguous

    trainer = Trainer(Client([Mixed()]), mode="factor")
    trainer.update(2)
    trainer.sender.send_weights()
    assert list(trainer.sender._unknown) == ["layers.0.o_proj.weight"] and held_equals(trainer)


def test_nothing_compared_is_not_called_ok():
    class Float(Runtime):
        def __init__(self, rank=0, world=1):
            super().__init__(rank, world)
            for parameter in self.parameters():
                parameter.data = parameter.data.float()

    trainer = Trainer(Client([Engine(model=Float)]))
    trainer.update()
    report = trainer.sender.send_weights()
    assert report.digest_ok is None and report.digest is None


def test_missing_answers_are_no_success():
    trainer = Trainer(Client([Engine(), Engine()]))
    trainer.update()
    trainer.sender.send_weights()
    stock = trainer.client.sync
    trainer.update()
    trainer.client.sync = lambda engines, info: stock(engines, info)[:1]
    with pytest.raises(SyncError, match="1 answers came from 2 engines"):
        trainer.sender.send_weights()
    trainer.client.sync = lambda engines, info: [[] for _ in engines]
    with pytest.raises(SyncError, match="0 of 1 workers answered"):
        trainer.sender.send_weights()
    trainer.client.sync = stock
    assert trainer.sender.send_weights().digest_ok and held_equals(trainer)


class Refusing(Runtime):
    def load_weights(self, weights):
        if len(weights := dict(weights)) < len(SHAPES):
            raise KeyError("needs the whole checkpoint")
        super().load_weights(weights.items())


def test_a_loader_that_fails_is_said_with_its_reason(capsys):
    trainer = Trainer(Client([Engine(model=Refusing)]), mode="dense")
    trainer.update()
    with pytest.raises(SyncError, match="needs the whole checkpoint"):
        trainer.sender.send_weights()
    assert "the loader failed: KeyError" in capsys.readouterr().out


def test_resume_then_factors():
    """The first sync is dense at the trainer's own version; OpenRLHF makes it before any update."""
    base = {name: torch.zeros(shape).bfloat16() for name, shape in SHAPES.items()}
    settings = {"version": 6, "loaded_version": None, "base_digests": digests_of(base)}
    trainer = Trainer(Client([Engine(), Engine()]), mode="factor", **settings)
    trainer.version = 6
    for engine in trainer.client.engines:
        engine.load(base)
    report = trainer.sender.send_weights()
    assert report.mode == "dense" and report.version == 6 and report.digest_ok and held_equals(trainer)
    trainer.update()
    report = trainer.sender.send_weights()
    assert report.mode == "factor" and report.version == 7 and held_equals(trainer)


def test_the_last_record_of_a_verified_sync_states_the_digest():
    from openrlhf_logra.sync.record import decode

    trainer = Trainer(Client([Engine()]))
    seen = []
    trainer.client.faults[0] = lambda index, engine, info: (seen.append(info), engine.sync(info))[1]
    trainer.update(2)
    report = trainer.sender.send_weights()
    headers = [decode(blob).header for blob in seen[0]["records"]]
    assert [header.digest for header in headers] == ["", f"{report.digest:016x}"]
    assert [(header.base_version, header.version) for header in headers] == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"mode": "desne"}, "mode 'desne'"),
        ({"mode": "factor", "exact_updates": False}, "exact_updates"),
        ({"verify_every": 0}, "verify_every 0"),
        ({"trained": ("layers.0.nowhere.weight",)}, "layers.0.nowhere.weight, which is no parameter"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, says):
    client = Client([Engine()])
    source = {name: torch.zeros(shape).bfloat16() for name, shape in SHAPES.items()}
    with pytest.raises(ValueError, match=says):
        LograTrainerEngine.trainer_init(LograTrainerInitInfo(rank=0, **settings), client=client, source=source)
    source["embed.weight"] = source["embed.weight"].float()
    with pytest.raises(ValueError, match="embed.weight is torch.float32"):
        LograTrainerEngine.trainer_init(LograTrainerInitInfo(rank=0), client=client, source=source)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("mode", ["auto", "sparse", "dense"])
@pytest.mark.parametrize("method, non_target", [("logra", "freeze"), ("logra", "adamw"), ("galore", "adamw")])
def test_the_coverage_table_shows_the_copy_that_changes_are_found_with(method, non_target, mode, log, tmp_path):
    flags = {"method": method, "non_target": non_target, "rank": 8, "target_modules": ("up_proj",), "sync_mode": mode}
    config = LograConfig(**flags, sync_log_dir=str(tmp_path) if log else None)
    model = nn.ModuleDict({"up_proj": nn.Linear(8, 12, bias=False), "embed": nn.Embedding(5, 8)}).bfloat16()
    model.get_input_embeddings = lambda: model["embed"]
    strategy = strategy_class(method)(config, model)
    info = LograTrainerInitInfo(
        rank=0,
        mode=mode,
        exact_updates=strategy.exact_updates,
        trained=strategy.trained,
        dense=strategy.dense,
        log_dir=config.sync_log_dir,
    )
    client = Client([Engine()])
    sender = LograTrainerEngine.trainer_init(info, client=client, source=strategy.parameters())
    assert sender.state_bytes == strategy.coverage().compared


def test_without_names_every_parameter_is_trained():
    """Nothing that changes stays behind unseen between two verifications."""
    trainer = Trainer(Client([Engine()]), exact_updates=False, verify_every=10, trained=None)
    for _ in range(3):
        for weight in trainer.weights.values():
            weight += 0.125
        trainer.version += 1
        trainer.sender.push((), trainer.version)
        assert trainer.sender.send_weights().mode == "sparse" and held_equals(trainer)


DENSE = ("embed.weight", "layers.0.norm.weight", "layers.0.q_proj.bias")


def train_densely(trainer, count=1):
    """Updates of the targets, each with a step of another optimizer on some elements of the rest."""
    for _ in range(count):
        generator = torch.Generator().manual_seed(trainer.version)
        for name in DENSE:
            moved = torch.rand(SHAPES[name], generator=generator) < 0.3
            trainer.weights[name][moved] += 0.25
        trainer.update()


@pytest.mark.parametrize("mode", ["factor", "auto", "sparse", "dense"])
def test_what_is_trained_densely_travels_with_the_factors(mode):
    settings = {"mode": mode, "trained": (*TARGETS, *DENSE), "dense": DENSE}
    trainer = Trainer(Client([Engine(1), Engine(2)]), **settings)
    for count in (1, 3, 2):
        train_densely(trainer, count)
        report = trainer.sender.send_weights()
        assert report.digest_ok and held_equals(trainer)
    copied = {"factor": DENSE, "auto": DENSE, "sparse": settings["trained"], "dense": ()}[mode]
    assert trainer.sender.state_bytes == sum(2 * trainer.weights[name].numel() for name in copied)


def test_a_log_leads_to_every_version_of_what_is_trained_densely(tmp_path):
    """Also to those between syncs, and across a resume before which nothing was sent."""
    trained = (*TARGETS, *DENSE)
    trainer = Trainer(Client([Engine()]), mode="factor", trained=trained, dense=DENSE, log_dir=str(tmp_path))
    weights = {name: weight.clone() for name, weight in trainer.weights.items()}
    history = []
    for sync in (True, False, True):
        for _ in range(3):
            train_densely(trainer)
            history.append({name: weight.clone() for name, weight in trainer.weights.items()})
        if sync:
            assert trainer.sender.send_weights().digest_ok
        else:
            trainer.sender.state_dict()
    records = [record_module.decode(path.read_bytes()) for path in record_files(tmp_path)]
    assert [record.header.version for record in records] == list(range(1, 10))
    for record, expected in zip(records, history):
        for name, change in record.changes(SHAPES):
            record_module.write_change(change, as_matrix(weights[name]), 0, 0, as_matrix(weights[name]).shape[1])
        assert all(torch.equal(weights[name], expected[name]) for name in SHAPES), record
