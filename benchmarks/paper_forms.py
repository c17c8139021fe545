"""What polyfed's readings of FedHeNN's and FedPNAS's papers change where polyfed has no option for the other reading: each
such reading, written here, against polyfed's default.

    R=benchmarks/results/paper_forms.json
    python benchmarks/paper_forms.py all --out $R
    python benchmarks/paper_forms.py show --out $R

Settings. `fedhenn`: the eight clients and four networks of recipe `digits`, two clients a round, 40 rounds;
`fedhenn_halved`: the same, four clients having lost half of their training images; `fedhenn_images`: the same with 48
images a client, of which forms take fewer, in minibatches of 12, so that the last is not too small for BatchNorm;
`fedhenn_homo`: the same as `fedhenn` with one CNN and algorithm 1; `fedpnas`: the five clients of recipe `fedpnas_effects`,
images turned by 0 and ±90 degrees, CA-FedPNAS, 12 rounds.

A seed draws data, networks and minibatches, and is the same for all forms of a setting. Accuracy after the last round, mean
over clients, in percent; differences from the default have Student's interval of 95 % over paired seeds. All forms have the
rates of the setting. The default of `fedpnas` is that of `deviations.py`, the same runs. What `--out` has is not repeated.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from first_heads import difference

import polyfed as pf
from polyfed.algorithms import CAFedPNAS, FedHeNN, FedHeNNHomo
from polyfed.alignment import linear_cka, mean_kernel_features
from polyfed.cli.commands.options import configuration_parser, recipes
from polyfed.core.examples.examples import Examples
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.nn.optimizers import Adam
from polyfed.core.seeds import derive_seed, numpy_generator
from polyfed.core.training import loop
from polyfed.data.partitioning.allocation import draw_stratified_rows
from polyfed.nas.operations import OPERATION_NAMES
from polyfed.simulation import experiment as experiments
from polyfed.simulation.monitoring.progress import SilentProgress

MORE_EPOCHS = 10  # of the authors' code, after the last round


# -- FedHeNN: other methods -------------------------------------------------------------------------------------------


class ComparedKernels(FedHeNN):
    """Is FedHeNN, and says after each round how alike the kernel of the clients' mean representation and the mean of their
    kernels are (CKA, on the whole pool), and of how many dimensions the clients' kernels and that of the mean are."""

    def analysis(self, server_state, client_ids):
        numbers, representations = (
            super().analysis(server_state, client_ids),
            _sorted_values(server_state["representations"]),
        )
        if not representations:
            return numbers
        mean = mean_representation(representations, self.normalise)
        kernels = mean_kernel_features(
            representations, [1 / len(representations)] * len(representations), self.normalise
        )
        ranks = {"rank": statistics.fmean(map(effective_rank, representations)), "rank_of_mean": effective_rank(mean)}
        return {**numbers, "mean_and_mean_kernel": float(linear_cka(mean, kernels)), **ranks}


class MeanOfRepresentations(ComparedKernels):
    """Aligns clients with the kernel of the mean representation, as eq. 3 has it, in place of the mean kernel of eq. 6."""

    def _mean_kernel(self, server_state, rows):
        representations = [a[rows.long()] for a in _sorted_values(server_state["representations"])]
        return {"features": mean_representation(representations, self.normalise)} if representations else {}


def mean_representation(representations, normalise):
    """Returns Σ_j A_j/N, each A_j scaled as in the mean kernel; all have one width."""
    return torch.stack([mean_kernel_features([a], [1.0], normalise) for a in representations]).mean(0)


def effective_rank(a):
    """Returns (Σ λ)²/Σ λ² of the centred kernel's eigenvalues: d if d of them are equal and the others 0."""
    eigenvalues = torch.linalg.svdvals((a - a.mean(0)).double()).square()
    return float(eigenvalues.sum() ** 2 / eigenvalues.square().sum())


class UntrainedNetworksCount(FedHeNN):
    """Begins with K̄(0), the mean kernel of the untrained networks of all clients (algorithm 2)."""

    def server_init(self, server):
        state = super().server_init(server)
        untrained = {
            info.id: initial_state(server.architectures[info.architecture], server.seed) for info in server.clients
        }
        representations, capacities = self._representations_of_models(untrained, server)
        return {**state, "representations": representations, "capacities": capacities}


