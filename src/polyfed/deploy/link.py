"""Starts Flower's SuperLink with a token (`polyfed.deploy.flower.superlink`); units and containers name this module."""

from polyfed.deploy.flower.superlink import run_command

if __name__ == "__main__":
    run_command()
