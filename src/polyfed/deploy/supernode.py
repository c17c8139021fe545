"""Starts a site's SuperNode (`polyfed.deploy.flower.supernode`); units and containers name this module."""

from polyfed.deploy.flower.supernode import run_command

if __name__ == "__main__":
    run_command()
