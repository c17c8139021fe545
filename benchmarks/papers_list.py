"""docs/papers.md: every table and figure of the four papers, with its command and its state. `papers.py page` calls it.

CONTENTS has the numbers of tables and figures, and what needs no run. Commands come from recipes/papers/*.yaml, states from
results/papers/*.json and results/paper_scale/*.json. An entry of the recipes that belongs to nothing in CONTENTS is listed
as polyfed's own.
"""

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import fmean

from paper_scale import PLANS
from papers_claims import PAPERS

from polyfed.cli.commands.options.recipes import read_recipe
from polyfed.cli.commands.papers.paper_tables import find_table, load_papers

SCALED = Path(__file__).parent / "results" / "paper_scale"
DATA = {
    "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashion_mnist": "Fashion-MNIST", "emnist": "EMNIST", "mnist": "MNIST",
    "sentiment140": "Sentiment140", "chest_xray14": "NIH chest X-rays", "fashion_mosaics": "mosaics of Fashion-MNIST",
    "digits": "scikit-learn's digits",
}  # fmt: skip
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DRAWING = "a drawing: nothing to reproduce"
COST = SCALED.parent / "paper_scale_cost.json"
COLUMNS = SCALED.parent / "pfedla_columns.json"
APPENDICES = {
    "flha": "Its appendices: A is Figure 5, B and D are in the table, C is Figure 6, E and F are settings of distillation "
    "([fedavg_kd](methods/fedavg_kd.md)) and [pFedHN](methods/pfedhn.md), G is Tables 4 and 5, H is Tables 6 and 7 and "
    "Figure 7.",
    "fedhenn": "It has no appendix.",
    "pfedla": "Its supplement, with the sizes of the hypernetworks, was not at hand.",
    "fedpnas": "Its appendices: A has the two algorithms, B is Table 3, C is Figure 4, D is equation 5 and Proposition 1, E "
    "derives equation 5, F proves the proposition.",
}
HEAD = """# Tables and figures of the papers

Which results of the four papers can you reproduce, and has anybody? Each table and figure with numbers has a command.
Nearly all were measured, with fewer clients, images and rounds than in the papers, and no whole table at the papers' own
length. The tables below have every table and figure, and claims in the text that have no table.

- **Command**: add `--scale cpu` (the default), `--scale paper` or `--scale smoke`. With a data set that does not come with
  polyfed add `--data.path FOLDER`, and `--variant` to choose that data set ([how](reproduce.md)).
- **State**: what has been measured with this command. *Scale cpu* is a small version: fewer clients, images and rounds, and
  often other data. It says which method is ahead of which there, and by how much ([results](results.md)). It does not
  confirm the paper's numbers.
- *Scale paper* has the paper's own numbers of clients and rounds. Nobody has run a whole table at it;
  [how far runs went](#at-the-papers-own-length) is below.
- A figure that is only drawn in the paper has no numbers to compare with. Its command measures what it draws.
- How each method differs from its paper is on the method's page: [FLHA-GHN](methods/flha_ghn.md),
  [FedHeNN](methods/fedhenn.md), [FedHeNN for one architecture](methods/fedhenn_homo.md), [pFedLA](methods/pfedla.md),
  [HeurpFedLA](methods/heur_pfedla.md), [FedPNAS](methods/fedpnas.md).
- `python benchmarks/papers.py page` makes this page from the recipes and the measured runs.
"""


@dataclass(frozen=True)
class Item:
    """A table, figure or claim of a paper.

    Attributes:
        number: its name in the paper.
        what: what it shows.
        key: the beginning of the names of its entries in recipes/papers; empty where there is none.
        state: what there is instead of a measurement, for those that have no entry or whose entry does not run.
        command: what to type, for those without an entry.
        rows: a pattern of the names of the entry's rows that are meant; all without one.
    """

    number: str
    what: str
    key: str = ""
    state: str = ""
    command: str = ""
    rows: str = "*"


