"""`openrlhf-logra replay` and `verify`: a log and its base give back every version bit for bit, or one line that says
why not and nothing else."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from copy import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openrlhf_logra.cli import main
from openrlhf_logra.host.models import load_model
from openrlhf_logra.math.exact import Update, apply_block, quantize
from openrlhf_logra.math.projection import Projection
from openrlhf_logra.sync import log as log_module
from openrlhf_logra.sync.log import RecordLog, digests, record_files
from openrlhf_logra.sync.record import RecordError, decode, encode
from openrlhf_logra.sync.stream import Position, RecordStream

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from models import make_model

RUN = "0123456789abcdef"
LENGTH = 50
EVERY = 4  # updates between syncs, which state digests
PROJECTION = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight$")


class Trainer:
    """Makes updates and records of a model in this process; `history` has a copy of the weights of every version."""

    def __init__(self, base, folder, by_factors=True, run=RUN, seed=0, every=EVERY, changes=PROJECTION.search):
        self.weights = {name: p.data for name, p in load_model(str(base), "--base").named_parameters()}
        self.targets = tuple(filter(changes, self.weights))
        self.folder, self.by_factors, self.seed, self.every, self.version = folder, by_factors, seed, every, 0
        self.history = {0: self.copy()}
        self.begin(Position(run))

    def begin(self, position):
        self.stream = RecordStream(
            position,
            self.version,
            parameters=self.weights,
            compared=() if self.by_factors else self.targets,
            every_version=True,
            by_factors=self.by_factors,
            refresh_every=1,
            limit=sys.maxsize,
            log=RecordLog(self.folder, position.run, position.parent, self.version),
            is_sender=True,
        )

    def copy(self):
        return {name: tensor.clone() for name, tensor in self.weights.items()}

    def update(self, count):
        for _ in range(count):
            updates = tuple(self.change(i, name) for i, name in enumerate(self.targets))
            self.version += 1
            self.history[self.version] = self.copy()
            self.stream.push(updates if self.by_factors else (), self.version)
            if self.every and self.version % self.every == 0:
                self.stream.close(digests(self.weights))
                self.stream.clear()
        if self.by_factors:
            self.stream.close({})  # the last one without digests, as a run that ended before its sync

    def change(self, i, name):
        generator = torch.Generator().manual_seed(1000 * self.seed + 100 * self.version + i)
        matrix = self.weights[name].view(-1, self.weights[name].shape[-1])
        q, s = quantize(torch.randn(matrix.shape[0], 4, generator=generator) * 1e-3)
        update = Update(Projection(self.seed, self.version, name, 4, matrix.shape[1]), self.version, q, s)
        apply_block(matrix, update)
        return update

    def resume(self, version, seed):
        """As a run that loads the checkpoint of `version` does: what came after is another branch."""
        headers = [decode(path.read_bytes()).header for path in record_files(self.folder)]
        (parent,) = (header.checksum for header in headers if header.version == version)
        for name, tensor in self.history[version].items():
            self.weights[name].copy_(tensor)
        self.version, self.seed = version, seed
        self.begin(Position(RUN, parent))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    trainer = Trainer(base, tmp_path_factory.mktemp("records"))
    trainer.update(LENGTH)
    return trainer


@pytest.fixture(scope="module")
def sparse(base, tmp_path_factory):
    trainer = Trainer(base, tmp_path_factory.mktemp("sparse"), by_factors=False, every=5)
    trainer.update(LENGTH)
    return trainer


@pytest.fixture
def records(run, tmp_path):
    """A copy of the factor log, to be damaged."""
    return Path(shutil.copytree(run.folder, tmp_path / "records"))


@pytest.fixture
def rebuild(capsys, tmp_path):
    """Call replay; returns exit code, lines on stdout, and our lines on stderr."""
    (tmp_path / "made").mkdir()

    def call(base, records, step, out=tmp_path / "made" / "out"):
        return command(capsys, "replay", "--base", base, "--records", records, "--step", step, "--out", out)

    call.out = tmp_path / "made" / "out"
    return call


@pytest.fixture
def compare(capsys):
    def call(checkpoint, records, *more):
        return command(capsys, "verify", "--checkpoint", checkpoint, "--records", records, *more)

    return call


def command(capsys, name, *arguments):
    capsys.readouterr()
    code = main.main([name, *map(str, arguments)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    own = [line for line in said.err.splitlines() if line.startswith("openrlhf-logra")]
    assert len(own) == (1 if code in (2, 130) else 0)
    return code, said.out.splitlines(), "".join(own)


def refused(rebuild, *arguments, **options):
    """The one line of a replay that wrote nothing."""
    code, _, said = rebuild(*arguments, **options)
    assert code == 2 and said.startswith("openrlhf-logra replay: ")
    assert list(rebuild.out.parent.iterdir()) == []
    return said


def file_of(records, version):
    return records / f"{version:09d}.safetensors"


def same(path, expected):
    found = {name: p.data for name, p in load_model(str(path), "--base").named_parameters()}
    assert list(found) == list(expected)
    return all(torch.equal(found[n].view(torch.int16), expected[n].view(torch.int16)) for n in found)


def total(weights):
    return f"{sum(digests(weights).values()) % 2**64:016x}"


# ---- what replay gives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 4, 7, 25, 48, LENGTH])
def test_replay_gives_every_version_bit_for_bit(rebuild, base, run, step):
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    code, printed, _ = rebuild(base, run.folder, step)
    assert code == 0 and same(rebuild.out, run.history[step])
    assert printed[-1].startswith(f"{rebuild.out}: version {step} of run {RUN}, {step} records, digest ")
    assert f"digest {total(run.history[step])}, " in printed[-1] and printed[-1].endswith(" s")
    assert [path.name for path in rebuild.out.parent.iterdir()] == ["out"]
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before


def test_a_rebuilt_checkpoint_is_a_whole_one(rebuild, base, run):
    """Same files as the base, its tokenizer included, and read by others than their owner as any new directory is."""
    from transformers import AutoTokenizer

    assert rebuild(base, run.folder, LENGTH)[0] == 0
    assert {path.name for path in rebuild.out.iterdir()} == {path.name for path in base.iterdir()}
    text = "one 2"
    assert AutoTokenizer.from_pretrained(rebuild.out)(text) == AutoTokenizer.from_pretrained(base)(text)
    assert rebuild.out.stat().st_mode == rebuild.out.parent.stat().st_mode


@pytest.mark.parametrize("step", [0, 5, 25, LENGTH])
def test_sparse_records(rebuild, base, sparse, step):
    code, printed, _ = rebuild(base, sparse.folder, step)
    assert code == 0 and same(rebuild.out, sparse.history[step])
    assert f"version {step} of run {RUN}, {step // 5} records" in printed[-1]


@pytest.mark.parametrize("step", [3, 27, LENGTH + 2, -1])
def test_a_version_inside_a_sparse_record_or_beyond_the_log(rebuild, base, sparse, step):
    said = refused(rebuild, base, sparse.folder, step)
    assert f"no record that ends at version {step}" in said
    if step == 27:
        assert "the last before it is 25" in said


def test_an_untied_head(rebuild, compare, tmp_path):
    base = make_model(tmp_path / "untied", tie_word_embeddings=False)
    trainer = Trainer(base, tmp_path / "records", by_factors=False, changes=lambda name: True)
    assert "lm_head.weight" in trainer.targets
    trainer.update(8)
    assert rebuild(base, trainer.folder, 8)[0] == 0 and same(rebuild.out, trainer.history[8])
    assert compare(rebuild.out, trainer.folder)[0] == 0


def test_experts_that_transformers_holds_as_one_tensor(rebuild, compare, tmp_path):
    """Their names in the trainer are not those in the checkpoint, and their tensors have three dimensions."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    trainer = Trainer(tmp_path / "base", tmp_path / "records", by_factors=False, changes=lambda name: "mlp" in name)
    assert any(trainer.weights[name].dim() == 3 for name in trainer.targets)
    trainer.update(4)
    assert rebuild(tmp_path / "base", trainer.folder, 4)[0] == 0 and same(rebuild.out, trainer.history[4])
    assert compare(rebuild.out, trainer.folder)[0] == 0


