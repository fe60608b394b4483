"""A rollout engine without vLLM's runtime: our real worker end on a small module with a loader like vLLM's."""

import torch
from torch import nn

from openrlhf_logra.sync.worker import LograInitInfo, LograUpdateInfo, LograWeightTransferEngine

WIDTH, HEADS = 24, 3
SHAPES = {
    "embed.weight": (10, WIDTH),
    "layers.0.norm.weight": (WIDTH,),
    "layers.0.q_proj.weight": (WIDTH, WIDTH),
    "layers.0.k_proj.weight": (8, WIDTH),
    "layers.0.v_proj.weight": (8, WIDTH),
    "layers.0.o_proj.weight": (WIDTH, WIDTH),
    "layers.0.q_proj.bias": (WIDTH,),
}


class Runtime(nn.Module):
    """One tensor-parallel worker: fused qkv by rows (k and v replicated), o by columns, a padded embedding."""

    def __init__(self, rank: int = 0, world: int = 1):
        super().__init__()
        self.rank, self.world, self.part = rank, world, WIDTH // world
        zeros = {
            "embed": torch.zeros(16, WIDTH),
            "norm": torch.zeros(WIDTH),
            "qkv": torch.zeros(self.part + 16, WIDTH),
            "qkv_bias": torch.zeros(self.part),
            "o": torch.zeros(WIDTH, self.part),
        }
        self.layers = nn.ModuleList([nn.Module()])
        self.embed = nn.Parameter(zeros.pop("embed").bfloat16(), requires_grad=False)
        for name, value in zeros.items():
            self.layers[0].register_parameter(name, nn.Parameter(value.bfloat16(), requires_grad=False))

    def load_weights(self, weights) -> None:
        layer, mine = self.layers[0], slice(self.rank * self.part, (self.rank + 1) * self.part)
        for name, value in weights:
            if name == "embed.weight":
                self.embed.data[:10].copy_(value)
                self.embed.data[10:].fill_(0)
            elif name.endswith("norm.weight"):
                layer.norm.data.copy_(value)
            elif name.endswith("q_proj.weight"):
                layer.qkv.data[: self.part].copy_(value[mine])
            elif name.endswith("k_proj.weight"):
                layer.qkv.data[self.part : self.part + 8].copy_(value)
            elif name.endswith("v_proj.weight"):
                layer.qkv.data[self.part + 8 :].copy_(value)
            elif name.endswith("q_proj.bias"):
                layer.qkv_bias.data.copy_(value[mine])
            elif name.endswith("o_proj.weight"):
                layer.o.data.copy_(value[:, mine])


class Engine:
    """`world` workers, as `SyncClient` sees them."""

    def __init__(self, world: int = 1, model: type[Runtime] = Runtime):
        self.workers = []
        for rank in range(world):
            worker = LograWeightTransferEngine.__new__(LograWeightTransferEngine)
            worker.model, worker.device = model(rank, world), torch.device("cpu")
            self.workers.append(worker)

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        for worker in self.workers:
            worker.model.load_weights(weights.items())

    def initialise(self, info: dict) -> list[dict]:
        for worker in self.workers:
            worker.init_transfer_engine(LograInitInfo(**info))
        return [worker.describe_layout() for worker in self.workers]

    def sync(self, info: dict) -> list[dict]:
        return [worker.apply(LograUpdateInfo(**info)) for worker in self.workers]


class Client:
    """Engines of this process; `faults` maps a call's number to what replaces it: f(engine index, engine, info)."""

    def __init__(self, engines: list[Engine]):
        self.engines, self.calls, self.faults = engines, 0, {}

    def count(self) -> int:
        return len(self.engines)

    def initialise(self, engines: list[int], info: dict) -> list:
        return [self.engines[index].initialise(info) for index in engines]

    def sync(self, engines: list[int], info: dict) -> list:
        if not info.get("records"):  # first contact, which only asks for digests
            return [self.engines[index].sync(info) for index in engines]
        fault = self.faults.get(self.calls, lambda index, engine, info: engine.sync(info))
        self.calls += 1
        answers = []
        for index in engines:
            try:
                answers.append(fault(index, self.engines[index], info))
            except Exception as error:
                answers.append(error)
        return answers
