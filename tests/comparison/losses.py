"""Validation losses put into the history of a run, for tests of what a search chooses."""


def set_loss(record, loss):
    """Gives the clients of a round a validation loss: a number for all, or one by client, which may be None."""
    for client, row in record["clients"].items():
        row["val_loss"] = loss[client] if isinstance(loss, dict) else loss