def test_every_parameter_is_loaded_in_bf16(base, monkeypatch):
    from transformers import Qwen2ForCausalLM

    monkeypatch.setattr(Qwen2ForCausalLM, "_keep_in_fp32_modules_strict", {"norm"}, raising=False)
    assert {parameter.dtype for parameter in load_model(str(base), "--base").parameters()} == {torch.bfloat16}


def test_a_base_without_a_tokenizer(rebuild, base, run, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(base, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    code, printed, _ = rebuild(bare, run.folder, 4)
    assert code == 0 and same(rebuild.out, run.history[4])
    assert any(line.startswith("no tokenizer is written: ") for line in printed)
    assert not list(rebuild.out.glob("tokenizer*"))


def test_an_empty_directory_is_filled(rebuild, base, run):
    rebuild.out.mkdir()
    assert rebuild(base, run.folder, 4)[0] == 0 and same(rebuild.out, run.history[4])


def test_from_the_command_line(base, run, tmp_path):
    call = ["replay", "--base", str(base), "--records", str(run.folder), "--step", "9", "--out", "out"]
    program = [sys.executable, "-m", "openrlhf_logra.cli.main", *call]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"out: version 9 of run {RUN}, 9 records, digest ")
    assert same(tmp_path / "out", run.history[9])
    assert "Loading weights" not in done.stderr and list(tmp_path.iterdir()) == [tmp_path / "out"]


# ---- damaged and misplaced records ----------------------------------------------------------------------------------


@pytest.fixture
def unloaded(monkeypatch):
    """No model may be loaded: records are checked before."""
    monkeypatch.setattr("openrlhf_logra.host.models.load_model", lambda *arguments: pytest.fail("a model was loaded"))


@pytest.mark.parametrize("version", [3, 4], ids=["no-digests", "digests"])
def test_no_flipped_bit_goes_unseen(rebuild, base, records, unloaded, version):
    for path in record_files(records)[6:]:
        path.unlink()
    path = file_of(records, version)
    blob = path.read_bytes()
    header = 8 + int.from_bytes(blob[:8], "little")
    choose = random.Random(version)
    places = [*range(16), *choose.sample(range(8, header), 120), *choose.sample(range(header, len(blob)), 60)]
    for place in places:
        damaged = bytearray(blob)
        damaged[place] ^= 1 << choose.randrange(8)
        path.write_bytes(damaged)
        assert f"openrlhf-logra replay: {path}: " in refused(rebuild, base, records, 6), place


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b[:5], lambda b: b"", lambda b: b + b"\0"])
def test_a_record_of_another_length(rebuild, base, records, unloaded, change):
    path = file_of(records, 9)
    path.write_bytes(change(path.read_bytes()))
    assert str(path) in refused(rebuild, base, records, LENGTH)


