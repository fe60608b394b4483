"""Which modules are targets."""

import pytest
import torch
from torch import nn
from toy import Toy

from openrlhf_logra.config import ConfigError
from openrlhf_logra.train.targets import check_rank, find_targets


class Tower(Toy):
    """A vision-language model: the tower has layers of the same names."""

    def __init__(self):
        super().__init__()
        self.visual = nn.ModuleList([nn.ModuleDict({"up_proj": nn.Linear(8, 8), "patch": nn.Linear(8, 8)})])
        self.language_model = Toy()

    def get_input_embeddings(self):
        return self.language_model.embed_tokens


def test_names_mean_the_language_model():
    names = [target.name for target in find_targets(Tower(), ("up_proj",))]
    assert names == ["language_model.layers.0.up_proj.weight", "language_model.layers.1.up_proj.weight"]
    assert [target.name for target in find_targets(Tower(), ("patch",))] == ["visual.0.patch.weight"]


@pytest.mark.parametrize(
    "name, found",
    [
        ("language_model.layers.1.up_proj", ["language_model.layers.1.up_proj.weight"]),
        ("layers.1.up_proj", ["language_model.layers.1.up_proj.weight"]),
        ("visual.0.up_proj", ["visual.0.up_proj.weight"]),
        ("0.patch", ["visual.0.patch.weight"]),
    ],
)
def test_a_name_is_the_end_of_a_path_or_all_of_it(name, found):
    assert [target.name for target in find_targets(Tower(), (name,))] == found
    with pytest.raises(ConfigError, match=f"--logra.target_modules {name[1:]} matches no module"):
        find_targets(Tower(), (name[1:],))  # not of a component


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_linear_with_a_forward_of_its_own_is_refused():
    model = Toy()
    model.layers[1].up_proj = Scaled(24, 40)
    with pytest.raises(ConfigError, match=r"layers\.1\.up_proj\.weight belongs to a Scaled"):
        find_targets(model, ("up_proj",))
    model = Toy()
    plain = model.layers[0].up_proj.forward
    model.layers[0].up_proj.forward = lambda x: plain(x)
    with pytest.raises(ConfigError, match=r"layers\.0\.up_proj"):
        find_targets(model, ("up_proj",))


def test_shared_weights_are_refused():
    model = Toy()
    model.lm_head.weight = model.embed_tokens.weight
    with pytest.raises(ConfigError, match="lm_head.weight shares its weight with embed_tokens.weight"):
        find_targets(model, ("lm_head",))


def test_the_largest_rank():
    targets = find_targets(Toy(), ("up_proj", "down_proj"))
    check_rank(24, targets)
    with pytest.raises(ConfigError, match="--logra.rank 25 is above in_features 24.*largest rank .* is 24"):
        check_rank(25, targets)


def test_sizes_on_the_meta_device():
    with torch.device("meta"):
        model = Toy()
    assert [(t.rows, t.width) for t in find_targets(model, ("down_proj",))] == [(24, 40), (24, 40)]
