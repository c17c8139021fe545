"""Starts a site's SuperNode; systemd units and containers start this module by its name.

The code is in `polyfed.deploy.flower.supernode`.
"""

from polyfed.deploy.flower.supernode import run_from_command_line

if __name__ == "__main__":
    run_from_command_line()
