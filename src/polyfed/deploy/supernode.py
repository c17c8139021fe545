"""Starts a site's SuperNode; systemd units and containers start this module by its name.

The code is in `polyfed.deploy.flower.supernode`.
"""

from polyfed.deploy.flower.supernode import run_command

if __name__ == "__main__":
    run_command()
