"""Tokens: identities of the scores, bad input in sentences, padding that costs nothing, learning, methods, resume, page."""

import contextlib
import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed import Client, UserError
from polyfed.cli.main import main
from polyfed.core.evaluation.metrics import resolve_metrics
from polyfed.core.examples.examples import Examples
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import fit
from polyfed.data.sources.tagged_sentences import TAGS, VOCABULARY, TaggedSentences
from polyfed.models import ModelSpec, build
from polyfed.simulation.checks.requirements import check_networks_run
from polyfed.simulation.storage.directory import read_manifest
from polyfed.tasks.scores.entities import BioTags, EntityF1
from polyfed.tasks.tokens import document_perplexity, perplexity, token_accuracy

BIO = ("O", "B-x", "I-x", "B-y", "I-y")
TASK = pf.tasks.Tokens(tags=TAGS)
SMALL = {"vocabulary": 128, "embedding": 12, "hidden": 12}


def one_hot(classes, number=5):
    return nn.functional.one_hot(torch.tensor(classes), number).float() * 20


def grammar_clients(sentences=40, task=TASK, model="lstm_tagger", **sizes):
    pool = TaggedSentences(sites=3, sentences=sentences).load()
    clients = []
    for site in range(3):
        rows = np.flatnonzero(pool.columns["site"] == f"site-{site}")
        train, test = (pool.train.select(torch.from_numpy(part)) for part in np.split(rows, [sentences // 2]))
        spec = ModelSpec(model, sizes or SMALL, pool.input_shape, 5)
        clients.append(Client(f"site-{site}", spec, train, test, task=task))
    return clients


# -- scores -----------------------------------------------------------------------------------------------------------


def test_the_perplexity_of_equal_logits_is_the_size_of_the_vocabulary():
    targets = torch.tensor([[1, 2, 3, -100], [6, -100, -100, -100]])
    assert perplexity(torch.zeros(2, 4, 7), targets) == pytest.approx(7)
    assert document_perplexity(torch.zeros(2, 4, 7), targets) == pytest.approx(7)
    outputs = torch.zeros(2, 4, 7)
    outputs[1, 0, 6] = 3.0  # only the token of the second document is better known
    second = float(-outputs[1, 0].log_softmax(0)[6])
    assert perplexity(outputs, targets) == pytest.approx(math.exp((3 * math.log(7) + second) / 4))
    assert document_perplexity(outputs, targets) == pytest.approx(math.exp((math.log(7) + second) / 2))


def test_accuracy_and_loss_count_each_token_that_is_not_ignored():
    outputs, targets = one_hot([[0, 1, 2], [3, 4, 0]]), torch.tensor([[0, 1, 1], [3, -100, -100]])
    assert token_accuracy(outputs, targets) == 0.75
    flat = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert torch.equal(TASK.loss(outputs, targets), flat)
    smoothed = TASK.training_loss(targets, None, 0.1)(outputs, targets)
    assert smoothed > flat
    weighted = TASK.training_loss(targets, "balanced")(outputs, targets)
    counts = torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0])
    weights = torch.where(counts == 2, 4 / (3 * 2), 4 / (3 * 1))
    weights[[2, 4]] = 1.0
    expected = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), weights, ignore_index=-100)
    assert weighted == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("true", "found", "counts"),
    [
        ("1 2 0 3 4", "1 2 0 3 4", (2, 2, 2)),
        ("1 2 0 3 4", "1 0 0 3 4", (1, 2, 2)),  # another end
        ("1 2 0 3 4", "3 4 0 3 4", (1, 2, 2)),  # another kind
        ("1 1 0 0 0", "1 2 0 0 0", (0, 1, 2)),  # one entity in place of two neighbours
        ("0 2 2 0 4", "0 1 2 0 3", (2, 2, 2)),  # an I begins an entity
        ("1 4 0 0 0", "1 3 0 0 0", (2, 2, 2)),  # as does an I of another kind
        ("0 0 0 0 0", "0 0 1 0 0", (0, 1, 0)),
        ("1 2 -9 2 0", "1 2 0 2 0", (1, 1, 1)),  # an ignored token, such as the end of a word, does not end it
    ],
)
def test_entities_are_right_if_their_kind_and_both_ends_are(true, found, counts):
    targets = torch.tensor([[int(k) if int(k) >= 0 else -100 for k in true.split()]])
    result = EntityF1(BIO).count(one_hot([[int(k) for k in found.split()]]), targets)
    assert tuple(int(number[0]) for number in result) == counts


