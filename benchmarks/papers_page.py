"""docs/results.md and its pictures, from benchmarks/results/papers. `papers.py page` calls it.

No conclusion is written by hand but for REMARKS, which are on single tables, and for sentences that are checked against
the measurements (papers_claims.py): "ahead" or "behind" is where an interval leaves out 0, "not decided" where it does not.
"""

import json
import re
from statistics import fmean

from papers_cells import interval
from papers_claims import PAPERS, conclusions, in_short, split
from papers_curves import DIGITS, OTHER, kind_of, of_curve, spanned
from papers_summary import answer, summary

from polyfed.cli.commands.papers.paper_tables import find_table

DATA_SETS = {"fashion_mnist": "Fashion-MNIST"}
WIDE = 8  # columns; a table that has more is printed on its side
NOT_BETTER = ("MB", "s", "count", "ratio")  # units in which more is not better
HEAD = """# Results of the papers' methods

How do four published systems do beside their rivals, with fewer clients, images and rounds than in the papers?
"""

OF_A_CURVE = """\
Under a curve, *in every seed with 20* means that with 20 examples a client the method of this page has the higher mean
in each seed. *The means do not cross* means that the same method of the two has the higher mean at every number of
examples.
"""
READING = """# How to read the results

Compare the order of methods, and whether a difference is decided, not the levels: polyfed's runs are smaller than the
papers'.

| word | meaning |
|---|---|
| polyfed | the mean over seeds ± the standard deviation over seeds |
| paper | the paper's figure; what is reduced against it stands under each table |
| ahead, behind | the 95 % interval of the paired difference is above 0, or below 0 |
| not decided | any other interval, also one without width, where all seeds happen to differ alike |
| 100 clients, 500 clients | rows and columns have the papers' names: in FedHeNN's tables they are 20 and 40 here |
| η_0 | the weight of FedHeNN's alignment term |
| RAD | the public examples on which FedHeNN compares representations |
| CKA | how alike two representations are, from 0 to 1 |
| normalise, Arch 0 to 3 | FLHA-GHN: it scales the weights that are generated; its four networks |
| adapted | FedPNAS: after the epoch of local training with which it ends |

[Other words](../glossary.md). A table or figure of the papers that is not on these pages has not been measured.

## What an interval covers

- **In a table** each seed deals the data anew and trains anew: intervals cover new clients of the same data.
- **In a curve** all seeds have the same clients: intervals cover new seeds and new test examples, not new clients.
- Each interval is for one difference. Where ten methods are compared, one in twenty such statements may be wrong.
- Most are of three seeds, and may be narrow by chance. What three showed was measured with further seeds in two tables,
  and once it did not hold ([FedHeNN, Table 2](fedhenn.md); [FLHA-GHN, Table 1](flha_ghn.md)).
- One setting that stands in two tables may differ, as a rule by some tenths of a point, and by many where seeds are far
  apart, as FedAvg's on the digits of FedPNAS's Fig. 3, or a single client's. They were measured on processors with other
  vector instructions, which round otherwise. So three seeds that decide something may not do so on your processor.

## How learning rates were chosen

- **In a curve** every method's rate was chosen on validation examples. One run a rate chooses, and may choose badly.
  FedHeNN's η_0 was tried in all combinations with the rate, and so with twice as many runs.
- A curve is read twice: at the round that was best on validation examples for each method, and after all rounds. What
  is decided both times is firmer than what is decided once.
- **In a table** methods share the rates of its recipe, which stand under it as "reduced". They were not chosen for each
  method, but for pFedHN in FLHA-GHN's Table 1, both kinds of network in its Table 2, η_0 in FedHeNN's tables and the
  samplers of FedPNAS ([the searches](../../benchmarks/notes/fedpnas.md#architecture-search)).
- So where a table and a curve differ, the curve is the fairer comparison.

`python benchmarks/papers.py page` makes the [results](../results.md) from measured runs. [Reproduce a
paper](../reproduce.md) says how to make a table yourself.
"""


