"""The sync against a real vLLM engine: records, versions, digests, repair (docs/sync.md)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm_engines import Trainer
from vllm_engines import engine as start_engine

from openrlhf_logra.sync.log import read_log
from openrlhf_logra.sync.record import decode, dense_record, encode


@pytest.fixture(scope="module")
def engine(tiny_model):
    with start_engine(tiny_model) as llm:
        yield llm


@pytest.fixture
def trainer(tiny_model, engine):
    """A fresh trainer, and the engine brought back to the checkpoint's weights."""

    def make(**options):
        made = Trainer(tiny_model, [engine], **options)
        reset(made)
        return made

    return make


def reset(trainer):
    shapes = {name: list(parameter.shape) for name, parameter in trainer.parameters.items()}
    trainer.client.initialise([0], {"shapes": shapes, "version": 0})
    blob, _ = encode(dense_record({n: p.detach().clone() for n, p in trainer.parameters.items()}, version=0))
    # As after a load: the run is not known yet.
    (report,) = trainer.client.engines[0].collective_rpc("logra_sync", args=({"records": [blob]},))
    assert report["stale"] is None and report["version"] == 0
    trainer.client.initialise([0], {"shapes": shapes, "version": 0})


def pointers(engine):
    return engine.collective_rpc(
        lambda worker: {n: p.data_ptr() for n, p in worker.model_runner.model.named_parameters()}
    )


def flip(worker, name, index):
    tensor = dict(worker.model_runner.model.named_parameters())[name].data
    tensor.view(torch.int16).view(-1)[index] ^= 1


def test_records_in_order_and_addresses_stay(trainer, engine):
    made = trainer(rank=1)
    before = pointers(engine)
    for updates in (1, 3, 8, 16):
        made.update(updates)
        report = made.sender.send_weights()
        assert report.mode == "factor" and report.digest_ok and report.version == made.strategy.version
        assert len(made.client.sent[-1]["records"]) == updates
        assert report.sync_bytes == sum(map(len, made.client.sent[-1]["records"]))
    assert len(made.client.sent) == 4, "one call per engine and sync"
    assert pointers(engine) == before
    assert not made.sender._unknown


def test_a_queue_larger_than_the_model_goes_dense(trainer):
    made = trainer()
    made.update(16)
    report = made.sender.send_weights()
    assert report.mode == "dense" and report.digest_ok and made.sender._stream.queue == []
    made.update()
    assert made.sender.send_weights().mode == "factor"


def test_every_parameter_is_covered(trainer):
    made = trainer()
    made.update()
    made.sender.send_weights()
    shapes = {name: list(parameter.shape) for name, parameter in made.parameters.items()}
    ((report,),) = made.client.initialise([0], {"shapes": shapes, "version": 1})
    places = report["places"]
    assert set(places) == set(made.parameters)
    for name, parameter in made.parameters.items():
        assert sum(rows * cols for _, rows, _, cols in places[name]) == parameter.numel(), name


def test_dense(trainer):
    made = trainer(mode="dense")
    for updates in (1, 2):
        made.update(updates)
        report = made.sender.send_weights()
        assert report.mode == "dense" and report.digest_ok
        assert report.sync_bytes >= report.dense_bytes


@pytest.mark.parametrize(
    "options",
    [{"mode": "sparse"}, {"distribution": "gaussian"}, {"method": "dense"}, {"method": "dense", "mode": "sparse"}],
    ids=["forced", "gaussian", "dense method", "dense method, forced"],
)
def test_changed_elements(trainer, options):
    made = trainer(update_ratio=1e-4, **options)
    for updates in (1, 3, 2):
        made.update(updates)
        report = made.sender.send_weights()
        assert report.mode == "sparse" and report.digest_ok and report.version == made.strategy.version
        assert report.sync_bytes < report.dense_bytes
        (blob,) = made.client.sent[-1]["records"]
        header = decode(blob).header
        assert (header.base_version, header.version) == (report.version - updates, report.version)


def test_auto_sends_whole_what_would_be_larger_as_factors(trainer):
    """Rank 8: factors of seven updates are larger than a matrix with 64 columns, and smaller than one with 96."""
    made = trainer()
    made.update(7)
    report = made.sender.send_weights()
    assert report.mode == "factor" and report.digest_ok and report.sync_bytes < report.dense_bytes
    records = [decode(blob) for message in made.client.sent for blob in message["records"]]
    assert {key.rpartition(".")[2] for record in records for key in record.tensors} == {"q", "s", "weight"}
    # Frozen parameters are not sent.
    assert {name for record in records for name in record.names()} == set(made.strategy.trained)
    made.update()
    assert made.sender.send_weights().digest_ok


def test_a_sync_moves_no_random_state(trainer, engine):
    """Sampling goes on as if there had been none."""
    state = lambda worker: torch.get_rng_state().tolist()  # noqa: E731
    made = trainer()
    made.update()
    before = engine.collective_rpc(state)
    assert made.sender.send_weights().digest_ok
    assert engine.collective_rpc(state) == before


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("refresh_every", [0, 2])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_every_kind_of_update(trainer, optimizer, refresh_every, rounding):
    made = trainer(optimizer=optimizer, refresh_every=refresh_every, rounding=rounding)
    made.update(5)
    assert made.sender.send_weights().digest_ok


def test_nothing_to_send(trainer):
    made = trainer()
    assert made.sender.send_weights().mode == "none" and made.client.sent == []
    made.update()
    made.sender.send_weights()
    report = made.sender.send_weights()
    assert report.mode == "none" and report.sync_bytes == 0 and len(made.client.sent) == 1