def test_entities_end_with_their_document_and_f1_adds_up_documents():
    targets = torch.tensor([[0, 1], [2, 0], [0, 3]])
    counts = EntityF1(BIO).count(one_hot(targets.tolist()), targets)
    assert [number.tolist() for number in counts] == [[1, 1, 1]] * 3
    outputs = one_hot([[0, 1], [0, 0], [3, 3]])
    assert EntityF1(BIO)(outputs, targets) == pytest.approx(2 * 2 / (3 + 3))
    assert math.isnan(EntityF1(BIO)(one_hot([[0]]), torch.tensor([[0]])))
    with pytest.raises(UserError, match="'X-1' is not a BIO tag"):
        pf.tasks.Tokens(tags=("O", "B-a", "X-1"))
    assert pf.tasks.Tokens(tags=("noun", "verb")).default_metric.name == "token_accuracy"
    with pytest.raises(UserError, match="entity_f1 needs the names of the tags"):
        pf.tasks.Tokens().find_metric("entity_f1")(outputs, targets)


def test_f1_agrees_with_a_plain_count_of_spans():
    rng = np.random.default_rng(0)

    def spans(row):
        found, start = set(), None
        for place, tag in enumerate([*row, 0]):
            kind = BIO[tag][2:]
            if start is not None and (tag in (0, 1, 3) or kind != start[1]):
                found.add((start[0], place, start[1]))
                start = None
            if tag and start is None:
                start = (place, kind)
        return found

    true, guessed = rng.integers(0, 5, (2, 30, 9))
    counts = [(len(spans(t) & spans(g)), len(spans(g)), len(spans(t))) for t, g in zip(true, guessed, strict=True)]
    documents = np.repeat(np.arange(30), 9)
    result = BioTags(BIO).count(guessed.ravel(), true.ravel(), documents, 30)
    assert np.array_equal(np.stack(result, axis=1), counts)


def test_a_metric_with_tags_is_found_again_and_chosen_by_name():
    chosen = resolve_metrics(["entity_f1", "token_accuracy"], TASK)
    assert resolve_metrics(chosen, TASK) == chosen
    assert chosen[0] != resolve_metrics(["entity_f1"], pf.tasks.Tokens(tags=BIO))[0]
    assert pf.tasks.get_task(TASK.spec) == TASK
    assert TASK.spec == {"name": "tokens", "tags": list(TAGS)}
    assert pf.tasks.Tokens(kind="next_token").default_metric.name == "perplexity"


# -- targets and bad input --------------------------------------------------------------------------------------------