REMARKS = {  # what one should know to read a table or a curve
    "fedhenn-table1": "What decides is which mean is the global model, over all clients' latest networks or over the last "
    "round's few. Where the two are different, as in the paper, FedHeNN's is ahead in seven of eight comparisons on "
    "CIFAR-10. Where they are the same it is ahead in none.",
    "flha-table1": """\
Three more seeds were run to see whether what the first three showed holds. By themselves, FLHA-GHN over:

| | 25 % | 12.5 % | 6.25 % |
|---|---|---|---|
| training alone | +1.6 (−0.6 to 3.8) | +7.9 (4.2 to 11.5) | +15.5 (11.7 to 19.3) |
| pFedHN | | +11.9 (7.7 to 16.2) | +17.9 (12.6 to 23.1) |
| distillation | −1.9 (−4.5 to 0.6) | +2.2 (−1.4 to 5.9) | +10.1 (5.9 to 14.2) |

At 25 % the paper has distillation ahead on CIFAR-10, too (89.7 against 88.8), but not on CIFAR-100, where training
alone is far behind. pFedHN has a head for each client, as in the paper. With heads by architecture, which two and four
clients share:

| | 12.5 % | 6.25 % |
|---|---|---|
| pFedHN gains | +7.0 (4.2 to 9.8) | +14.0 (10.6 to 17.4) |
| FLHA-GHN over it | +6.8 (5.8 to 7.8) | +4.9 (2.9 to 6.9) |

At 25 % both forms of pFedHN are the same.""",
    "flha-table1_forms": "As published is with polyfed's earlier reading of section 4.2's start, of which Fig. 6 says "
    "more, and with norm layers as nodes of the graph. Without normalise FLHA-GHN has the largest rate at which no seed "
    "ended at chance, 0.1. With 0.3, which was better in two other seeds, one of these three did "
    "([rates](../benchmarks/notes/flha_ghn.md#flha-ghns-forms)).",
    "fedhenn-table2": """\
FedHeNN Hetero and training alone with its networks have nine seeds on CIFAR-10 with two classes. Six more were run to
see whether what the first three showed holds:

| | three seeds | the six others |
|---|---|---|
| 500 clients (40 here): it does not | +1.2 (0.7 to 1.6) | +0.1 (−0.8 to 0.9) |
| 100 clients (20 here): it does | −1.1 (−1.7 to −0.5) | −1.5 (−2.6 to −0.4) |

So read a narrow interval of three seeds with care: it may be narrow by chance.""",
    "fedhenn-effects": """\
- **The term** makes networks see alike, as it should, and that alone does not raise accuracy. From η_0 0 to 1 CKA goes
  from 0.4 to 0.95, and accuracy with several networks falls by 4.3 points (1.6 to 6.9).
- **With one network** three seeds do not tell training with the term from training without it (η_0 0). So the lead over
  training alone in Table 2 may be that of averaging.
- **Epochs**: the paper says that FedAvg suffers from more local epochs and FedHeNN does not. Here twice the epochs
  raise FedAvg's model by 5.7 points (0.1 to 11.4), and FedHeNN's global one by 0.4 (0.1 to 0.8).
- **The RBF kernel's width** of 0.1, 0.5 or 2 median distances changes accuracy by no more than its spread over three
  seeds.
- "As in Table 2" is also the setting of "its epochs" and of η_0 1 with one network, 0.1 with several.""",
    "fedhenn-fig1": "FedAvg and FedProx have one model for ten classes here, and a client's own test images are of two. So "
    "FedHeNN's lead over them is not that of its alignment: training alone with FedHeNN's networks has it, too.",
    "fedhenn-fig3": "From nobody to all clients FedHeNN Homo loses 1.6 points and training alone 2.5. That difference, 0.9 "
    "(−1.6 to 3.5), is not decided.",
    "pfedla-examples": """\
- **Rounds**: its weights over clients learn by one step a round. With 80 and 160 images nothing was decided over
  training alone after 40 and 25 rounds, and with 320 it was behind by 4.0 (2.0 to 6.0) after 15. Here are 60, 60 and
  40.
- **Rates**: one run a rate chooses, and may choose badly.
    - With 160 images it chose 0.1 for training alone, just before 0.2. With 0.2 that has 90.3 after all rounds, and
      pFedLA's lead is 1.1 (−0.8 to 3.0), not decided.
    - With 80 images the next rate for training alone, 0.1, is worse, 85.8 instead of 87.2.
    - With 40 images it chose 0.8 for FedRep, which had 82.5 with 0.2.
- **FedFomo** weighs models by held-out examples, 8 of the 40. Where a client's own training makes their loss worse, it
  keeps its former model. With all its images in one batch every epoch is the same step, so that it never leaves it.
  Hence 41 % here and 47 % in Table 1, and being ahead of it says little.""",
    "flha-examples": "`flha_ghn_published` is with polyfed's earlier reading of section 4.2's start, and with norm layers "
    "as nodes of the graph. Distillation trains its teacher in the first half of the rounds. With 160 and 320 examples "
    "the search can choose no round after 15 of 20 and 10 of 15, five and two rounds after that half: so there the lead "
    "over it after all rounds is what counts.",
    "flha-appendix_b": "Networks which concatenate train with generated weights, too: in the mean of three seeds "
    "the hybrids "
    "are within 3 points of the ResNet-18 next to them with four clients, and within 6 with eight; the "
    "paper's within 2. Over distillation the ResNet-18 has 4.4 points (2.2 to 6.7) with eight clients and "
    "0.5 (0.0 to 1.0) with four.",
    "flha-fig4": "Three seeds. Up to five epochs between communications cost nothing, as in the paper. With ten, which "
    "leave four rounds, one seed of three is 15 points lower; with twenty, which leave two, the hypernetwork has learned "
    "little.",
    "fedpnas-proposition1": """\
- Three seeds. The proposition bounds the gap by the distance of θ_b from its optimum, so that it should shrink in
  training. It does not:

    | | after a tenth of the rounds | after all |
    |---|---|---|
    | digits | 0.37 | 0.54 |
    | Fashion-MNIST | 0.48 | 0.67 |

- α_i is above 0.989 everywhere, and above 0.999 after all rounds, since the first step changes θ_p little. The client's
  own gradient has a cosine of 0.18 to 0.65 with the federated one. So α_i does not tell here which client contradicts
  the others.
- Whether assumption 1, on which the proposition rests, holds was not measured.""",
    "flha-appendix_d": """\
One seed a choice, so that only large differences count:

- The paper's rate, 0.009, is right for its optimiser. With 0.001 and 0.0001 SGD learns little or nothing in 40 rounds,
  and 0.1 diverges.
- Adam does as well with 0.001.
- A latent dimension of 128 trains badly at the paper's rate, and eight steps of the GNN are worse than its three.
- Bottleneck, weight decay, schedule and kind of GNN make differences of a few points, which one seed does not
  decide.""",
    "flha-fig6": "Section 4.2's sentence, on all layers of a head, gives Kaiming's spread with fan_out, as the figure "
    "shows: to some per cent where nodes differ in size, exactly with normalise. It leaves open of what size the "
    "heads' input is; polyfed measures it ([FLHA-GHN](methods/flha_ghn.md#details)). Before, polyfed had the formula on "
    "the last layer alone, which gave 0.07 of Kaiming's spread with fan_in. That was its reading, not the paper's "
    "formula.",
    "flha-fig7": "Three seeds, after 20 epochs: the generated start gains 2.5 points (−4.0 to 9.1) over training from "
    "scratch, which is not decided. The paper draws the curves of one network and states no number.",
    "flha-table7": "The network that is replaced falls most, by 8 to 13 points here, which all four intervals confirm, "
    "and by 7 to 13 in the paper. The paper's average drop, 2.2 ± 1.4, is that of the others, over the "
    "twelve cells; here it is 1.5 ± 1.2 in the mean of three seeds, and one of the twelve is decided.",
    "flha-table6": "Training from scratch has the rate 0.03, FLHA-GHN's: of four rates the best over the four networks, in "
    "seeds that the table does not have ([rates](../benchmarks/notes/flha_ghn.md#the-rates-of-flha-ghns-table-1)).",
    "pfedla-fig1b": "By similarity client 1 takes half of conv1 from itself and half from the client with the same classes, "
    "and 1/4 of fc1, since all clients' fc1 are about as far from one another: the paper has it the other way round, "
    "larger weights in fc1 and fc2. Learned weights leave conv1, conv2 and fc1 wholly to client 1, and share fc2 and the "
    "classifier with the client of the same classes in two of three seeds.",
    "pfedla-fig5": "In each period the order is the paper's, the same classes before three of four before the others; no "
    "difference is decided. The target's own weight goes from 1/8 to nearly 1.",
    "pfedla-fig7": "On CIFAR-10 a client's convolutions and fc1 have nearly all their weight on itself after 60 rounds: it "
    "shares fc2 and the classifier. The paper's statement on fc1 is neither shown nor refuted: no layer is decidedly first.",
    "fedpnas-examples": "To the round that is compared CA-FedPNAS computes about ten times as long as training alone and "
    "FedAvg. More of the same rounds bring FedAvg little but with 20 images (after all rounds). A larger network for "
    "the same seconds was not tried.",
    "flha-table2": "One of three runs without GNN ended at chance at 25 %: its networks stopped learning in the first "
    "rounds. Hence the width of that interval.",
    "fedpnas-effects": "On digits seeds 0, 1 and 2 were measured first: CA-FedPNAS over CA-FedDSNAS +0.016 (−0.005 to "
    "+0.037). The seeds here are six others, so that none was chosen for what it shows.",
    "pfedla-table1": "With 100 clients of which 10 % take part, each client is drawn in 6 of the 60 rounds, and its "
    "hypernetwork takes 6 steps; in the paper's 2,500 rounds it would be 250. So that column says how the methods begin, "
    "not where they end.",
    "pfedla-table2b": "All methods share one rate here, which was not chosen for any of them. On Fashion-MNIST pFedHN "
    "diverged at it in two of three seeds.",
    "fedpnas-fig3": "On CIFAR-10 the lead of the methods that sample by context is one of speed: they are at their end "
    "after 10 of 20 rounds, and FedDSNAS comes up to them. 400 images a client teach no method more (10 % is chance).",
    "fedpnas-table2": "Fig. 3 was measured anew after this table, which is of earlier runs of the same federations.",
    "fedpnas-table1": "The columns of high heterogeneity without a name of data are CIFAR-10: 400 images a client and 540 "
    "minibatches teach none of the three much (10 % is chance). After half of these rounds CA-FedPNAS was ahead "
    "([an earlier measurement](../benchmarks/notes/fedpnas.md#architecture-search)); Fig. 3 shows by rounds how FedDSNAS "
    "comes up.",
}


