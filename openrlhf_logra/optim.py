"""Fira and GaLore as plain torch optimizers, for any training script (spec section 12).

    from openrlhf_logra.optim import FiraAdamW, divide_params

    groups = divide_params(model, target_modules_list=["Linear"], rank=8)
    optimizer = FiraAdamW(groups, lr=0.01)

One process, or data parallel with whole gradients on every rank: nothing is sharded here (under OpenRLHF,
`--logra.method fira` does). By default `step()` uses all gradients at once, which `torch.nn.utils.clip_grad_norm_` may
clip before. After `update_in_backward()` each gradient is used and freed as soon as backward has it: no more than one
layer's exist at a time, so that neither clipping by the global norm, nor accumulation over micro-batches, nor data
parallelism is possible.
"""

import math
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

_RULE = ("rank", "update_gap", "scale", "norm_growth_limit")


def divide_params(
    model: nn.Module,
    target_modules_list: Iterable[str] | str,
    rank: int,
    update_gap: int = 200,
    scale: float = 0.25,
) -> list[dict[str, Any]]:
    """Parameter groups: the weights that get a low-rank state, and all other parameters that require grad.

    Args:
        target_modules_list: modules whose weight matrices are meant: by class name ("Linear") or by the end of their
            path ("q_proj", "mlp.up_proj"). A weight that an embedding shares (a tied head) is none of them.
        rank: of the subspaces; of a matrix with a smaller side, that side.
        update_gap: steps between two bases.
        scale: of the step in the subspace.

    Raises:
        ValueError: a name matches no module with a weight matrix that is trained.
    """
    chosen: dict[int, nn.Parameter] = {}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name in [target_modules_list] if isinstance(target_modules_list, str) else target_modules_list:
        hits = [module for path, module in model.named_modules() if _is_called(name, path, module)]
        weights = (getattr(hit, "weight", None) for hit in hits)
        matrices = [w for w in weights if _is_trained_matrix(w) and id(w) not in embeddings]
        if not matrices:
            raise ValueError(f"target_modules_list: {name!r} matches no module with a weight matrix that is trained")
        chosen.update({id(weight): weight for weight in matrices})
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    low_rank = {"params": list(chosen.values()), "rank": rank, "update_gap": update_gap, "scale": scale}
    return [low_rank, {"params": others}] if others else [low_rank]


def _is_called(name: str, path: str, module: nn.Module) -> bool:
    return type(module).__name__ == name or path == name or path.endswith(f".{name}")


def _is_trained_matrix(weight: Any) -> bool:
    return isinstance(weight, nn.Parameter) and weight.dim() == 2 and weight.requires_grad


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
        for holds, name, value in (
            (lr >= 0, "lr", lr),
            (all(0 <= beta < 1 for beta in betas), "betas", betas),
            (eps >= 0, "eps", eps),
            (weight_decay >= 0, "weight_decay", weight_decay),
        ):
            if not holds:
                raise ValueError(f"{name} is {value}, which is out of range")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

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
        Learning rates are those at the time.

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
        # (Looked for each time: loading a state puts other groups in place.)
        group = next(group for group in self.param_groups if any(p is parameter for p in group["params"]))
        self._step(parameter, group)
        parameter.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, after a look at what the group says of its rule.

        Raises:
            ValueError: a value is out of range.
        """
        accepted = {
            "rank": lambda value: value >= 1,
            "update_gap": lambda value: value >= 0,
            "scale": lambda value: 0 < value < math.inf,
            "norm_growth_limit": check_limit,
        }
        for name, accepts in accepted.items() if "rank" in param_group else ():
            if name in param_group and not accepts(param_group[name]):
                raise ValueError(f"{name} is {param_group[name]}, which is out of range")
        super().add_param_group(param_group)

    def _step(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        if "rank" not in group:
            return self._adamw(parameter, group)
        state = self.state[parameter]
        kept = state.get("kept", 0)
        step = self._rule_of(parameter, group).step(parameter.grad.float(), state)
        if state["kept"] > kept:
            warnings.warn(
                f"no new basis for a matrix {tuple(parameter.shape)}: the old one stays in use", stacklevel=3
            )
        decayed = parameter.float() * (1 - group["lr"] * group["weight_decay"])
        parameter.copy_(decayed.sub_(step, alpha=group["lr"]))

    def _rule_of(self, parameter: nn.Parameter, group: dict[str, Any]) -> GaLore:
        known = {field.name for field in fields(self._rule)}
        given = {name: group[name] for name in _RULE if name in group and name in known}
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
        """As torch's, but that moments and bases keep their float32 where parameters are bf16."""
        super().load_state_dict(state_dict)
        for saved, group in zip(state_dict["param_groups"], self.param_groups):
            for key, parameter in zip(saved["params"], group["params"]):
                if "rank" in group and key in state_dict["state"]:
                    values = state_dict["state"][key]
                    self.state[parameter] = {
                        name: value.to(parameter.device, copy=True) if isinstance(value, torch.Tensor) else value
                        for name, value in values.items()
                    }


class GaLoreAdamW(_LowRankAdamW):
    """AdamW whose low-rank groups move in their gradients' leading subspaces alone.

    Args:
        params: groups as `divide_params` makes them, or plain parameters.
        lr, betas, eps, weight_decay: AdamW's.

    Raises:
        ValueError: a value is out of range.
    """

    _rule = GaLore


class FiraAdamW(_LowRankAdamW):
    """GaLoreAdamW, and the rest of the gradient, scaled as Adam scales the subspace and limited in the growth of its
    norm (group entry "norm_growth_limit", 1.01 where there is none).

    Args:
        params: groups as `divide_params` makes them, or plain parameters.
        lr, betas, eps, weight_decay: AdamW's.

    Raises:
        ValueError: a value is out of range.
    """

    _rule = Fira
