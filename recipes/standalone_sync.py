"""Any training script and vLLM, without OpenRLHF: low-rank updates, and engines that hold the same bits.

python recipes/standalone_sync.py MODEL
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from openrlhf_logra.config import LograConfig
from openrlhf_logra.strategies.logra import LograStrategy
from openrlhf_logra.sync.trainer import LograTrainerEngine, LograTrainerInitInfo

EXTENSION = "openrlhf_logra.host.vllm_worker.LograWorkerExtension"
# The first switches our vLLM entry point on, the second lets an RPC carry bytes. Both reach the engine's processes.
os.environ.update(OPENRLHF_LOGRA="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1")


class Client:
    """What the trainer's end needs of the engines: here one in this process. Over a network, forward three calls."""

    def __init__(self, llm: LLM):
        self._llm = llm

    def count(self) -> int:
        return 1

    def initialise(self, engines: list[int], init_info: dict) -> list:
        return [self._llm.collective_rpc("logra_initialise", args=(init_info,)) for _ in engines]

    def sync(self, engines: list[int], update_info: dict) -> list:
        return [self._llm.collective_rpc("logra_sync", args=(update_info,)) for _ in engines]


def main(path: str) -> None:
    llm = LLM(path, dtype="bfloat16", worker_extension_cls=EXTENSION, weight_transfer_config={"backend": "logra"})
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    strategy = LograStrategy(LograConfig(rank=8, update_ratio=1e-3), model)
    strategy.attach()
    strategy.bind(model.device)
    settings = LograTrainerInitInfo(
        rank=0,
        trained=strategy.trained,
        exact_updates=strategy.exact_updates,
        refresh_every=strategy.config.refresh_every,
        verify_every=1,
    )
    sync = LograTrainerEngine.trainer_init(settings, client=Client(llm), source=strategy.parameters())
    for _ in range(3):
        ids = torch.randint(3, model.config.vocab_size, (4, 16))
        model(input_ids=ids, labels=ids).loss.backward()
        outcome = strategy.step(alpha=1.0, max_norm=1.0)
        if not outcome.skipped:
            sync.push(outcome.updates, outcome.version)
        print(sync.send_weights())
        print(llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=8), use_tqdm=False)[0].outputs)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
