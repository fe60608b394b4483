"""Every `--logra.*` flag, once: its name, default, help and the values it accepts (docs/flags.md).

What depends on the host's own flags is refused in host/refusals.py.
"""

import argparse
import importlib
import math
import os
import traceback
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

from .math.direction import OPTIMIZERS, DirectionConfig
from .math.exact import ROUNDINGS
from .math.kl import KLSettings
from .math.limiter import check_limit
from .math.projection import DISTRIBUTIONS
from .strategies import strategy_class, strategy_names
from .sync.modes import SYNC_MODES

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROBES = ("auto", "jvp", "fd")


class ConfigError(ValueError):
    """A flag, or a combination of flags, that cannot work. The message is one line: what, where, what to do."""


def one_line(error: BaseException) -> str:
    """The first line of what went wrong first, or its type where it says nothing."""
    first = error.__cause__ or error
    return next(iter(str(first).splitlines()), "") or type(first).__name__


def blamed(error: BaseException) -> str:
    """What an error in somebody else's code says, in one line: its type, its words, and which line of that code."""
    ours = (os.path.dirname(__file__) + os.sep, os.path.dirname(importlib.__file__) + os.sep, "<")
    frames = traceback.extract_tb(error.__traceback__)
    places = [f" ({frame.filename}:{frame.lineno})" for frame in frames if not frame.filename.startswith(ours)]
    return f"{type(error).__name__}: {one_line(error)}{''.join(places[:1])}"


def _flag(name: str, default: Any, help: str, **options: Any) -> Any:
    return field(default=default, metadata={"flag": name, "help": help, **options})


