"""docs/results/claims.md and sentences.md: what the papers claim, and what of it the measurements in
benchmarks/results/papers show. A sentence that they do not carry is not written."""

import json
import re
from operator import itemgetter

from papers_curves import against, kind_of, spanned

from polyfed.cli.commands.papers.paper_tables import find_table

PAPERS = {
    "pfedla": ("pFedLA", "Layer-wise aggregation by a hypernetwork for each client (Ma et al., CVPR 2022)"),
    "fedhenn": ("FedHeNN", "Representations aligned by CKA (Makhija et al., ICML 2022)"),
    "flha": ("FLHA-GHN", "A graph hypernetwork for different architectures (Litany et al., 2022)"),
    "fedpnas": ("FedPNAS", "Personalised architecture search (Hoang and Kingsford)"),
}
EXAMPLES = " examples"


CLAIMS = (  # what a paper claims; where it is measured: a table's own rows or columns, or a curve's method; against whom
    ("pFedLA is better than training alone and than FedAvg, by the number of examples", "pfedla-examples", ("pfedla",),
     ("local", "fedavg", "fedavg_ft")),
    ("The same, four of five images of two classes (CIFAR-10)", "pfedla_cifar10-examples", ("pfedla",),
     ("local", "fedavg", "fedavg_ft")),
    ("pFedLA is better than training alone and than FedAvg", "pfedla-table1", ("pFedLA",),
     ("local training", "FedAvg", "FedAvg, fine-tuned (not in the paper)")),
    ("FLHA-GHN is better than training alone, pFedHN and distillation, for different architectures", "flha-table1",
     tuple(f"{share} %, FLHA-GHN" for share in (25, 12.5, 6.25)), ("local training", "pFedHN", "distillation")),
    ("The same as published: without normalise, Kaiming's variance, momentum and clipping", "flha-table1_forms",
     tuple(f"{share} %, FLHA-GHN as published" for share in (25, 12.5, 6.25)), ("local training", "pFedHN", "distillation")),
    ("The same with ten labels a picture (mosaics instead of X-rays; points of AUC)", "flha-table3",
     tuple(f"{share} %, FLHA-GHN" for share in (25, 12.5, 6.25)), ("local training", "pFedHN", "distillation")),
    ("FLHA-GHN is better than these, by the number of examples, with rates chosen for each", "flha-examples", ("flha_ghn",),
     ("local", "pfedhn", "fedavg_kd", "fedavg_ft (one network)")),
    ("The same as published", "flha-examples", ("flha_ghn_published",),
     ("local", "pfedhn", "fedavg_kd", "fedavg_ft (one network)")),
    ("FLHA-GHN is better than one network by FedAvg where clients' classes are very unbalanced (α = 0.1)", "flha-table5",
     ("α = 0.1, FLHA-GHN",), ("α = 0.1, standard FL", "α = 0.1, local training")),
    ("FLHA-GHN's weights are a better start for an unseen architecture than random ones", "flha-table6", ("GHN init",),
     ("from scratch",)),
    ("FedHeNN is better than FedRep, and than training alone", "fedhenn-table2", ("FedHeNN Homo", "FedHeNN Hetero"),
     ("FedRep", "local training, homo", "local training, hetero")),
    ("FedHeNN is better than training alone, by the number of examples (Fashion-MNIST)", "fedhenn-examples", ("fedhenn",),
     ("local",)),
    ("The same, one network for all clients", "fedhenn_homo-examples", ("fedhenn_homo",), ("local", "fedavg", "fedavg_ft")),
    ("FedHeNN is better than training alone where some clients have half of the data, too", "fedhenn-fig3",
     ("FedHeNN Homo", "FedHeNN Hetero"), ("local training, homo", "local training, hetero")),
    ("It is better there than FedRep, and than the global models of FedAvg and FedProx", "fedhenn-fig3",
     ("FedHeNN Homo", "FedHeNN Hetero"),
     ("FedRep", "FedAvg", "FedAvg, mean over all", "FedProx", "FedProx, mean over all")),
    ("FedHeNN is better than training alone where a share of the clients has a small network", "fedhenn-fig1",
     ("FedHeNN",), ("local training, FedHeNN's networks",)),
    ("FedHeNN's global model is better than those of FedAvg and FedProx", "fedhenn-table1", ("FedHeNN, global",),
     ("FedAvg", "FedAvg, mean over all", "FedProx", "FedProx, mean over all")),
    ("CA-FedPNAS is better than training alone, FedAvg and FedDSNAS (images turned by 0 and ±90 degrees)",
     "fedpnas-examples", ("ca_fedpnas",), ("local", "fedavg", "fedavg_ft", "feddsnas")),
    ("CA-FedPNAS is better than a search of one network for all, FedDSNAS", "fedpnas-table1", ("CA-FedPNAS",),
     ("FedDSNAS", "FedDSNAS, adapted")),
    ("CA-FedPNAS is better than FedDSNAS on rotations that no client has seen", "fedpnas-table2",
     ("CA-FedPNAS", "CA-FedPNAS, retrained"), ("FedDSNAS", "FedDSNAS, retrained")),
    ("CA-FedPNAS is better than its parts, and than FedAvg (images turned by 0 and ±90 degrees)", "fedpnas-effects",
     ("CA-FedPNAS",), ("CA-FedDSNAS", "CA-FedDSNAS, adapted", "FedDSNAS", "FedDSNAS, adapted", "FedAvg", "FedAvg-FT")),
    ("CA-FedPNAS is better than its parts, and than FedAvg (images turned by −30 to 30 degrees)", "fedpnas-fig3",
     ("CA-FedPNAS",), ("CA-FedDSNAS", "CA-FedDSNAS, adapted", "FedDSNAS", "FedDSNAS, adapted", "FedAvg")),
)  # fmt: skip

