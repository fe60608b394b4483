"""What `--logra.sync.mode` means for the updates of a strategy: for the sync, and for the table of its costs."""

SYNC_MODES = ("auto", "factor", "sparse", "dense")


def keeps_records(mode: str, logged: bool) -> bool:
    """Whether updates become records: for the engines, or for a log."""
    return mode != "dense" or logged


def by_factors(mode: str, exact_updates: bool) -> bool:
    """Whether such a record holds the factors of an update; changed elements otherwise."""
    return exact_updates and mode != "sparse"


def compared(
    mode: str, logged: bool, exact_updates: bool, *, trained: tuple[str, ...], dense: tuple[str, ...]
) -> tuple[str, ...]:
    """Names of the parameters whose changes are found by comparing with a copy: `dense`, those that no factors cover,
    or all that are `trained`."""
    if not keeps_records(mode, logged):
        return ()
    return dense if by_factors(mode, exact_updates) else trained
