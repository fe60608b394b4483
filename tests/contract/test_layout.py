"""Layout discovery on models whose layers are alike, or only look so."""

import torch
from torch import nn

from openrlhf_logra.sync.layout import discover_layout

WIDTH = 8


class Layer(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(2 * WIDTH, WIDTH, dtype=dtype), requires_grad=False)


class Stack(nn.Module):
    """q and k of each layer fused; counts what its loader is given."""

    def __init__(self, dtypes):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dtype) for dtype in dtypes)
        self.loaded = 0

    def load_weights(self, weights):
        for name, value in weights:
            self.loaded += 1
            _, number, part, _ = name.split(".")
            start = WIDTH * "qk".index(part)
            self.layers[int(number)].qk.data[start : start + WIDTH].copy_(value)


def names(count):
    return {f"layers.{number}.{part}.weight": (WIDTH, WIDTH) for number in range(count) for part in "qk"}


def test_layers_alike_are_learnt_once():
    model = Stack([torch.bfloat16] * 12)
    layout, unknown = discover_layout(model, names(12), model.load_weights)
    assert model.loaded == 2 and not unknown and layout.keys() == names(12).keys()
    for name, (block,) in layout.items():
        assert block.parameter == f"layers.{name.split('.')[1]}.qk" and block.row0 == WIDTH * ("k.weight" in name)


def test_a_layer_of_another_dtype_is_looked_at_by_itself():
    model = Stack([torch.bfloat16, torch.float32, torch.bfloat16])
    layout, unknown = discover_layout(model, names(3), model.load_weights)
    assert model.loaded == 4 and set(unknown) == {"layers.1.q.weight", "layers.1.k.weight"}
    assert set(layout) == set(names(3)) - set(unknown)


def test_a_layer_of_another_shape_is_learnt_by_itself():
    model = Stack([torch.bfloat16] * 3)
    shapes = names(3)
    model.layers[1].qk.data = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)
    del shapes["layers.1.k.weight"]
    layout, unknown = discover_layout(model, shapes, model.load_weights)
    assert model.loaded == 3 and not unknown and layout["layers.1.q.weight"][0].rows == WIDTH


def test_a_tower_that_the_loader_does_not_know_takes_nothing_with_it():
    """Its layers have the same numbers as the others; one of its parameters stands beside theirs without a number."""
    model = Stack([torch.bfloat16] * 3)
    model.head = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16), requires_grad=False)
    layers = model.load_weights

    def load_weights(weights):
        for name, value in weights:
            if name.startswith("tower"):
                raise ValueError(f"no parameter {name}")
            model.head.data.copy_(value) if name == "head.weight" else layers([(name, value)])

    tower = {f"tower.{name}": shape for name, shape in names(2).items()} | {"tower.patches.weight": (WIDTH, WIDTH)}
    layout, unknown = discover_layout(model, {**tower, **names(3), "head.weight": (WIDTH, WIDTH)}, load_weights)
    assert layout.keys() == {*names(3), "head.weight"} and model.loaded == 2
    assert unknown.keys() == tower.keys() and all("no parameter tower" in reason for reason in unknown.values())
