"""Builds the sentences that say at which round and to which score methods are compared."""


def budget_sentence(kind: str, limit: float | None, *, has_limit: bool, has_validation_examples: bool) -> str:
    """Returns a sentence that says at which round each method was compared, from the parts of the budget.

    Args:
        kind: of the budget.
        limit: bytes or seconds; None if nothing was sent.
        has_limit: whether the user gave the limit.
        has_validation_examples: whether clients have validation examples.
    """
    if kind == "best" and has_validation_examples:
        return "each method at its best round by validation loss (alone: each client at its own), with equal local training"
    if kind in ("best", "steps"):
        return "each method after all its rounds, with equal local training"
    if limit is None:
        return "each method after all its rounds: nothing was sent"
    amount = f"{limit / 2**20:.2f} MB" if kind == "bytes" else f"{limit:.1f} s of clients and server"
    whose = "" if has_limit else ", what the cheapest run spends in all"
    return f"each run at its last evaluated round within {amount}{whose}"


def describe_target_source(target: float | None, reference: str | None) -> str:
    """Says where the target score comes from: the user, or a reference method."""
    if target is not None:
        return "asked for"
    if reference is None:
        return "no method that trains alone has a score"
    return f"what {reference} reaches with the same seed at the compared round"
