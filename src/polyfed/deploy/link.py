"""Starts Flower's SuperLink, whose control interface requires a token; systemd units and containers start this module
by its name.

The code is in `polyfed.deploy.flower.superlink`.
"""

from polyfed.deploy.flower.superlink import run_from_command_line

if __name__ == "__main__":
    run_from_command_line()