def write(results, docs):
    """Writes the page of results, and the pages of details in docs/results."""
    folder = docs / "results"
    folder.mkdir(exist_ok=True)
    parts, took = [HEAD, summary(results, docs), "## Each paper\n"], minutes(results)
    for paper, (name, what) in PAPERS.items():
        tables = sorted(f for f in results.glob(f"{paper}-*.json") if not f.stem.endswith("-examples"))
        curves = {
            key: results / f"{key}-examples.json" for key in (paper, *(o for o in OTHER if o.startswith(f"{paper}_")))
        }
        curves = {key: file for key, file in curves.items() if file.exists()}
        if not tables and not curves:
            continue
        page = page_of(name)
        parts.append(f"### {name}\n\n{what}: [every table and curve of {name}](results/{page}).\n")
        details = [
            f"# Results of {name}\n\n{answer(results, name)}{what}. [How to read these tables](reading.md); "
            f"[the method](../methods/{page}).\n\n{OF_A_CURVE}",
            *(
                of_curve(key, name, json.loads(file.read_text(encoding="utf-8")), docs, REMARKS.get(f"{key}-examples"))
                for key, file in curves.items()
            ),
            *(of_table(json.loads(file.read_text(encoding="utf-8")), took) for file in tables),
        ]
        (folder / page).write_text("\n".join([details[0], *map(one_folder_down, details[1:])]), encoding="utf-8")
    parts.append(
        "## All claims\n\n[What the papers claim, and what was found](results/claims.md), line by line. "
        "[The same in sentences](results/sentences.md), with the intervals.\n"
    )
    (folder / "sentences.md").write_text(conclusions(results), encoding="utf-8")
    claims = f"# What the papers claim, and what was found\n\n{in_short(results)}"
    (folder / "claims.md").write_text(one_folder_down(claims), encoding="utf-8")
    (folder / "reading.md").write_text(READING, encoding="utf-8")
    if took:
        parts.append("## How long a table takes\n\n[Minutes of each table](results/minutes.md).\n")
        (folder / "minutes.md").write_text(how_long(results), encoding="utf-8")
    (docs / "results.md").write_text("\n".join(parts), encoding="utf-8")


