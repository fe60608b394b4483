"""Make everything the CPU demo starts from: a tokenizer, prompts, and a tiny warm-started policy.

    python recipes/cpu/prepare.py --out DIR --seed N

The problems are Reasoning-Gym's, question text unchanged. The policy is a Qwen2 of about half a million parameters, trained
on the spot with supervised samples until it solves about a third of unseen problems when sampled at temperature 1.0:
good enough to earn rewards, far enough from perfect that reinforcement learning shows.

Written to DIR: model/ (Hugging Face checkpoint, bf16, with its tokenizer), train.jsonl and eval.jsonl (columns prompt,
label, datasource; no problem in common), and last of all prepared.json, whose presence means that the rest is complete.
"""

import argparse
import json
import random
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from reward import reward_func  # noqa: E402  (the file that OpenRLHF loads by its path)

PAD, EOS = "<pad>", "<eos>"
PROMPT_END = "\n"  # closes the question; the answer follows
IGNORE = -100


@dataclass(frozen=True)
class Task:
    """One Reasoning-Gym data set. `pieces` are fixed parts of its question that become one token each."""

    name: str
    config: dict[str, Any]
    pieces: tuple[str, ...]


TASKS = (
    Task("spell_backward", {}, ("Spell this word backward (example: sun -> nus): ",)),
)


@dataclass(frozen=True)
class Settings:
    """What decides the outcome. Two runs with equal settings make the same files (up to wall-clock limits)."""

    seed: int
    tasks: tuple[str, ...]
    hidden_size: int = 128
    layers: int = 2
    pool: int = 20000  # problems drawn per task, before duplicates are dropped
    held_out: int = 256  # per task
    validation: int = 512  # per task
    prompts: int = 4096  # per task, for reinforcement learning
    batch_size: int = 64
    lr: float = 3e-3
    target_pass1: float = 0.32
    max_seconds: float = 110.0


@dataclass(frozen=True)
class Problem:
    task: str
    prompt: str
    answer: str
    label: str  # JSON: all that reward.py needs to ask Reasoning-Gym's verifier


def draw_problems(task: Task, size: int, seed: int) -> list[Problem]:
    """`size` problems of the task, duplicates dropped, in the order in which they were drawn."""
    problems = {}
    for entry in reasoning_gym.create_dataset(task.name, size=size, seed=seed, **task.config):
        # The verifiers used here look at the answer only, which keeps the label short.
        label = json.dumps({"task": task.name, "entry": {"answer": entry["answer"], "metadata": {}}})
        prompt = entry["question"] + PROMPT_END
        problems.setdefault(prompt, Problem(task.name, prompt, entry["answer"], label))
    return list(problems.values())


