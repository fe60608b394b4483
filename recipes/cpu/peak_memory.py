"""A callback (`--logra.callbacks peak_memory:PeakMemory`): the trainer's largest memory so far, beside its metrics."""

import resource

import torch

from openrlhf_logra.train.callbacks import Callback, UpdateContext


class PeakMemory(Callback):
    """`peak_memory_bytes`: allocated on the GPU, or where there is none, resident in the process."""

    def on_step_end(self, context: UpdateContext) -> None:
        if context.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(context.device)
        else:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        context.metrics["peak_memory_bytes"] = float(peak)