PROVED = "shown by a test: rounds in plain torch ([what proves it](methods/{}.md#what-proves-it))"
CONTENTS = {
    "flha": (
        Item("Algorithm 1", "local updates of the hypernetwork and their mean", state=PROVED.format("flha_ghn")),
        Item("Figure 1", "overview of the method", state=DRAWING),
        Item("Figure 2", "the graph hypernetwork", state=DRAWING),
        Item("Table 1", "accuracy on CIFAR-10 and CIFAR-100, four architectures", "table1"),
        Item("Table 2", "with and without graph network", "table2"),
        Item("Table 3", "AUC on chest X-rays", "table3"),
        Item("Figure 3", "an architecture that took no part, by epochs", "fig3"),
        Item("Figure 4", "accuracy by the epochs between communications", "fig4"),
        Item("Figure 5", "the four architectures", state="a drawing: polyfed builds the four networks after it",
             command="polyfed graph flha_arch1 --input 3,32,32"),
        Item("Figure 6", "spread of generated weights at the start", "fig6"),
        Item("Figure 7", "a small CNN that took no part, by epochs", "fig7"),
        Item("Table 4", "how classes are dealt", "table4",
             "states no numbers; the command prints the counts, and draws them with `--plot FILE`"),
        Item("Table 5", "unbalanced classes", "table5"),
        Item("Table 6", "an architecture that took no part, at the end", "table6"),
        Item("Table 7", "one architecture replaced by a small CNN", "table7"),
        Item("Section 4.2", "FedAvg is a special case", state="shown by a test: with a lookup table for the graph network"),
        Item("Section 4.3", "asynchronous passing has no advantage", state="on scikit-learn's digits nothing decided, three "
             "seeds ([measured](../benchmarks/notes/flha_ghn.md#flha-ghns-message-passing))",
             command="polyfed run flha_table1 --variant cifar10-25 --algorithm.passing asynchronous"),
        Item("Section 5.4", "the others lose 2.2 ± 1.4 points by it: twelve cells of Table 7", "drop"),
        Item("Appendix B", "networks that concatenate", "appendix_b"),
        Item("Appendix D", "the search of hyper-parameters", "appendix_d"),
    ),
    "fedhenn": (
        Item("Algorithm 1", "clients of one architecture", state=PROVED.format("fedhenn_homo")),
        Item("Algorithm 2", "clients of several architectures", state=PROVED.format("fedhenn")),
        Item("Figure 1", "some clients are too poor for the full network", "fig1"),
        Item("Figure 2", "representation and prediction parts of a network", state=DRAWING),
        Item("Table 1", "accuracy of the global model (Table 2 of the web text)", "table1"),
        Item("Table 2", "accuracy of the personal models (Table 3 of the web text)", "table2"),
        Item("Table 3", "linear against RBF kernel (Table 1 of the web text)", "table3"),
        Item("Figure 3", "half of the data taken from some clients", "fig3"),
        Item("Section 4.2", "effects of η_0, the size of the RAD and local epochs; Procrustes distance (section 3.4)",
             "effects"),
        Item("Section 4.1", "effect of σ of the RBF kernel", "effect of sigma", rows="RBF *"),
        Item("Lemma 3.2", "with a large η linear models become alike", state="shown by a test, with its limits"),
    ),
    "pfedla": (
        Item("Algorithm 1", "pFedLA", state=PROVED.format("pfedla")),
        Item("Algorithm 2", "HeurpFedLA", state=PROVED.format("heur_pfedla")),
        Item("Figure 1", "toy example: weights by layer against one weight a client", "fig1"),
        Item("Figure 2", "overview of the method", state=DRAWING),
        Item("Figure 3", "a hypernetwork", state=DRAWING),
        Item("Figure 4", "the layers that HeurpFedLA retains", state=DRAWING),
        Item("Table 1", "accuracy, non-IID.1", "table1"),
        Item("Table 2", "accuracy, non-IID.2", "table2"),
        Item("Table 3", "accuracy and traffic by the number k of retained layers", "table3"),
        Item("Figure 5", "weights of a target client in the course of training", "fig5"),
        Item("Figure 6", "weights between clients with similar classes", "fig6"),
        Item("Figure 7", "weights by layer", "fig7"),
    ),
    "fedpnas": (
        Item("Algorithm 1", "the two passes of a step, and the mean", state=PROVED.format("fedpnas")),
        Item("Algorithm 2", "sampling and evaluation, cell by cell", state=PROVED.format("fedpnas")),
        Item("Figure 1", "overview of the method", state=DRAWING),
        Item("Figure 2", "cells of the two stacks", state=DRAWING),
        Item("Figure 3", "accuracy by rounds on MNIST (a) and CIFAR-10 (b), time (c)", "fig3"),
        Item("Table 1", "slightly and strongly different images", "table1"),
        Item("Table 2", "rotations that no client has seen", "table2"),
        Item("Figure 4", "FedAvg's network", state="a drawing: polyfed has the network as `cnn_fedpnas`"),
        Item("Table 3", "numbers of parameters of the operations", "table3"),
        Item("Proposition 1", "α_i is near the cosine of a client's gradient and the mean one", "prop"),
    ),
}  # fmt: skip


