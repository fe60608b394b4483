"""Log-probabilities of the rollout engines, which the mismatch of predicted-KL control needs (docs/kl.md).

OpenRLHF asks for them only where it corrects by importance sampling.
"""

from types import SimpleNamespace

from ..config import LograConfig

VARIABLE = "OPENRLHF_LOGRA_ROLLOUT_LOG_PROBS"  # the mode, for rollout actors; absent where they are left alone
RAW, PROCESSED = "raw_logprobs", "processed_logprobs"  # vLLM's names


def wanted(config: LograConfig) -> bool:
    """Whether the flags ask for mismatch subtraction."""
    return config.controls_kl and not config.kl_no_mismatch_subtraction


def mode(args: SimpleNamespace) -> str | None:
    """vLLM's mode that gives the policy at the rollout's temperature, the one that the trainer computes; None if none
    does. Processed log-probabilities, which the host's own correction uses, are at the rollout's temperature, but of
    what top-p has left; raw ones are at temperature 1."""
    if args.rollout.top_p == 1:
        return PROCESSED
    # The host's correction takes the processed ones: the user's recipe.
    return RAW if args.rollout.temperature == 1 and not _host_corrects(args) else None


def _host_corrects(args: SimpleNamespace) -> bool:
    advantage = args.algo.advantage
    if hasattr(advantage, "is_correction_level"):
        return advantage.is_correction_level != "off"
    return advantage.is_correction_enable  # before OpenRLHF 0.11.2


def use(args: SimpleNamespace, config: LograConfig) -> bool:
    """Whether rollout actors return log-probabilities for us."""
    return wanted(config) and mode(args) is not None
