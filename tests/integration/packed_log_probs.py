"""Log-probabilities and gradients of OpenRLHF's actor in float32: padded, packed, and packed over a ring of two ranks.

    python packed_log_probs.py MODEL RESULTS_DIR   (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as torchrun sets them)

Used by test_packing.py.
"""

import sys
from pathlib import Path

from openrlhf_logra.host import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from openrlhf.models import Actor  # noqa: E402

LENGTHS = (12, 5, 9, 1, 7)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded tokens and attention mask [5, 12]."""
    tokens = torch.randint(3, 99, (len(LENGTHS), 12), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()
    return tokens * mask, mask


def run(model: str, packing: bool, ring=None) -> dict:
    torch.manual_seed(0)
    attention = "flash_attention_2"
    actor = Actor(model, attn_implementation=attention, param_dtype="bf16", packing_samples=packing)
    actor.model.float()
    sequences, mask = batch()
    actions = mask[:, 1:].float()
    log_probs = actor(sequences, actions, attention_mask=mask, ring_attn_group=ring)
    (log_probs * actions * torch.linspace(0.5, 2, log_probs.numel()).view_as(log_probs)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in actor.named_parameters()}
    if ring is not None:  # as DeepSpeed does: the mean over all ranks
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size(ring)
    return {"log_probs": log_probs.detach() * actions, "gradients": gradients}


def main() -> None:
    model, results = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"padded": run(model, False), "packed": run(model, True)}
    if dist.get_world_size() > 1:
        from openrlhf.models.ring_attn_utils import set_ring_attn_group
        from ring_flash_attn import substitute_hf_flash_attn

        ring = dist.new_group(range(dist.get_world_size()))
        set_ring_attn_group(ring)
        substitute_hf_flash_attn(ring, 1)
        found["ring"] = run(model, True, ring)
    torch.save(found, results / f"rank{dist.get_rank()}.pt")
    dist.barrier()


main()
