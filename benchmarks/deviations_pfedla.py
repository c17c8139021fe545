"""What polyfed's readings of pFedLA's paper change for which there is no option, on scikit-learn's digits.

    python benchmarks/deviations_pfedla.py all
    python benchmarks/deviations_pfedla.py bytes

Settings, as in `deviations.py`: ten clients of four classes and 40 training images, 40 rounds of 5 epochs, rate 0.05, six
seeds; differences have Student's interval of 95 % over paired seeds. `norm` has BatchNorm:

- norm, "norms in convolutions": scale and shift of a norm have the weight of the convolution before them;
- norm and pfedla, "own draws": each client's model starts from a draw of its own; "one draw / √10"
  has the size that a mean of ten draws has;
- heur, "retained not used": eq. 10 and 11 without Δθ of the layers that a client retains in this round (k = 1).

`bytes` prints what HeurpFedLA's Table 3 would move with each subset of EMNIST.
"""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

from deviations import SETTINGS
from deviations_forms import Form, build_parser, replace_in, train_and_show

from polyfed.algorithms import HeurPFedLA, PFedLA
from polyfed.algorithms.hypernetworks import pfedla
from polyfed.cli.commands.options import configuration_parser, recipes
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.seeds import derive_seed
from polyfed.models import build
from polyfed.simulation import experiment as experiments

RESULTS = Path(__file__).parent / "results" / "deviations_pfedla.json"
ROUNDS, TRAINING = 40, {"lr": 0.05, "local_epochs": 5, "batch_size": 32}
SUBSETS = {"digits": 10, "letters": 26, "balanced": 47, "byclass": 62}  # of EMNIST, classes
MODULES, MASK, PRODUCTS, INITIAL = (
    pfedla.group_tensor_names_into_layers,
    pfedla.retained_layer_mask,
    pfedla.inner_products_with_updates,
    pfedla.init_server_state,
)


def clients_of_recipe(setting, seed):
    """The clients of a setting of `deviations.py`."""
    recipe, scale, variant, words, *_ = SETTINGS[setting]
    config = recipes.read_recipe(recipe).configuration(scale, variant)
    words = [*words, "--seed", str(seed)]
    return experiments.load_participants(
        experiments.build_experiment(configuration_parser.parse_configuration(words, config, "deviations"))
    ).clients


def join_norms_with_convolutions(names, names_by_module, granularity):
    """Layer -> names of tensors, where a norm belongs to the layer before it."""
    layers = {}
    for layer, tensors in MODULES(names, names_by_module, granularity).items():
        if layer.startswith("norm"):
            layers[next(reversed(layers))] += tensors
        else:
            layers[layer] = list(tensors)
    return layers


def start_from_own_draws(server, options, k=0):
    """The server's state before round 1, with a draw of its own for each client."""
    state = INITIAL(server, options, k)
    for client, common in state["models"].items():
        drawn = initial_state(server.model, derive_seed(server.seed, "deviations", client))
        state["models"] = state["models"] | {client: {name: drawn[name] for name in common}}
    return state


def start_from_small_weights(server, options, k=0):
    """The server's state before round 1, with one draw as small as a mean of as many draws as there are clients."""
    state = INITIAL(server, options, k)
    small = {name: value / len(state["clients"]) ** 0.5 for name, value in state["models"][state["clients"][0]].items()}
    return {**state, "models": dict.fromkeys(state["clients"], small)}


def own_draws():
    return replace_in(pfedla, init_server_state=start_from_own_draws)


def leave_out_retained_layers():
    """Replaces the products of eq. 10 and 11 by 0 in the layers that a client has retained."""
    masks = []

    def mask(weights, rows, k):
        masks.append(MASK(weights, rows, k))
        return masks[-1]

    def products(models, served, replies, layers):
        return PRODUCTS(models, served, replies, layers).masked_fill(masks[-1][:, :, None], 0.0)

    return replace_in(pfedla, retained_layer_mask=mask, inner_products_with_updates=products)


def form(method, clients, replaced=None):
    return Form(method, clients, ROUNDS, replaced or nullcontext)


PLAIN, NORM = (partial(clients_of_recipe, name) for name in ("pfedla", "pfedla_norm"))
PFEDLA, HEUR = PFedLA(**TRAINING), HeurPFedLA(**TRAINING, k=1)
FORMS = {
    "norm": {
        "default": form(PFEDLA, NORM),
        "norms in convolutions": form(
            PFEDLA, NORM, lambda: replace_in(pfedla, group_tensor_names_into_layers=join_norms_with_convolutions)
        ),
        "own draws": form(PFEDLA, NORM, own_draws),
    },
    "pfedla": {
        "default": form(PFEDLA, PLAIN),
        "own draws": form(PFEDLA, PLAIN, own_draws),
        "one draw / √10": form(PFEDLA, PLAIN, lambda: replace_in(pfedla, init_server_state=start_from_small_weights)),
    },
    "heur": {
        "default": form(HEUR, PLAIN),
        "retained not used": form(HEUR, PLAIN, leave_out_retained_layers),
    },
}


def show_bytes():
    """Prints the megabytes of Table 3 with each subset of EMNIST: 750 times what a client moves, up and down, in 4-byte
    numbers."""
    for subset, classes in SUBSETS.items():
        sizes = [parameter.numel() for parameter in build("cnn_pfedla", (1, 28, 28), classes).parameters()]
        whole, classifier = 750 * 4 * 2 * sum(sizes) / 2**20, 750 * 4 * sum(sizes[-2:]) / 2**20
        print(f"{subset}, {classes} classes: k = 0 {whole:.2f} MB, without the classifier {whole - classifier:.2f} MB")


def main():
    parser = build_parser(__doc__, FORMS, RESULTS)
    arguments = parser.parse_args()
    if arguments.settings == "bytes":
        show_bytes()
    else:
        train_and_show(arguments, FORMS, {})


if __name__ == "__main__":
    main()
