"""Low-rank adapters in federations of tweets: what is sent of them, equal and different ranks, full weights, and none.

    python benchmarks/adapters.py --data DATA --out benchmarks/results/adapters.json

A small transformer (`transformers.BertConfig`, nothing is downloaded) learns to fill in masked words of 40,000 tweets of
Sentiment140 without their labels. Then six sites with other tweets, 100 to train on each (Dirichlet 10 over the two
classes), train it to tell positive tweets from negative ones: all its weights, or adapters of the layers `query` and
`value` and the classifier, 20 rounds of an epoch, by the first 16 words. The rate of each row is the best of three by
validation accuracy with seed 0, and one more is tried where that is the smallest or the largest. Printed: test accuracy
after the last round, mean over sites and five seeds (of sites, draws and training) with the interval of 95 % over seeds; how
far it is ahead of training all weights alone; the worst site; kB (2^10 bytes) up of a client and round; for different ranks
the share of the squared singular values of the adapters beyond rank 2 after rounds 1, 5 and 20.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rank_collapse import Watched, interval
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, BertModel

import polyfed as pf
from polyfed.algorithms import FedAvg, FedSALoRA, FFALoRA, Local, RoLoRA
from polyfed.core.algorithm import Algorithm
from polyfed.data.sources.published.tweets import Sentiment140
from polyfed.models.lora import add_lora
from polyfed.simulation.monitoring.progress import SilentProgress

WORDS, LENGTH, SHORT, MASK, UNSEEN = 3000, 25, 16, 3000, 40_000  # the mask is a token of its own
CONFIG = BertConfig(
    vocab_size=WORDS + 1, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=LENGTH, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
)  # fmt: skip
SITES, TRAIN, VAL, TEST, ROUNDS = 6, 100, 100, 300, 20
RANKS = (2, 2, 4, 8, 16, 16)
RATES, SEEDS = (0.001, 0.003, 0.01), (0, 1, 2, 3, 4)
BEYOND = {0.001: 0.0003, 0.01: 0.03}  # tried where the best rate is the smallest or the largest
T_QUANTILE = 2.776  # of Student's t with four degrees of freedom, 97.5 %


class Classifier(nn.Module):
    """The transformer, the mean of its outputs over the words of a tweet, and a linear layer."""

    def __init__(self, pretrained: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.bert, self.classifier = BertModel(CONFIG, add_pooling_layer=False), nn.Linear(CONFIG.hidden_size, 2)
        if pretrained is not None:
            self.bert.load_state_dict(pretrained)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens[:, :SHORT]
        real = (tokens != 0).float()
        hidden = self.bert(input_ids=tokens, attention_mask=real).last_hidden_state
        out: Tensor = self.classifier((hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1))
        return out


def adapted(pretrained: Mapping[str, Tensor], rank: int) -> nn.Module:
    """The classifier with adapters of scale 2, whatever their rank."""
    layers = ["*.query", "*.value"]
    return add_lora(Classifier(pretrained), rank, alpha=2.0 * rank, layers=layers, train=["classifier.*"])


def pretrain(tokens: Tensor, epochs: int = 6) -> dict[str, Tensor]:
    """The weights of the transformer after training on masked words; the texts have no labels."""
    torch.manual_seed(0)
    network = BertForMaskedLM(CONFIG).train()
    batches = [part for _ in range(epochs) for part in torch.randperm(len(tokens)).split(64)]
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=len(batches))
    total = 0.0
    for step, rows in enumerate(batches):
        words = tokens[rows]
        hidden = (torch.rand(words.shape) < 0.15) & (words > 1)  # neither padding nor unknown words
        outputs = network.bert(input_ids=words.masked_fill(hidden, MASK), attention_mask=(words != 0).float())
        loss = F.cross_entropy(network.cls(outputs.last_hidden_state[hidden]), words[hidden])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if (step + 1) % 500 == 0:
            print(f"pretraining, step {step + 1} of {len(batches)}: {total / 500:.3f}", flush=True)
            total = 0.0
    return {name: tensor.detach().clone() for name, tensor in network.bert.state_dict().items()}


@dataclass(frozen=True)
class Case:
    """One row: a method, and the rank of each site's adapters; None trains all weights."""

    method: Callable[..., Algorithm]
    ranks: tuple[int, ...] | None


def same(rank: int) -> tuple[int, ...]:
    return (rank,) * SITES


CASES = {
    "local, all weights": Case(Local, None),
    "fedavg, all weights": Case(FedAvg, None),
    "local, rank 8": Case(Local, same(8)),
    **{f"fedavg, rank {rank}": Case(FedAvg, same(rank)) for rank in (2, 4, 8, 16)},
    "ffa_lora, rank 8": Case(FFALoRA, same(8)),
    "rolora, rank 8": Case(RoLoRA, same(8)),
    "fedsa_lora, rank 8": Case(FedSALoRA, same(8)),
    **{
        f"fedavg adapters={mode}, ranks 2 to 16": Case(partial(Watched, adapters=mode), RANKS)
        for mode in ("zero_pad", "svd", "stack")
    },
}