def page_of(name):
    """Returns the file of a paper's details."""
    return f"{name.lower().replace('-', '_')}.md"


def one_folder_down(text):
    """Turns the links and headings of a part of docs/results.md into those of a page in docs/results.

    >>> one_folder_down("### Table 1\\n[a](#flha-ghn) [b](glossary.md) [c](#how-long-a-table-takes) ![d](images/e.svg)")
    '## Table 1\\n[a](flha_ghn.md) [b](../glossary.md) [c](minutes.md) ![d](../images/e.svg)'
    """
    inside = {f"#{name.lower()}": page_of(name) for name, _ in PAPERS.values()} | {
        "#how-long-a-table-takes": "minutes.md"
    }
    text = re.sub(r"\]\(([^)\s]+)\)", lambda link: f"]({inside.get(link[1]) or '../' + link[1]})", text)
    return re.sub(r"^#(#+ )", r"\1", text, flags=re.MULTILINE) if text.startswith("#") else text


def number(value, unit):
    return f"{value:.{DIGITS[unit]}f}"


def of_table(found, took):
    """One table: its cells, what is reduced, and what is shown. `took` has the minutes of those that were timed."""
    columns = list(dict.fromkeys(cell["column"] for cell in found["cells"]))
    rows = list(dict.fromkeys(cell["row"] for cell in found["cells"]))
    at = {(cell["row"], cell["column"]): cell for cell in found["cells"]}
    numbers = sorted({len(cell["seeds"]) for cell in found["cells"]})
    beside = only_in_the_paper(found, columns)
    if turned := len(columns) > WIDE and len(columns) > len(rows):  # on its side
        columns, rows, at = rows, columns, {(column, row): cell for (row, column), cell in at.items()}
        beside = {}
    stated = {c for c in columns if any(at[r, c]["paper"] is not None for r in rows if (r, c) in at)}
    head = [word for c in columns for word in ([f"{c}: polyfed", "paper"] if c in stated else [f"{c}: polyfed"])]
    lines = [
        f"### {found['number']}: {found['title']}\n",
        "| | " + " | ".join([*head, *(f"paper, {c}" for c in beside)]) + " |",
        "|---|" + "---|" * (len(head) + len(beside)),
    ]
    for row in rows:
        words = []
        for column in columns:
            cell = at.get((row, column))
            spread = (
                "" if cell is None or cell["ours_spread"] is None else f" ± {number(cell['ours_spread'], cell['unit'])}"
            )
            words.append("" if cell is None else number(cell["ours"], cell["unit"]) + spread)
            if column in stated:
                words.append("" if cell is None or cell["paper"] is None else cell["printed"])
        words += [given.get(row, "") for given in beside.values()]
        bold = f"**{row}**" if found["by"] == "row" and not turned and row.endswith(tuple(found["own"])) else row
        lines.append(f"| {bold} | " + " | ".join(words) + " |")
    lines.append("")
    said = [
        sentence(found["gains"], own, place)
        for own, place in dict.fromkeys((g["own"], g["at"]) for g in found["gains"] if g["gain"] is not None)
    ]
    lines += [*(f"- {one}" for one in said), ""] if said else []
    lines += differences(found["gains"])
    lines += by_round(found.get("by_round", {}), found["own"])
    if "--data.name" in (options := list(found["options"])):
        data = options[options.index("--data.name") + 1]
        lines.append(f"polyfed's figures are on {DATA_SETS[data]}, the paper's on its own data.\n")
    of = {found["reduced"][cell["recipe"]]: cell["recipe"] for cell in found["cells"] if cell["recipe"]}
    for reduced, recipe in of.items():
        which = f" (recipe `{recipe}`)" if len(of) > 1 else ""
        if reduced:
            parts = " ".join(reduced.split()).split("; ")
            lines += [f"Reduced against the paper{which}:\n", *(f"- {part}" for part in parts), ""]
    if found["seconds"]:
        seeds = "1 seed" if numbers == [1] else f"{' or '.join(map(str, numbers))} seeds"
        shared = f"; the runs of {find_table(*found['runs'].split('/')).printed_name}" if found.get("runs") else ""
        timed = took.get(f"{found['paper']}/{found['table']}")
        lines.append(
            f"{seeds}{shared}."
            + (f" Three seeds take {spelled(timed)} ([where](#how-long-a-table-takes))." if timed else "")
        )
    if remark := REMARKS.get(f"{found['paper']}-{found['table']}"):
        lines.append(f"\n{remark}\n")
    if note := " ".join(find_table(found["paper"], found["table"]).note.split()):
        lines.append(f"Note: {note}.")
    return "\n".join([*lines, ""])


