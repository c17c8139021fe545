"""`python -m polyfed` is the command `polyfed`."""

from polyfed.cli import entry

if __name__ == "__main__":
    entry()