FEW, ALL = ("20 ", "40 ", "160 "), ("20 ", "40 ", "80 ", "160 ", "320 ")  # examples a client
AHEAD, NOT, BEHIND = ("ahead of",), ("not decided against",), ("behind",)
CONCLUSIONS = (  # a sentence; its grounds: results, of which method, against whom, how places begin, which way
    ("**pFedLA** is ahead of FedAvg with 20 to 320 images of Fashion-MNIST a client, {}. Of training alone it is ahead with "
     "80 and 160, {}, which for 160 depends on the rate that was chosen; with 20, 40 and 320 nothing is decided, {}. Over "
     "FedAvg with fine-tuning nothing is decided at any of these sizes, {}. On CIFAR-10, where ten clients share classes, "
     "it is ahead of training alone, {} in Table 1, whose methods share one rate, and {} where each has its own. Its "
     "weights over clients learn by one step a round: where a tenth of 100 clients takes part, it is behind training "
     "alone, {}.",
     (("pfedla-examples", "pfedla", "fedavg", ALL, AHEAD), ("pfedla-examples", "pfedla", "local", ("80 ", "160 "), AHEAD),
      ("pfedla-examples", "pfedla", "local", ("20 ", "40 ", "320 "), NOT),
      ("pfedla-examples", "pfedla", "fedavg_ft", ALL, NOT),
      ("pfedla-table1", "pFedLA", "local training", "CIFAR10, 10", AHEAD),
      ("pfedla_cifar10-examples", "pfedla", "local", "40 ", AHEAD),
      ("pfedla-table1", "pFedLA", "local training", "FashionMNIST, 100", BEHIND))),
    ("**FLHA-GHN** helps different networks with few images. With 20, 40 and 160 a client it is ahead of training alone, "
     "{}, and of distillation, {}; with 80, {} and {}, and with 320 over training alone, {}, nothing is decided. In "
     "Table 1, where four clients have a quarter of the images each, it is not ahead of distillation, {}, in six seeds, nor "
     "as published, {}; with eight and sixteen clients, which have less, it is, {}. Sites that can all take one network do "
     "better with FedAvg and fine-tuning: with 20 to 160 FLHA-GHN is behind it, {}.",
     (("flha-examples", "flha_ghn", "local", FEW, AHEAD), ("flha-examples", "flha_ghn", "fedavg_kd", FEW, AHEAD),
      ("flha-examples", "flha_ghn", "local", "80 ", NOT), ("flha-examples", "flha_ghn", "fedavg_kd", "80 ", NOT),
      ("flha-examples", "flha_ghn", "local", "320 ", NOT),
      ("flha-table1", "25 %, FLHA-GHN", "distillation", "25 %", NOT),
      ("flha-table1_forms", "25 %, FLHA-GHN as published", "distillation", "25 %", BEHIND),
      ("flha-table1", ("12.5 %, FLHA-GHN", "6.25 %, FLHA-GHN"), "distillation", ("12.5 %", "6.25 %"), AHEAD),
      ("flha-examples", "flha_ghn", "fedavg_ft (one network)", ("20 ", "40 ", "80 ", "160 "), BEHIND))),
    ("**FedHeNN** with one network for all is ahead of training alone on CIFAR-10, {}. With several networks it is ahead "
     "on the tweets of 20 clients, {}; on Fashion-MNIST nothing is decided, {}, and on CIFAR-10 it is not ahead, {}. Over "
     "FedRep it is ahead with one network where clients have five classes of CIFAR-10, {}; with several networks and two "
     "classes nothing is decided, {}, and on tweets it is behind, {}. Its global model is ahead of FedAvg's on "
     "CIFAR-10, {}. FedHeNN takes the mean over all clients' latest networks: with that mean FedAvg is not behind, {}.",
     (("fedhenn-fig3", "FedHeNN Homo", "local training, homo", "", AHEAD),
      ("fedhenn-table2", "FedHeNN Hetero", "local training, hetero", "Sentiment140, 100", AHEAD),
      ("fedhenn-examples", "fedhenn", "local", ALL, NOT),
      ("fedhenn-table2", "FedHeNN Hetero", "local training, hetero", "CIFAR-10", NOT + BEHIND),
      ("fedhenn-table2", "FedHeNN Homo", "FedRep",
       ("CIFAR-10, 100 clients, 5 classes", "CIFAR-10, 500 clients, 5 classes"), AHEAD),
      ("fedhenn-table2", "FedHeNN Hetero", "FedRep",
       ("CIFAR-10, 100 clients, 2 classes", "CIFAR-10, 500 clients, 2 classes"), NOT),
      ("fedhenn-table2", "FedHeNN Hetero", "FedRep", "Sentiment140, 100", BEHIND),
      ("fedhenn-table1", "FedHeNN, global", "FedAvg", "CIFAR-10", AHEAD),
      ("fedhenn-table1", "FedHeNN, global", "FedAvg, mean over all", "CIFAR-10", NOT + BEHIND))),
    ("**CA-FedPNAS** is ahead of a search of one network for all, FedDSNAS, {}, and of FedAvg, {}, where images are "
     "turned by 0 and ±90 degrees. Where FedDSNAS gets the same last epoch of local training, it is still ahead on "
     "digits, {}, and not decided on Fashion-MNIST, {}. Against CA-FedDSNAS, which samples by context, too, but is not "
     "personalised, nothing is decided, {}: searched with images turned by up to 30 and by 90 degrees, digits, "
     "Fashion-MNIST and CIFAR-10, three to nine seeds, and eight forms of the inner step.",
     (("fedpnas-effects", "CA-FedPNAS", "FedDSNAS", "", AHEAD), ("fedpnas-effects", "CA-FedPNAS", "FedAvg", "", AHEAD),
      ("fedpnas-effects", "CA-FedPNAS", "FedDSNAS, adapted", "digits", AHEAD),
      ("fedpnas-effects", "CA-FedPNAS", "FedDSNAS, adapted", "Fashion-MNIST", NOT),
      ("fedpnas-effects", "CA-FedPNAS", "CA-FedDSNAS", "", NOT))),
)  # fmt: skip


