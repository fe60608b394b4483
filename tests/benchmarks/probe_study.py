"""How right the probes of predicted KL are, and what they cost, on this machine's CPU.

    python tests/benchmarks/probe_study.py [--sizes 0.4M 7M 40M] [--responses 32] [--tokens 128] [--repeats 5]

For each model size, dtype and estimator: relative error of predicted against exact KL at KL = 1e-4 (exact: the same
model in float32, the step really added to its weights), seconds as a share of one update (forward, backward, sketch,
step) on `--responses` responses, and peak memory beside the model's. Medians over repeats, extremes in brackets. Then
the error of central differences by the KL of their step.
Every case runs in a process of its own.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

SIZES = {
    "0.4M": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 99},
    "7M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 8000},
    "40M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 32000},
}
KL = 1e-4
STEPS = (1e-2, 5e-3, 2.5e-3, 1e-3, 3e-4)
PROBED = 2  # responses: the default of --logra.kl.probe_responses


def build(size: str, dtype: str):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from openrlhf_logra.config import LograConfig
    from openrlhf_logra.strategies.logra import LograStrategy

    torch.manual_seed(0)
    config = Qwen2Config(
        **SIZES[size], num_attention_heads=4, num_key_value_heads=2, initializer_range=0.05, tie_word_embeddings=True
    )
    # The same bf16 weights for both dtypes: float32 differs in the arithmetic only.
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).to(getattr(torch, dtype))
    strategy = LograStrategy(LograConfig(rank=32, update_ratio=1e-3), model)
    strategy.attach()
    strategy.bind(torch.device("cpu"))
    return model, strategy


def responses(size: str, count: int, tokens: int):
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, SIZES[size]["vocab_size"], (count, tokens), generator=generator)


def train(model, strategy, ids, micro: int = 8):
    for part in ids.split(micro):
        model(input_ids=part, labels=part, use_cache=False).loss.backward()
    return strategy.propose(max_norm=1.0)


def probing(model, strategy, proposal, ids):
    import torch

    from openrlhf_logra.train.probe import Probe, ProbeBatch

    half = ids.shape[1] // 2
    batch = ProbeBatch(tuple(ids[:PROBED]), (torch.arange(half, ids.shape[1] - 1),) * PROBED, 1.0)
    forward = partial(model, use_cache=False)
    return Probe(model, lambda one: forward(input_ids=one)), batch, partial(strategy.along, proposal)


def run(size: str, dtype: str, kind: str, count: int, tokens: int, repeats: int) -> dict:
    """One case: `kind` is update, jvp or fd."""
    import torch

    from openrlhf_logra.host import cpu
    from openrlhf_logra.train.kl_control import PROBE_KL

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cpu.multiply_in_float32()  # as every process of a run on such a machine does
    model, strategy = build(size, dtype)
    ids = responses(size, count, tokens)
    if kind == "update":
        seconds = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            strategy.commit(train(model, strategy, ids), 1e-3) if dtype == "bfloat16" else None
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds[1:]}
    proposal = train(model, strategy, ids[:8])
    probe, batch, along = probing(model, strategy, proposal, ids)
    before = probe.hidden(batch)
    held = memory(reset=True)

    def q(epsilon: float) -> float:
        if kind == "jvp":
            variance = probe.variance_by_tangent(batch, along)
        else:
            variance, _ = probe.variance_by_difference(batch, before, along, epsilon)
        return variance / (2 * batch.count)

    epsilon = math.sqrt(PROBE_KL / q(1.0))
    epsilon = math.sqrt(PROBE_KL / q(epsilon))
    peak = memory() - held
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        first = probe.hidden(batch)
        found = q(epsilon)
        probe.divergence(batch, first, probe.hidden(batch))
        seconds.append(time.perf_counter() - begin)
    by_step = [q(math.sqrt(kl / found)) for kl in STEPS] if kind == "fd" else []
    return {"seconds": seconds, "peak": peak, "q": found, "by_step": by_step}


def exact(size: str, count: int, tokens: int) -> float:
    """KL / alpha^2 of the step really taken, in float32, at KL = 1e-4."""
    import torch

    from openrlhf_logra.host import cpu

    cpu.multiply_in_float32()
    model, strategy = build(size, "float32")
    ids = responses(size, count, tokens)
    proposal = train(model, strategy, ids[:8])
    probe, batch, along = probing(model, strategy, proposal, ids)
    before = probe.hidden(batch)
    alpha = math.sqrt(KL / (probe.variance_by_tangent(batch, along) / (2 * batch.count)))
    with torch.no_grad():
        for target, direction in zip(strategy.targets, proposal.directions):
            step = direction @ strategy._projection(target, direction.device)
            target.weight.sub_(alpha * proposal.eta * step)
    return probe.divergence(batch, before, probe.hidden(batch)) / batch.count / alpha**2


def memory(reset: bool = False) -> int:
    """Largest resident size of this process since the last reset, in bytes (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def child(*arguments) -> dict:
    command = [sys.executable, str(Path(__file__)), "--case", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: list[float], scale: float = 1.0) -> str:
    low, middle, high = min(values) * scale, statistics.median(values) * scale, max(values) * scale
    return f"{middle:.3g} [{low:.3g}, {high:.3g}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=32, help="responses of one update on one rank")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each, half of them generated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        kind, *rest = json.loads(args.case)
        print(json.dumps({"exact": exact, "run": run}[kind](*rest)))
        return
    shape = args.responses, args.tokens
    print(f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores")
    print(f"probe of {PROBED} responses beside an update of {shape[0]} responses of {shape[1]} tokens\n")
    print("| model | dtype | estimator | error at KL 1e-4 | seconds | share of the update | peak memory |")
    print("|---|---|---|---|---|---|---|")
    by_step = []
    for size in args.sizes:
        truth = child("exact", size, *shape)
        update = child("run", size, "bfloat16", "update", *shape, args.repeats)["seconds"]
        for dtype in ("float32", "bfloat16"):
            for kind in ("jvp", "fd"):
                found = child("run", size, dtype, kind, *shape, args.repeats)
                error = f"{(found['q'] / truth - 1) * 100:+.2f}%"
                share = statistics.median(found["seconds"]) / statistics.median(update) * 100
                share_text = f"{share:.1f}% of {statistics.median(update):.2f} s" if dtype == "bfloat16" else ""
                peak = f"{found['peak'] / 1e6:.0f} MB"
                print(f"| {size} | {dtype} | {kind} | {error} | {spread(found['seconds'])} | {share_text} | {peak} |")
                sys.stdout.flush()
                if kind == "fd":
                    errors = [f"{(q / truth - 1) * 100:+.1f}%" for q in found["by_step"]]
                    by_step.append(f"| {size} | {dtype} | {' | '.join(errors)} |")
    print(f"\n| model | dtype | {' | '.join(f'step of KL {kl:g}' for kl in STEPS)} |\n|---|---|{'---|' * len(STEPS)}")
    print("\n".join(by_step))


if __name__ == "__main__":
    main()