def test_next_tokens_are_the_inputs_shifted_without_padding():
    task = pf.tasks.Tokens(kind="next_token")
    ids = torch.tensor([[5, 0, 6, 0, 0], [1, 2, 3, 4, 5]])
    client = Client("north", nn.Identity, ids, ids, task=task)
    assert client.train.labels.tolist() == [[0, 6, -100, -100, -100], [2, 3, 4, 5, -100]]
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    named = Client("north", nn.Identity, {"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}, task=task)
    assert named.train.labels.tolist()[0] == [0, 6, 0, -100, -100]
    filled_at_the_beginning = {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}
    assert task.complete_targets(filled_at_the_beginning, torch.zeros(2)).tolist()[0] == [0, 6, 0, 5, -100]
    given = torch.tensor([[1, 2, 3, 4, -100]] * 2)
    assert torch.equal(Client("north", nn.Identity, (ids, given), ids, task=task).train.labels, given)
    again = dataclasses.replace(client, train=client.train.select(torch.tensor([1])))
    assert again.train.labels.tolist() == [[2, 3, 4, 5, -100]]
    with pytest.raises(UserError, match="client 'north': train inputs hold no integers"):
        Client("north", nn.Identity, torch.zeros(2, 5), ids, task=task)
    with pytest.raises(UserError, match="client 'north': train targets: all tokens of row 0 are ignored"):
        Client("north", nn.Identity, torch.zeros(2, 5, dtype=torch.int64), ids, task=task)


def test_another_ignored_index_becomes_the_kept_one():
    client = Client("north", None, (torch.ones(2, 2).long(), torch.tensor([[0, 9], [1, 9]])), ([[1]], [[0]]),
                    task=pf.tasks.Tokens(ignore_index=9))  # fmt: skip
    assert client.train.labels.tolist() == [[0, -100], [1, -100]]


def test_what_does_not_fit_is_a_sentence_with_client_and_row():
    x, y = torch.randint(1, 9, (4, 6)), torch.randint(0, 3, (4, 6))

    def check(tokens=x, targets=y, task="tokens", **sizes):
        spec = ModelSpec("lstm_tagger", {"vocabulary": 9, **sizes}, (6,), 3)
        check_networks_run([Client("north", spec, (tokens, targets), (x, y * 0), task=task)])

    check()
    large = x.clone()
    large[2, 1] = 12
    with pytest.raises(UserError, match=r"client 'north': train row 2 has the token 12, .* vocabulary of 9 \(0 to 8\)"):
        check(large)
    large[2, 1] = -1
    with pytest.raises(UserError, match="client 'north': train row 2 has the token -1"):
        check(large)
    with pytest.raises(UserError, match=r"client 'north': train: .* logits of shape \(batch, 5, classes\)"):
        check(targets=y[:, :5])
    with pytest.raises(UserError, match="client 'north': train has class 4 in row 3, but the network has 3 outputs"):
        check(targets=torch.where(torch.arange(4)[:, None] == 3, 4, y))
    with pytest.raises(UserError, match="the network has 3 outputs for each token, and there are 2 tags"):
        check(targets=y.clamp(max=1), task={"name": "tokens", "tags": ["a", "b"]})
    with pytest.raises(UserError, match=r"client 'north': train targets: row \d, position \d is 2; with 2 classes"):
        check(targets=y.clone().fill_(2), task={"name": "tokens", "tags": ["a", "b"]})


def test_sites_with_other_vocabularies_are_refused_before_anything_is_computed():
    clients = grammar_clients(8)
    other = ModelSpec("lstm_tagger", {**SMALL, "vocabulary": 20}, (12,), 5)
    clients[1] = dataclasses.replace(clients[1], model=other)
    with pytest.raises(UserError, match=r"client 'site-1': train row .* vocabulary of 20"):
        pf.federate(clients, pf.algorithms.Local(), rounds=1)


# -- padding ----------------------------------------------------------------------------------------------------------


class Recorder(nn.Module):
    """Notes the lengths of the minibatches it is given."""

    def __init__(self):
        super().__init__()
        self.net, self.lengths = build("tiny_transformer", (9,), 3, vocabulary=9, dim=8), []

    def forward(self, tokens):
        self.lengths.append(tokens.shape[1])
        return self.net(tokens)


def padded(lengths, width=9):
    x = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in zip(x, lengths, strict=True):
        row[:length] = torch.randint(1, 9, (length,))
    return x, torch.where(x > 0, x % 3, -100)


def test_a_minibatch_is_as_long_as_its_longest_sequence_and_the_result_the_same():
    x, y = padded([2, 3, 2, 4])
    results = []
    for task in (pf.tasks.Tokens(), pf.tasks.Tokens(padding=None)):
        torch.manual_seed(0)
        net = Recorder()
        fit(net, Examples(x, y), LocalTraining(batch_size=4, local_epochs=2), lr=0.1, seed=0, task=task)
        results.append((net.lengths, net.net.head.weight.detach()))
    assert (results[0][0], results[1][0]) == ([4, 4], [9, 9])
    assert torch.allclose(results[0][1], results[1][1], atol=1e-6)


def test_parts_of_inputs_are_cut_together_by_the_attention_mask():
    x, y = padded([2, 3])
    mask = (torch.arange(9) < 5).long().expand(2, 9)
    inputs, targets = pf.tasks.Tokens().trim_minibatch(
        {"input_ids": x, "attention_mask": mask, "age": torch.ones(2, 1)}, y
    )
    assert [tuple(part.shape) for part in (*inputs.values(), targets)] == [(2, 5), (2, 5), (2, 1), (2, 5)]
    assert pf.tasks.Tokens().trim_minibatch(torch.ones(2, 4), y)[1] is y  # no tokens in the inputs


@pytest.mark.parametrize("name", ["lstm_tagger", "tiny_transformer"])
def test_padding_changes_no_output_of_the_built_in_networks(name):
    net = build(name, (9,), 3, vocabulary=9).eval()
    x, _ = padded([4, 2])
    short = net(x[:, :4])
    assert torch.allclose(net(x)[:, :4][x[:, :4] > 0], short[x[:, :4] > 0], atol=1e-5)
    assert bool(torch.isfinite(net(x * 0)).all())


def test_a_causal_transformer_sees_no_later_token():
    net = build("tiny_transformer", (6,), 9, vocabulary=9, causal=True).eval()
    x, changed = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[1, 2, 3, 8, 8, 8]])
    assert torch.allclose(net(x)[:, :3], net(changed)[:, :3], atol=1e-6)
    both = build("tiny_transformer", (6,), 9, vocabulary=9).eval()
    assert not torch.allclose(both(x)[:, :3], both(changed)[:, :3], atol=1e-3)


# -- learning, methods, files -----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_small_tagger_learns_the_grammar():
    clients = grammar_clients(120)
    method = pf.algorithms.FedAvg(lr=0.02, optimizer="adam", batch_size=8, local_epochs=2)
    run = pf.federate(clients, method, rounds=5, metrics=["entity_f1", "token_accuracy"], evaluate_every=5)
    rows = run.table()
    assert min(row["entity_f1"] for row in rows) > 0.9
    assert min(row["token_accuracy"] for row in rows) > 0.9


