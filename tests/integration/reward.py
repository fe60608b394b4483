"""A reward that differs between samples of any model: the share of letters among the first characters."""

import torch


def reward_func(queries, prompts, labels):
    scores = []
    for query, prompt in zip(queries, prompts, strict=True):
        answer = query[len(prompt) :]
        scores.append(sum(c.islower() for c in answer) / max(len(answer), 1))
    rewards = torch.tensor(scores)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
