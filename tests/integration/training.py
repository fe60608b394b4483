"""Runs the stock command line of OpenRLHF on the CPU and reads what it said."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from openrlhf_logra.config import from_flat
from openrlhf_logra.math.digest import as_matrix, digest_block

HERE = Path(__file__).parent
MARK = "LOGRA_TEST_RUN"
LOGRA = str(Path(sys.executable).with_name("openrlhf-logra"))


def write_prompts(path: Path, count: int = 64) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"say {i:03d} ", "label": "-"}) + "\n" for i in range(count)))
    return path


def stock_flags(model: Path, folder: Path, *, zero=2, ranks=1, engines=1, steps=3, **changes) -> list[str]:
    """Flags of a tiny run: `steps` rollouts of 8 prompts x 4 samples, two updates each."""
    prompts = write_prompts(folder / "prompts.jsonl", 8 * steps)
    flags = {
        "--actor.model_name_or_path": model,
        "--actor.num_gpus_per_node": ranks,
        "--actor.adam.lr": 1e-6,
        "--vllm.num_engines": engines,
        "--vllm.enforce_eager": None,
        "--ds.zero_stage": zero,
        "--data.prompt_dataset": prompts,
        "--data.input_key": "prompt",
        "--data.label_key": "label",
        "--data.max_len": 32,
        "--reward.remote_url": HERE / "reward.py",
        "--rollout.batch_size": 8,
        "--rollout.n_samples_per_prompt": 4,
        "--rollout.max_new_tokens": 8,
        "--rollout.micro_batch_size": 8,
        "--train.batch_size": 16,
        "--train.micro_batch_size": 8,
        "--algo.advantage.estimator": "group_norm",
        "--algo.kl.init_coef": 0,
        "--ckpt.output_dir": folder / "model",
        "--ckpt.path": folder / "checkpoints",
        **changes,
    }
    return [str(item) for flag, value in flags.items() for item in ([flag] if value is None else [flag, value])]


LOGRA_FLAGS = ["--logra.enable", "--logra.rank", "8", "--logra.update_ratio", "5e-3", "--logra.sync.verify_every", "1"]


def check_flags(parser: argparse.ArgumentParser, flags: list[str]) -> None:
    """Parse and check flags in this process as the plugin does before Ray starts; raises what it raises."""
    from openrlhf.utils.config import hierarchize

    from openrlhf_logra.host import refusals

    flat = parser.parse_args(flags)
    config = from_flat(flat)
    config.validate()
    refusals.check(hierarchize(flat), config)


@dataclass
class Step:
    number: int
    version: int
    sync_bytes: str
    digest: str | None
    line: str


@dataclass
class Finished:
    code: int
    output: str
    seconds: float
    steps: list[Step] = field(default_factory=list)

    def roles(self) -> list[str]:
        """Which processes reported the plugin, one entry per process."""
        found = re.findall(r"active in (?:the |a )(.+?) \(pid (\d+)\)", self.output)
        return sorted({(role, pid) for role, pid in found})


_STEP = re.compile(
    r"\[logra\] step (\d+):.* version (\d+), sync \w+ ([\d.]+ \w+) of .*?(?:digest ok ([0-9a-f]{16}))?, [\d.]+ s"
)


def start(flags: list[str], folder: Path, program: list[str] | None = None) -> tuple[subprocess.Popen, Path, str]:
    """Start a run in its own session; returns process, log file and the mark that all its processes carry."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "HF_HUB_OFFLINE": "1", "RAY_DEDUP_LOGS": "0", "COLUMNS": "200"}
    environment.pop("RAY_ADDRESS", None)
    log = folder / "train.log"
    command = [*(program or [sys.executable, "-m", "openrlhf.cli.train_ppo_ray"]), *flags]
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder
        )
    return process, log, mark


def run(flags: list[str], folder: Path, timeout: float = 500, program: list[str] | None = None) -> Finished:
    begin = time.monotonic()
    process, log, mark = start(flags, folder, program)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)
    finally:
        leave_nothing(mark)
    output = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    steps = [
        Step(int(m[1]), int(m[2]), m[3], m[4], m[0]) for m in map(_STEP.search, output.splitlines()) if m is not None
    ]
    return Finished(process.returncode, output, time.monotonic() - begin, steps)


def processes_of(mark: str) -> list[int]:
    """Processes started by a run that are still there, by the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until_gone(mark: str, seconds: float) -> list[int]:
    """Processes of the run that are left after at most `seconds`."""
    end = time.monotonic() + seconds
    while (left := processes_of(mark)) and time.monotonic() < end:
        time.sleep(0.5)
    return left


def leave_nothing(mark: str) -> None:
    for pid in wait_until_gone(mark, 20):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def digest_of_checkpoint(folder: Path) -> str:
    """Digest of all parameters of a saved model, as a step line shows it; a tied head is counted once."""
    tensors = load_file(folder / "model.safetensors")
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    total = sum(
        digest_block(as_matrix(tensor), name, as_matrix(tensor).shape[1])
        for name, tensor in tensors.items()
        if not (tied and name == "lm_head.weight")
    )
    return f"{total & (1 << 64) - 1:016x}"


def merged_by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Parameters by name of a bf16 model into which peft has merged a saved adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    return dict(PeftModel.from_pretrained(model, adapter).merge_and_unload().named_parameters())


def check_steps(finished: Finished, steps: int, form: str) -> None:
    """Every sync was of one form, and verified; every step changed the weights."""
    lines = [step.line for step in finished.steps]
    assert [step.version for step in finished.steps] == list(range(2, 2 * steps + 1, 2)), lines
    assert all(step.digest and f"sync {form}" in step.line for step in finished.steps), lines
    assert len({step.digest for step in finished.steps}) == steps, "every step must have changed the weights"


def check_replay(folder: Path, base: Path, finished: Finished) -> None:
    """The base model and the records give the saved checkpoint, tensor by tensor, as the last step's digest says."""
    out = folder / "replayed"
    command = ["--base", base, "--records", folder / "records", "--step", finished.steps[-1].version, "--out", out]
    subprocess.run([LOGRA, "replay", *map(str, command)], check=True)
    held, saved = (load_file(path / "model.safetensors") for path in (out, folder / "model"))
    # OpenRLHF may save the tied head as a tensor of its own; transformers does not.
    embeddings = saved["model.embed_tokens.weight"]
    assert torch.equal(saved.pop("lm_head.weight", embeddings), embeddings)
    assert held.keys() == saved.keys() and all(torch.equal(held[name], saved[name]) for name in held)
    assert finished.steps[-1].digest == digest_of_checkpoint(out)
