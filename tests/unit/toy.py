"""A small model in plain torch with the shape that LoGRA expects of a Hugging Face one."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, inner, bias=True)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down_proj(torch.nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Toy(nn.Module):
    """Embedding, blocks (the first one's module is used twice when `shared`), head."""

    _keys_to_ignore_on_save = None

    def __init__(self, vocabulary=23, width=24, inner=40, layers=2, checkpointing=None, shared=False):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(layers))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.checkpointing, self.shared = checkpointing, shared

    def get_input_embeddings(self):
        return self.embed_tokens

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in [*self.layers, self.layers[0]] if self.shared else self.layers:
            if self.checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
        return self.lm_head(x)


def loss_of(model, ids):
    logits = model(ids[:, :-1]).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def batch(rows=4, length=9, vocabulary=23, seed=0):
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
