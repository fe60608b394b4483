"""What cannot work is refused before Ray starts: one line with the reason and the way out."""

import math
import os
from pathlib import Path
from types import SimpleNamespace

from torch import nn

from ..config import ConfigError, LograConfig, one_line
from ..strategies.base import Strategy
from ..strategies.checks import make_strategy
from ..sync.log import record_files
from ..train.callbacks import load_callbacks
from .models import load_skeleton, looks_local
from .vllm_plugin import let_through

_DATA_FILES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}


def check(args: SimpleNamespace, config: LograConfig) -> None:
    """Check flags, model, data and reward of a hierarchized namespace.

    Raises:
        ConfigError: naming the flag, the value found and what to do.
    """
    _check_combinations(args)
    _check_step_control(args, config)
    load_callbacks(config.callbacks)
    _check_log(args, config)
    _check_model(args, config)
    _check_dataset("--data.prompt_dataset", args.data.prompt_dataset, args, required=True)
    _check_dataset("--eval.dataset", args.eval.dataset, args, required=False)
    _check_reward(args)


def _check_combinations(args: SimpleNamespace) -> None:
    refused = [
        (
            args.ds.lora.rank > 0 and args.logra.method != "lora",
            f"--ds.lora.rank {args.ds.lora.rank}: LoRA trains adapters, --logra.method {args.logra.method} weights; "
            "set --ds.lora.rank 0, or train the adapters with --logra.method lora",
        ),
        (
            args.ds.lora.rank <= 0 and args.logra.method == "lora",
            f"--logra.method lora: trains the adapters of --ds.lora.rank, which is {args.ds.lora.rank}; set it",
        ),
        (
            args.logra.method == "lora" and args.ds.lora.alpha <= 0,
            f"--ds.lora.alpha {args.ds.lora.alpha}: scales what adapters add; it must be positive",
        ),
        (
            args.logra.method == "lora" and not 0 <= args.ds.lora.dropout < 1,
            f"--ds.lora.dropout {args.ds.lora.dropout}: must be at least 0 and below 1",
        ),
        (args.ds.load_in_4bit, "--ds.load_in_4bit: 4-bit weights cannot be updated in place; drop it"),
        (
            args.actor.optim == "muon",
            "--actor.optim muon: LoGRA replaces the actor's optimizer on its targets; use --actor.optim adam",
        ),
        (
            args.ds.param_dtype != "bf16",
            f"--ds.param_dtype {args.ds.param_dtype}: updates are exact in bf16 only; use bf16",
        ),
        (
            args.ds.use_liger_kernel,
            "--ds.use_liger_kernel: its fused layers bypass the sketched linears; drop it",
        ),
        (args.ds.deepcompile, "--ds.deepcompile: compiled graphs bypass the sketched linears; drop it"),
        (
            args.ds.tensor_parallel_size > 1,
            f"--ds.tensor_parallel_size {args.ds.tensor_parallel_size}: DeepSpeed's AutoTP replaces the linears that "
            "are sketched; use 1 (the rollout engines' --vllm.tensor_parallel_size is free)",
        ),
        (
            args.ds.zpg > 1,
            f"--ds.zpg {args.ds.zpg}: ZeRO++ keeps a second copy of every partition that an update would miss; use 1",
        ),
        (
            args.train.enable_ema,
            "--train.enable_ema: OpenRLHF's moving average skips parameters without gradient, so that LoGRA's targets "
            "would stay at their first value; drop it",
        ),
        (
            args.ds.grad_accum_dtype == "fp32" and args.ds.zero_stage <= 1,
            f"--ds.grad_accum_dtype fp32 with --ds.zero_stage {args.ds.zero_stage}: DeepSpeed's optimizer for this "
            "does not step where gradients are zero; use ZeRO 2 or 3, or drop it (sketches are float32 anyway)",
        ),
        (
            args.ds.use_universal_ckpt,
            "--ds.use_universal_ckpt: DeepSpeed's universal checkpoints leave out parameters that its optimizer does "
            "not train, LoGRA's targets among them; drop it (another number of ranks needs no conversion)",
        ),
        (not args.vllm.num_engines, "--vllm.num_engines must be at least 1: LoGRA synchronises vLLM engines"),
        (
            not 0 < args.actor.adam.lr < math.inf,
            f"--actor.adam.lr {args.actor.adam.lr}: OpenRLHF's schedule needs a positive one, and under "
            "--logra.kl.disable alpha is lr / peak lr",
        ),
        (
            not 0 <= args.actor.max_norm < math.inf,
            f"--actor.max_norm {args.actor.max_norm}: must be a positive number, or 0 for none",
        ),
        (
            args.logra.eval_at_start and args.train.async_enable,
            "--logra.eval_at_start: asynchronous training evaluates in its generator only; drop it",
        ),
        (
            not let_through(),
            f"VLLM_PLUGINS={os.environ.get('VLLM_PLUGINS')} keeps vLLM from loading openrlhf_logra; add it or unset",
        ),
    ]
    for holds, message in refused:
        if holds:
            raise ConfigError(message)


def _check_step_control(args: SimpleNamespace, config: LograConfig) -> None:
    running = config.reward_baseline == "running"
    refused = [
        (
            config.controls_kl and not args.rollout.temperature > 0,
            f"--rollout.temperature {args.rollout.temperature}: predicted-KL control needs a positive one; set it, or "
            "--logra.kl.disable",
        ),
        (
            running and args.algo.advantage.estimator != "reinforce",
            "--logra.reward_baseline running: --algo.advantage.estimator "
            f"{args.algo.advantage.estimator} brings its own baseline; use reinforce",
        ),
    ]
    for holds, message in refused:
        if holds:
            raise ConfigError(message)


