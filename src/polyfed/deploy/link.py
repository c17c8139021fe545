"""Runs `flower-superlink` with the checks of `polyfed.deploy.flower.superlink`; units and containers of sites name this module."""

from polyfed.deploy.flower.superlink import run_command

if __name__ == "__main__":
    run_command()