def test_damage_after_the_version_that_is_wanted_does_not_matter(rebuild, base, run, records):
    file_of(records, 20).write_bytes(b"damaged")
    assert rebuild(base, records, 19)[0] == 0 and same(rebuild.out, run.history[19])


def lose_one(records):
    file_of(records, 20).unlink()
    return file_of(records, 21)


def rename_one(records):
    file_of(records, LENGTH).rename(file_of(records, LENGTH + 1))
    return file_of(records, LENGTH + 1)


def swap_two(records):
    first, second = file_of(records, 20), file_of(records, 21)
    first.rename(records / "aside")
    second.rename(first)
    (records / "aside").rename(second)
    return first


def garbage(records):
    file_of(records, 20).write_bytes(os.urandom(1000))
    return file_of(records, 20)


def some_checkpoint(records):
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(3)}, file_of(records, 20))
    return file_of(records, 20)


def a_directory(records):
    file_of(records, 20).unlink()
    file_of(records, 20).mkdir()
    return file_of(records, 20)


def another_run(records):
    """With its checksum and its place in the chain right."""
    record = decode(file_of(records, 20).read_bytes())
    file_of(records, 20).write_bytes(encode(type(record)(with_run(record.header, "another"), record.tensors))[0])
    return file_of(records, 20)


def with_run(header, run):
    return type(header)(**{**vars(header), "run": run})


