"""The table and the picture at the top of docs/results.md: each paper's method against its main rivals, at all places where
both were measured."""

import json
from statistics import median

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from papers_claims import at_places, at_sizes, in_points
from papers_curves import kind_of, signed, spanned

from polyfed.data.plot import save_figure

PICTURE = "results.svg"
COLOURS = {"ahead of": "#1a7f37", "not decided against": "#8c959f", "behind": "#cf222e"}
_FLHA = tuple(f"{share} %, FLHA-GHN" for share in (25, 12.5, 6.25))
ROWS = (  # method, rival, and where both were measured: results, the method's names there, the rival's
    ("pFedLA", "training alone", (("pfedla-examples", ("pfedla",), "local"),
      ("pfedla_cifar10-examples", ("pfedla",), "local"), ("pfedla-table1", ("pFedLA",), "local training"))),
    ("pFedLA", "FedAvg", (("pfedla-examples", ("pfedla",), "fedavg"),
      ("pfedla_cifar10-examples", ("pfedla",), "fedavg"), ("pfedla-table1", ("pFedLA",), "FedAvg"))),
    ("pFedLA", "FedAvg, fine-tuned", (("pfedla-examples", ("pfedla",), "fedavg_ft"),
      ("pfedla_cifar10-examples", ("pfedla",), "fedavg_ft"),
      ("pfedla-table1", ("pFedLA",), "FedAvg, fine-tuned (not in the paper)"))),
    ("FLHA-GHN", "training alone", (("flha-examples", ("flha_ghn",), "local"), ("flha-table1", _FLHA, "local training"))),
    ("FLHA-GHN", "distillation", (("flha-examples", ("flha_ghn",), "fedavg_kd"), ("flha-table1", _FLHA, "distillation"))),
    ("FLHA-GHN", "pFedHN", (("flha-examples", ("flha_ghn",), "pfedhn"), ("flha-table1", _FLHA, "pFedHN"))),
    ("FLHA-GHN", "FedAvg, fine-tuned, one network", (("flha-examples", ("flha_ghn",), "fedavg_ft (one network)"),)),
    ("FedHeNN", "training alone", (("fedhenn-examples", ("fedhenn",), "local"),
      ("fedhenn-table2", ("FedHeNN Hetero",), "local training, hetero"))),
    ("FedHeNN, one network", "training alone", (("fedhenn_homo-examples", ("fedhenn_homo",), "local"),
      ("fedhenn-table2", ("FedHeNN Homo",), "local training, homo"))),
    ("FedHeNN, one network", "FedRep", (("fedhenn-table2", ("FedHeNN Homo",), "FedRep"),)),
    ("FedHeNN's global model", "FedAvg", (("fedhenn-table1", ("FedHeNN, global",), "FedAvg"),)),
    ("CA-FedPNAS", "training alone", (("fedpnas-examples", ("ca_fedpnas",), "local"),)),
    ("CA-FedPNAS", "FedAvg", (("fedpnas-examples", ("ca_fedpnas",), "fedavg"),
      ("fedpnas-effects", ("CA-FedPNAS",), "FedAvg"), ("fedpnas-fig3", ("CA-FedPNAS",), "FedAvg"))),
    ("CA-FedPNAS", "FedDSNAS", (("fedpnas-examples", ("ca_fedpnas",), "feddsnas"),
      ("fedpnas-effects", ("CA-FedPNAS",), "FedDSNAS"), ("fedpnas-fig3", ("CA-FedPNAS",), "FedDSNAS"))),
    ("CA-FedPNAS", "CA-FedDSNAS", (("fedpnas-effects", ("CA-FedPNAS",), "CA-FedDSNAS"),
      ("fedpnas-fig3", ("CA-FedPNAS",), "CA-FedDSNAS"))),
)  # fmt: skip


def summary(results, docs):
    """Writes the picture, and returns what it shows in short, and the table below it."""
    found = gains_by_rival(results)
    if not found:
        return ""
    draw(docs / "images" / PICTURE, found)
    picture = f"![Differences in accuracy between the papers' methods and their rivals](images/{PICTURE})\n"
    return "\n".join([say_shortly(found), picture, tabulate(found)])