class TrainedOnBeforeTests(FedHeNN):
    """Trains each client's network for ten more epochs before it is tested (authors' code, which keeps the term in them)."""

    def personal_model(self, message, client_state, client, seed):
        network = super().personal_model(message, client_state, client, seed)
        if message.scalars:  # of training, which takes the network from here, too
            return network
        return train_on(network, client, self, seed)


class GlobalModelTrainedOnBeforeTests(FedHeNNHomo):
    """Tests a copy of the global model that each client trained for ten epochs (authors' code, which keeps the term in
    them), not W_i."""

    def personal_model(self, message, client_state, client, seed):
        return train_on(self._load_global_model(message, client_state, client), client, self, seed)


def train_on(network, client, method, seed):
    loop.fit(
        network, client, replace(method, local_epochs=MORE_EPOCHS), lr=method.lr, seed=derive_seed(seed, "more epochs")
    )
    return network


# -- FedHeNN: other data and networks ---------------------------------------------------------------------------------


def give_clients_images_as_pool(participants, seed):
    """Takes the public pool from the clients' training images, as many as it had, and equally many of each client."""
    size, trains = len(participants.public), [client.train for client in participants.clients]
    random = numpy_generator(derive_seed(seed, "pool of clients' images"))
    counts = [len(rows) for rows in np.array_split(np.arange(size), len(trains))]
    parts = [
        train.select(torch.from_numpy(np.sort(random.permutation(len(train))[:count])))
        for train, count in zip(trains, counts, strict=True)
    ]
    x, y = torch.cat([part.raw_inputs for part in parts]), torch.cat([part.labels for part in parts])
    return replace(participants, public=Examples(x, y, transform=trains[0].transform))


def draw_networks(participants, seed):
    """Draws each client's network from those of the setting, all equally probable, instead of dealing them in turn."""
    networks = list(dict.fromkeys(client.model for client in participants.clients))
    numbers = numpy_generator(derive_seed(seed, "networks")).integers(len(networks), size=len(participants.clients))
    clients = (replace(c, model=networks[k]) for c, k in zip(participants.clients, numbers, strict=True))
    return replace(participants, clients=tuple(clients))


