"""The eight PPO-family recipes of OpenRLHF 0.11.0 as flags, and what the tests override: sizes, places and counts.

A recipe's flags are those of its script, with the script's values. `command` translates them for the installed
release, overrides what two cores without a GPU cannot do, and returns the command line.
"""

import shlex
from dataclasses import dataclass

Flags = dict[str, tuple[str, ...]]

_HYBRID = "--train.colocate_all --vllm.sync_backend nccl --vllm.enforce_eager --ds.enable_sleep"
_ZERO = "--ds.zero_stage 3 --ds.param_dtype bf16 --actor.gradient_checkpointing_enable"
_PROMPTS = """
    --data.prompt_dataset OpenRLHF/prompt-collection-v0.1 --data.input_key context_messages --data.apply_chat_template
"""
_FILTER = "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range"
_LLAMA = "--actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture"


def _nodes(gpus: int, *models: str) -> str:
    return " ".join(f"--{model}.num_nodes 1 --{model}.num_gpus_per_node {gpus}" for model in models)


# train_reinforce_baseline_hybrid_engine and ..._ray_agent_async are the same but for two flags and one value.
_AGENT = f"""
    --actor.model_name_or_path Qwen/Qwen3-4B-Thinking-2507 --ckpt.load_enable
    --ckpt.output_dir exp/Qwen3-4B-Thinking --ckpt.path exp/Qwen3-4B-Thinking/ckpt --ckpt.save_hf --ckpt.max_num 3
    --ckpt.save_steps 10 --train.agent_func_path examples/python/agent_func.py
    --data.prompt_dataset zhuzilin/dapo-math-17k --data.input_key prompt --data.label_key label --data.max_len 74240
    --rollout.max_new_tokens 64000 --data.apply_chat_template --ds.packing_samples
    --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 1024 {_FILTER} 0.0 1.0
    --train.dynamic_batch_enable --train.max_tokens_per_gpu 16192 --rollout.max_tokens_per_gpu 32768
    --train.micro_batch_size 1 --rollout.micro_batch_size 8 --data.max_samples 128000 --train.max_epochs 1
    --train.num_episodes 1
    {_nodes(4, "ref", "actor")} --vllm.num_engines 2 --vllm.tensor_parallel_size 2 {_HYBRID}
    {_ZERO} --ds.ring_attn_size 2 --ds.ring_attn_head_stride 2
    --algo.advantage.estimator reinforce_baseline --actor.adam.lr 5e-7 --actor.entropy_coef 0.0
    --algo.kl.init_coef 1e-5 --algo.kl.use_loss --algo.kl.estimator k2
    --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop
    --logger.tensorboard_dir exp/Qwen3-4B-Thinking/runs --logger.logging_steps 1 --eval.steps -1
"""

