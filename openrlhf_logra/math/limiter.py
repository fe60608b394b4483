"""Fira's norm-growth limiter: a norm may grow by a factor of at most `limit` from one step to the next."""


def limited(norm: float, last: float | None, limit: float) -> float:
    """The factor in (0, 1] that keeps `norm` within `limit` times the last step's.

    Args:
        norm: of this step, before.
        last: of the last step that was not zero, as it was taken; None where there was none.
        limit: at least 1; infinity limits nothing.
    """
    if not last or norm <= limit * last:
        return 1.0
    return limit * last / norm


def check_limit(limit: float) -> bool:
    """Whether a limit is one: 1 or more, infinity included, NaN not."""
    return limit >= 1