def answer(results, paper):
    """Returns in how many settings the methods of a paper are ahead of each rival, or behind it, and the table's rows."""
    found = {pair: gains for pair, gains in gains_by_rival(results).items() if paper in pair[0]}
    clauses = {own: {"ahead of": [], "behind": [], "": []} for own, _ in found}
    for (own, rival), gains in found.items():
        kinds = [kind_of(gain) for gain in gains]
        name = rival.replace(", fine-tuned", " with fine-tuning").replace(", one", " of one")
        for kind in ("ahead of", "behind"):
            if kind in kinds:
                clauses[own][kind].append(f"{name} in {kinds.count(kind)} of {len(gains)}")
        if not {"ahead of", "behind"} & {*kinds}:
            clauses[own][""].append(name)
    said = []
    for own, shares in clauses.items():
        told = [f"is {kind} {', '.join(names)} settings" for kind, names in shares.items() if kind and names]
        open_against = [f"nothing is decided against {', '.join(shares[''])}"] if shares[""] else []
        said.append(f"{own.replace(',', ' with')} {'; '.join(['; it '.join(told), *open_against])}.")
    if len(said) > 1:
        said = ["\n".join(f"- {sentence}" for sentence in said)]
    return f"{said[0]}\n\n{tabulate(found)}\n" if found else ""


def gains_by_rival(results):
    """Returns the differences at all places, by method and rival, of the pairs that were measured."""
    return {(own, rival): gains for own, rival, places in ROWS if (gains := measured(results, places))}


def tabulate(found):
    """Returns the table of differences in points of accuracy, a row a rival."""
    lines = [
        "| method | compared with | settings | ahead | not decided | behind | median difference | least | largest |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (own, rival), gains in found.items():
        kinds = [kind_of(gain) for gain in gains]
        counts = [str(kinds.count(kind)) for kind in COLOURS]
        middle = signed(median(gain["gain"] for gain in gains), "%")
        ends = spanned(gains[0]), spanned(gains[-1])
        lines.append(f"| {own} | {rival} | {len(gains)} | {' | '.join(counts)} | {middle} | {' | '.join(ends)} |")
    return "\n".join([*lines, ""])


def say_shortly(found):
    """Returns how often the papers' methods are ahead of training alone, and where fine-tuned FedAvg is; "" for a part."""
    if len(found) < len(ROWS):
        return ""

    def share(own, rival, kind="ahead of"):
        kinds = [kind_of(gain) for gain in found[own, rival]]
        return f"{kinds.count(kind)} of {len(kinds)}"

    alone, tuned = "training alone", "FedAvg, fine-tuned"
    return (
        f"**Ahead of training alone**: FLHA-GHN in {share('FLHA-GHN', alone)} settings, CA-FedPNAS in "
        f"{share('CA-FedPNAS', alone)}, pFedLA in {share('pFedLA', alone)}, FedHeNN in "
        f"{share('FedHeNN, one network', alone)} with one network and {share('FedHeNN', alone)} with several. Where all can "
        f"take one network, fine-tuned FedAvg is ahead of FLHA-GHN in "
        f"{share('FLHA-GHN', f'{tuned}, one network', 'behind')}, and pFedLA is ahead of fine-tuned FedAvg in "
        f"{share('pFedLA', tuned)}.\n\n"
        "Green is decided for the method, red against it, grey not decided ([more](results/reading.md)).\n"
    )


def measured(results, places):
    """Returns the differences in points of accuracy at all places, the least first; those of curves are after all rounds."""
    gains = []
    for stem, own, over in places:
        file = results / f"{stem}.json"
        if not file.exists():
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = at_sizes(found, *own, over, after_all=True) if "points" in found else at_places(found, own, over)
        gains += [{**in_points(gain), "unit": "%"} for _, gain in rows if gain["low"] is not None]
    return sorted(gains, key=lambda gain: gain["gain"])


def draw(file, found):
    """Draws an interval for each setting, in a band for each pair of methods."""
    figure = Figure(figsize=(8.6, 0.9 + 0.42 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, gains in enumerate(found.values()):
        if row % 2:
            axes.axhspan(row - 0.5, row + 0.5, color="#8c959f", alpha=0.1, linewidth=0)
        for place, gain in enumerate(gains):
            height = row + 0.66 * ((place + 0.5) / len(gains) - 0.5)
            colour = COLOURS[kind_of(gain)]
            axes.plot([gain["low"], gain["high"]], [height, height], color=colour, linewidth=1)
            axes.plot(gain["gain"], height, marker="o", markersize=3, color=colour)
    for kind, colour in COLOURS.items():
        axes.plot(
            [], [], color=colour, marker="o", markersize=3, label=kind.removesuffix(" of").removesuffix(" against")
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(found)), [f"{own} − {rival}" for own, rival in found], fontsize=8)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlabel("difference in points of accuracy, with 95 % interval; each line is one setting")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), fontsize=8)
    file.parent.mkdir(exist_ok=True)
    save_figure(figure, file)