def conclusions(results):
    """What to take from the page.

    Raises:
        SystemExit: a sentence that the measurements do not carry.
    """
    lines = [
        "# What follows, in sentences\n",
        "Differences in points of accuracy, with 95 % intervals; of several the least and the largest. Those by the number "
        "of images are from the curves, after all rounds; the others are from tables "
        "([how to read them](reading.md), [the table](../results.md)).\n",
    ]
    for sentence, grounds in CONCLUSIONS:
        told = []
        for stem, own, name, place, kinds in grounds:
            found = json.loads((results / f"{stem}.json").read_text(encoding="utf-8"))
            forms = (own,) if isinstance(own, str) else own
            rows = at_sizes(found, own, name, after_all=True) if "points" in found else at_places(found, forms, name)
            begin = (place,) if isinstance(place, str) else place
            rows = [row for row in rows if row[0].startswith(begin)]
            known = all(any(row[0].startswith(one) for row in rows) for one in begin)
            if not known or any(kind_of(gain) not in kinds for _, gain in rows):
                shown, wanted = gathered(rows), " or ".join(kinds)
                raise SystemExit(
                    f"{sentence!r} is not carried: {own} against {name} in {stem} is {shown}, not {wanted}"
                )
            told.append(in_words([gain for _, gain in rows]))
        name, _, text = sentence.format(*told).removeprefix("**").partition("**")
        first, *others = re.split(r"(?<=[a-z0-9)]\.) (?=[A-Z])", f"{name}{text}")
        lines += [f"## {name}\n"]
        for item in (first, *others):
            clause, *rest = item.removesuffix(".").split("; ")
            lines += [f"- {clause}.", *(f"    - {one[0].upper()}{one[1:]}." for one in rest)]
        lines.append("")
    return "\n".join([*lines, ""])


