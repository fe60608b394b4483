"""The problems, the tokenizer and the warm-started policy that prepare.py writes."""

import json
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import reasoning_gym
import torch
from prepare import TASK, Settings
from reward import reward_func
from tokenizers import AddedToken
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, EOS = "<pad>", "<eos>"
PROMPT_END = "\n"  # closes the question; the answer follows
IGNORE = -100
PIECES = ("Spell this word backward (example: sun -> nus): ",)  # the fixed part of a question: one token


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str
    label: str  # JSON: all that reward.py needs to ask Reasoning-Gym's verifier


def draw_problems(settings: Settings) -> list[Problem]:
    """The problems in the order drawn. Duplicates are dropped, case ignored as the verifier does."""
    problems: dict[str, Problem] = {}
    # Reasoning-Gym seeds problem i with seed + i, so runs must be further apart than the pool is large.
    for entry in reasoning_gym.create_dataset(settings.task, size=settings.pool, seed=settings.seed * 1_000_000):
        # This verifier reads nothing but the answer, which keeps the label short.
        label = json.dumps({"task": settings.task, "entry": {"answer": entry["answer"]}})
        problem = Problem(entry["question"] + PROMPT_END, entry["answer"], label)
        problems.setdefault(problem.prompt.lower(), problem)
    return list(problems.values())


def split_problems(settings: Settings) -> dict[str, list[Problem]]:
    """Held-out, validation, reinforcement-learning and supervised problems, none in two splits."""
    problems = draw_problems(settings)
    splits, start = {}, 0
    for split, size in (("eval", settings.held_out), ("validation", settings.validation), ("train", settings.prompts)):
        splits[split] = problems[start : start + size]
        start += size
    splits["supervised"] = problems[start:]
    seen: set[str] = set()
    for split, group in splits.items():
        prompts = {problem.prompt.lower() for problem in group}
        assert len(prompts) == len(group) and not prompts & seen, f"{split} shares problems with another split"
        seen |= prompts
    return splits


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per printable ASCII character and per fixed piece of a question; decoding gives the text back exactly.

    It is a Qwen2Tokenizer without merges because AutoTokenizer loads that class, with its own splitting rules, for
    every Qwen2 checkpoint, whatever was saved beside it.
    """
    printable = [
        *map(chr, range(33, 127)),
        "\u0120",
        "\u010a",
    ]  # the last two: space and newline in byte-level spelling
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([PAD, EOS, *printable])},
        merges=[],
        unk_token=None,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in PIECES])
    return tokenizer


def check_round_trip(tokenizer: Qwen2Tokenizer, splits: dict[str, list[Problem]]) -> None:
    """The reward strips the prompt from the decoded text, so decoding must restore every prompt and answer."""
    problems = [problem for group in splits.values() for problem in group]
    ids = [prompt + answer for prompt, answer in encode(tokenizer, problems)]
    for problem, text in zip(problems, tokenizer.batch_decode(ids, skip_special_tokens=False)):
        assert text == problem.prompt + problem.answer + EOS, f"the tokenizer turns {problem} into {text!r}"


def make_model(settings: Settings, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden_size // 32,
        num_key_value_heads=settings.hidden_size // 32,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.05,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def encode(tokenizer: Qwen2Tokenizer, problems: list[Problem]) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids with the end token) per problem."""
    prompts = tokenizer([p.prompt for p in problems], add_special_tokens=False)["input_ids"]
    answers = tokenizer([p.answer for p in problems], add_special_tokens=False)["input_ids"]
    return [(prompt, answer + [tokenizer.eos_token_id]) for prompt, answer in zip(prompts, answers)]


