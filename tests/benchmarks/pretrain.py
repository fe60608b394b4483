"""Fira, GaLore and full-rank AdamW: pre-training a small Llama from scratch (the article's claim, at our scale).

    python tests/benchmarks/pretrain.py [--seeds 1 2 42] [--steps 1000] [--rates fira=0.01 ...] [--sweep]

The text is the language reference that comes with every Python (pydoc_data.topics), byte by byte; its last tenth is
held out. Rank 8 of 128. `--sweep` tries several learning rates on the first seed and prints what each gives; without
it, one rate of each method (`--rates`) is used for all seeds, and a table printed.
"""

import argparse
import math
import os
import platform
import pydoc_data.topics
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from openrlhf_logra.optim import FiraAdamW, GaLoreAdamW, divide_params

RANK, LENGTH, BATCH, WARM_UP = 8, 128, 8, 0.1
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RATES = {"adamw": 1e-3, "galore": 4e-2, "fira": 1e-2}  # the best of SWEEP
SWEEP = {"adamw": (5e-4, 1e-3, 2e-3), "galore": (2e-2, 4e-2, 8e-2), "fira": (5e-3, 1e-2, 2e-2)}


def text() -> torch.Tensor:
    joined = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return torch.tensor(list(joined.encode()), dtype=torch.long)


def build(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def make_optimizer(method: str, model: LlamaForCausalLM, lr: float) -> torch.optim.Optimizer:
    if method == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    kind = {"galore": GaLoreAdamW, "fira": FiraAdamW}[method]
    return kind(divide_params(model, TARGETS, RANK), lr=lr)


def windows(data: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([data[start : start + LENGTH] for start in starts])


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, data: torch.Tensor) -> float:
    model.eval()
    rows = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)[:256]
    losses = [model(part, labels=part).loss.item() * len(part) for part in rows.split(32)]
    model.train()
    return sum(losses) / len(rows)


def train(method: str, seed: int, lr: float, steps: int) -> tuple[float, int, float]:
    """Held-out loss (nats per byte), bytes of optimizer state, seconds per step."""
    data = text()
    split = len(data) * 9 // 10
    model = build(seed)
    optimizer = make_optimizer(method, model, lr)
    warm_up = max(1, int(steps * WARM_UP))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda t: min(1, (t + 1) / warm_up) * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1, t / steps))) / 2),
    )
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for _ in range(steps):
        batch = windows(data[:split], generator)
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    seconds = (time.perf_counter() - start) / steps
    state = sum(
        value.nbytes for of in optimizer.state.values() for value in of.values() if isinstance(value, torch.Tensor)
    )
    return validation_loss(model, data[split:]), state, seconds


def rate_of(given: str) -> tuple[str, float]:
    name, _, rate = given.partition("=")
    if name not in RATES:
        raise argparse.ArgumentTypeError(f"{given}: is not METHOD=RATE with a method of {', '.join(RATES)}")
    return name, float(rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 42])
    parser.add_argument("--steps", type=int, default=1000)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--rates", nargs="+", type=rate_of, default=[], metavar="METHOD=RATE")
    what.add_argument("--sweep", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if min(args.steps, args.threads) < 1 or len(set(args.seeds)) < len(args.seeds):
        parser.error("--steps and --threads must be at least 1, --seeds different from each other")
    torch.set_num_threads(args.threads)
    parameters = sum(parameter.numel() for parameter in build(0).parameters())
    print(
        f"{parameters:,} parameters, rank {RANK} of 128, {args.steps} steps of {BATCH} x {LENGTH} bytes, "
        f"{len(text()):,} bytes of text; {platform.processor() or platform.machine()}, {args.threads} of "
        f"{os.cpu_count()} cores, torch {torch.__version__}",
        flush=True,
    )
    if args.sweep:
        for method, rates in SWEEP.items():
            for rate in rates:
                loss, _, _ = train(method, args.seeds[0], rate, args.steps)
                print(f"{method} {rate:g}: {loss:.4f}", flush=True)
        return
    rates = {**RATES, **dict(args.rates)}
    print("| method | rate | " + " | ".join(f"seed {seed}" for seed in args.seeds) + " | mean | state | s/step |")
    print("|---" * (len(args.seeds) + 5) + "|")
    for method, rate in rates.items():
        results = [train(method, seed, rate, args.steps) for seed in args.seeds]
        losses = [loss for loss, _, _ in results]
        seconds = statistics.median(seconds for _, _, seconds in results)
        cells = [f"{loss:.4f}" for loss in (*losses, statistics.mean(losses))]
        print(
            f"| {method} | {rate:g} | {' | '.join(cells)} | {results[0][1] / 1e6:.2f} MB | {seconds:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
