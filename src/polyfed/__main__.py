"""`python -m polyfed` is the command `polyfed`."""

from polyfed.cli.main import entry

if __name__ == "__main__":
    entry()