def forged(records):
    """One change of one record, sealed again: what follows does not continue it."""
    record = decode(file_of(records, 20).read_bytes())
    record.tensors[next(name for name in record.tensors if name.endswith(".q"))][0, 0] += 1
    file_of(records, 20).write_bytes(encode(record)[0])
    return file_of(records, 21)


FAULTS = [lose_one, rename_one, swap_two, garbage, some_checkpoint, a_directory, another_run, forged]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_log_is_refused_and_the_record_named(rebuild, base, records, unloaded, fault):
    path = fault(records)
    step = LENGTH + 1 if fault is rename_one else LENGTH
    assert f"replay: {path}: " in refused(rebuild, base, records, step)


@pytest.mark.parametrize("step", [0, 1, 2, LENGTH])
def test_the_first_record_is_missing(rebuild, base, records, step):
    """The rest is a chain too, as that of a log that begins with a resume: digests show that the base is not its."""
    file_of(records, 1).unlink()
    said = refused(rebuild, base, records, step)
    if step:
        assert str(file_of(records, 4)) in said and "not the model that this log begins with, version 1 of run" in said
    else:
        assert "the first leads from version 1 to 2" in said


@pytest.mark.parametrize("step", [LENGTH + 1, 10**12, -1])
def test_a_version_beyond_the_log(rebuild, base, run, unloaded, step):
    said = refused(rebuild, base, run.folder, step)
    assert f"no record that ends at version {step}" in said and str(run.folder) in said


@pytest.mark.parametrize("make", [None, lambda folder: folder.mkdir(), lambda folder: folder.write_text("")])
def test_no_log(rebuild, base, tmp_path, unloaded, make):
    folder = tmp_path / "nothing"
    if make:
        make(folder)
    assert str(folder) in refused(rebuild, base, folder, 1)


def test_records_that_vanish_between_the_passes(rebuild, base, records, monkeypatch):
    def load(*arguments):
        file_of(records, 20).unlink(missing_ok=True)
        return load_model(*arguments)

    monkeypatch.setattr("openrlhf_logra.host.models.load_model", load)
    assert "is missing" in refused(rebuild, base, records, LENGTH)


# ---- branches -------------------------------------------------------------------------------------------------------


def test_a_log_with_a_hole_is_not_gone_on_with(run, records, tmp_path):
    """Left by a leg of the run without its log, or by a lost file: found when the run starts."""
    last = decode(file_of(records, LENGTH).read_bytes()).header
    with pytest.raises(RecordError, match=f"end at version {LENGTH} and do not lead to .* version {LENGTH + 3}"):
        RecordLog(records, RUN, last.checksum, LENGTH + 3)
    file_of(records, 7).unlink()
    with pytest.raises(RecordError, match="000000008.safetensors: does not continue"):
        RecordLog(records, RUN, last.checksum, LENGTH)
    (records / "weights.safetensors").write_bytes(b"")
    with pytest.raises(RecordError, match="weights.safetensors: not a record: .+; give"):
        RecordLog(records, RUN, last.checksum, LENGTH)


def test_abandoned_branches_never_take_each_others_place(records):
    for version in (40, 30, 20):
        RecordLog(records, RUN, decode(file_of(records, version).read_bytes()).header.checksum, version)
        if version == 30:
            shutil.rmtree(records / "abandoned-000")  # somebody tidies up
    assert sorted(path.name for path in records.glob("abandoned-*")) == ["abandoned-001", "abandoned-002"]


@pytest.fixture(scope="module")
def branches(base, tmp_path_factory):
    """30 updates, then back to version 20 and 12 others; `old` has the weights of the way left."""
    trainer = Trainer(base, tmp_path_factory.mktemp("branches"))
    trainer.update(30)
    trainer.old = dict(trainer.history)
    trainer.resume(20, seed=1)
    trainer.update(12)
    return trainer


@pytest.fixture
def resumed(branches, tmp_path):
    """The same with a log of its own, to be damaged."""
    trainer = copy(branches)
    trainer.folder = Path(shutil.copytree(branches.folder, tmp_path / "resumed"))
    trainer.aside = trainer.folder / "abandoned-000"
    return trainer


