"""Flora: momentum that is kept as a random sketch of full gradients (docs/strategies.md).

S = G A^T                      the same sketch as LoGRA's, of a gradient that was formed first
M <- M A_old A^T               when A is drawn again, every `update_gap` steps
M <- beta1 M + (1 - beta1) S
step = M A

Carrying M over to another A multiplies |M|^2 by k / r in expectation, for rows of length k: the step jumps at a draw,
and momentum falls from draw to draw only if beta1^update_gap sqrt(k / r) is below 1.
"""

import math
from dataclasses import dataclass, replace

import torch

from .projection import Projection, projection_index
from .subspace import State


@dataclass(frozen=True)
class Flora:
    """The rule of one matrix (see `MatrixRule`).

    Attributes:
        projection: names A; its index counts draws from here on.
        update_gap: steps between two draws; 0 keeps the first.
        beta1: decay of the momentum.
    """

    projection: Projection
    update_gap: int = 200
    beta1: float = 0.9

    def step(self, gradient: torch.Tensor, state: State) -> torch.Tensor:
        index = projection_index(state.setdefault("t", 0), self.update_gap)
        drawn = self._draw(index, gradient.device)
        sketch = gradient @ drawn.t()
        if "m" not in state:
            state["m"] = torch.zeros_like(sketch)
        elif index != state["index"]:
            state["m"] = state["m"] @ (self._draw(state["index"], gradient.device) @ drawn.t())
        state["m"].lerp_(sketch, 1 - self.beta1)
        state.update(t=state["t"] + 1, index=index)
        return state["m"] @ drawn

    @property
    def shortest_gap(self) -> int:
        """Steps between two draws from which on momentum falls from draw to draw."""
        growth = math.sqrt(self.projection.width / self.projection.rank)
        return math.floor(math.log(growth) / -math.log(self.beta1)) + 1 if self.beta1 else 1

    def state_bytes(self, rows: int, cols: int) -> int:
        return 4 * rows * self.projection.rank

    def _draw(self, index: int, device: torch.device) -> torch.Tensor:
        return replace(self.projection, index=index).block(device=device) / math.sqrt(self.projection.rank)