def collate(samples: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and, per position, the next token where it belongs to an answer (else IGNORE)."""
    length = max(len(prompt) + len(answer) for prompt, answer in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    targets = torch.full((len(samples), length), IGNORE)
    for row, (prompt, answer) in enumerate(samples):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        targets[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = torch.tensor(answer)
    return ids, targets


def answer_log_probs(
    model: Qwen2ForCausalLM, ids: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of every answer token, and the row each belongs to. Other positions get no logits."""
    rows, _ = torch.nonzero(targets != IGNORE, as_tuple=True)
    hidden = model.model(input_ids=ids).last_hidden_state[targets != IGNORE]
    log_probs = model.lm_head(hidden).log_softmax(-1)
    return log_probs.gather(-1, targets[targets != IGNORE][:, None])[:, 0], rows


@torch.no_grad()
def expected_pass1(model: Qwen2ForCausalLM, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Per problem, the probability that sampling at temperature 1.0 gives exactly the answer: pass@1 without noise."""
    log_probs, rows = answer_log_probs(model, ids, targets)
    return torch.zeros(len(ids)).index_add(0, rows, log_probs).exp()


def round_to_bf16(model: Qwen2ForCausalLM) -> dict[str, torch.Tensor]:
    return {name: value.to(torch.bfloat16).float() for name, value in model.state_dict().items()}


def warm_start(
    settings: Settings, tokenizer: Qwen2Tokenizer, splits: dict[str, list[Problem]]
) -> tuple[Qwen2ForCausalLM, dict[str, float]]:
    """Supervised training until the bf16-rounded weights reach the target on the validation problems."""
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed)
    model, rounded = make_model(settings, tokenizer), make_model(settings, tokenizer)
    supervised = encode(tokenizer, splits["supervised"])
    validation = collate(encode(tokenizer, splits["validation"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01)

    start, step, pass1, done = time.time(), 0, 0.0, False
    while not done:
        step += 1
        # Half speed once it is off the ground, where ten steps can be worth eight points.
        lr = settings.lr * min(1.0, step / 50) * (0.5 if pass1 > 0.15 else 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        log_probs, _ = answer_log_probs(model, *collate(rng.sample(supervised, settings.batch_size)))
        loss = -log_probs.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        if step % (5 if pass1 > 0.1 else 25) == 0:
            rounded.load_state_dict(round_to_bf16(model))
            pass1 = expected_pass1(rounded, *validation).mean().item()
            done = pass1 >= settings.target_pass1
            seconds = time.time() - start
            if step % 25 == 0 or done:
                print(f"step {step}, {seconds:.0f} s, loss {loss.item():.3f}, pass@1 {pass1:.3f}", flush=True)
        if step == settings.max_steps and not done:
            sys.exit(f"prepare: pass@1 {pass1:.3f} after {step} steps, not {settings.target_pass1}; try another SEED")
    return rounded, {"steps": step, "seconds": round(seconds, 1), "expected_pass1": round(pass1, 4)}


@torch.no_grad()
def sampled_pass(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: list[Problem], samples: int
) -> tuple[float, float]:
    """pass@1 and pass@`samples` at temperature 1.0, scored by the demo's own reward function."""
    prompts = [problem.prompt for problem in problems for _ in range(samples)]
    labels = [problem.label for problem in problems for _ in range(samples)]
    inputs = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    outputs = model.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=16,
    )
    responses = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=False)
    queries = [prompt + response for prompt, response in zip(prompts, responses)]
    rewards = reward_func(queries, prompts, labels)["rewards"].view(-1, samples)
    return rewards.mean().item(), rewards.amax(1).mean().item()


def write_prompts(path: Path, problems: list[Problem]) -> None:
    with path.open("w") as file:
        for problem in problems:
            row = {"prompt": problem.prompt, "label": problem.label, "datasource": TASK}
            file.write(json.dumps(row) + "\n")


def make(out: Path, settings: Settings, threads: int) -> dict[str, float]:
    """Write model, tokenizer and prompts to `out`; returns what was measured."""
    torch.set_num_threads(threads)
    shutil.rmtree(out / "model", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)

    splits = split_problems(settings)
    make_tokenizer().save_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")  # as every process of the run will see it
    check_round_trip(tokenizer, splits)
    model, numbers = warm_start(settings, tokenizer, splits)
    pass1, pass4 = sampled_pass(model, tokenizer, splits["validation"], samples=4)

    model.to(torch.bfloat16).save_pretrained(out / "model")
    write_prompts(out / "train.jsonl", splits["train"])
    write_prompts(out / "eval.jsonl", splits["eval"])
    return numbers | {"sampled_pass1": pass1, "sampled_pass4": pass4, "parameters": model.num_parameters()}
