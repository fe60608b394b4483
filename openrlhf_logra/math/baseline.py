"""The paper's baseline for one response per prompt: a global running mean of rewards (Algorithm 1, advantages)."""

import torch


class RunningBaseline:
    """Mean of every reward seen in earlier batches; of the first batch itself, before which there is none.

    Earlier batches only, so that a reward does not enter the baseline that it is compared with.
    """

    def __init__(self) -> None:
        self._count, self._mean = 0, 0.0

    def take(self, rewards: torch.Tensor) -> float:
        """The baseline of this batch, which then joins the mean.

        Args:
            rewards: [n], any float dtype; what is not finite is left out of the mean.
        """
        rewards = rewards.double()
        rewards = rewards[rewards.isfinite()]
        before, count = (self._mean, self._count), self._count + len(rewards)
        if len(rewards):
            self._mean += float((rewards - self._mean).sum()) / count
            self._count = count
        return before[0] if before[1] else self._mean

    def state_dict(self) -> dict:
        """Numbers only."""
        return {"count": self._count, "mean": self._mean}

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state_dict()`."""
        self._count, self._mean = state["count"], state["mean"]
