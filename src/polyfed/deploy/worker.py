"""Starts a site's long-lived process (`polyfed.deploy.site.worker`); the SuperNode names this module."""

from polyfed.deploy.site.worker import run_command

if __name__ == "__main__":
    run_command()