SHIPPED = {
    "train_dapo_ray_hybrid_engine": f"""
        {_nodes(8, "ref", "actor")} --vllm.num_engines 4 --vllm.tensor_parallel_size 2 {_HYBRID} --vllm.enable_sleep
        --vllm.gpu_memory_utilization 0.6
        --algo.kl.init_coef 1e-3 --algo.advantage.gamma 1.0 --algo.kl.use_loss --algo.kl.estimator k3
        --algo.advantage.estimator group_norm {_FILTER} 0 1 --actor.eps_clip_low_high 0.2 0.27
        {_LLAMA} --reward.remote_url /openrlhf/examples/python/reward_func.py
        --ckpt.output_dir /openrlhf/examples/test_scripts/final/llama3-8b-rlhf
        --ckpt.path /openrlhf/examples/test_scripts/ckpt/llama3-8b-rlhf --ckpt.save_steps 20 --ckpt.save_hf
        --train.micro_batch_size 8 --train.batch_size 128 --rollout.micro_batch_size 16 --rollout.batch_size 128
        --rollout.n_samples_per_prompt 8 --train.max_epochs 1 --data.max_len 2048 --data.max_samples 20000
        {_ZERO} --ds.packing_samples --actor.adam.lr 5e-7 {_PROMPTS} --algo.advantage.is_correction_enable
    """,
    "train_ppo_ray_hybrid_engine": f"""
        {_nodes(8, "ref", "reward", "critic", "actor")} --vllm.num_engines 4 --vllm.tensor_parallel_size 2 {_HYBRID}
        --vllm.enable_sleep --vllm.gpu_memory_utilization 0.5
        {_LLAMA} --reward.model_name_or_path OpenRLHF/Llama-3-8b-rm-700k
        --ckpt.output_dir /openrlhf/examples/test_scripts/final/llama3-8b-rlhf
        --ckpt.path /openrlhf/examples/test_scripts/ckpt/llama3-8b-rlhf --ckpt.save_hf
        --train.batch_size 128 --rollout.batch_size 1024 --rollout.n_samples_per_prompt 1 --train.max_epochs 1
        --data.max_len 2048 --data.max_samples 100000 {_ZERO} --ds.packing_samples
        --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --algo.kl.init_coef 0.01 {_PROMPTS} --reward.normalize_enable
        --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 --algo.advantage.is_correction_enable
    """,
    "train_ppo_ray_slurm": f"""
        {_nodes(4, "ref", "reward", "critic", "actor")} --vllm.num_engines 4 --vllm.tensor_parallel_size 2
        --train.colocate_critic_reward --train.colocate_actor_ref
        {_LLAMA} --reward.model_name_or_path OpenRLHF/Llama-3-8b-rm-mixture
        --ckpt.output_dir /openrlhf/examples/checkpoint/llama3-8b-rlhf
        --train.micro_batch_size 8 --train.batch_size 128 --rollout.micro_batch_size 16 --rollout.batch_size 1024
        --data.max_samples 100000 --train.max_epochs 1 --data.max_len 2048 {_ZERO}
        --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --algo.kl.init_coef 0.01 {_PROMPTS} --reward.normalize_enable
        --ds.adam_offload --ds.packing_samples --vllm.sync_backend nccl --logger.wandb.key token
    """,
    "train_ppo_with_reward_fn": f"""
        {_nodes(2, "ref", "critic", "actor")} --vllm.num_engines 2 --vllm.tensor_parallel_size 2
        --train.colocate_actor_ref {_LLAMA} --reward.remote_url /openrlhf/examples/python/reward_func.py
        --ckpt.output_dir /openrlhf/examples/checkpoint/llama3-8b-rlhf
        --train.micro_batch_size 8 --train.batch_size 128 --rollout.micro_batch_size 16 --rollout.batch_size 1024
        --data.max_samples 100000 --train.max_epochs 1 --data.max_len 2048 {_ZERO}
        --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --algo.kl.init_coef 0.01 {_PROMPTS} --reward.normalize_enable
        --ds.packing_samples --ds.adam_offload --ds.attn_implementation flash_attention_2 --logger.wandb.key token
    """,
    "train_prorlv2_math_hybrid_engine": f"""
        {_nodes(8, "ref", "actor")} --vllm.num_engines 8 --vllm.tensor_parallel_size 1 {_HYBRID} --vllm.enable_sleep
        --vllm.gpu_memory_utilization 0.75
        --algo.kl.init_coef 1e-4 --algo.advantage.gamma 1.0 --algo.kl.use_loss --algo.kl.estimator k2
        --algo.advantage.estimator reinforce_baseline {_FILTER} 0 1 --actor.eps_clip_low_high 0.2 0.27
        --actor.model_name_or_path deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B
        --reward.remote_url examples/python/math_reward_func.py
        --ckpt.output_dir exp/DeepSeek-R1-Qwen-1.5B-PRORLV2 --ckpt.path exp/DeepSeek-R1-Qwen-1.5B-PRORLV2/ckpt
        --ckpt.save_steps 5 --ckpt.save_hf
        --train.batch_size 1024 --rollout.batch_size 512 --rollout.n_samples_per_prompt 16
        --train.dynamic_batch_enable --train.num_episodes 100 --data.max_len 9216 --rollout.max_new_tokens 8192
        {_ZERO} --actor.adam.lr 1e-6
        --data.prompt_dataset OpenRLHF/dapo-math-17k --data.input_key prompt --data.label_key label
        --eval.dataset OpenRLHF/aime-2024 --eval.steps 5 --eval.temperature 1.0 --eval.n_samples_per_prompt 4
        --data.apply_chat_template --ds.packing_samples
        --algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 0.5 5.0
        --algo.advantage.is_correction_type icepop
        --train.max_tokens_per_gpu 32768 --reward.stop_properly_penalty_coef 0.0
    """,
    "train_reinforce_baseline_hybrid_engine": f"{_AGENT} --vllm.gpu_memory_utilization 0.7",
    "train_reinforce_baseline_ray_agent_async": f"""
        {_AGENT} --train.async_enable --train.partial_rollout_enable --vllm.gpu_memory_utilization 0.95
    """,
    "train_vlm_math_hybrid_engine": f"""
        {_nodes(4, "ref", "actor")} --vllm.num_engines 4 --vllm.tensor_parallel_size 1 {_HYBRID} --vllm.enable_sleep
        --vllm.gpu_memory_utilization 0.7
        --algo.kl.init_coef 0 --algo.advantage.gamma 1.0 --algo.kl.use_loss --algo.kl.estimator k2
        --algo.advantage.estimator reinforce_baseline
        --actor.model_name_or_path Qwen/Qwen3.5-2B --reward.remote_url examples/python/math_reward_func.py
        --ckpt.output_dir exp/Qwen3.5-2B-VLM-RLHF --ckpt.path exp/Qwen3.5-2B-VLM-RLHF/ckpt --ckpt.save_hf
        --ckpt.save_steps 5 --eval.steps -1
        --train.micro_batch_size 1 --rollout.micro_batch_size 1 --train.batch_size 1024 --rollout.batch_size 128
        --rollout.n_samples_per_prompt 8 --train.num_episodes 100 --data.max_len 4096 --rollout.max_new_tokens 2048
        {_ZERO} --actor.adam.lr 2e-6
        --data.prompt_dataset hiyouga/geometry3k --data.input_key prompt --data.label_key label
        --data.image_key images --data.max_images_per_prompt 1 --actor.freeze_visual_encoder
        --data.apply_chat_template --ds.attn_implementation eager
    """,
}

