"""How large FLHA-GHN's messages are, over those of FedAvg with the federation's largest network. Nothing is trained.

    python benchmarks/ghn_bytes.py --out benchmarks/results/ghn_bytes.json

For each federation: kB (2^10 bytes) of the largest network's state as FedAvg sends it, one way to one client, and how many
times as much FLHA-GHN sends with its default heads (in brackets the rank, latent entries and hidden units that these chose),
with the largest of those (`factored`), the smallest, and with `head: lowrank` and `mlp`. "Heads in use" counts, of the
default's message, the GNN and those heads alone that a client's network uses, for the client that has most: as much would be
sent if each client got no others. Numbers are those of the messages, with the names of their tensors.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from four_networks import LENGTH, NETWORKS
from torch import Tensor, nn

from polyfed.algorithms import FLHAGHN, FedAvg
from polyfed.cli.commands.options.recipes import read_recipe
from polyfed.core.algorithm import ClientInfo, Message, ServerContext
from polyfed.core.serialization import safetensors_num_bytes
from polyfed.graphs import ArchitectureGraph, LayerCatalogue, extract
from polyfed.models import ModelSpec

HEAD_PREFIX = "heads."


def of_recipe(
    name: str, shape: tuple[int, ...], classes: int, variant: str | None = None
) -> dict[str, Callable[[], nn.Module]]:
    """The networks of a shipped recipe, by a text that describes them."""
    configuration = read_recipe(name).configuration(variant=variant)
    models = configuration["model"]
    specs = [models] if "name" in models else models.values() if isinstance(models, Mapping) else models
    built = {}
    for spec in specs:
        arguments = {field: value for field, value in spec.items() if field != "name"}
        built[str(spec)] = ModelSpec(spec["name"], arguments, shape, classes)
    return built


DIGITS, FASHION, CIFAR10, HEART, TWEETS = (1, 8, 8), (1, 28, 28), (3, 32, 32), (28,), (40,)
FEDERATIONS: dict[str, tuple[dict[str, Callable[[], nn.Module]], tuple[int, ...], int]] = {
    # networks, shape of an input, largest token (0 where inputs are not tokens)
    "recipe quickstart (with flha_ghn)": (of_recipe("quickstart", HEART, 2), HEART, 0),
    "four hospitals, one MLP (with flha_ghn)": ({"mlp": ModelSpec("mlp", {"hidden": [16]}, HEART, 2)}, HEART, 0),
    "one MLP of 4,000 weights": ({"mlp": ModelSpec("mlp", {"hidden": [64, 32]}, HEART, 2)}, HEART, 0),
    "recipe digits": (of_recipe("digits", DIGITS, 10), DIGITS, 0),
    "recipe blobs": (of_recipe("blobs", (1, 32, 32), 2), (1, 32, 32), 0),
    "recipe tagging (with flha_ghn)": (of_recipe("tagging", (12,), 5), (12,), 2),
    "leaderboard digits-0.1, digits-1, groups, rotations": (of_recipe("leaderboard", DIGITS, 10, "digits-1"), DIGITS, 0),
    "leaderboard architectures": (of_recipe("leaderboard", DIGITS, 10, "architectures"), DIGITS, 0),
    "leaderboard fashion": (of_recipe("leaderboard", FASHION, 10, "fashion-1"), FASHION, 0),
    "leaderboard hospitals": (of_recipe("leaderboard", (30,), 2, "hospitals"), (30,), 0),
    "leaderboard tweets": (of_recipe("leaderboard", TWEETS, 2, "tweets"), TWEETS, 2),
    "leaderboard cifar10": (of_recipe("leaderboard", CIFAR10, 10, "cifar10"), CIFAR10, 0),
    "the paper's four networks": (
        {name: ModelSpec(name, {}, CIFAR10, 10) for name in ("resnet18", "flha_arch1", "flha_arch2", "flha_arch3")},
        CIFAR10, 0,
    ),
    "four unlike networks, tweets": (NETWORKS["tweets"], (LENGTH,), 2),
    "four unlike networks, CIFAR-10": (NETWORKS["cifar10"], CIFAR10, 0),
}  # fmt: skip


def example(shape: tuple[int, ...], tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randint(0, tokens, (2, *shape), generator=generator)
        if tokens
        else torch.randn(2, *shape, generator=generator)
    )


def message_of(method: FLHAGHN, catalogue: LayerCatalogue) -> Message:
    context = ServerContext(seed=0, rounds=1, clients=(), layer_catalogue=catalogue)
    return method.dispatch(method.server_init(context), ClientInfo("a"))


def size_of(message: Message) -> int:
    return safetensors_num_bytes(
        {f"{group}/{name}": t for group, tensors in message.tensors.items() for name, t in tensors.items()}
    )


def in_use(message: Message, graph: ArchitectureGraph) -> int:
    """Bytes of the message without the heads of types that the graph does not have."""
    keys = {kind.key for kind in graph.layer_types}
    tensors = message.tensors["ghn"]
    kept = {n: t for n, t in tensors.items() if not n.startswith(HEAD_PREFIX) or n.split(".")[1] in keys}
    return size_of(Message({"ghn": kept}))


def measure(networks: dict[str, Callable[[], nn.Module]], shape: tuple[int, ...], tokens: int) -> dict[str, object]:
    fedavg = FedAvg()
    largest = 0
    for build in networks.values():
        context = ServerContext(seed=0, rounds=1, clients=(), model=build)
        largest = max(largest, size_of(fedavg.dispatch(fedavg.server_init(context), ClientInfo("a"))))
    row: dict[str, object] = {"networks": len(networks), "largest_network": largest}
    forms = {
        "light": FLHAGHN(),
        "factored": FLHAGHN(head="factored"),
        "smallest": FLHAGHN(rank=2, latent=8, hidden=4),
        "lowrank": FLHAGHN(head="lowrank"),
        "mlp": FLHAGHN(head="mlp"),
    }
    for name, method in forms.items():
        graphs = [
            method.contraction.apply(extract(build(), example(shape, tokens), method.kinds))
            for build in networks.values()
        ]
        catalogue = LayerCatalogue.from_graphs(graphs)
        message = message_of(method, catalogue)
        row[name] = size_of(message)
        if name == "light":
            config = method._config_of_message(message.tensors["ghn"])
            row |= {
                "types": len(catalogue.types),
                "rank": config.rank,
                "latent": config.latent,
                "hidden": config.hidden,
            }
            row["shared_types"] = sum(
                sum(kind in graph.layer_types for graph in graphs) > 1 for kind in catalogue.types
            )
            row["in_use"] = max(in_use(message, graph) for graph in graphs)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    options = parser.parse_args()
    results = {}
    columns = (
        "federation, networks, layer types (shared), largest network kB, default, heads in use, factored, smallest, "
    )
    columns += "lowrank, mlp"
    print(f"| {columns.replace(', ', ' | ')} |")
    print("|---" * 10 + "|")
    for name, (networks, shape, tokens) in FEDERATIONS.items():
        row = results[name] = measure(networks, shape, tokens)
        ratios = {
            form: row[form] / row["largest_network"]
            for form in ("light", "in_use", "factored", "smallest", "lowrank", "mlp")
        }
        row["ratios"] = {form: round(ratio, 2) for form, ratio in ratios.items()}
        shown = [f"{ratio:.1f}" for ratio in ratios.values()]
        shown[0] += f" ({row['rank']}, {row['latent']}, {row['hidden']})"
        size = f"{row['networks']} | {row['types']} ({row['shared_types']}) | {row['largest_network'] / 2**10:.0f}"
        print(f"| {name} | {size} | {' | '.join(shown)} |", flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
