"""What polyfed's readings of FLHA-GHN's paper change for which there is no option.

    python benchmarks/deviations_flha.py all --path /usr/share/datasets/fashion-mnist

Settings, six seeds each if the file has them; differences have Student's interval of 95 % over paired seeds. Unless a line
says otherwise: four clients with 52 of scikit-learn's digits each, dealt uniformly, Arch 0 to 3 of width 8, 25 rounds of one
epoch, minibatches of 16, FLHA-GHN at a rate of 0.1; accuracy on 359 digits that are nobody's, mean over clients.

- four: the scale s of a head starts as section 4.2 says of W_H, with zero bias; 51 and 47 of the 52 images are trained on;
  10 rounds, which is 200 of 500; a small CNN in the place of Arch 3, and two others of 4 layers, which are compared with it;
- alone: the last three, each client alone, rate 0.05;
- tied: networks without norms of which a convolution is used 1 to 4 times: its weight is generated of the mean of its
  nodes' latents, of the first node's, or one for each use; s with zero bias; rate 0.03;
- distillation: 10 rounds of the teacher and 15 of the student, or 10 of both; Arch 1, 2 or 3 as the teacher;
- concatenation: ResNet-18 and the three hybrids of appendix B, of which other blocks concatenate, two or four in each;
- chains: Table 2's networks of 4, 7, 10 and 13 layers, rate 0.03, without the pooling between convolutions;
- augmented: Fashion-MNIST at 14×14 pixels, 64 images a client, rate 0.03: cropped and mirrored, or not; tested on 1,000 of
  the published test images;
- stem: mosaics of Fashion-MNIST (28×28, several labels each), 64 a client, networks with the first convolution of the
  X-rays, 7×7 with stride 2: with and without pooling after it, rate 0.03; AUC on 1,000 test mosaics.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from deviations_forms import Form, build_parser, replace_in, train_and_show
from torch import nn
from torch.nn import functional

import polyfed as pf
from polyfed.algorithms import FLHAGHN, FedAvgKD, Local
from polyfed.data import IID, SOURCES, PadCropFlip, Split, make_clients
from polyfed.data.sources.published.mosaics import FashionMosaics
from polyfed.data.sources.published.vision import FashionMNIST
from polyfed.hypernetworks import generated_network, ghn_start
from polyfed.models import ModelSpec, build
from polyfed.models import flha as networks_of_flha

RESULTS = Path(__file__).parent / "results" / "deviations_flha.json"
ROUNDS, IMAGES, WIDTH = 25, 52, 8
ARCHITECTURES = ("resnet18", "flha_arch1", "flha_arch2", "flha_arch3")
OTHER_SIZES = {
    "flha_chain": {"num_layers": 4, "width": WIDTH},
    "cnn_small": {"channels": (WIDTH, 2 * WIDTH), "norm": "batch"},
}
RESET_HEAD, TO_TENSORS = ghn_start._reset_head, generated_network.graph_to_tensors
FOLDER: list[str | None] = []  # of Fashion-MNIST, from the command line


class Tied(nn.Module):
    """A residual CNN without norms; its second convolution is used `uses` times, or there are as many of them."""

    def __init__(self, uses: int, is_tied: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.middle = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(1 if is_tied else uses))
        self.last = nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1)
        self.fc = nn.Linear(2 * WIDTH * 16, 10)
        self.uses = uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        for use in range(self.uses):
            x = x + self.middle[use % len(self.middle)](x).relu()
        return self.fc(self.last(x).relu().flatten(1))


def build_without_pooling(name, shape, classes):
    network = build(name, shape, classes, width=WIDTH, stem="xray")
    network.pool1 = nn.Identity()
    return network


def build_hybrid(blocks, shape, classes):
    """A ResNet-18 whose blocks at these positions concatenate."""
    with replace_in(networks_of_flha, _HYBRIDS={1: blocks}):
        return build("resnet18_hybrid", shape, classes, width=WIDTH)


def build_chain(num_layers, pools, shape, classes):
    network = build("flha_chain", shape, classes, width=WIDTH, num_layers=num_layers)
    for name, part in network.named_children():
        if isinstance(part, nn.MaxPool2d) and not pools:
            setattr(network, name, nn.Identity())
    return network


@cache
def load_pool(name):
    """Digits with a common test set, Fashion-MNIST at half its size, or mosaics."""
    if name == "digits":
        return SOURCES["digits"](common_test=0.2).load()
    if name == "mosaics":
        return FashionMosaics(*FOLDER, num_train=5000, num_test=1000).load()
    pool = FashionMNIST(*FOLDER).load()
    parts = ((part, functional.avg_pool2d(part.input_tensor.float(), 2).byte()) for part in (pool.train, pool.test))
    train, test = (replace(part, x=images) for part, images in parts)
    return replace(pool, train=train, test=test)


def four_clients(
    seed, *, data="digits", images=IMAGES, trained_on=None, networks=ARCHITECTURES, augment=None, **options
):
    """Clients tested on the common test set; `trained_on` keeps the first of their training images alone."""
    pool, tested = load_pool(data), {"digits": -1}.get(data, 1000)
    split = Split(clients=4, test_fraction=0.02, examples_per_client=images, global_test=tested)
    parts, _ = make_clients(pool, split, IID(), seed=seed)
    task = {"task": pool.task} if data == "mosaics" else {}
    members = []
    for part, network in zip(parts, networks, strict=True):
        if isinstance(network, str):
            size = OTHER_SIZES.get(network, {"width": WIDTH, **options})
            network = ModelSpec(network, size, pool.input_shape, pool.num_outputs)
        train = part.train.select(torch.arange(trained_on or len(part.train)))
        members.append(pf.Client(part.id, network, replace(train, augment=augment), part.global_test, **task))
    return members


def tied_clients(seed, is_tied=True):
    return four_clients(seed, networks=[partial(Tied, uses, is_tied) for uses in (1, 2, 3, 4)])


def hybrid_clients(seed, *blocks):
    hybrids = [partial(build_hybrid, positions, (1, 8, 8), 10) for positions in blocks]
    return four_clients(seed, networks=["resnet18", *hybrids])


def chain_clients(seed, pools):
    networks = [partial(build_chain, num_layers, pools, (1, 8, 8), 10) for num_layers in (4, 7, 10, 13)]
    return four_clients(seed, networks=networks)


def unpooled_clients(seed):
    networks = [partial(build_without_pooling, name, (1, 28, 28), 10) for name in ARCHITECTURES]
    return four_clients(seed, data="mosaics", images=64, networks=networks)


def start_scales_without_bias(with_factor):
    """Lets s start as section 4.2 says of all of W_H: Xavier-normal, its factor besides, and with zero bias."""

    def reset(head, kind, variance):
        RESET_HEAD(head, kind, variance)
        if not kind.is_norm:
            factor = math.sqrt(2 * kind.c_in / head.scale.in_features) if with_factor else 1.0
            nn.init.xavier_normal_(head.scale.weight, factor)
            nn.init.zeros_(head.scale.bias)

    return replace_in(ghn_start, _reset_head=reset)


def generate_of_first_nodes():
    """Generates the weight of a layer with several uses of the first of its nodes."""

    def convert(graph, *options):
        tensors = TO_TENSORS(graph, *options)
        sets = {}
        for kind, (nodes, rows, parameters) in tensors.weight_sets.items():
            first = torch.stack([nodes[rows == row][0] for row in range(len(parameters))])
            sets[kind] = (first, torch.arange(len(parameters)), parameters)
        return replace(tensors, weight_sets=sets)

    return replace_in(generated_network, graph_to_tensors=convert)


def form(method, clients=four_clients, rounds=ROUNDS, replaced=nullcontext, score="accuracy"):
    return Form(method, clients, rounds, replaced, score)


def with_hybrids(*blocks):
    return form(FLHA, lambda seed: hybrid_clients(seed, *blocks))


def with_teacher(name):
    return form(replace(DISTILLATION, teacher={"name": name, "width": WIDTH}))


def with_small_network(name):
    return partial(four_clients, networks=(*ARCHITECTURES[:3], name))


FLHA = FLHAGHN(lr=0.1, batch_size=16)
SLOW = replace(FLHA, lr=0.03)
TRAINING = {"lr": 0.05, "momentum": 0.9, "batch_size": 16, "clip_norm": 5.0}
LOCAL = Local(**TRAINING)
DISTILLATION = FedAvgKD(
    teacher={"name": "resnet18", "width": WIDTH}, teacher_lr=0.1, teacher_rounds=10, schedule="cosine", **TRAINING
)
FASHION, MOSAICS = (partial(four_clients, data=name, images=64) for name in ("fashion", "mosaics"))
FORMS = {
    "tied": {
        "default": form(SLOW, tied_clients),
        "first node": form(SLOW, tied_clients, replaced=generate_of_first_nodes),
        "a weight a use": form(SLOW, partial(tied_clients, is_tied=False)),
        "s without bias": form(SLOW, tied_clients, replaced=partial(start_scales_without_bias, False)),
        "s without bias, with factor": form(SLOW, tied_clients, replaced=partial(start_scales_without_bias, True)),
    },
    "distillation": {
        "default": form(DISTILLATION),
        "10 rounds of the student": form(DISTILLATION, rounds=20),
        **{f"teacher {name}": with_teacher(name) for name in ARCHITECTURES[1:]},
    },
    "concatenation": {
        "default": with_hybrids(*networks_of_flha._HYBRIDS.values()),
        "first blocks": with_hybrids((0, 2), (2, 4), (4, 6)),
        "four blocks": with_hybrids((0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 6, 7)),
    },
    "chains": {
        "default": form(SLOW, partial(chain_clients, pools=True)),
        "no pooling": form(SLOW, partial(chain_clients, pools=False)),
    },
    "four": {
        "default": form(FLHA),
        "s without bias, with factor": form(FLHA, replaced=partial(start_scales_without_bias, True)),
        "51 images": form(FLHA, partial(four_clients, trained_on=51)),
        "47 images": form(FLHA, partial(four_clients, trained_on=47)),
        "10 rounds": form(FLHA, rounds=10),
        "small CNN": form(FLHA, with_small_network("flha_small")),
        "chain of 4 layers": form(FLHA, with_small_network("flha_chain")),
        "two linear layers": form(FLHA, with_small_network("cnn_small")),
    },
    "alone": {
        "small CNN": form(LOCAL, with_small_network("flha_small")),
        "chain of 4 layers": form(LOCAL, with_small_network("flha_chain")),
        "two linear layers": form(LOCAL, with_small_network("cnn_small")),
    },
    "stem": {
        "default": form(SLOW, partial(MOSAICS, stem="xray"), score="auc"),
        "no pooling": form(SLOW, unpooled_clients, score="auc"),
    },
    "augmented": {
        "default": form(SLOW, partial(FASHION, augment=PadCropFlip(padding=2))),
        "not augmented": form(SLOW, FASHION),
    },
}
COMPARED_WITH = {("four", name): "small CNN" for name in ("chain of 4 layers", "two linear layers")}


def main():
    parser = build_parser(__doc__, FORMS, RESULTS)
    parser.add_argument("--path", help="folder of Fashion-MNIST")
    arguments = parser.parse_args()
    FOLDER.append(arguments.path)
    train_and_show(arguments, FORMS, COMPARED_WITH)


if __name__ == "__main__":
    main()
