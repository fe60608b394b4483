"""DeepSpeed checkpoints that DeepSpeed cannot continue by itself: those that stock OpenRLHF wrote, or another number
of ranks, or another ZeRO stage. Their weights are taken over bit for bit, with the schedule and what the host and we
have put beside them; what DeepSpeed's optimizer kept begins anew.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import ConfigError
from .ranks import rank, world_size
from .shards import written_by_rank_0
from .targets import full_shape

_WHOLE = "mp_rank_00_model_states.pt"  # ZeRO 0 to 2
_OF_RANK_0 = f"zero_pp_rank_0_{_WHOLE}"  # ZeRO 3
_DEEPSPEEDS_OWN = ("module", "optimizer", "lr_scheduler", "frozen_param_fragments")


@dataclass(frozen=True)
class Found:
    """A checkpoint on disk.

    Attributes:
        folder, tag: as DeepSpeed takes them.
        states: the file of rank 0: DeepSpeed's figures, the host's and ours; weights in it are mapped, not read.
    """

    folder: Path
    tag: str
    states: dict[str, Any]

    @property
    def stage(self) -> int:
        """ZeRO stage that it was written in."""
        return self.states["ds_config"].get("zero_optimization", {}).get("stage", 0)

    def difference(self, engine) -> str | None:
        """What keeps DeepSpeed from continuing it with this engine, or None."""
        if self.states["dp_world_size"] != world_size():
            return f"was written by {self.states['dp_world_size']} ranks"
        if self.stage != engine.zero_optimization_stage():
            return f"was written in ZeRO stage {self.stage}"
        return None

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters by name, whole: bf16, or under ZeRO 3 float32 master copies of the same; read when used."""
        if self.stage < 3:
            return self.states["module"]
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return get_fp32_state_dict_from_zero_checkpoint(str(self.folder), self.tag, lazy_mode=True)


def look_into(folder: str, tag: str | None) -> Found | None:
    """The checkpoint that DeepSpeed would load; None where there is none that it would find."""
    latest = Path(folder) / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    for name in (_WHOLE, _OF_RANK_0):
        path = Path(folder) / (tag or "") / name
        if tag and path.is_file():
            states = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
            return Found(Path(folder), tag, states)
    return None


def adopt(found: Found, engine, parameters: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Take over weights and schedule. A collective.

    Args:
        engine: DeepSpeed's.
        parameters: the trainer's, by the checkpoint's names.

    Returns:
        What the host and we have put beside DeepSpeed's own.

    Raises:
        ConfigError: it is of another model.
    """
    weights = found.weights()  # on every rank, so that all of them see what does not fit
    for name, parameter in parameters.items():
        shape = tuple(weights[name].shape) if name in weights else None
        if shape != full_shape(parameter):
            raise ConfigError(
                f"--ckpt.path: the checkpoint {found.folder / found.tag} has {shape or 'nothing'} for {name} "
                f"{full_shape(parameter)}; resume with the model that it was written with"
            )
    for name, parameter in parameters.items():
        with torch.no_grad(), written_by_rank_0(parameter) as whole:
            if rank() == 0:
                whole.copy_(weights[name].contiguous())
    engine.optimizer.refresh_fp32_params()
    # (Not by its state, which has an entry per parameter group: there may be fewer here.)
    engine.lr_scheduler.last_epoch = found.states["lr_scheduler"]["last_epoch"] - 1
    engine.lr_scheduler.step()
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, found.states[name])
    return {key: value for key, value in found.states.items() if key not in _DEEPSPEEDS_OWN}
