"""A sync of one update at the shapes of Qwen2.5-7B: bytes against full weights, an apply against a dense load.

    python tests/benchmarks/sync_payload.py [--rank 256] [--repeats 5] [--device cpu]

Real records of one layer, times the number of layers. Times are medians of repeats in one process, and extremes; a
"dense load" decodes a record of the same matrices whole and copies it into them.
"""

import argparse
import platform
import statistics
import time

import torch

from openrlhf_logra.math.exact import Update, quantize
from openrlhf_logra.math.projection import Projection
from openrlhf_logra.sync.log import apply_record
from openrlhf_logra.sync.record import decode, dense_record, encode, factor_record

HIDDEN, INTERMEDIATE, KEY_VALUE, LAYERS, VOCABULARY = 3584, 18944, 512, 28, 152064
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEY_VALUE, HIDDEN),
    "self_attn.v_proj": (KEY_VALUE, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}


def full_bytes() -> int:
    """All parameters of the model in bf16: what a stock sync sends."""
    layer = sum(d * k for d, k in LAYER.values()) + HIDDEN + 2 * KEY_VALUE + 2 * HIDDEN
    return 2 * (LAYERS * layer + 2 * VOCABULARY * HIDDEN + HIDDEN)


def measure(call, repeats: int, device: str) -> list[float]:
    seconds = []
    for _ in range(repeats + 1):  # the first one warms up
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def shown(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    names = {f"model.layers.0.{name}.weight": shape for name, shape in LAYER.items()}
    updates = tuple(
        Update(
            Projection(0, 0, name, args.rank, k), 0, *quantize(torch.randn(d, args.rank, generator=generator) * 1e-6)
        )
        for name, (d, k) in names.items()
    )
    weights = {
        name: (torch.randn(shape, generator=generator) * 0.02).bfloat16().to(args.device)
        for name, shape in names.items()
    }
    factors, _ = encode(factor_record(updates, 1, 1))
    dense, _ = encode(dense_record(weights, 1))
    payload, full = LAYERS * len(factors), full_bytes()
    name = platform.processor() or platform.machine() if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, rank {args.rank}")
    print(f"sync of one update {payload / 1e6:,.0f} MB, full weights {full / 1e6:,.0f} MB: 1/{full / payload:.1f}")
    apply = measure(lambda: apply_record(decode(factors), weights), args.repeats, args.device)
    load = measure(lambda: apply_record(decode(dense), weights), args.repeats, args.device)
    print(f"one layer: apply {shown(apply)}, dense load {shown(load)}")
    print(f"ratio of medians: {statistics.median(apply) / statistics.median(load):.1f}")


if __name__ == "__main__":
    main()