# What a test may override: sizes, places and counts. Anything else is what makes a recipe the one it is.
OVERRIDABLE = frozenset(
    [f"--{model}.num_{what}" for model in ("actor", "critic", "ref", "reward") for what in ("nodes", "gpus_per_node")]
    + [f"--{model}.model_name_or_path" for model in ("actor", "reward")]
    + ["--vllm.num_engines", "--vllm.tensor_parallel_size"]
    + [f"--{phase}.{size}" for phase in ("train", "rollout") for size in ("batch_size", "micro_batch_size")]
    + ["--rollout.n_samples_per_prompt", "--rollout.max_new_tokens", "--data.max_len", "--train.num_episodes"]
    + ["--train.max_tokens_per_gpu", "--rollout.max_tokens_per_gpu", "--ckpt.save_steps", "--eval.steps"]
    + ["--data.prompt_dataset", "--eval.dataset", "--reward.remote_url", "--train.agent_func_path"]
    + ["--ckpt.output_dir", "--ckpt.path", "--logger.tensorboard_dir", "--logger.wandb.key"]
)

# `--algo.advantage.is_correction_type` of 0.11.0 as level, mode and gating of 0.11.2.
CORRECTIONS = {
    "tis": ("token", "clip", "ratio"),
    "icepop": ("token", "mask", "ratio"),
    "seq-mask-tis": ("seq", "mask", "ratio"),
}


# Every recipe, where it has the flag.
COMMON = {
    "--data.max_len": 40,
    "--rollout.max_new_tokens": 12,
    "--train.num_episodes": 1,
    "--train.micro_batch_size": 1,
    "--rollout.micro_batch_size": 4,
    "--train.max_tokens_per_gpu": 100,  # two or three sequences each
    "--rollout.max_tokens_per_gpu": 200,
    "--ckpt.save_steps": 2,  # the last of the run
    "--logger.wandb.key": "0" * 40,  # no account; the run logs offline
}


def _ranks(count: int, *models: str) -> dict[str, int]:
    return {f"--{model}.num_gpus_per_node": count for model in models}


def _engines(count: int, tensor_parallel: int) -> dict[str, int]:
    return {"--vllm.num_engines": count, "--vllm.tensor_parallel_size": tensor_parallel}


def _sizes(rollout: int, samples: int, train: int) -> dict[str, int]:
    """Updates per sync, rollout * samples / train, stay as shipped (test_recipes.py)."""
    sizes = {"--rollout.batch_size": rollout, "--train.batch_size": train}
    return {**sizes, "--rollout.n_samples_per_prompt": samples} if samples > 1 else sizes


@dataclass(frozen=True)
class Recipe:
    """How one recipe is run here.

    Attributes:
        launch: what its script starts it with, "python" or "ray job".
        architecture: what its model is made like (models.py).
        overrides: beside COMMON and places.
        traces: regular expressions; what makes the recipe different leaves each of them in the run's output.
        working_dir: whether its Ray job has one.
        added: flags of ours beside --logra.enable.
    """

    launch: str
    architecture: str
    overrides: dict[str, int]
    traces: tuple[str, ...]
    working_dir: bool = False
    added: tuple[str, ...] = ()