def in_words(gains):
    """A difference in points with its interval, or the least and the largest of several, each with its own."""
    points = sorted((in_points(gain) for gain in gains), key=itemgetter("gain"))
    return spanned(points[0]) if len(points) == 1 else f"from {spanned(points[0])} to {spanned(points[-1])}"


def in_short(results):
    """What the papers claim first, and what of it was found, a line for whom it is against."""
    lines, kinds = [], []
    for claim, stem, own, over in CLAIMS:
        file = results / f"{stem}.json"
        if not file.exists():
            continue
        found, place = json.loads(file.read_text(encoding="utf-8")), named(stem)
        if "points" in found:
            last = {name: at_sizes(found, *own, name, after_all=True) for name in over}
            claims = {
                claim: {name: at_sizes(found, *own, name) for name in over},
                "The same, after all rounds": last,
            }
        else:
            claims = {claim: {name: at_places(found, own, name) for name in over}}
        for told, rows in claims.items():
            lines += claimed(f"{told} | {place}", rows)
            kinds += [kind_of(gain) for places in rows.values() for _, gain in places]
    head = [
        f"Of {len(kinds)} differences in what the papers claim {kinds.count('ahead of')} are ahead as claimed, "
        f"{kinds.count('not decided against')} are not decided, and {kinds.count('behind')} are behind. Some rivals are "
        "not in the papers, such as FedAvg with fine-tuning.\n",
        "Differences in points of accuracy, with 95 % intervals. Where more than two places come out alike, only their "
        "least and largest difference stand here, each with its own interval.\n",
        "| the paper's claim | measured in | against | ahead | not decided | behind |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *lines, ""])


def claimed(told, found):
    """A line for each method that a claim is against."""
    lines = []
    for name, rows in found.items():
        kinds = {"ahead of": [], "not decided against": [], "behind": []}
        for row in rows:
            kinds[kind_of(row[1])].append(row)
        if rows:
            lines.append(f"| {told} | {name} | " + " | ".join(gathered(places) for places in kinds.values()) + " |")
            told = " | "
    return lines


def at_sizes(found, own, name, after_all=False):
    """How far a method of a curve is ahead of another, by size: at the chosen rounds, or after all."""
    gains = {size: against(found, size, own, after_all).get(name) for size in sorted(found["points"], key=int)}
    return [(f"{size}{EXAMPLES}", gain) for size, gain in gains.items() if gain]


def at_places(found, own, name):
    """How far a method of a table is ahead of another, by place."""
    rows = [
        (place_of(gain, own), gain)
        for gain in found["gains"]
        if gain["own"] in own and split(gain["over"])[1] == name and gain["low"] is not None and alike(gain)
    ]
    return [row for row in rows if row[0].endswith(", mean")] or rows  # where there are means over clients


def named(stem):
    """A link to where a claim was measured."""
    paper, _, table = stem.partition("-")
    name = "curve" if table == "examples" else find_table(paper, table).printed_name
    return f"[{name}](#{PAPERS[paper.partition('_')[0]][0].lower()})"


def gathered(rows):
    """The differences at one or two places, or the range of those at more."""
    points = [(place, in_points(gain)) for place, gain in rows]
    if len(points) <= 2:
        return "<br>".join(f"{place}: {spanned(gain)}" for place, gain in points)
    sizes = [place.removesuffix(EXAMPLES) for place, _ in points if place.endswith(EXAMPLES)]
    return (
        f"{', '.join(sizes) + EXAMPLES if sizes else f'{len(points)} places'}: {in_words([gain for _, gain in rows])}"
    )


def in_points(gain):
    """A difference of shares, which are fractions in curves and in some tables, in percent."""
    times = 1 if gain.get("unit") == "%" else 100
    return {key: times * gain[key] for key in ("gain", "low", "high")}


def place_of(gain, own):
    """Where a difference was measured, and of which of several methods."""
    group, name = split(gain["own"])
    several = len({split(one)[1] for one in own}) > 1
    return f"{group}{name}, {gain['at']}" if several else f"{group}{gain['at']}"


def alike(gain):
    """Whether both methods had the same networks, where there are two kinds of clients."""
    kinds = [word for word in ("homo", "hetero") if gain["over"].endswith(f", {word}")]
    return all(gain["own"].lower().endswith(word) for word in kinds)


def split(name):
    """A row's group ("25 %, ") and its own name."""
    group, comma, rest = name.partition(", ")
    return (f"{group}{comma}", rest) if comma and "%" in group else ("", name)
