"""Starts Flower's SuperLink, whose control interface requires a token; systemd units and containers start this module
by its name.

The code is in `polyfed.deploy.flower.superlink`.
"""

import sys
from importlib.metadata import version


def start_superlink_or_explain() -> None:
    """Runs the SuperLink with this process's arguments; exits with a sentence if Flower does not suit."""
    try:
        from polyfed.deploy.flower.superlink import run_from_command_line
    except ImportError as error:
        sys.exit(
            f"polyfed: with Flower {version('flwr')} the control interface cannot be closed by a token ({error}), and "
            "whoever reaches an open one can run code here and at sites; pip install 'flwr>=1.41,<1.43', which were tried"
        )
    run_from_command_line()


if __name__ == "__main__":
    start_superlink_or_explain()