def sites(pool: Any, pretrained: Mapping[str, Tensor], case: Case, seed: int) -> list[pf.Client]:
    """Six sites with tweets that the pretraining has not seen."""
    size = TRAIN + VAL + TEST
    split = pf.data.Split(clients=SITES, examples_per_client=TRAIN, test_fraction=TEST / size, val_fraction=VAL / size)
    parts, _ = pf.data.make_clients(pool, split, pf.data.Dirichlet(alpha=10.0), seed=seed)
    factories = {rank: partial(adapted, pretrained, rank) for rank in set(case.ranks or ())}
    whole = partial(Classifier, pretrained)
    networks = [whole] * SITES if case.ranks is None else [factories[rank] for rank in case.ranks]
    return [pf.Client(p.id, net, p.train, p.test, p.val) for p, net in zip(parts, networks, strict=True)]


def score(pool: Any, pretrained: Mapping[str, Tensor], case: Case, lr: float, seed: int) -> dict[str, Any]:
    method = case.method(lr=lr, optimizer="adamw", batch_size=25)
    clients, begin = sites(pool, pretrained, case, seed), time.process_time()
    run = pf.federate(
        clients, method, rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS, workers=0, progress=SilentProgress()
    )
    *own, mean = run.table()
    energy = [record["analysis"]["energy"] for record in run.history if record.get("analysis")]
    return {
        "seed": seed, "lr": lr, "accuracy": mean["accuracy"], "val": mean["val_accuracy"],
        "worst": min(row["accuracy"] for row in own[:SITES]), "seconds": round(time.process_time() - begin, 1),
        "kb": run.history[-1]["bytes_up_total"] / SITES / ROUNDS / 2**10, "energy": [round(e, 5) for e in energy],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the tweets (Parquet: text, label)")
    parser.add_argument(
        "--out", type=Path, required=True, help="a JSON file; what it has already is not computed again"
    )
    parser.add_argument("--weights", type=Path, help="a file that keeps the pretrained weights from call to call")
    parser.add_argument("--only", default="", help="only the rows whose names contain one of these, with | between")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pool = Sentiment140(path=str(given.data), vocabulary_size=WORDS, deal_test=True).load()
    found: dict[str, Any] = json.loads(given.out.read_text("utf-8")) if given.out.exists() else {}
    if given.weights is not None and given.weights.exists():
        pretrained = torch.load(given.weights, weights_only=True)
    else:
        begin = time.process_time()
        pretrained = pretrain(pool.train.input_tensor[:UNSEEN])
        found["pretraining"] = {"seconds": round(time.process_time() - begin, 1)}
        if given.weights is not None:
            torch.save(pretrained, given.weights)
    pool = replace(pool, train=pool.train.select(torch.arange(UNSEEN, len(pool.train))))
    runs = found.setdefault("runs", {})

    def keep() -> None:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    chosen = {name: case for name, case in CASES.items() if any(part in name for part in given.only.split("|"))}
    for name, case in chosen.items():
        entry = runs.setdefault(name, {})
        for lr in RATES + tuple(BEYOND.values()):
            if str(lr) not in entry and (lr in RATES or BEYOND.get(best_rate(entry)) == lr):
                entry[str(lr)] = [score(pool, pretrained, case, lr, SEEDS[0])]
                keep()
        best = entry["chosen"] = best_rate(entry)
        for seed in SEEDS[len(entry[str(best)]) :]:
            entry[str(best)].append(score(pool, pretrained, case, best, seed))
            keep()
        print(f"{name}: {best}", flush=True)
    show(runs)


def best_rate(entry: Mapping[str, Any]) -> float:
    """The rate with the best validation accuracy with the first seed."""
    return max((float(lr) for lr in entry if lr != "chosen"), key=lambda lr: entry[str(lr)][0]["val"])


def show(runs: Mapping[str, Any]) -> None:
    """Prints the table of the rows that are complete."""
    rows = {name: entry[str(entry["chosen"])] for name, entry in runs.items() if "chosen" in entry}
    alone = [run["accuracy"] for run in rows["local, all weights"]]
    print(
        "| | rate | accuracy | over training alone | worst site | kB up | beyond rank 2 |\n|---|---|---|---|---|---|---|"
    )
    for name, chosen in rows.items():
        accuracy = [run["accuracy"] for run in chosen]
        gain = [one - other for one, other in zip(accuracy, alone, strict=True)]
        worst, kb, lr = interval([run["worst"] for run in chosen]), chosen[0]["kb"], chosen[0]["lr"]
        energy = [
            f"{100 * statistics.mean(run['energy'][k] for run in chosen):.1f}"
            for k in (0, 4, 19)
            if chosen[0]["energy"]
        ]
        print(f"| {name} | {lr} | {interval(accuracy)} | {interval(gain)} | {worst} | {kb:.1f} | {' '.join(energy)} |")


if __name__ == "__main__":
    main()
