"""Make everything the CPU demo starts from: a tokenizer, prompts, and a tiny warm-started policy.

    python recipes/cpu/prepare.py --out DIR --seed N

The problems are Reasoning-Gym's, question text unchanged. The policy is a Qwen2 of about half a million parameters,
trained on the spot with supervised samples until it solves about a third of unseen problems when sampled at
temperature 1.0: good enough to earn rewards, far enough from perfect that reinforcement learning shows.

Written to DIR: model/ (Hugging Face checkpoint, bf16, with its tokenizer), train.jsonl and eval.jsonl (columns
prompt, label, datasource; no problem in common), and last of all prepared.json, whose presence means that the rest
is complete.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

# Reasoning-Gym's data set with its default settings: words of 3 to 10 letters from a list of 150 thousand. A tiny
# model learns to copy backward within a minute, and only an answer right in every letter counts: much to gain.
TASK = "spell_backward"


@dataclass(frozen=True)
class Settings:
    """What decides the outcome, beside the wall-clock limit."""

    seed: int
    task: str = TASK
    hidden_size: int = 128
    layers: int = 2
    pool: int = 20000  # problems drawn, before duplicates are dropped
    held_out: int = 512
    validation: int = 512
    prompts: int = 4096  # for reinforcement learning
    batch_size: int = 64
    lr: float = 3e-3
    target_pass1: float = 0.32
    max_steps: int = 1000  # five times what it takes; not seconds, so that a slow machine makes the same policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=42, help="seed of problems, initial weights and batches")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for torch")
    args = parser.parse_args()

    settings = Settings(seed=args.seed)
    done = args.out / "prepared.json"
    wanted = asdict(settings)
    if done.exists() and json.loads(done.read_text())["settings"] == wanted:
        print(f"{args.out} is prepared already")
        return
    done.unlink(missing_ok=True)
    from warm_start import make  # ten seconds of imports, for the first time only

    numbers = make(args.out, settings, args.threads)
    done.write_text(json.dumps({"settings": wanted, "measured": numbers}, indent=2) + "\n")
    print(
        f"prepared {args.out}: {numbers['parameters']} parameters, {numbers['steps']} steps, {numbers['seconds']} s, "
        f"validation pass@1 {numbers['sampled_pass1']:.3f}, pass@4 {numbers['sampled_pass4']:.3f}"
    )


if __name__ == "__main__":
    main()
