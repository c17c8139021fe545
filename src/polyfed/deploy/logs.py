"""Sets up the logging of a deployment's processes."""

import logging


def log_to_stderr() -> None:
    """Writes polyfed's log lines to stderr, beside Flower's."""
    logger = logging.getLogger("polyfed")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("polyfed: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # Flower's own handler would print each line again