_FILTERED = r"Filtered out: avg_reward=1\.00"
_CORRECTED = r"'is_filter_ratio': "

RECIPES = {
    "train_dapo_ray_hybrid_engine": Recipe(
        "python",
        "llama",
        {**_ranks(2, "ref", "actor"), **_engines(1, 2), **_sizes(8, 4, 4)},
        (_FILTERED, _CORRECTED, r"'logprobs_diff': "),
    ),
    "train_ppo_ray_hybrid_engine": Recipe(
        "python",
        "llama",
        {**_ranks(1, "ref", "reward", "critic", "actor"), **_engines(1, 1), **_sizes(32, 1, 4)},
        (_CORRECTED, r"'critic_loss': ", r"reward normalization status: True"),
    ),
    "train_ppo_ray_slurm": Recipe(
        "ray job",
        "llama",
        {**_ranks(1, "ref", "reward", "critic", "actor"), **_engines(2, 1), **_sizes(32, 1, 4)},
        (r"'critic_loss': ", r"reward normalization status: True"),
        working_dir=True,
    ),
    "train_ppo_with_reward_fn": Recipe(
        "ray job",
        "llama",
        {**_ranks(1, "ref", "critic", "actor"), **_engines(1, 2), **_sizes(32, 1, 4)},
        (r"'critic_loss': ",),
        working_dir=True,
    ),
    "train_prorlv2_math_hybrid_engine": Recipe(
        "python",
        "qwen2",
        {**_ranks(2, "ref", "actor"), **_engines(2, 1), **_sizes(8, 4, 4), "--eval.steps": 1},
        (_FILTERED, _CORRECTED, r"'eval_default_pass4': "),
    ),
    "train_reinforce_baseline_hybrid_engine": Recipe(
        "ray job",
        "qwen3",
        {**_ranks(2, "ref", "actor"), **_engines(1, 2), **_sizes(8, 4, 32)},
        (_FILTERED, _CORRECTED, r"'entropy_loss': ", r"'turns': "),
    ),
    "train_reinforce_baseline_ray_agent_async": Recipe(
        "ray job",
        "qwen3",
        {**_ranks(2, "ref", "actor"), **_engines(2, 1), **_sizes(8, 4, 32)},
        (_FILTERED, _CORRECTED, r"'entropy_loss': ", r"'turns': "),
    ),
    "train_vlm_math_hybrid_engine": Recipe(
        "python",
        "llava",
        {**_ranks(2, "ref", "actor"), **_engines(2, 1), **_sizes(4, 4, 16)},
        (r"'policy_loss': ",),
        added=("--logra.kl.disable",),  # predicted-KL control does not pass images (docs/kl.md)
    ),
}


def parse(text: str) -> Flags:
    """The flags of a command line, each with its values."""
    flags: dict[str, list[str]] = {}
    for word in shlex.split(text):
        if word.startswith("--"):
            values = flags.setdefault(word, [])
        else:
            values.append(word)
    return {flag: tuple(values) for flag, values in flags.items()}


def translate(flags: Flags) -> Flags:
    """Flags of 0.11.0 as 0.11.2 names them."""
    flags = dict(flags)
    enabled = flags.pop("--algo.advantage.is_correction_enable", None) is not None
    (kind,) = flags.pop("--algo.advantage.is_correction_type", ("tis",))
    if enabled:
        for name, value in zip(("level", "mode", "gating"), CORRECTIONS[kind]):
            flags[f"--algo.advantage.is_correction_{name}"] = (value,)
    return flags


def updates_per_sync(flags: Flags) -> int:
    """Optimizer steps between two syncs; every recipe has one epoch."""
    batch, samples, train = (
        int(flags.get(flag, ("1",))[0])
        for flag in ("--rollout.batch_size", "--rollout.n_samples_per_prompt", "--train.batch_size")
    )
    assert batch * samples % train == 0
    return batch * samples // train


def overrides_of(name: str, places: dict[str, object]) -> Flags:
    """What is overridden of a recipe; a flag that it does not have is not added."""
    shipped = parse(SHIPPED[name])
    chosen = {**COMMON, **RECIPES[name].overrides, **places}
    return {flag: (str(value),) for flag, value in chosen.items() if flag in shipped}


def command(name: str, places: dict[str, object]) -> list[str]:
    """The command line of a scaled recipe, with LoGRA in it."""
    flags = {**translate(parse(SHIPPED[name])), **overrides_of(name, places)}
    return [word for flag, values in flags.items() for word in (flag, *values)] + list(RECIPES[name].added)