def test_the_first_sync_after_a_resume_is_dense(trainer):
    made = trainer(loaded_version=None)
    made.strategy.version = 7
    made.update()
    report = made.sender.send_weights()
    assert report.mode == "dense" and report.version == 8 and report.digest_ok
    made.update()
    assert made.sender.send_weights().mode == "factor"


def test_verify_every(trainer):
    made = trainer(verify_every=3)
    checked = []
    for _ in range(7):
        made.update()
        checked.append(made.sender.send_weights().digest_ok)
    assert checked == [True, None, None, True, None, None, True]


def without(index):
    return lambda info: {**info, "records": [r for i, r in enumerate(info["records"]) if i != index]}


FAULTS = {
    "first record lost": without(0),
    "middle record lost": without(1),
    "last record lost": without(2),
    "repeated record": lambda info: {**info, "records": [info["records"][0], *info["records"]]},
    "reordered": lambda info: {**info, "records": [info["records"][i] for i in (1, 0, 2)]},
    "truncated": lambda info: {**info, "records": [*info["records"][:2], info["records"][2][:-10]]},
    "no safetensors": lambda info: {**info, "records": [b"garbage" * 20]},
    "all lost": lambda info: {**info, "records": []},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_fault_on_the_wire_is_seen_and_repaired(trainer, fault, capsys):
    made = trainer()
    made.update(3)
    calls = []

    def once(info):
        calls.append(info)
        return fault(info) if len(calls) == 1 else info

    made.client.tamper = once
    report = made.sender.send_weights()
    assert report.mode == "dense" and report.digest_ok and report.version == 3
    assert "repairing with a dense sync" in capsys.readouterr().out
    made.update()
    assert made.sender.send_weights().mode == "factor"


def test_a_flipped_element_is_found_named_and_repaired(trainer, engine, capsys):
    made = trainer()
    made.update()
    made.sender.send_weights()
    layer = "model.layers.1.self_attn.qkv_proj.weight"
    # The last row of the fused matrix belongs to v_proj.
    size = engine.collective_rpc(lambda w: dict(w.model_runner.model.named_parameters())[layer].numel())[0]
    engine.collective_rpc(flip, args=(layer, size - 1))
    made.update()
    report = made.sender.send_weights()
    assert report.digest_ok is False and report.mode == "dense"
    assert "digest of model.layers.1.self_attn.v_proj.weight" in capsys.readouterr().out
    made.update()
    assert made.sender.send_weights().digest_ok


def test_two_failures_in_a_row_stop_the_run(trainer):
    from openrlhf_logra.sync.trainer import SyncError

    made = trainer()
    made.update()
    made.client.tamper = lambda info: {**info, "records": [record[:-1] for record in info["records"]]}
    with pytest.raises(SyncError, match="sync to version 1 failed: engine 0: .*not a record"):
        made.sender.send_weights()


def test_dense_parts(trainer, monkeypatch):
    import openrlhf_logra.sync.trainer as module

    monkeypatch.setattr(module, "_PART_BYTES", 20_000)
    made = trainer(mode="dense")
    made.update()
    assert made.sender.send_weights().digest_ok
    assert len(made.client.sent) > 3
    # A part that is missing leaves the engine stale; the repair starts with the first part again.
    made.update()
    seen = []
    made.client.tamper = lambda info: (seen.append(info), {**info, "records": []} if len(seen) == 2 else info)[1]
    assert made.sender.send_weights().digest_ok
    assert len(seen) > 5


def test_log_probs_of_engine_and_trainer_agree(trainer, engine):
    """The engine computes with the new weights: its greedy continuation is the trainer's."""
    made = trainer()
    made.update(20)
    made.sender.send_weights()
    from vllm import SamplingParams

    prompt = [5, 17, 40, 33]
    (output,) = engine.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True),
        use_tqdm=False,
    )
    tokens = list(output.outputs[0].token_ids)
    with torch.no_grad():
        logits = made.model(input_ids=torch.tensor([prompt + tokens])).logits.float().log_softmax(-1)[0]
    for position, (token, found) in enumerate(zip(tokens, output.outputs[0].logprobs)):
        expected = logits[len(prompt) - 1 + position, token]
        assert abs(found[token].logprob - float(expected)) < 0.05


def test_a_late_engine_catches_up_from_the_log(trainer, engine, tmp_path):
    """An engine that holds the base model takes the log's records, and is where the others are."""
    made = trainer(log_dir=str(tmp_path))
    for updates in (1, 2):
        made.update(updates)
        report = made.sender.send_weights()
    base = Trainer(made._path, [engine])
    reset(base)
    records = [path.read_bytes() for path, _ in read_log(tmp_path)]
    ((answer,),) = base.client.sync([0], {"records": records, "verify": True})
    assert answer["stale"] is None and answer["version"] == 3
    total = sum(int(value, 16) for blocks in answer["digests"].values() for *_, value in blocks)
    assert total & (1 << 64) - 1 == report.digest


def test_the_standalone_example_runs(tiny_model):
    script = Path(__file__).parents[2] / "recipes" / "standalone_sync.py"
    settings = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    finished = subprocess.run([sys.executable, script, tiny_model], env=settings, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]
    reports = [line for line in finished.stdout.splitlines() if line.startswith("SyncReport")]
    assert len(reports) == 3 and all("mode='factor'" in line and "digest_ok=True" in line for line in reports)