def split_problems(settings: Settings) -> dict[str, dict[str, list[Problem]]]:
    """Problems by split and task; no prompt is in two splits."""
    splits: dict[str, dict[str, list[Problem]]] = {"eval": {}, "validation": {}, "train": {}, "supervised": {}}
    for task in TASKS:
        # Reasoning-Gym seeds problem i with seed + i: stay further apart than the pool is large.
        problems = draw_problems(task, settings.pool, settings.seed * 1_000_000)
        random.Random(settings.seed).shuffle(problems)
        start = 0
        for split, size in (("eval", settings.held_out), ("validation", settings.validation), ("train", settings.prompts)):
            splits[split][task.name] = problems[start : start + size]
            start += size
        splits["supervised"][task.name] = problems[start:]
    seen: set[str] = set()
    for split, by_task in splits.items():
        prompts = {problem.prompt for problems in by_task.values() for problem in problems}
        assert not prompts & seen, f"{split} shares problems with another split"
        seen |= prompts
    return splits


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per printable ASCII character and per fixed piece of a question; decoding gives the text back exactly.

    It is a Qwen2Tokenizer without merges because AutoTokenizer loads that class, with its own splitting rules, for every
    Qwen2 checkpoint, whatever was saved beside it.
    """
    printable = [*map(chr, range(33, 127)), "\u0120", "\u010a"]  # the last two: space and newline in byte-level spelling
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([PAD, EOS, *printable])},
        merges=[],
        unk_token=None,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for task in TASKS for piece in task.pieces])
    return tokenizer


def check_round_trip(tokenizer: Qwen2Tokenizer, splits: dict[str, dict[str, list[Problem]]]) -> None:
    """The reward strips the prompt from the decoded text, so decoding must restore every prompt and answer."""
    problems = [problem for by_task in splits.values() for group in by_task.values() for problem in group]
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


def answer_log_probs(model: Qwen2ForCausalLM, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
    settings: Settings, tokenizer: Qwen2Tokenizer, splits: dict[str, dict[str, list[Problem]]]
) -> tuple[Qwen2ForCausalLM, dict[str, Any]]:
    """Supervised training until the bf16-rounded weights reach the target on the validation problems."""
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed)
    model, rounded = make_model(settings, tokenizer), make_model(settings, tokenizer)
    supervised = {name: encode(tokenizer, problems) for name, problems in splits["supervised"].items()}
    validation = {name: collate(encode(tokenizer, problems)) for name, problems in splits["validation"].items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01)
    share = {name: 1 / len(supervised) for name in supervised}  # of a batch

    start, step, pass1 = time.time(), 0, 0.0
    while True:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, step / 50) * (0.5 if pass1 > 0.15 else 1.0)
        batch = []
        for name, samples in supervised.items():
            batch += rng.sample(samples, round(share[name] * settings.batch_size))
        log_probs, _ = answer_log_probs(model, *collate(batch))
        loss = -log_probs.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        # Rises by a few points in ten steps once it is off the ground: look often then.
        if step % (5 if pass1 > 0.1 else 25) == 0:
            rounded.load_state_dict(round_to_bf16(model))
            by_task = {name: expected_pass1(rounded, *data).mean().item() for name, data in validation.items()}
            pass1 = sum(by_task.values()) / len(by_task)
            # A task that lags gets more of the batch, so that none is solved while another has not begun.
            weight = {name: max(settings.target_pass1 + 0.05 - value, 0.05) for name, value in by_task.items()}
            share = {name: value / sum(weight.values()) for name, value in weight.items()}
            late = time.time() - start > settings.max_seconds
            if step % 25 == 0 or pass1 >= settings.target_pass1 or late:
                tasks = " ".join(f"{name} {value:.3f}" for name, value in by_task.items())
                print(
                    f"warm start: step {step}, {time.time() - start:.0f} s, loss {loss.item():.3f}, "
                    f"pass@1 {pass1:.3f} ({tasks})",
                    flush=True,
                )
            if pass1 >= settings.target_pass1 or late:
                break
    numbers = {"steps": step, "seconds": round(time.time() - start, 1), "expected_pass1": round(pass1, 4)}
    return rounded, numbers


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


def write_prompts(path: Path, by_task: dict[str, list[Problem]], seed: int) -> None:
    problems = [problem for task in by_task.values() for problem in task]
    random.Random(seed).shuffle(problems)
    with path.open("w") as file:
        for problem in problems:
            row = {"prompt": problem.prompt, "label": problem.label, "datasource": "reasoning_gym"}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=42, help="seed of problems, initial weights and batches")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    settings = Settings(seed=args.seed, tasks=tuple(task.name for task in TASKS))
    done = args.out / "prepared.json"
    wanted = json.loads(json.dumps(asdict(settings)))
    if done.exists() and json.loads(done.read_text())["settings"] == wanted:
        print(f"{args.out} is prepared already")
        return
    if args.out.exists():
        done.unlink(missing_ok=True)
        shutil.rmtree(args.out / "model", ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)

    splits = split_problems(settings)
    make_tokenizer().save_pretrained(args.out / "model")
    tokenizer = AutoTokenizer.from_pretrained(args.out / "model")  # as every process of the run will see it
    check_round_trip(tokenizer, splits)
    model, numbers = warm_start(settings, tokenizer, splits)
    validation = [problem for problems in splits["validation"].values() for problem in problems]
    pass1, pass4 = sampled_pass(model, tokenizer, validation, samples=4)

    model.to(torch.bfloat16).save_pretrained(args.out / "model")
    write_prompts(args.out / "train.jsonl", splits["train"], settings.seed)
    write_prompts(args.out / "eval.jsonl", splits["eval"], settings.seed)
    numbers |= {"sampled_pass1": pass1, "sampled_pass4": pass4, "parameters": model.num_parameters()}
    done.write_text(json.dumps({"settings": wanted, "measured": numbers}, indent=2) + "\n")
    print(
        f"prepared {args.out}: {numbers['parameters']} parameters, {numbers['steps']} steps in {numbers['seconds']} s, "
        f"validation pass@1 {pass1:.3f}, pass@4 {pass4:.3f}"
    )


if __name__ == "__main__":
    main()