@dataclass(frozen=True)
class LograConfig:
    """The parsed flags. Attribute `sync_mode` is the flag `--logra.sync.mode`, and so on.

    Raises:
        ConfigError: there is no such strategy, or its module cannot be loaded.
    """

    enable: bool = _flag("enable", False, "Train with LoGRA. Without this flag nothing of the host changes.")
    method: str = _flag(
        "method",
        "logra",
        "Registered strategy that turns gradients into updates: logra; galore, fira, flora (full gradients, small "
        "states, the actor's learning rate); lora (OpenRLHF's own, of --ds.lora.rank) and dense (its AdamW on all "
        "parameters), with a lossless sync of what changed. A run names the flags that its method makes no use of; "
        "norm_growth_limit and sync.mode factor are refused where they would mean nothing.",
        choices=strategy_names,
    )
    rank: int = _flag("rank", 256, "Rank r of every target's sketch.")
    seed: int = _flag("seed", 42, "Seed of the projections and of the rounding dither; any integer.")
    distribution: str = _flag("distribution", "rademacher", "Entries of the projection.", choices=DISTRIBUTIONS)
    refresh_every: int | None = _flag(
        "refresh_every",
        None,
        "Draw a new projection, or find a new subspace, every K updates; 0 keeps the first. Default: 200 for galore, "
        "fira and flora, 20 for adam, else 1.",
        type=int,
    )
    target_modules: tuple[str, ...] = _flag(
        "target_modules",
        DEFAULT_TARGETS,
        "The nn.Linear modules to train, each name the whole or the end of a module's path: q_proj, mlp.up_proj, "
        "model.layers.0.mlp.up_proj.",
        nargs="+",
    )
    optimizer: str = _flag("optimizer", "row_adam", "Direction computed from the sketch.", choices=OPTIMIZERS)
    beta1: float = _flag("beta1", 0.9, "First-moment decay of adam, galore, fira and flora.")
    beta2: float = _flag("beta2", 0.95, "Second-moment decay of row_adam, adam, galore and fira.")
    eps: float = _flag(
        "eps", 1e-8, "Floor of the second moment's root: relative in row_adam and adam, absolute in galore and fira."
    )
    update_ratio: float = _flag(
        "update_ratio", 6e-5, "Proposed |step| / |W| over all targets, before the step size alpha scales it."
    )
    non_target: str = _flag(
        "non_target",
        "freeze",
        "What happens to all other parameters: freeze keeps them, adamw trains them with OpenRLHF's own AdamW, by its "
        "schedule.",
        choices=("freeze", "adamw"),
    )
    norm_growth_limit: float | None = _flag(
        "norm_growth_limit",
        None,
        "Factor by which the norm of an update (logra), or of each target's part outside of the subspace (fira), may "
        "grow from one update to the next; inf does not limit. Default: 1.01 for fira, inf for logra; the others have "
        "none.",
        type=float,
    )
    rounding: str = _flag(
        "rounding", "stochastic", "How updated weights round to bf16; nearest is an ablation.", choices=ROUNDINGS
    )
    kl_disable: bool = _flag(
        "kl.disable",
        False,
        "No predicted-KL control: step size alpha = lr / peak lr of the actor's scheduler, which otherwise means "
        "nothing.",
    )
    kl_budget: float = _flag(
        "kl.budget",
        KLSettings.budget,
        "KL per token that the first update may cost: alpha = sqrt(budget / q), see alpha_max.",
    )
    kl_final_budget: float = _flag(
        "kl.final_budget",
        KLSettings.final_budget,
        "KL per token that an update may cost from update `kl.horizon` on; at most `kl.budget`.",
    )
    kl_horizon: int = _flag(
        "kl.horizon", KLSettings.horizon, "Updates over which the budget falls, along half a cosine."
    )
    kl_alpha_max: float = _flag(
        "kl.alpha_max", KLSettings.alpha_max, "Largest step size; the proposed step has size 1."
    )
    kl_probe: str = _flag(
        "kl.probe",
        "auto",
        "How q is measured: jvp (forward-mode AD), fd (central differences), auto (jvp where the model has it; which "
        "one is said).",
        choices=PROBES,
    )
    kl_probe_responses: int = _flag("kl.probe_responses", 2, "Responses of each rank that q is measured on.")
    kl_probe_max_tokens: int = _flag("kl.probe_max_tokens", 4096, "Generated tokens of each of them at most.")
    kl_no_mismatch_subtraction: bool = _flag(
        "kl.no_mismatch_subtraction",
        False,
        "Do not take the mismatch of rollout and trainer log-probabilities off the budget.",
    )
    kl_mismatch_ema: float = _flag(
        "kl.mismatch_ema", KLSettings.mismatch_ema, "Weight of a new observation of the mismatch."
    )
    kl_mismatch_floor: float = _flag(
        "kl.mismatch_floor", KLSettings.mismatch_floor, "Share of the budget that the mismatch must leave."
    )
    kl_feedback: bool = _flag(
        "kl.feedback", False, "Correct the budget by the smoothed ratio of realised to predicted KL."
    )
    reward_baseline: str = _flag(
        "reward_baseline",
        "none",
        "running: advantage = reward minus the running mean of all rewards of earlier steps, and nothing else is "
        "subtracted or normalised; for one response per prompt, with --algo.advantage.estimator reinforce.",
        choices=("none", "running"),
    )
    callbacks: tuple[str, ...] = _flag(
        "callbacks",
        (),
        "Classes package.module:Class derived from openrlhf_logra.train.callbacks.Callback, called in this order.",
        nargs="+",
        type=str,
    )
    sync_mode: str = _flag(
        "sync.mode",
        "auto",
        "What is sent to the rollout engines: factor (seed and factors), sparse (the elements whose bits changed; "
        "needs a copy of the trained weights in host memory), dense (all values), or auto: where updates can be "
        "repeated exactly, for each parameter the smaller of factors and all values, else sparse. Repairs and the "
        "first sync after a resume are always dense.",
        choices=SYNC_MODES,
    )
    sync_verify_every: int = _flag(
        "sync.verify_every", 10, "Compare engine and trainer digests every N syncs (the first and dense ones always)."
    )
    sync_log_dir: str | None = _flag(
        "sync.log_dir",
        None,
        "Keep every record in this directory (of the machine of trainer rank 0), for `openrlhf-logra replay` and "
        "`verify`.",
        type=str,
    )
    eval_at_start: bool = _flag(
        "eval_at_start", False, "Run the host's evaluation once before the first step (synchronous training)."
    )
    allow_untested_host: bool = _flag(
        "allow_untested_host", False, "Run with versions of the host's packages that were not tested."
    )

    def __post_init__(self):
        try:
            strategy = strategy_class(self.method)
            refresh_every = strategy.default_refresh(self.optimizer)
        except Exception as error:
            raise ConfigError(f"--logra.method {self.method}: cannot be loaded: {blamed(error)}") from error
        if self.refresh_every is None:
            object.__setattr__(self, "refresh_every", refresh_every)
        if self.norm_growth_limit is None:
            object.__setattr__(self, "norm_growth_limit", strategy.default_growth_limit)
        object.__setattr__(self, "target_modules", tuple(self.target_modules))
        object.__setattr__(self, "callbacks", tuple(self.callbacks))

    @property
    def controls_kl(self) -> bool:
        """Whether alpha is set by predicted KL: the flags ask for it, and the strategy's steps can be probed."""
        return not self.kl_disable and strategy_class(self.method).can_probe

    @property
    def unused_flags(self) -> tuple[str, ...]:
        """Flags, without "--logra.", that the method makes no use of; of another package's, where it says so."""
        strategy = strategy_class(self.method)
        return strategy.unused_flags if strategy.can_probe else ("kl.*", *strategy.unused_flags)

    def direction(self) -> DirectionConfig:
        """The constants of the direction."""
        return DirectionConfig(self.optimizer, self.beta1, self.beta2, self.eps)

    def kl_settings(self) -> KLSettings:
        """The constants of the predicted-KL controller."""
        return KLSettings(
            budget=self.kl_budget,
            final_budget=self.kl_final_budget,
            horizon=self.kl_horizon,
            alpha_max=self.kl_alpha_max,
            subtract_mismatch=not self.kl_no_mismatch_subtraction,
            mismatch_ema=self.kl_mismatch_ema,
            mismatch_floor=self.kl_mismatch_floor,
            feedback=self.kl_feedback,
        )

    def validate(self) -> None:
        """Check every value on its own.

        Raises:
            ConfigError: naming the flag, the value and what is accepted.
        """
        _require(self.rank >= 1, "rank", self.rank, "an integer of at least 1")
        _require(self.refresh_every >= 0, "refresh_every", self.refresh_every, "0 (never) or a positive integer")
        _require(0 <= self.beta1 < 1, "beta1", self.beta1, "at least 0 and below 1")
        _require(0 <= self.beta2 < 1, "beta2", self.beta2, "at least 0 and below 1")
        # Smaller or larger ones leave float32 where a second moment is zero.
        _require(1e-16 <= self.eps <= 1, "eps", self.eps, "a number from 1e-16 to 1")
        limit = self.norm_growth_limit
        if limit is not None and strategy_class(self.method).default_growth_limit is None:
            raise ConfigError(
                f"--logra.norm_growth_limit {limit}: --logra.method {self.method} limits nothing; drop it"
            )
        _require(limit is None or check_limit(limit), "norm_growth_limit", limit, "at least 1, or inf")
        _require(0 < self.update_ratio <= 1, "update_ratio", self.update_ratio, "a number in (0, 1]")
        for name in ("budget", "final_budget", "alpha_max"):
            value = getattr(self, f"kl_{name}")
            _require(0 < value < math.inf, f"kl.{name}", value, "a positive number")
        if self.kl_final_budget > self.kl_budget:
            raise ConfigError(
                f"--logra.kl.final_budget {self.kl_final_budget} is above --logra.kl.budget {self.kl_budget}, from "
                "which the budget falls; lower it (the same value keeps the budget constant)"
            )
        for name in ("horizon", "probe_responses", "probe_max_tokens"):
            value = getattr(self, f"kl_{name}")
            _require(value >= 1, f"kl.{name}", value, "an integer of at least 1")
        _require(0 < self.kl_mismatch_ema <= 1, "kl.mismatch_ema", self.kl_mismatch_ema, "above 0 and at most 1")
        _require(0 <= self.kl_mismatch_floor <= 1, "kl.mismatch_floor", self.kl_mismatch_floor, "from 0 to 1")
        _require(self.sync_verify_every >= 1, "sync.verify_every", self.sync_verify_every, "an integer of at least 1")
        if self.sync_mode == "factor" and not strategy_class(self.method).exact_updates:
            raise ConfigError(
                f"--logra.sync.mode factor: --logra.method {self.method} makes no factors; use auto, sparse or dense"
            )
        if self.distribution == "gaussian" and self.sync_mode == "factor":
            raise ConfigError(
                "--logra.sync.mode factor needs --logra.distribution rademacher: a Gaussian update is not an integer "
                "product, so that engines cannot repeat it bit for bit; use --logra.sync.mode auto"
            )


