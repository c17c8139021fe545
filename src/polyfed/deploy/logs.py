"""Sets up the logging of a deployment's processes."""

import logging


def send_logs_to_stderr() -> None:
    """Makes polyfed's loggers write to stderr, where Flower's log lines appear too."""
    logger = logging.getLogger("polyfed")
    if all(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        logging.getLogger("polyfed.simulation").setLevel(logging.CRITICAL)  # the server prints each round itself
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("polyfed: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # Flower's own handler would print each line again