def belongs(name, key):
    """Whether an entry is of a table or figure: `table2b` and `table2_x` are of `table2`, `table20` is not."""
    return bool(key) and name.startswith(key) and not name[len(key) :][:1].isdigit()


def kind(item):
    """Tables come first, then figures, then claims."""
    words = ("Table", "Figure")
    return words.index(word) if (word := item.number.partition(" ")[0]) in words else len(words)


def entries_of(paper, item):
    """The entries of an item, in the order of the recipes' file."""
    return [
        table
        for table in load_papers()[paper].tables.values()
        if any(belongs(n, item.key) for n in (table.name, *table.aliases))
    ]


def page(results):
    """The page's text."""
    parts = [HEAD]
    for paper, (name, what) in PAPERS.items():
        parts.append(f"## {name}\n\n{what}. With intervals and remarks: [results](results.md#{name.lower()}).")
        parts.append(f"{APPENDICES[paper]}\n")
        parts += ["| in the paper | what it shows | command | state |", "|---|---|---|---|"]
        listed = set()
        for item in sorted(CONTENTS[paper], key=kind):
            entries = entries_of(paper, item)
            listed |= {table.name for table in entries}
            parts += [row(item.number, item.what, table, item, results) for table in entries or [None]]
        parts += [
            row("polyfed's own", table.title, table, Item("", ""), results)
            for table in load_papers()[paper].tables.values() if table.name not in listed
        ]  # fmt: skip
        parts.append("")
    return "\n".join([*parts, at_length()])


def row(number, what, table, item, results):
    if table is None:
        command = f"`{item.command}`" if item.command else "–"
        return f"| {number} | {what} | {command} | {item.state or 'not measured: polyfed has no recipe for it'} |"
    if table.reason_not_run:
        return f"| {number} | {what} | `{table.reason_not_run.split('`')[1]}` | {item.state} |"
    shown = what if item.key in (table.name, *table.aliases) else table.title
    return (
        f"| {number} | {shown} | `polyfed reproduce {table.paper} {table.name}` | {state(table, results, item.rows)} |"
    )


def state(table, results, rows="*"):
    """What has been measured of an entry, or of some of its rows, and on which of the recipe's data sets it has not."""
    file = results / f"{table.paper}-{table.name}.json"
    if not table.variants_by_recipe():
        return "computed; needs no data and no run" if file.exists() else "not measured"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"cells": [], "options": []}
    measured = [cell for cell in found["cells"] if fnmatchcase(cell["row"], rows)]
    parts = ["not measured"]
    if measured:
        other = other_data(found["options"])
        here = {other or data_of(cell["recipe"], cell["variant"], found["scale"]) for cell in measured}
        parts = [
            f"scale {found['scale']}: {spoken(sorted(here))}; {counted({len(cell['seeds']) for cell in measured})}"
        ]
        cells = [
            (cell, data_of(cell.recipe, cell.variant, "paper")) for cell in table.cells if fnmatchcase(cell.row, rows)
        ]
        places = {(cell["row"], cell["column"]) for cell in measured}
        on_these = [(cell.row, cell.column) in places for cell, data in cells if other or data in here]
        if not all(on_these):
            parts.append(f"{sum(on_these)} of {len(on_these)} cells on these data")
        if elsewhere := sorted({data for _, data in cells} - here):
            parts.append(f"Not on {spoken(elsewhere)}")
    return ". ".join([*parts, *lengths(table)])


@cache
def recipe_of(name):
    return read_recipe(name)


@cache
def data_of(recipe, variant, scale):
    return recipe_of(recipe).configuration(scale, variant)["data"]["name"]


def other_data(options):
    """The data set that the options of a measurement name instead of the recipe's."""
    return options[options.index("--data.name") + 1] if "--data.name" in options else None


def spoken(names):
    words = [DATA.get(name, name) for name in names]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def counted(seeds):
    words = [NUMBERS[n] if n < len(NUMBERS) else str(n) for n in sorted(seeds)]
    return f"{' or '.join(words)} seed{'' if seeds == {1} else 's'}"


def scaled():
    """What was reached at scale paper, by file."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(SCALED.glob("*.json"))]


def lengths(table):
    """How far an entry was run at the paper's own length, a sentence for each variant."""
    told = []
    for found in scaled():
        by_round = {}
        for name, of in found["methods"].items():
            by_round.setdefault(of["round"], []).append(f"`{name}`")
        if (found["paper"], found["table"]) == (table.paper, table.name) and by_round:
            done = "; ".join(
                f"{at} of {found['rounds']} rounds by {', '.join(names)}" for at, names in by_round.items()
            )
            told.append(f"[Scale paper](#at-the-papers-own-length), {found['variant']}: {done}")
    return told


