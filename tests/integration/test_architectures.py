"""Every layout: six architectures (without --full the three that differ most: biases and a tied head, fused matrices,
heads wider than the model), an engine of one worker beside one of two (tensor parallelism).

After ten syncs of factors, and two of changed elements in every parameter, the engines hold in every runtime parameter
the bits that fresh engines load from the saved checkpoint, and continue prompts as those do.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FULL
from models import ARCHITECTURES, make_architecture
from vllm_engines import Trainer, engine

FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
PROMPTS = [[5, 17, 40, 33], [60, 61, 62], [9] * 20]


def runtime_bits(llm) -> list[dict[str, np.ndarray]]:
    """Every parameter of every worker as vLLM holds it."""
    return llm.collective_rpc(
        lambda worker: {
            name: parameter.data.cpu().contiguous().view(torch.int16).numpy()
            for name, parameter in worker.model_runner.model.named_parameters()
        }
    )


def continuations(llm) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def holds_what_a_fresh_engine_loads(llm, fresh) -> None:
    for held, loaded in zip(runtime_bits(llm), runtime_bits(fresh), strict=True):
        assert held.keys() == loaded.keys()
        different = [name for name in held if not np.array_equal(held[name], loaded[name])]
        assert not different
    assert continuations(llm) == continuations(fresh)


def check(name: str, folder: Path, every_fresh: bool) -> None:
    path = make_architecture(folder / "base", name)
    targets = {"target_modules": FUSED} if name == "phi3" else {}
    with engine(path) as one, engine(path, tensor_parallel_size=2) as two:
        before = continuations(one)
        trainer = Trainer(path, [one, two], mode="factor", **targets)
        for sync in range(10):
            trainer.update(1 + sync % 3)
            report = trainer.sender.send_weights()
            assert report.digest_ok and report.mode == "factor"
        assert not trainer.sender._unknown and not trainer.sender._rearranged
        # The same weights go on by changed elements in every parameter, embeddings and norms included.
        dense = Trainer(trainer.saved(folder / "between"), [one, two], method="dense")
        for _ in range(2):
            dense.update()
            report = dense.sender.send_weights()
            assert report.digest_ok and report.mode == "sparse"
        after = dense.saved(folder / "after")
        with engine(after) as fresh:
            holds_what_a_fresh_engine_loads(one, fresh)
            assert continuations(one) != before
        if every_fresh:
            with engine(after, tensor_parallel_size=2) as fresh:
                holds_what_a_fresh_engine_loads(two, fresh)


def run_engine_cores_here() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


@pytest.fixture(scope="module")
def process():
    """Holds vLLM, engine cores included, for all architectures: importing it is most of the time. Apart from this
    process, because vLLM keeps its settings for good."""
    with ProcessPoolExecutor(1, get_context("spawn"), run_engine_cores_here) as pool:
        yield pool


@pytest.mark.parametrize("name", ARCHITECTURES if FULL else ("qwen2", "phi3", "gemma3"))
def test_engines_hold_what_a_fresh_load_would(name, process, tmp_path):
    process.submit(check, name, tmp_path, FULL or name == "phi3").result()
