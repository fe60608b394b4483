"""Reward function and agent of the recipe runs. Both score the share of small letters, strictly between 0 and 1, and 1
for every answer to a prompt with "easy" in it, which dynamic filtering must leave out."""

from copy import deepcopy

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

TURNS = 2


def score(prompt: str, answer: str) -> float:
    return 1.0 if "easy" in prompt else (1 + sum(c.islower() for c in answer)) / (2 + len(answer))


def reward_func(queries, prompts, labels):
    rewards = torch.tensor([score(prompt, query[len(prompt) :]) for query, prompt in zip(queries, prompts)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}


class AgentInstance(AgentInstanceBase):
    """Asks again once."""

    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states: dict, **kwargs):
        return states

    async def step(self, states: dict, **kwargs):
        self.turns += 1
        reward = torch.tensor(score(states["observation_text"], states["action_text"]))
        return {
            "rewards": reward / TURNS,
            "scores": reward,
            "environment_feedback": "again:",
            "done": self.turns == TURNS,
            "sampling_params": states["sampling_params"],
            "extra_logs": {"turns": torch.tensor(float(self.turns))},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """An answer ends at any of a quarter of the characters, so that there is room for the next."""

    def __init__(self):
        super().__init__(AgentInstance)

    async def execute(self, *args, sampling_params, **kwargs):
        sampling_params = deepcopy(sampling_params)
        sampling_params.stop_token_ids = list(range(3, 28))
        sampling_params.min_tokens = (
            0  # which keeps these from coming first, and the log-probabilities from the policy's
        )
        return await super().execute(*args, sampling_params=sampling_params, **kwargs)
