"""Reward of the CPU demo: Reasoning-Gym's own verifier, 1.0 for full marks and 0.0 otherwise.

OpenRLHF loads this file by its path (`--reward.remote_url recipes/cpu/reward.py`) in every rollout worker and calls
`reward_func` from several threads, so it keeps no state. The label says which task the problem belongs to and holds
what that task's verifier needs; prepare.py writes it.
"""

import json
from functools import cache

import reasoning_gym
import torch

EOS = "<eos>"


@cache
def verifier(task: str):
    """A data set is asked only for its `score_answer`; the problem itself comes with the label."""
    return reasoning_gym.create_dataset(task, size=1, seed=0)


def score(query: str, prompt: str, label: str) -> float:
    """`query` is prompt + response as text. No end token means that the response was cut off, which earns nothing."""
    answer, end, _ = query.removeprefix(prompt).partition(EOS)
    if not end:
        return 0.0
    problem = json.loads(label)
    # Exactly 1.0: for a right answer with something after it, spell_backward's partial credit sums to
    # 0.9999999999999999 or even 1.0000000000000002 at some lengths.
    return float(verifier(problem["task"]).score_answer(answer, problem["entry"]) == 1.0)


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, torch.Tensor]:
    rewards = torch.tensor([score(*item) for item in zip(queries, prompts, labels)])
    return {"rewards": rewards, "scores": rewards}
