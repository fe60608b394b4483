"""Fira and GaLore as plain torch optimizers, for any training script (docs/strategies.md).

    from openrlhf_logra.optim import FiraAdamW, divide_params

    groups = divide_params(model, target_modules_list=["Linear"], rank=8)
    optimizer = FiraAdamW(groups, lr=0.01)

One process, or data parallel with whole gradients on every rank: nothing is sharded here (under OpenRLHF,
`--logra.method fira` does). By default `step()` uses all gradients at once, which `torch.nn.utils.clip_grad_norm_` may
clip before. After `update_in_backward()` each gradient is used and freed as soon as backward has it: no more than one
layer's exist at a time, so that neither clipping by the global norm, nor accumulation over micro-batches, nor data
parallelism is possible, nor a module that is used twice under reentrant checkpointing (its second use would be
computed again with weights that have moved).

Steps are computed in float32 and rounded to the weights' own type: bf16 weights, to which most of a small step is lost
(docs/bits.md), belong under `--logra.method fira`; here keep them in float32 and use autocast.
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.adamw import adamw
from torch.utils.hooks import RemovableHandle

from .math.limiter import check_limit
from .math.subspace import Fira, GaLore

# Of a group's values: which are accepted, and how to say it.
_OF_ADAM = {
    "lr": (lambda value: 0 <= value < math.inf, "a number of at least 0"),
    "betas": (lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value), "two numbers in [0, 1)"),
    "eps": (lambda value: 0 <= value < math.inf, "a number of at least 0"),
    "weight_decay": (lambda value: 0 <= value < math.inf, "a number of at least 0"),
}
_OF_RULE = {
    "rank": (lambda value: isinstance(value, int) and value >= 1, "an integer of at least 1"),
    "update_gap": (lambda value: isinstance(value, int) and value >= 0, "0 (never) or a positive integer"),
    "scale": (lambda value: 0 < value < math.inf, "a positive number"),
    "norm_growth_limit": (check_limit, "at least 1, or inf"),
}
# What groups for the package galore_torch have.
_OF_GALORE_TORCH = {"update_proj_gap": "call it update_gap", "proj_type": "the smaller side is projected; drop it"}


def divide_params(
    model: nn.Module,
    target_modules_list: Iterable[str] | str,
    rank: int,
    update_gap: int = GaLore.update_gap,
    scale: float = GaLore.scale,
) -> list[dict[str, Any]]:
    """Parameter groups: the weights that get a low-rank state, and all other parameters that require grad.

    Args:
        target_modules_list: modules whose weight matrices are meant: by class name ("Linear") or by the end of their
            path ("q_proj", "mlp.up_proj"). A weight that an embedding shares (a tied head) is none of them.
        rank: of the subspaces; of a matrix whose smaller side is below it, that side.
        update_gap: steps between two bases; 0 keeps the first.
        scale: of the step in the subspace.

    Raises:
        ValueError: a number is out of range, no name is given, or one matches no module with a weight matrix that is
            trained.
    """
    constants = {"rank": rank, "update_gap": update_gap, "scale": scale}
    _check(constants, _OF_RULE)
    chosen: dict[int, nn.Parameter] = {}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    names = [target_modules_list] if isinstance(target_modules_list, str) else list(target_modules_list)
    if not names:
        raise ValueError("target_modules_list is empty; name the modules whose weights get a low-rank state")
    for name in names:
        hits = [module for path, module in model.named_modules() if _is_called(name, path, module)]
        weights = (getattr(hit, "weight", None) for hit in hits)
        matrices = [w for w in weights if _is_trained_matrix(w) and id(w) not in embeddings]
        if not matrices:
            raise ValueError(
                f"target_modules_list: {name!r} matches no module with a weight matrix that is trained (one that an "
                "embedding shares does not count)"
            )
        chosen.update({id(weight): weight for weight in matrices})
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    low_rank = {"params": list(chosen.values()), **constants}
    return [low_rank, {"params": others}] if others else [low_rank]


def _is_called(name: str, path: str, module: nn.Module) -> bool:
    return type(module).__name__ == name or path == name or path.endswith(f".{name}")


def _is_trained_matrix(weight: Any) -> bool:
    return isinstance(weight, nn.Parameter) and weight.dim() == 2 and weight.requires_grad


def _check(values: dict[str, Any], accepted: dict[str, tuple[Callable[[Any], bool], str]]) -> None:
    for name, (accepts, words) in accepted.items():
        try:
            fits = name not in values or accepts(values[name])
        except TypeError:
            fits = False
        if not fits:
            raise ValueError(f"{name} is {values[name]!r}; it must be {words}")


def _warn(message: str) -> None:
    """At the user's line: torch puts a changing number of frames around `step` and hooks."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "openrlhf_logra"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class _LowRankAdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay); groups with a "rank" follow a rule of math/subspace.py."""

    _rule: type[GaLore]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        if not any("rank" in group for group in self.param_groups):
            _warn(
                f"{type(self).__name__}: no group has a rank, so that plain AdamW trains every parameter; make the "
                "groups with divide_params"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Use every gradient that there is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def update_in_backward(self) -> list[RemovableHandle]:
        """From now on backward itself takes the steps, and frees each gradient: of the parameters that there are now.
        Learning rates are those at the time. `step()` finds nothing left to do; call it all the same where there is a
        scheduler, which expects it.

        Returns:
            Handles whose `remove()` ends it.

        Raises:
            RuntimeError: there are several ranks, whose gradients are not averaged yet when backward has them.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError("update_in_backward: gradients of several ranks are averaged later; use step()")
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        return [parameter.register_post_accumulate_grad_hook(self._use) for parameter in parameters]

    @torch.no_grad()
    def _use(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            return  # used already: this was called twice
        # (Looked for each time: loading a state puts other groups in place.)
        group = next(group for group in self.param_groups if any(p is parameter for p in group["params"]))
        self._step(parameter, group)
        parameter.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, after a look at the group. Keys of your own are left alone.

        Raises:
            ValueError: a value is out of range or has no effect, or a group with a rank holds something else than real
                matrices.
        """
        given = {**self.defaults, **param_group}
        constants = [field.name for field in fields(self._rule)] if "rank" in given else []
        for name in given:
            if name in _OF_GALORE_TORCH or (name in _OF_RULE and name not in constants):
                hint = _OF_GALORE_TORCH.get(name, "drop it" if constants else "give the group a rank, or drop it")
                raise ValueError(f"{type(self).__name__} makes no use of a group's {name!r}: {hint}")
        _check(given, _OF_ADAM | _OF_RULE)
        param_group["rule"] = self._rule.__name__  # a saved state says whose it is
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"] if "rank" in given else ():
            if parameter.dim() != 2 or parameter.is_complex():
                group = self.param_groups.pop()
                raise ValueError(
                    f"a group with rank {group['rank']} holds a {parameter.dtype} parameter of shape "
                    f"{tuple(parameter.shape)}; only real matrices have a low-rank state"
                )

    def _step(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        if parameter.grad.is_sparse:
            raise RuntimeError(
                f"{type(self).__name__} takes no sparse gradients; build the embedding with sparse=False"
            )
        if "rank" not in group:
            return self._adamw(parameter, group)
        state = self.state[parameter]
        kept = state.get("kept", 0)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        step = self._rule_of(parameter, group).step(parameter.grad.to(wide), state)
        if state["kept"] > kept:
            _warn(
                f"no new basis for a matrix {tuple(parameter.shape)} (its gradient is zero or not finite, or the SVD "
                "did not converge): the old one stays in use"
            )
        decayed = parameter.to(wide) * (1 - group["lr"] * group["weight_decay"])
        parameter.copy_(decayed.sub_(step, alpha=group["lr"]))

    def _rule_of(self, parameter: nn.Parameter, group: dict[str, Any]) -> GaLore:
        known = {field.name for field in fields(self._rule)}
        given = {name: group[name] for name in _OF_RULE if name in group and name in known}
        given["rank"] = min(group["rank"], *parameter.shape)
        return self._rule(**given, beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"])

    def _adamw(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """torch's own, on one parameter."""
        state = self.state[parameter]
        if not state:
            moments = (torch.zeros_like(parameter), torch.zeros_like(parameter))
            state.update(step=torch.tensor(0.0), exp_avg=moments[0], exp_avg_sq=moments[1])
        adamw(
            [parameter],
            [parameter.grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but that moments and bases keep their float32 where parameters are bf16.

        Raises:
            ValueError: it is another optimizer's, of other ranks, of other parameters, or of other shapes.
        """
        self._check_saved(state_dict)
        super().load_state_dict(state_dict)
        for saved, group in zip(state_dict["param_groups"], self.param_groups):
            for key, parameter in zip(saved["params"], group["params"]):
                if "rank" in group and key in state_dict["state"]:
                    values = state_dict["state"][key]
                    self.state[parameter] = {
                        name: value.to(parameter.device, copy=True) if isinstance(value, torch.Tensor) else value
                        for name, value in values.items()
                    }

    def _check_saved(self, state_dict: dict[str, Any]) -> None:
        found, own = len(state_dict["param_groups"]), len(self.param_groups)
        if found != own:
            raise ValueError(f"load_state_dict: parameter groups are {found} in the state and {own} here")
        for index, (saved, group) in enumerate(zip(state_dict["param_groups"], self.param_groups)):
            for name in ("rule", "rank"):
                if saved.get(name) != group.get(name):
                    found, own = saved.get(name), group.get(name)
                    raise ValueError(
                        f"load_state_dict: {name} of group {index} is {found} in the state and {own} here"
                    )
            found, own = len(saved["params"]), len(group["params"])
            if found != own:
                raise ValueError(
                    f"load_state_dict: group {index} has {found} parameters in the state and {own} here; it is of "
                    "another model"
                )
            low_rank = "rank" in group
            for place, (key, parameter) in enumerate(zip(saved["params"], group["params"])):
                moment = state_dict["state"].get(key, {}).get("m" if low_rank else "exp_avg")
                shape = tuple(parameter.shape)
                expected = self._rule_of(parameter, group).low_shape(*shape) if low_rank else shape
                if moment is not None and tuple(moment.shape) != expected:
                    raise ValueError(
                        f"load_state_dict: parameter {place} of group {index} has moments {tuple(moment.shape)} in "
                        f"the state and would have {expected} here; give the parameters in the order of the saved ones"
                    )


class GaLoreAdamW(_LowRankAdamW):
    """AdamW whose low-rank groups move in their gradients' leading subspaces alone.

    Args:
        params: groups as `divide_params` makes them. What has no rank is trained by AdamW; where nothing has one, a
            warning says so.
        lr, betas, eps, weight_decay: AdamW's.

    Raises:
        ValueError: a value is out of range or has no effect.
    """

    _rule = GaLore


class FiraAdamW(_LowRankAdamW):
    """GaLoreAdamW, and the rest of the gradient, scaled as Adam scales the subspace and limited in the growth of its
    norm (group entry "norm_growth_limit", 1.01 where there is none).

    Args:
        params: groups as `divide_params` makes them. What has no rank is trained by AdamW; where nothing has one, a
            warning says so.
        lr, betas, eps, weight_decay: AdamW's.

    Raises:
        ValueError: a value is out of range or has no effect.
    """

    _rule = Fira