def _check_model(args: SimpleNamespace, config: LograConfig) -> None:
    path = args.actor.model_name_or_path
    if not path:
        raise ConfigError("--actor.model_name_or_path is missing; give a model directory or a hub name")
    model = load_skeleton(path)
    if config.method == "lora":
        model = _with_adapters(model, args)
    check_method(config, model, f"--actor.model_name_or_path {path}")


def check_method(config: LograConfig, model: nn.Module, named: str) -> Strategy:
    """The strategy for a model, `named` by flag and value, whose predicted KL can be controlled if it is to be.

    Raises:
        ConfigError: there can be none.
    """
    strategy = make_strategy(config, model)
    head = model.get_output_embeddings()
    if (
        config.controls_kl
        and head is not None
        and any(model.get_parameter(n) is head.weight for n in set(strategy.trained) - set(strategy.dense))
    ):
        raise ConfigError(
            "--logra.target_modules: predicted-KL control measures the policy at the output head's input, so that it "
            "cannot be trained meanwhile; leave the head out, or add --logra.kl.disable"
        )
    if config.controls_kl and hasattr(model.config, "vision_config"):
        raise ConfigError(
            f"{named}: predicted-KL control does not pass images through the model yet; add --logra.kl.disable"
        )
    return strategy


def _with_adapters(model: nn.Module, args: SimpleNamespace) -> nn.Module:
    """The model as OpenRLHF adapts it."""
    from peft import LoraConfig, get_peft_model

    lora = args.ds.lora
    names = lora.target_modules if isinstance(lora.target_modules, str) else " ".join(lora.target_modules)
    try:
        adapted = get_peft_model(
            model, LoraConfig(r=lora.rank, target_modules=lora.target_modules, task_type="CAUSAL_LM")
        )
    except ValueError as error:
        raise ConfigError(f"--ds.lora.target_modules {names}: {one_line(error)}") from error
    for name in () if isinstance(lora.target_modules, str) else lora.target_modules:
        if not any(f".{path}".endswith(f".{name}") for path in adapted.targeted_module_names):
            raise ConfigError(f"--ds.lora.target_modules {names}: no module of the model is called {name!r}")
    return adapted


def _check_log(args: SimpleNamespace, config: LograConfig) -> None:
    """A run that does not resume begins its own log. (Whose records a resumed one finds is seen when it starts.)"""
    if not config.sync_log_dir:
        return
    folder = Path(config.sync_log_dir)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--logra.sync.log_dir {folder}: is not a directory")
    if not args.ckpt.load_enable and record_files(folder):
        raise ConfigError(
            f"--logra.sync.log_dir {folder}: holds the records of another run; give an empty directory, or resume "
            "that run with --ckpt.load_enable"
        )


def _check_dataset(flag: str, value: str | None, args: SimpleNamespace, required: bool) -> None:
    """Local files are read; hub names and directories are left to the host."""
    if not value:
        if required:
            raise ConfigError(f"{flag} is missing; give a .jsonl, .json, .csv or .parquet file, or a hub name")
        return
    for item in value.split(","):
        path = Path(item.strip().split("@")[0])
        if path.suffix in _DATA_FILES:
            _check_data_file(flag, path, args)
        elif looks_local(str(path)) and not path.exists():
            raise ConfigError(f"{flag} {path}: no such file or directory")


def _check_data_file(flag: str, path: Path, args: SimpleNamespace) -> None:
    if not path.is_file():
        raise ConfigError(f"{flag} {path}: no such file")
    if path.stat().st_size == 0:
        raise ConfigError(f"{flag} {path}: the file is empty")
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar, enable_progress_bar

    disable_progress_bar()
    try:
        rows = load_dataset(_DATA_FILES[path.suffix], data_files=str(path), split="train")
    except Exception as error:
        reason = one_line(error)
        if "corresponds to no data" not in reason:  # datasets' words for no rows
            raise ConfigError(f"{flag} {path}: cannot be read as {path.suffix[1:]}: {reason}") from error
        rows = ()
    finally:
        enable_progress_bar()
    if len(rows) == 0:
        raise ConfigError(f"{flag} {path}: has no rows")
    for key_flag, key in (("--data.input_key", args.data.input_key), ("--data.label_key", args.data.label_key)):
        if key is not None and key not in rows.column_names:
            raise ConfigError(
                f"{flag} {path}: has no column {key!r} ({key_flag}); its columns are {', '.join(rows.column_names)}"
            )


def _check_reward(args: SimpleNamespace) -> None:
    if not (args.reward.remote_url or args.reward.model_name_or_path or args.train.agent_func_path):
        raise ConfigError(
            "--reward.remote_url is missing; give a .py file with reward_func or a URL, or "
            "--reward.model_name_or_path, or --train.agent_func_path"
        )
    for flag, value in (
        ("--reward.remote_url", args.reward.remote_url),
        ("--train.agent_func_path", args.train.agent_func_path),
    ):
        for item in (value or "").split(","):
            if item.endswith(".py") and not Path(item).is_file():
                raise ConfigError(f"{flag} {item}: no such file")
