"""CPU stand-in of flash attention (host/cpu_attention.py): packed rows and rings compute what padded batches do."""

from pathlib import Path

import pytest
import torch
from conftest import run_ranks
from models import ARCHITECTURES, make_architecture

SCRIPT = Path(__file__).with_name("packed_log_probs.py")


@pytest.fixture(scope="module", params=["qwen2", "sliding"])
def found(request, tmp_path_factory):
    """[per rank: {way: log-probabilities and gradients}]."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "sliding":
        ARCHITECTURES["sliding"] = ("Mistral", {"sliding_window": 4})
    model = make_architecture(folder / "model", request.param)
    run_ranks(SCRIPT, [str(model), str(folder)], 2, timeout=200)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("way", ["packed", "ring"])
def test_it_computes_what_a_padded_batch_does(found, way):
    for rank in found:
        padded, other = rank["padded"], rank[way]
        assert padded["log_probs"].abs().max() > 1
        torch.testing.assert_close(other["log_probs"], padded["log_probs"], rtol=1e-5, atol=1e-5)
        for name, gradient in padded["gradients"].items():
            error = (other["gradients"][name] - gradient).norm() / gradient.norm()
            assert gradient.norm() > 0 and error < 1e-5, f"{name}: {error}"
