"""Log-probabilities of the rollout engines, which the mismatch of predicted-KL control needs (spec section 6).

OpenRLHF asks for them only where it corrects by importance sampling.
"""

from types import SimpleNamespace

from ..config import LograConfig
from ..train.kl_control import controls_kl

VARIABLE = "OPENRLHF_LOGRA_ROLLOUT_LOG_PROBS"  # the mode, for rollout actors; absent where they are left alone
RAW, PROCESSED = "raw_logprobs", "processed_logprobs"  # vLLM's names


def wanted(config: LograConfig) -> bool:
    """Whether the flags ask for mismatch subtraction."""
    return controls_kl(config) and not config.kl_no_mismatch_subtraction


def mode(args: SimpleNamespace) -> str | None:
    """vLLM's mode that gives the policy at the rollout's temperature, the one that the trainer computes; None if none
    does. Processed log-probabilities, which the host's own correction uses, are at the rollout's temperature, but of
    what top-p has left; raw ones are at temperature 1."""
    if args.rollout.top_p == 1:
        return PROCESSED
    corrects = args.algo.advantage.is_correction_level != "off"  # by the processed ones: the user's recipe
    return RAW if args.rollout.temperature == 1 and not corrects else None


def use(args: SimpleNamespace, config: LograConfig) -> bool:
    """Whether rollout actors return log-probabilities for us."""
    return wanted(config) and mode(args) is not None
