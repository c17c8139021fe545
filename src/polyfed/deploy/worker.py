"""Runs a site's process with the checks of `polyfed.deploy.site.worker`; units and containers of sites name this module."""

from polyfed.deploy.site.worker import run_command

if __name__ == "__main__":
    run_command()
