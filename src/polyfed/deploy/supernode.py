"""Runs `flower-supernode` with the checks of `polyfed.deploy.flower.supernode`; units and containers of sites name this module."""

from polyfed.deploy.flower.supernode import run_command

if __name__ == "__main__":
    run_command()