def only_in_the_paper(found, columns):
    """The paper's figures on data that were not measured here, a column a data set (mean of its columns), by row."""
    values, of = {}, {}
    for cell in find_table(found["paper"], found["table"]).cells:
        if cell.column not in columns and cell.paper is not None:
            name = cell.column.partition(", ")[0]
            of.setdefault(name, set()).add(cell.column)
            values.setdefault(name, {}).setdefault(cell.row, []).append((cell.paper, cell.unit))
    return {
        f"{name}, mean" if len(of[name]) > 1 else next(iter(of[name])): {
            row: number(fmean(value for value, _ in told), told[0][1]) for row, told in rows.items()
        }
        for name, rows in values.items()
    }


def sentence(gains, own, at):
    """Which differences of a method are decided, at one place."""
    kinds = {"ahead of": [], "behind": [], "not decided against": [], "one seed only, against": []}
    here = [gain for gain in gains if (gain["own"], gain["at"]) == (own, at) and gain["gain"] is not None]
    for gain in here:
        kinds[kind_of(gain)].append(split(gain["over"])[1])
    no_score = here[0].get("unit") in NOT_BETTER or at.startswith("CKA")
    words = {"ahead of": "more than", "behind": "less than"} if no_score else {}
    said = "; ".join(f"{words.get(kind, kind)} {', '.join(names)}" for kind, names in kinds.items() if names)
    return f"{at}: **{own}** is {said}."