def test_on_half_too(participants, seed):
    """Adds a second test set: half of the test images at clients that have lost half of their training images, and all
    elsewhere. Training does not depend on it."""
    full = max(len(client.train) for client in participants.clients)
    clients = (
        replace(c, global_test=_draw(c.test, len(c.test) // (2 if len(c.train) < full else 1), seed))
        for c in participants.clients
    )
    return replace(participants, clients=tuple(clients))


def keep_training_images(*counts):
    """Returns a change that leaves each client the last of these numbers of training images, drawn from the number before,
    so that fewer are a part of more."""

    def change(participants, seed):
        clients = participants.clients
        for count in counts:
            clients = tuple(replace(c, train=_draw(c.train, min(count, len(c.train)), seed)) for c in clients)
        return replace(participants, clients=clients)

    return change


def _draw(examples, count, seed):
    return examples.select(
        torch.from_numpy(draw_stratified_rows(examples.labels.numpy(), count, derive_seed(seed, count)))
    )


def _sorted_values(by_client):
    return [by_client[client] for client in sorted(by_client)]


# -- FedPNAS ----------------------------------------------------------------------------------------------------------

FIRST_PASS_ONLY = []
"""Of each step, the share of the personal stack's numbers that only the first pass drew."""


class EveryWeightSteps(CAFedPNAS):
    """Gives −η·α·g of eq. 5 also to weights of operations that only the first pass drew, and so have no g̃."""

    def _add_second_order_term(self, personal, g):
        pairs = list(zip(personal, g, strict=True))
        alpha = sum((s * p.grad).sum() for p, s in pairs if s is not None and p.grad is not None)
        alone = [(p, s) for p, s in pairs if s is not None and p.grad is None]
        super()._add_second_order_term(personal, g)
        for parameter, slope in alone:
            parameter.grad = -self.eta * alpha * slope
        FIRST_PASS_ONLY.append(sum(p.numel() for p, _ in alone) / sum(p.numel() for p in personal))


class MomentsGoOn(CAFedPNAS):
    """Keeps Adam's moments and step counts at each client from round to round."""

    def local_update(self, message, client_state, client, seed):
        with adam_that_goes_on(client_state.get("moments", {})) as moments:
            reply, state = super().local_update(message, client_state, client, seed)
        return reply, {**state, "moments": moments}


@contextmanager
def adam_that_goes_on(earlier):
    """Lets `fit` begin with the moments in `earlier`, {"group.parameter.moment": tensor}; yields a dict that then has those
    of its end."""
    later, optimizers = {}, []

    def build(groups, *_, **__):
        for i, group in enumerate(groups):
            for j, parameter in enumerate(group.parameters):
                if f"{i}.{j}.0" in earlier:
                    group.state[parameter] = [earlier[f"{i}.{j}.{k}"].clone() for k in range(3)]
        optimizers.append(Adam(groups))
        return optimizers[-1]

    with mock.patch.object(loop, "build_optimizer", build):
        yield later
    (optimizer,) = optimizers
    for i, group in enumerate(optimizer.groups):
        for j, parameter in enumerate(group.parameters):
            later.update({f"{i}.{j}.{k}": moment.clone() for k, moment in enumerate(group.state.get(parameter, ()))})


class RawImage(CAFedPNAS):
    """Feeds the image itself to the first cells, once in each of their channels: the stem's kernels are 1 in the middle and
    0 elsewhere, and stay so."""

    def server_init(self, server):
        state = super().server_init(server)
        stem = {
            name: torch.zeros_like(tensor) for name, tensor in state["base"].items() if name.startswith("base.stem.")
        }
        kernels = stem["base.stem.weight"]
        channels = torch.arange(len(kernels))
        kernels[channels, channels % kernels.shape[1], kernels.shape[2] // 2, kernels.shape[3] // 2] = 1.0
        return {**state, "base": {**state["base"], **stem}}

    def sampler_lr_factor(self, name):
        return 0.0 if name.startswith("base.stem.") else super().sampler_lr_factor(name)


class BaseStackAloneReduces(CAFedPNAS):
    """Has no personal cell that halves the image."""

    def supernet_plan(self, in_channels, outputs):
        plan = super().supernet_plan(in_channels, outputs)
        return replace(plan, personal=tuple(replace(cell, reduces=False) for cell in plan.personal))


# -- what is run ------------------------------------------------------------------------------------------------------


def same(value, *_):
    return value


def as_class(kind, **changes):
    """Returns a change of a method into one of the class `kind` with the same fields, but for `changes`."""
    return lambda method: kind(**{f.name: getattr(method, f.name) for f in fields(kind) if f.init} | changes)


def with_fields(**changes):
    return lambda method: replace(method, **changes)


@dataclass(frozen=True)
class Setting:
    """Holds a recipe with its scale, variant and further options of the command line, the method if it is not the recipe's,
    and the length of a run."""

    recipe: str
    words: tuple[str, ...]
    rounds: int
    seeds: range
    scale: str | None = None
    variant: str | None = None
    clients_per_round: float = 1.0
    method: Callable = same


@dataclass(frozen=True)
class Form:
    """Holds what a form changes: the method, and the participants."""

    method: Callable = same
    participants: Callable = same


# Those of recipe `digits`.
HENN = {"lr": 0.05, "local_epochs": 2, "batch_size": 16, "eta0": 1.0, "rad_size": 256, "rad_batch": 32}
IMAGES = ("--data.examples-per-client", "48", "--data.test-fraction", "0.55556")  # 60 test images, as in the recipe
SETTINGS = {
    "fedhenn": Setting("digits", (), 40, range(6), clients_per_round=0.25),
    "fedhenn_halved": Setting("digits", ("--data.shrink-fraction", "0.5"), 40, range(6), clients_per_round=0.25),
    "fedhenn_images": Setting(
        "digits", IMAGES, 40, range(6), clients_per_round=0.25, method=lambda method: replace(method, batch_size=12)
    ),
    "fedhenn_homo": Setting(
        "digits", ("--model", "cnn_small"), 40, range(6), clients_per_round=0.25, method=lambda _: FedHeNNHomo(**HENN)
    ),
    "fedpnas": Setting("fedpnas_effects", (), 12, range(3, 9), "cpu", "digits"),
}
DEFAULT = Form()
FORMS = {
    "fedhenn": {
        "default": Form(as_class(ComparedKernels)),
        "mean of representations": Form(as_class(MeanOfRepresentations)),
        "untrained networks count": Form(as_class(UntrainedNetworksCount, share="weights")),
        "pool of clients' images": Form(participants=give_clients_images_as_pool),
        "networks drawn": Form(participants=draw_networks),
        "ten more epochs": Form(as_class(TrainedOnBeforeTests)),
    },
    "fedhenn_halved": {"default": Form(participants=test_on_half_too)},
    "fedhenn_images": {
        "default": Form(participants=keep_training_images(42)),
        "36 images": Form(participants=keep_training_images(42, 36)),
        "48 images": DEFAULT,
    },
    "fedhenn_homo": {
        "default": DEFAULT,
        "ten epochs from the global model": Form(as_class(GlobalModelTrainedOnBeforeTests)),
        "ten epochs from the last cohort's mean": Form(
            as_class(GlobalModelTrainedOnBeforeTests, averaged_over="cohort")
        ),
    },
    "fedpnas": {
        "default": DEFAULT,
        "every weight steps": Form(as_class(EveryWeightSteps)),
        "moments go on": Form(as_class(MomentsGoOn)),
        "raw image": Form(as_class(RawImage)),
        "base stack alone reduces": Form(as_class(BaseStackAloneReduces)),
        "2/3 of the images": Form(with_fields(local_steps=8), keep_training_images(119)),
        "32 edges": Form(with_fields(base_cells=4, personal_cells=4, personal_operations=OPERATION_NAMES)),
    },
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", help="with commas between them, all, or show")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "paper_forms.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if arguments.settings != "show":
        for setting in SETTINGS if arguments.settings == "all" else arguments.settings.split(","):
            train_all(setting, results, arguments.out)
    show(results)


def train_all(setting, results, out):
    """Runs what is missing, seed by seed, so that a stop leaves whole seeds."""
    for seed in SETTINGS[setting].seeds:
        method, participants = build(setting, seed)
        for name, form in FORMS[setting].items():
            runs = results.setdefault(setting, {}).setdefault(name, {})
            if str(seed) not in runs:
                who = form.participants(participants, seed)
                runs[str(seed)] = measure(form.method(method), who, SETTINGS[setting], seed)
                out.write_text(json.dumps(results, indent=1) + "\n")
                print(setting, name, seed, runs[str(seed)], flush=True)


def build(setting, seed):
    """Returns the method of a setting and its participants."""
    of = SETTINGS[setting]
    config = (
        {key: value for key, value in recipes.load_recipe_configuration(of.recipe).items() if key != "description"}
        if of.scale is None
        else recipes.read_recipe(of.recipe).configuration(of.scale, of.variant)
    )
    words = [*of.words, "--seed", str(seed)]
    experiment = experiments.build_experiment(configuration_parser.parse_configuration(words, config, "paper_forms"))
    return of.method(experiment.algorithm), experiments.load_participants(experiment)


def measure(method, participants, setting, seed):
    """Accuracy after the last round, and the numbers that the method's analysis has of it."""
    FIRST_PASS_ONLY.clear()
    run = pf.federate(
        participants.clients, method, rounds=setting.rounds, seed=seed, public=participants.public,
        clients_per_round=setting.clients_per_round, evaluate_every=setting.rounds, workers=0, progress=SilentProgress(),
    )  # fmt: skip
    scores = {name: score for name, score in run.table()[-1].items() if name in ("accuracy", "global_accuracy")}
    numbers = {**scores, **run.history[-1].get("analysis", {})}
    if FIRST_PASS_ONLY:
        numbers["first_pass_only"] = statistics.fmean(FIRST_PASS_ONLY)
    return {name: round(number, 5) for name, number in numbers.items()}


def show(results):
    """Means over seeds, and differences from the default in pairs of seeds."""
    for setting, forms in results.items():
        for form, runs in forms.items():
            seeds = [seed for seed in runs if seed in forms["default"]]
            theirs, ours = ([forms[one][seed]["accuracy"] for seed in seeds] for one in ("default", form))
            if "global_accuracy" in runs[seeds[0]]:
                ours = [runs[seed]["global_accuracy"] for seed in seeds]
            gap = difference(theirs, ours) if theirs != ours and len(seeds) > 1 else ""
            others = {
                name: round(statistics.fmean(run[name] for run in runs.values() if name in run), 4)
                for name in sorted({name for run in runs.values() for name in run} - {"accuracy"})
            }  # fmt: skip
            mean, spread = (
                100 * of(ours) if len(seeds) > 1 else 100 * ours[0] for of in (statistics.fmean, statistics.stdev)
            )
            print(f"{setting}, {form}: {mean:.1f} ± {spread:.1f} % ({len(seeds)} seeds) {gap} {others}")


if __name__ == "__main__":
    main()
