"""A run that is stopped at will."""

from polyfed.simulation.runs.progress import Progress


class Stop(Progress):
    """Ctrl-C when a round is complete."""

    def __init__(self, number):
        self.number = number

    def round(self, record):
        if record["round"] == self.number:
            raise KeyboardInterrupt

    def start(self, *told): ...

    client = say = stop = start