def differences(gains):
    """The paired differences with their intervals, a row a pair."""
    known = [gain for gain in gains if gain["low"] is not None]
    if not known:
        return []
    places = list(dict.fromkeys(gain["at"] for gain in known))
    lines = ["| difference (95 % interval) | " + " | ".join(places) + " |", "|---|" + "---|" * len(places)]
    for own, over in dict.fromkeys((gain["own"], gain["over"]) for gain in known):
        at = {gain["at"]: gain for gain in known if (gain["own"], gain["over"]) == (own, over)}
        lines.append(f"| {own} − {over} | " + " | ".join(spanned(at.get(place)) for place in places) + " |")
    return [*lines, ""]


def by_round(scores, own):
    """Scores over rounds, a table for each place, and the lead of the paper's first method in each of them."""
    places = {}
    for name, found in scores.items():
        place, _, method = name.partition(", ")
        places.setdefault(place, {})[method] = found
    lines = []
    for place, methods in places.items():
        rounds = sorted(set.intersection(*(set(found) for found in methods.values())), key=int)
        lines += [f"| {place}, % after round | " + " | ".join(rounds) + " |", "|---|" + "---|" * len(rounds)]
        for method, found in methods.items():
            means = [f"{100 * fmean(found[at].values()):.1f}" for at in rounds]
            lines.append(f"| {f'**{method}**' if method in own else method} | " + " | ".join(means) + " |")
        first = methods[own[0]]
        for method, found in methods.items():
            if method != own[0]:
                leads = [interval([100 * (first[at][s] - found[at][s]) for s in first[at]]) for at in rounds]
                lines.append(f"| {own[0]} − {method} | " + " | ".join(spanned(lead) for lead in leads) + " |")
        lines.append("")
    return lines


