"""Three sites with three different transformers of Hugging Face learn whether a sentence praises or blames (needs
`pip install transformers`).

Without a network they are tiny and drawn at random, and words are their tokens. With `--hub` they are small pretrained BERTs
of the hub, which share one vocabulary: a federation that compares networks on the same public texts needs that.
"""

import random
import sys

import torch

import polyfed as pf

try:
    import transformers
except ImportError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

HUB = {
    "north": "google/bert_uncased_L-2_H-128_A-2",
    "south": "google/bert_uncased_L-4_H-128_A-2",
    "west": "google/bert_uncased_L-2_H-256_A-4",
}
LENGTH = 12

# -- the texts --------------------------------------------------------------------------------------------------------

PRAISE, BLAME = ["good", "great", "fine", "brilliant", "moving"], ["bad", "poor", "dull", "tedious", "silly"]
BEGINNINGS, SUBJECTS = [["we", "thought"], []], ["film", "story", "plot", "cast"]
OTHERS = ["the", "a", "we", "thought", *SUBJECTS, "was", "seemed", "not", "very", "so", "in", "parts"]
WORDS = ["[PAD]", "[CLS]", *OTHERS, *PRAISE, *BLAME]


def sentence(rng):
    """Like "we thought the plot was not very good"; "not" turns its meaning round."""
    good, turned = rng.random() < 0.5, rng.random() < 0.25
    words = [*rng.choice(BEGINNINGS), rng.choice(["the", "a"]), rng.choice(SUBJECTS), rng.choice(["was", "seemed"])]
    words += [*["not"] * turned, *rng.choice([["very"], ["so"], []]), rng.choice(PRAISE if good else BLAME)]
    words += rng.choice([["in", "parts"], []])
    return " ".join(words), int(good != turned)


def tokenised(texts):
    """A dict of tensors, as the tokenizers of transformers give it: its keys are the names of forward's arguments."""
    if "--hub" in sys.argv:
        tokenizer = transformers.AutoTokenizer.from_pretrained(HUB["north"])
        tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}
    ids = torch.zeros(len(texts), LENGTH, dtype=torch.int64)
    for row, text in zip(ids, texts, strict=True):
        known = [WORDS.index(word) for word in ["[CLS]", *text.split()]]
        row[: len(known)] = torch.tensor(known)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def examples(number, rng):
    texts, labels = zip(*(sentence(rng) for _ in range(number)), strict=True)
    return tokenised(list(texts)), torch.tensor(labels)


# -- the networks: they return an object with .logits -----------------------------------------------------------------

SIZES = {"vocab_size": len(WORDS), "max_position_embeddings": LENGTH, "num_labels": 2, "pad_token_id": 0}
CONFIGS = {
    "north": transformers.BertConfig(
        **SIZES, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    ),
    "south": transformers.DistilBertConfig(**SIZES, dim=32, n_layers=1, n_heads=4, hidden_dim=64),
    "west": transformers.ElectraConfig(
        **SIZES, embedding_size=16, hidden_size=48, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    ),
}


def network(site):
    """Builds the site's network; called once for each."""
    kind = transformers.AutoModelForSequenceClassification
    if "--hub" in sys.argv:
        return kind.from_pretrained(HUB[site], num_labels=2)
    return kind.from_config(CONFIGS[site])


# -- the federation ---------------------------------------------------------------------------------------------------

TRAINING = {"lr": 0.003, "optimizer": "adam", "batch_size": 16, "local_epochs": 2}
METHODS = {
    "local": pf.algorithms.Local(**TRAINING),
    "fedhenn": pf.algorithms.FedHeNN(eta0=0.1, rad_size=64, rad_batch=64, momentum=0.0, **TRAINING),
}


def sites():
    rng = random.Random(0)
    test, public = examples(200, rng), examples(64, rng)
    clients = [pf.Client(site, lambda site=site: network(site), train=examples(120, rng), test=test) for site in HUB]
    return clients, public


if __name__ == "__main__":
    clients, public = sites()
    print("accuracy   " + "".join(f"{site:>8}" for site in HUB))
    for name, method in METHODS.items():
        run = pf.federate(clients, method, rounds=12, public=public, evaluate_every=12)
        scores = {row["client"]: row["accuracy"] for row in run.table()}
        print(f"{name:<11}" + "".join(f"{scores[site]:>8.2f}" for site in HUB), flush=True)