@pytest.mark.parametrize("step", [20, 21, 32])
def test_a_resumed_run_has_one_line(rebuild, base, resumed, step):
    assert len(list(resumed.aside.iterdir())) == 10
    assert rebuild(base, resumed.folder, step)[0] == 0 and same(rebuild.out, resumed.history[step])


def test_the_new_branch_really_is_another(resumed):
    assert any(not torch.equal(resumed.history[30][name], resumed.old[30][name]) for name in resumed.targets)


@pytest.mark.parametrize("version", [21, 25, 30])
def test_an_abandoned_record_in_the_place_of_the_new_one(rebuild, base, resumed, unloaded, version):
    shutil.copy(file_of(resumed.aside, version), resumed.folder)
    named = 22 if version == 21 else version  # the first one of either branch continues version 20
    assert f"replay: {file_of(resumed.folder, named)}: does not continue" in refused(rebuild, base, resumed.folder, 32)


def test_an_abandoned_record_behind_the_new_ones(rebuild, base, resumed, unloaded, tmp_path):
    for version in range(28, 33):
        file_of(resumed.folder, version).unlink()
    shutil.copy(file_of(resumed.aside, 28), resumed.folder)
    path = file_of(resumed.folder, 28)
    assert f"replay: {path}: does not continue" in refused(rebuild, base, resumed.folder, 28)


def test_a_log_that_begins_at_a_checkpoint(rebuild, base, resumed, tmp_path):
    """The way that was left, from the checkpoint where it parted."""
    checkpoint = tmp_path / "checkpoint"
    assert rebuild(base, resumed.folder, 20, out=checkpoint)[0] == 0
    code, printed, _ = rebuild(checkpoint, resumed.aside, 30)
    assert code == 0 and same(rebuild.out, resumed.old[30])
    assert "version 30 of run" in printed[-1] and ", 10 records, " in printed[-1]
    shutil.rmtree(rebuild.out)
    assert rebuild(checkpoint, resumed.aside, 20)[0] == 0 and same(rebuild.out, resumed.old[20])
    shutil.rmtree(rebuild.out)
    assert "version 20 of run" in refused(rebuild, base, resumed.aside, 30)


# ---- the base -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 2, 4, LENGTH])
def test_another_base(rebuild, run, tmp_path, step):
    """Also for versions before the first that states digests."""
    said = refused(rebuild, make_model(tmp_path / "other", seed=1), run.folder, step)
    assert "its digest of model.embed_tokens.weight does not hold (" in said and str(file_of(run.folder, 4)) in said
    assert f"--base is not the model that this log begins with, version 0 of run {RUN}" in said


def test_one_bit_of_a_frozen_parameter_of_the_base(rebuild, base, run, tmp_path):
    name = "model.layers.1.input_layernorm.weight"
    other = altered(base, tmp_path / "other", name)
    assert f"its digest of {name} does not hold (1 of 26 parameters differ); --base is" in refused(
        rebuild, other, run.folder, LENGTH
    )