def flag_of(attribute: str) -> str:
    """The flag of an attribute of LograConfig."""
    return f"--logra.{LograConfig.__dataclass_fields__[attribute].metadata['flag']}"


def _require(holds: bool, flag: str, value: Any, accepted: str) -> None:
    if not holds:
        raise ConfigError(f"--logra.{flag} is {value}; it must be {accepted}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group "LoGRA" with every `--logra.*` flag to the host's parser."""
    group = parser.add_argument_group("LoGRA", "reinforcement learning with low-rank gradient sketches")
    for item in fields(LograConfig):
        options = {key: value for key, value in item.metadata.items() if key != "flag"}
        if callable(options.get("choices")):
            options["choices"] = options["choices"]()
        if isinstance(item.default, bool):
            options["action"] = "store_true"
        else:
            element = item.default[0] if isinstance(item.default, tuple) and item.default else item.default
            options.setdefault("type", type(element))
            options["help"] += f" Default: {_shown(item.default)}." if item.default not in (None, ()) else ""
        group.add_argument(f"--logra.{item.metadata['flag']}", default=item.default, **options)


def _shown(default: Any) -> str:
    return " ".join(default) if isinstance(default, tuple) else str(default)


def from_flat(parsed: argparse.Namespace) -> LograConfig:
    """The configuration of a namespace as `add_flags`'s parser returns it (attributes "logra.rank" and so on)."""
    return LograConfig(
        **{item.name: getattr(parsed, f"logra.{item.metadata['flag']}") for item in fields(LograConfig)}
    )


def from_hierarchy(logra: SimpleNamespace) -> LograConfig:
    """The configuration of OpenRLHF's nested form of the same namespace (`args.logra`)."""
    values = {}
    for item in fields(LograConfig):
        node = logra
        for part in item.metadata["flag"].split("."):
            node = getattr(node, part)
        values[item.name] = node
    return LograConfig(**values)