def at_length():
    """What was reached at scale paper: a table for each paper."""
    lines = [
        """## At the papers' own length

One table or figure of each paper at scale `paper`: one variant, one seed, one processor core.

- Runs that do not have all their rounds were stopped: they say how far a method came, and not what the end would be. The
  last but one column has the paper's numbers for the end.
- `python benchmarks/paper_scale.py run NAME` makes such runs, goes on with those that were stopped, and writes what they
  reached. Hours are of a machine that did other work, too.
- What whole runs would take is computed from a few steps of local training, in hours of the processor
  (`python benchmarks/paper_scale_cost.py NAME`); evaluations come on top.
""",
    ]
    reached = {(found["paper"], found["table"]): found for found in scaled()}
    cost = json.loads(COST.read_text(encoding="utf-8"))
    for key, plan in PLANS.items():
        found = reached.get((plan.paper, plan.table), {"methods": {}})
        lines.append(
            f"### {PAPERS[plan.paper][0]}, {find_table(plan.paper, plan.table).printed_name}, {plan.variant}\n"
        )
        if found["methods"]:
            unit = next(cell["unit"] for of in found["methods"].values() for cell in of["cells"])
            lines += [
                f"Reduced against the paper: {found['reduced']}.\n",
                f"| method | round | accuracy ({unit}) by round | paper, at the end | hours, processor |",
                "|---|---|---|---|---|",
            ]
        for name, of in found["methods"].items():
            lines.append(
                f"| `{name}` | {of['round']} of {found['rounds']} | {course(of, unit)} | {at_the_end(of)} | "
                f"{of['hours']:.1f}, {of['processor']} |"
            )
        if lacking := [f"`{name}`" for name in plan.methods if name not in found["methods"]]:
            lines += [*([""] if found["methods"] else []), f"Not begun: {', '.join(lacking)}."]
        if key == "pfedla":
            lines.append(f"\n{with_more_images()}")
        if key in cost:
            hours = ", ".join(f"`{name}` {spoken_hours(of['hours'])}" for name, of in cost[key].items())
            lines.append(f"\nLocal training in all rounds would take one core about so long: {hours}.")
        lines.append("")
    return "\n".join(lines)


def with_more_images():
    """What pFedLA and training alone have with more images a client than in the table above it."""
    runs = json.loads(COLUMNS.read_text(encoding="utf-8"))

    def accuracy(rounds, method):
        by_seed = runs[f"table1, fashion_mnist, 3000 images, {rounds} rounds"][method]
        return f"{fmean(run['accuracy'] for run in by_seed.values()):.1f}"

    return (
        "The paper does not say how many images a client has. With 3,000 instead of 100 `pfedla` has "
        f"{accuracy(80, 'pfedla')} % after 80 rounds (paper: 94.34), and `local` {accuracy(2, 'local')} % after two rounds "
        f"and {accuracy(60, 'local')} % after 60. So the paper's training alone may have had few epochs "
        "([measured](../benchmarks/notes/pfedla.md#images-a-client-in-pfedlas-table-1))."
    )


def spoken_hours(hours):
    return f"{hours:.1f} hours" if hours < 10 else f"{hours:.0f} hours"


def course(of, unit):
    """At most six of the scores on the way, the last among them."""
    metric = of["cells"][0]["metric"] if of["cells"] else "score"
    scores = of["by_round"].get({"score": "accuracy"}.get(metric, "global_accuracy"), {})
    if not scores:
        return "not scored yet"
    rounds = list(scores)
    chosen = sorted({round(step * (len(rounds) - 1) / 5) for step in range(6)})
    factor, digits = (100, 1) if unit == "%" else (1, 3)
    return ", ".join(f"{factor * scores[rounds[i]]:.{digits}f} ({rounds[i]})" for i in chosen)


def at_the_end(of):
    """The paper's figures, one for each cell of the method."""
    stated = [cell for cell in of["cells"] if cell["paper"] is not None]
    if not stated:
        return "not stated"
    if len(stated) == 1:
        return stated[0]["printed"]
    return ", ".join(f"{cell['column'].rpartition(', ')[2]} {cell['printed']}" for cell in stated)


def write(results, docs):
    (docs / "papers.md").write_text(page(results), encoding="utf-8")
