"""How the site's search ranks pages: a weight for each page, and words that people type for it.

Material's search counts a word in a title a thousand times one in the text, and a page's `tags` a thousand times a title.
No page shows its tags (site.css hides them in the list of results). Each word of a question is read as the beginning of a
word, without small words such as "a" and "my"; "own" is read as "custom" (search_words.js).

A browser loads the whole index. So it leaves out long tables of results, the names of tests, and the signatures and types of
the reference; guides stay in it whole.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

WEIGHTS = {  # by the beginning of a page's address, the first that fits; 1 elsewhere
    "api/": 0.2,
    "results": 0.2,
    "leaderboard": 0.2,
    "papers.md": 0.3,
    "benchmarks.md": 0.2,
    "methods/": 0.6,
    "methods.md": 2.0,
    "configuration": 1.5,
    "glossary.md": 1.5,
    "choose.md": 4.2,
    "index.md": 2.0,
    "scaling.md": 4.0,
}
GUIDE_WEIGHT = 4.0  # tutorial and how-to
UNSEARCHED = ("results/", "leaderboard/federations.md", "multicentre/", "benchmarks/")  # long tables
_UNSEARCHED_SECTIONS = re.compile(r"methods/.*#(results|what-proves-it)$")
_SIGNATURE = re.compile(r"<pre>.*?</pre>", flags=re.DOTALL)
_TYPE = re.compile(r"\(\s*<code>[^<]*</code>\s*(, default:\s*<code>[^<]*</code>\s*)?\)|<code>dataclass</code>")
_PARAMETERS = re.compile(r"<p>Parameters:</p> <ul>.*?</ul>")  # of a method: they are the defaults on its own page
_SHARED_FIELDS = re.compile(r"<p>As in every method .*?</p>", flags=re.DOTALL)
_BLOCK = re.compile(r"</?(?:p|ul|li)>")
_CODE = re.compile(r"(<pre.*?</pre>)", flags=re.DOTALL)

WORDS = {
    "add_a_method.md": "custom method algorithm implement",
    "callbacks.md": "hook hooks custom callback callbacks",
    "asynchronous.md": "straggler stragglers fedbuff fedasync",
    "choose.md": "method best recommend recommended",
    "compare.md": "who join",
    "compare/fair.md": "learning rate tune tuning hyperparameter hyperparameters search optuna grid",
    "compare/results.md": "comparison.json",
    "data.md": "data image images text texts string strings label labels dataset datasets numpy dataloader",
    "data/large.md": "large big lazy",
    "data/partitions.md": "dirichlet non iid partition partitions skew split shift",
    "data/several_inputs.md": "multimodal several inputs dict tuple mask",
    "data/sources.md": "imagefolder folder mnist cifar source",
    "defaults.md": "default defaults",
    "deploy.md": "hospital hospitals two deploy deployment flower",
    "deploy/failures.md": "fails failed offline unavailable timeout",
    "deploy/machines.md": "docker container containers kubernetes ram hardware",
    "deploy/network.md": "firewall port ports proxy nginx tls",
    "deploy/noise.md": "budget ledger",
    "deploy/options.md": "disclose consent",
    "deploy/secure_sums.md": "secure aggregation secagg bonawitz masks",
    "deploy/who_learns_what.md": "sees learns server",
    "export.md": "export save load model serve serving onnx predict prediction inference production download",
    "faq.md": "custom decided undecided converged rounds longer resume checkpoint crash interrupted windows macos error "
    "optimizer optimiser reproducible",
    "index.md": "federate federated install pip conda requirements licence license cite citation bibtex personalized",
    "intervals.md": "cross validation fold folds many enough need test confidence significance significant p-value "
    "power sample size",
    "json.md": "json output script",
    "look.md": "cross matrix",
    "metrics.md": "metric metrics auc auroc accuracy f1 sensitivity specificity calibration",
    "networks.md": "lstm rnn cnn custom model models network networks different architecture architectures "
    "heterogeneous torchvision timm pytorch",
    "methods.md": "batch epochs momentum scheduler",
    "notebook.md": "plot plots chart figure results",
    "pretrained.md": "hugging face huggingface transformers bert finetune fine peft",
    "privacy.md": "differential privacy dp epsilon patient",
    "report.md": "report page html print pdf subgroup subgroups",
    "scaling.md": "many clients bytes bandwidth communication traffic cost",
    "security.md": "leave leaves sent safe gdpr legal governance hipaa",
    "security/bad_site.md": "bad byzantine poison poisoning malicious robust krum attack",
    "security/how_much_leaks.md": "leak leaks reconstruct reconstruction membership inference",
    "tabular.md": "patients csv excel xlsx spreadsheet parquet pandas dataframe missing custom",
    "tabular/columns.md": "column columns categorical identifier",
    "tabular/groups.md": "repeated measurements visits longitudinal group groups recordings",
    "tabular/several_files.md": "schema scale standardise",
    "tasks.md": "regression multilabel task tasks",
    "tasks/forecasting.md": "forecast forecasting time series",
    "tasks/own_loss.md": "custom loss losses focal class weights weighted imbalance unbalanced imbalanced classes",
    "tasks/own_task.md": "custom task",
    "tasks/segmentation.md": "segmentation segment dice unet",
    "tasks/survival.md": "survival cox hazard censored c-index",
    "tasks/tokens.md": "token tokens tagging ner language perplexity",
    "tutorial.md": "tutorial start started getting quickstart example beginner",
    "versions.md": "python version versions 3.11 3.12 3.13 3.14",
}


def weigh_page(address: str, section: str) -> float:
    """Returns the weight of a page in the search: above 1 for guides, below 1 for results and what is made from code."""
    if section in ("Tutorial", "How-to") and address not in WEIGHTS:
        return GUIDE_WEIGHT
    return next((weight for start, weight in WEIGHTS.items() if address.startswith(start)), 1.0)


def shorten_entries(entries: Iterable[Mapping[str, object]]) -> Iterator[dict[str, object]]:
    """Yields the entries of the search's index without what a search does not need.

    >>> entry = {"location": "api/runs.html#polyfed.run", "text": "<pre>run(...)</pre> <p>Runs   it.</p>"}
    >>> list(shorten_entries([entry, {"location": "methods/local.html#results", "text": "81.2"}]))
    [{'location': 'api/runs.html#polyfed.run', 'text': 'Runs it.'}]
    """
    for entry in entries:
        location, text = str(entry["location"]), str(entry["text"])
        if _UNSEARCHED_SECTIONS.match(location):
            continue
        if location.startswith("api/"):
            text = _TYPE.sub("", _SIGNATURE.sub("", text))
        text = _SHARED_FIELDS.sub("", text)
        text = "".join(part if part.startswith("<pre") else re.sub(r"\s+", " ", part) for part in _CODE.split(text))
        if location.startswith("api/algorithms.html"):
            text = _PARAMETERS.sub("", text)
        if location.startswith("api/"):
            text = re.sub(r"\s+", " ", _BLOCK.sub(" ", text)).strip()
        yield {**entry, "text": text}