def test_perplexity_of_next_tokens_falls_below_that_of_frequencies():
    task = pf.tasks.Tokens(kind="next_token")
    pool = TaggedSentences(sites=1, sentences=60).load()
    spec = ModelSpec("tiny_transformer", {"vocabulary": 128, "causal": True}, pool.input_shape, len(VOCABULARY))
    client = Client("north", spec, pool.train.x[:40], pool.train.x[40:], task=task)
    run = pf.federate([client], pf.algorithms.Local(lr=0.01, optimizer="adam", batch_size=8), rounds=6)
    scores = [record["clients"]["north"]["perplexity"] for record in run.history]
    shares = torch.from_numpy(task.constant_model().outputs(client.train.labels.numpy(), len(VOCABULARY)))
    frequencies = perplexity(shares.expand(len(client.test), -1), client.test.labels)
    assert scores[-1] < scores[0]
    assert scores[-1] < frequencies < len(VOCABULARY)


SHARED = {"name": "lstm_tagger", **SMALL}
METHODS = {
    "fedavg_ft": {}, "fedprox": {}, "pfedla": {}, "flha_ghn": {}, "fedhenn": {"rad_size": 8, "rad_batch": 8},
    "fedmd": {}, "fml": {"shared": SHARED},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if n == "fedavg_ft" else pytest.param(n, marks=pytest.mark.thorough) for n in METHODS]
)
def test_methods_train_taggers(name):
    clients = grammar_clients(12)
    method = pf.algorithms.REGISTRY[name](lr=0.01, batch_size=4, **METHODS[name])
    public = TaggedSentences(sites=1, sentences=12, seed=7).load().train.x if "public_data" in method.requires else None
    if public is not None:
        width = clients[0].train.x.shape[1]
        public = nn.functional.pad(public, (0, max(0, width - public.shape[1])))[:, :width]
    run = pf.federate(clients, method, rounds=2, public=public, progress=False)
    assert all(row["entity_f1"] is not None for row in run.table())


def test_methods_for_classes_say_so():
    for name in ("fedproto", "fd", "fedpac"):
        with pytest.raises(UserError, match=f"{name} needs one class per example"):
            pf.federate(grammar_clients(8), name, rounds=1)


@pytest.mark.thorough
def test_a_run_is_resumed_and_compared_and_has_a_page(tmp_path):
    clients = grammar_clients(12)
    method = pf.algorithms.FedAvg(lr=0.01, optimizer="adam", batch_size=4)
    options = {"rounds": 2, "workers": 0, "progress": False}
    whole = pf.federate(clients, method, out=tmp_path / "whole", **options)
    stopped = pf.federate(clients, method, out=tmp_path / "part", callbacks=[StopAtOnce()], **options)
    assert len(stopped.history) == 1
    resumed = pf.resume(tmp_path / "part", clients=clients, progress=False)
    assert resumed.table() == whole.table()
    assert read_manifest(tmp_path / "part")["task"] == TASK.spec
    comparison = pf.compare(
        clients, ["local", method], seeds=[0, 1], rounds=1, tune="none", out=tmp_path / "compared", progress=False
    )
    assert comparison.results["score"] == "entity_f1"
    assert "majority" in comparison.results["references"]
    with contextlib.chdir(tmp_path):
        assert main(["report", "compared", "--out", "page.html"]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "entity F1" in page
    assert "ROC" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


class StopAtOnce(pf.Callback):
    def on_round(self, record):
        return False


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft and transformers between themselves
@pytest.mark.thorough
def test_transformers_with_adapters_of_different_ranks_tag_tokens():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    pool = TaggedSentences(sites=2, sentences=8).load()
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, num_labels=5,
    )  # fmt: skip

    def network(rank):
        torch.manual_seed(0)
        net = transformers.BertForTokenClassification(config)
        return peft.get_peft_model(
            net, peft.LoraConfig(r=rank, target_modules=["query"], modules_to_save=["classifier"])
        )

    sets = [
        ({"input_ids": ids, "attention_mask": (ids > 0).long()}, targets)
        for ids, targets in zip(pool.train.x.split(4), pool.train.y.split(4), strict=True)
    ]
    clients = [
        Client(f"site-{k}", lambda rank=rank: network(rank), *sets[2 * k : 2 * k + 2], task=TASK)
        for k, rank in enumerate((1, 2))
    ]
    method = pf.algorithms.FedAvg(adapters="zero_pad", lr=0.01, batch_size=8)
    run = pf.federate(clients, method, rounds=1)
    assert all(row["entity_f1"] is not None for row in run.table())