TIMED = "minutes.json"  # of papers_minutes.py: seconds of a call, by table and data set
ONE_BY_ONE = (
    "minutes_one_by_one.json"  # the same of one seed, with a call for each variant and one method after another
)
SOURCES = {"digits": "digits", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "sentiment140": "tweets"}


def timings(results, file=TIMED):
    """Minutes that three seeds take, by table and data set, and the file's content."""
    if not (results / file).exists():
        return {}, {}
    found = json.loads((results / file).read_text(encoding="utf-8"))
    tables = {
        key: {data: 3 / len(call["seeds"].split(",")) * call["seconds"] / 60 for data, call in calls.items()}
        for key, calls in found["tables"].items()
    }
    return tables, found


def minutes(results):
    """Minutes that three seeds of each table take, all its data sets."""
    return {key: sum(calls.values()) for key, calls in timings(results)[0].items()}


def spelled(value):
    return f"{value:.0f} minute{'s' * (round(value) != 1)}"


def how_long(results):
    """A row a table: minutes for three seeds, of each data set and of all."""
    (tables, found), (before, slower) = timings(results), timings(results, ONE_BY_ONE)
    whole = minutes(results).values()
    lines = [
        "# How long a table takes\n",
        f"Three seeds of a table take {min(whole):.0f} to {max(whole):.0f} minutes on {found['cores']} cores.\n",
        f"Minutes for three seeds at scale `cpu` on {found['cores']} idle cores ({found['cpu']}, "
        f"{found['instructions']}): one call of `polyfed reproduce` for each data set, start of the command and evaluation "
        "included. A call that was stopped goes on where it was. A table of forms was timed in the folder of that whose "
        "runs it shares. Tables that are not here were not timed.\n",
        f"The last column is of another machine ({slower['cpu']}, {slower['instructions']}, {slower['cores']} cores) and an "
        "earlier version, which ran one method after another: three times the minutes of one seed.\n",
        "| table | each data set | all | earlier, on the other machine |",
        "|---|---|---|---|",
    ]
    for key in {**tables, **before}:
        paper, name = key.split("/")
        each = ", ".join(f"{SOURCES[data]} {value:.0f}" for data, value in tables.get(key, {}).items())
        both = f"{sum(tables[key].values()):.0f}" if key in tables else ""
        parts = [f"{SOURCES[data]} {value:.0f}" for data, value in before.get(key, {}).items()]
        earlier = f"{sum(before[key].values()):.0f}: {', '.join(parts)}" if parts else ""
        lines.append(f"| {PAPERS[paper][0]}, {find_table(paper, name).printed_name} | {each} | {both} | {earlier} |")
    return "\n".join([*lines, ""])
