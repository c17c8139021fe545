"""polyfed: personalised federated learning across different architectures.

>>> import polyfed as pf
>>> pf.algorithms.get("fedavg") is pf.algorithms.FedAvg
True
"""

from polyfed import algorithms
from polyfed.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.comparison import compare
from polyfed.data.examples import Examples
from polyfed.errors import ClientError, RoundError, UserError
from polyfed.federation import federate, resume
from polyfed.metrics import Metric
from polyfed.runs.results import Run

__all__ = [
    "Algorithm",
    "Client",
    "ClientError",
    "ClientInfo",
    "Examples",
    "Message",
    "Metric",
    "RoundError",
    "Run",
    "ServerContext",
    "UserError",
    "algorithms",
    "compare",
    "federate",
    "resume",
]
