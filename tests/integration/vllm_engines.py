"""Real vLLM engines in this process's charge, and a trainer that syncs with them: no Ray, no DeepSpeed."""

import os
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from openrlhf_logra.config import LograConfig
from openrlhf_logra.host.vllm_plugin import ENABLED
from openrlhf_logra.strategies.dense import DenseStrategy
from openrlhf_logra.strategies.logra import LograStrategy
from openrlhf_logra.sync.trainer import LograTrainerEngine, LograTrainerInitInfo, digests_of

EXTENSION = "openrlhf_logra.host.vllm_worker.LograWorkerExtension"


@contextmanager
def engine(path, tensor_parallel_size=1, **options):
    """A vLLM engine with our end in its workers."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # read at every RPC, on both sides
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the engines of a test share the cores
    os.environ.update({ENABLED: "1", "VLLM_CPU_KVCACHE_SPACE": "1"})
    from vllm import LLM

    try:
        llm = LLM(
            str(path),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=64,
            disable_log_stats=True,
            tensor_parallel_size=tensor_parallel_size,
            worker_extension_cls=EXTENSION,
            weight_transfer_config={"backend": "logra"},
            **options,
        )
    finally:
        del os.environ[ENABLED]
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


class LocalEngines:
    """`SyncClient` over engines of this process; `tamper` may change what is sent."""

    def __init__(self, engines):
        self.engines = engines
        self.tamper = lambda update_info: update_info
        self.sent: list[dict] = []

    def count(self):
        return len(self.engines)

    def initialise(self, engines, init_info):
        return [self.engines[i].collective_rpc("logra_initialise", args=(init_info,)) for i in engines]

    def sync(self, engines, update_info):
        if update_info.get("records"):
            self.sent.append(update_info)
            update_info = self.tamper(update_info)
        return [self.engines[i].collective_rpc("logra_sync", args=(update_info,)) for i in engines]


class Trainer:
    """A policy in this process that makes updates, and the sender."""

    def __init__(self, path, engines, *, method="logra", update_ratio=1e-2, **options):
        sync = {
            key: options.pop(key)
            for key in ("mode", "verify_every", "loaded_version", "version", "state", "log_dir")
            if key in options
        }
        self._path = Path(path)
        config = LograConfig(method=method, **{"rank": 8, "update_ratio": update_ratio, **options})
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        self.strategy = {"logra": LograStrategy, "dense": DenseStrategy}[method](config, self.model)
        self.strategy.attach()
        self.strategy.bind(torch.device("cpu"))
        self.client = LocalEngines(engines)
        self.parameters = self.strategy.parameters()
        if sync.get("loaded_version", 0) == 0:
            sync["base_digests"] = digests_of(self.parameters)
        self.sender = LograTrainerEngine.trainer_init(
            LograTrainerInitInfo(
                rank=0,
                trained=self.strategy.trained,
                exact_updates=self.strategy.exact_updates,
                refresh_every=config.refresh_every,
                **{"verify_every": 1, **sync},
            ),
            client=self.client,
            source=self.parameters,
        )
        self._seed = 0

    def update(self, count=1):
        for _ in range(count):
            self._seed += 1
            ids = torch.randint(3, 99, (2, 10), generator=torch.Generator().manual_seed(self._seed))
            self.model(input_ids=ids, labels=ids).loss.backward()
            if isinstance(self.strategy, DenseStrategy):
                self._step_of_adam()
            outcome = self.strategy.step(1.0, 1.0)
            self.sender.push(outcome.updates, outcome.version)

    def saved(self, path):
        """A checkpoint of the present weights, with the tokenizer."""
        for name in ("tokenizer.json", "tokenizer_config.json"):
            path.mkdir(exist_ok=True)
            (path / name).write_bytes((self._path / name).read_bytes())
        self.model.save_pretrained(path)
        return path

    def _step_of_adam(self):
        """What DeepSpeed's optimizer would have done by now, roughly: some elements of every parameter move."""
        for parameter in self.parameters.values():
            moved = parameter.data - 2e-3 * parameter.grad.sign() * parameter.data.abs()
            parameter.data.copy_(moved)
            parameter.grad = None