def altered(checkpoint, path, name):
    """A copy of a checkpoint, one element of one parameter changed in its last bit."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, path)
    tensors = load_file(path / "model.safetensors")
    tensors[name].view(torch.int16).view(-1)[7] ^= 1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("shape", [{"intermediate_size": 128}, {"num_hidden_layers": 1}])
def test_a_base_of_another_shape(rebuild, run, tmp_path, shape):
    said = refused(rebuild, make_model(tmp_path / "other", **shape), run.folder, LENGTH)
    assert f"{file_of(run.folder, 1)}: does not fit the weights of --base: factor record 0 -> 1: " in said


@pytest.mark.parametrize("step", [0, 3])
def test_without_digests_nothing_is_claimed(rebuild, base, tmp_path, step):
    trainer = Trainer(base, tmp_path / "records", every=0)
    trainer.update(3)
    code, printed, _ = rebuild(base, trainer.folder, step)
    assert code == 0 and same(rebuild.out, trainer.history[step])
    assert printed[-1].endswith("; not verified: no record states digests")


def test_no_base(rebuild, run, tmp_path):
    assert "--base /nowhere/model: no such directory" in refused(rebuild, "/nowhere/model", run.folder, 4)
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(rebuild, tmp_path / "empty", run.folder, 4)


def test_a_base_without_weights(rebuild, base, run, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(base, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert f"--base {bare}: cannot be loaded: " in refused(rebuild, bare, run.folder, 4)


def test_a_fault_on_the_way_is_named(rebuild, base, run, monkeypatch):
    """A bit that changes after the first comparison is found by the last one."""
    name = "model.layers.0.self_attn.v_proj.weight"

    def apply(record, weights):
        stock(record, weights)
        if record.header.version == 20:
            weights[name].view(torch.int16)[3, 5] ^= 1 << 14

    stock = log_module.apply_record
    monkeypatch.setattr(log_module, "apply_record", apply)
    said = refused(rebuild, base, run.folder, LENGTH)
    assert f"{file_of(run.folder, 48)}: its digest of {name} does not hold (1 of 26 parameters differ)" in said
    assert "--base" not in said


# ---- what is left ---------------------------------------------------------------------------------------------------


def test_an_out_that_is_not_empty_is_left_alone(rebuild, base, run, unloaded):
    rebuild.out.mkdir()
    (rebuild.out / "precious").write_text("kept")
    code, _, said = rebuild(base, run.folder, 4)
    assert code == 2 and f"--out {rebuild.out}: is not empty" in said
    assert [path.read_text() for path in rebuild.out.iterdir()] == ["kept"]


def test_an_out_that_cannot_be_one(rebuild, base, run, unloaded, tmp_path):
    (tmp_path / "file").write_text("")
    assert "is not a directory" in refused(rebuild, base, run.folder, 4, out=tmp_path / "file")
    assert "is no directory in which" in refused(rebuild, base, run.folder, 4, out=tmp_path / "nowhere" / "out")
    assert "is no directory in which" in refused(rebuild, base, run.folder, 4, out=tmp_path / "file" / "out")


def test_an_out_that_is_a_mount_point(rebuild, base, run, unloaded, monkeypatch):
    rebuild.out.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == rebuild.out)
    code, _, said = rebuild(base, run.folder, 4)
    assert code == 2 and "is a mount point" in said


def breaks_while_saving(monkeypatch, error):
    from transformers import PreTrainedModel

    def save(self, folder, **options):
        Path(folder, "model.safetensors").write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save)


def breaks_while_applying(monkeypatch, error):
    stock = log_module.apply_record

    def apply(record, weights):
        if record.header.version == 7:
            raise error
        stock(record, weights)

    monkeypatch.setattr(log_module, "apply_record", apply)


@pytest.mark.parametrize("breaks", [breaks_while_saving, breaks_while_applying])
def test_an_interrupted_replay_leaves_nothing(rebuild, base, run, monkeypatch, breaks):
    breaks(monkeypatch, KeyboardInterrupt())
    code, _, said = rebuild(base, run.folder, LENGTH)
    assert code == 130 and said == "openrlhf-logra replay: interrupted"
    assert list(rebuild.out.parent.iterdir()) == []


def test_a_terminated_replay_leaves_nothing(rebuild, base, run, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    stock = log_module.apply_record
    monkeypatch.setattr(log_module, "apply_record", lambda *both: (stock(*both), os.kill(os.getpid(), signal.SIGTERM)))
    try:
        with pytest.raises(SystemExit) as stopped:
            rebuild(base, run.folder, 4)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == 143 and list(rebuild.out.parent.iterdir()) == []


def test_a_full_disk(rebuild, base, run, monkeypatch):
    breaks_while_saving(monkeypatch, OSError(28, "No space left on device"))
    said = refused(rebuild, base, run.folder, 4)
    assert f"--out {rebuild.out}: cannot be written: " in said and "No space left" in said


# ---- verify ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(base, run, tmp_path_factory):
    """Checkpoints of some versions, written without replay."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for version in (20, 22, 48):
        model = load_model(str(base), "--base")
        for name, parameter in model.named_parameters():
            parameter.data.copy_(run.history[version][name])
        model.save_pretrained(folder / str(version))
    return folder


