"""The steps that FedAvg and its relatives share: one global model that goes down, is trained, and is averaged."""

from collections.abc import Mapping

from torch import Tensor

from polyfed.algorithm import Client, Message, ServerContext
from polyfed.buffers import Policy, give_back, travelling
from polyfed.scratch import Scratch, initial_state, scratch
from polyfed.tree import Spec, Tree, spec, weighted_mean

State = dict[str, Tree]
Mine = dict[str, Tree]


def start(server: ServerContext, policy: Policy) -> State:
    """The initial global model θ: the common draw of the federation's architecture."""
    assert server.model is not None  # `requires` names "one_architecture"
    buffers = scratch(server.model).buffers
    return {"model": travelling(initial_state(server.model, server.seed), buffers, policy)}


def reply(own: Scratch, client: Client, loss: float, policy: Policy) -> tuple[Message, Mine]:
    """The trained model θ_i with n_i, and the private state of the buffer policy."""
    model, mine = give_back(own, policy)
    return Message({"model": model}, {"num_examples": len(client.train), "train_loss": loss}), mine


def average(replies: Mapping[str, Message], weighted: bool) -> dict[str, Tensor]:
    """θ = Σ_i (n_i/n) θ_i over the replies, or (1/m) Σ_i θ_i unweighted."""
    weights = {i: reply.scalars["num_examples"] for i, reply in replies.items()} if weighted else None
    return weighted_mean({i: reply.arrays["model"] for i, reply in replies.items()}, weights)


def same_as_down(down: Message) -> dict[str, Spec]:
    """The reply holds the model that went down: the same names, shapes and dtypes."""
    return {"model": spec(down.arrays["model"])}