@pytest.mark.parametrize("version", [20, 48])
@pytest.mark.parametrize("asked", [False, True])
def test_verify_finds_the_version(compare, run, checkpoints, version, asked):
    code, printed, _ = compare(checkpoints / str(version), run.folder, *(["--step", version] if asked else []))
    assert code == 0 and printed[-1] == f"{checkpoints / str(version)}: is version {version} of run {RUN}"


def test_verify_finds_a_sparse_version(compare, rebuild, base, sparse):
    assert rebuild(base, sparse.folder, 35)[0] == 0
    code, printed, _ = compare(rebuild.out, sparse.folder)
    assert code == 0 and printed[-1].endswith(f"is version 35 of run {RUN}")


def lacking(checkpoint, path, name):
    """The checkpoint without one tensor, which transformers would make up."""
    shutil.copytree(checkpoint, path)
    tensors = load_file(path / "model.safetensors")
    del tensors[name]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_proj.bias"])
def test_an_incomplete_checkpoint_is_no_version(compare, rebuild, base, run, checkpoints, tmp_path, name):
    code, _, said = compare(lacking(checkpoints / "20", tmp_path / "less", name), run.folder)
    assert code == 2 and f"lacks {name} (1 tensors in all)" in said
    assert f"lacks {name}" in refused(rebuild, lacking(base, tmp_path / "base", name), run.folder, 4)


def test_what_no_record_states_is_said(compare, run, checkpoints, monkeypatch):
    import openrlhf_logra.host.models as models

    monkeypatch.setattr(models, "persistent_buffers", lambda model: ["router.bias", "router.scale"])
    code, printed, _ = compare(checkpoints / "20", run.folder)
    assert code == 0 and printed[-1].endswith("but for 2 buffers that no record states (router.bias, ...)")


@pytest.mark.parametrize("more", [[], ["--step", "20"]])
def test_verify_names_one_changed_element(compare, run, checkpoints, tmp_path, more):
    name = "model.layers.1.self_attn.v_proj.weight"
    code, printed, _ = compare(altered(checkpoints / "20", tmp_path / "other", name), run.folder, *more)
    assert code == 1 and f": {name} differs, the first of 1 among 26 parameters" in printed[-1]
    assert ("is not version 20 of run" if more else "version 20 has most in common with it") in printed[-1]


def test_verify_against_another_version(compare, run, checkpoints):
    code, printed, _ = compare(checkpoints / "20", run.folder, "--step", "24")
    assert code == 1 and "is not version 24" in printed[-1]
    assert "layers.0.self_attn.q_proj.weight differs, the first of 14 among 26 parameters" in printed[-1]


def test_verify_of_a_version_without_digests(compare, run, checkpoints):
    """All of them are equally far: the latest is named."""
    code, printed, _ = compare(checkpoints / "22", run.folder)
    assert code == 1 and "; version 48 has most in common with it: " in printed[-1]


@pytest.mark.parametrize("step", [0, 22, 99])
def test_verify_names_the_versions_that_can_be_compared(compare, run, checkpoints, unloaded, step):
    code, _, said = compare(checkpoints / "22", run.folder, "--step", step)
    assert code == 2 and f"no record states the digests of version {step}; those of " in said
    near = {0: "4, 8, 12", 22: "20, 24", 99: "40, 44, 48"}[step]
    assert near in said and "and 2 others are stated" in said


def test_verify_of_another_model(compare, run, tmp_path):
    code, printed, _ = compare(make_model(tmp_path / "other", num_hidden_layers=1), run.folder)
    assert code == 1 and "differs, the first of " in printed[-1]


def test_verify_without_any_digests(compare, base, tmp_path):
    Trainer(base, tmp_path / "records", every=0).update(3)
    code, _, said = compare(base, tmp_path / "records")
    assert code == 2 and "no record states digests" in said


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_refuses_a_faulty_log(compare, base, records, unloaded, fault):
    path = fault(records)
    code, _, said = compare(base, records)
    assert code == 2 and f"openrlhf-logra verify: {path}: " in said


def test_verify_without_a_checkpoint(compare, run):
    code, _, said = compare("/nowhere/model", run.folder)
    assert code == 2 and said == "openrlhf-logra verify: --checkpoint /nowhere/model: no such directory"
