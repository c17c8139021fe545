"""docs/leaderboard.md and its picture, from benchmarks/results/leaderboard. `leaderboard.py page` calls it.

No number and no conclusion is written by hand: a method is "better" where an interval leaves out 0, and "not decided"
where it does not.
"""

import json
from collections import Counter
from statistics import fmean, median

from leaderboard_pictures import draw_gains, draw_ranks, gain_over_federations
from leaderboard_titles import FEDERATIONS, REGIMES

from polyfed.cli.commands.options.recipes import read_recipe

ONCE_MORE = """## Searched once more

Some methods are not ahead above where their papers have them ahead. Here each is in a federation like that of its paper,
made small (recipe `rivals`, where the papers' sections are named). Twelve runs a method search its rate together with its
own weights, by validation examples; `benchmarks/leaderboard.py` has the values. All else is as above.
"""
SEVERAL = ("architectures", "near_networks")  # federations of several networks
ONE_HEAD = ("lg_fedavg", "fedgh")  # methods in which all clients begin with one head since those were first measured
RULE = "of the last 3 evaluated rounds"  # as the page says
HEAD = """# Leaderboard

Methods on the same eleven small federations, against training alone. A gain above 0 is better than training alone.
Each has ten clients of few examples (the breast cancer table has four):
your own data can decide otherwise, so [compare](compare.md) on them.
[How it was measured](leaderboard/measured.md); [each federation, with scores and costs](leaderboard/federations.md).
"""

MEASURED = """# How the leaderboard was measured

The recipe is `leaderboard`: `polyfed compare leaderboard --variant groups --same-data --seeds 0,1,2 --budget steps` makes
one federation again, and `python benchmarks/leaderboard.py page` makes these pages from the results.

- All methods take the same number of local steps, with the same networks, clients and minibatches.
- Each method tries five learning rates (0.1, 0.3, 1, 3 and 10 times its own) with the first seed. The best by validation
  examples after all rounds is taken (mean of the last three evaluated ones). All other options are the method's defaults,
  but for those that the recipe names.
- Rates were chosen before the validation loss chose them ([compare](../compare.md)): by the mean validation score, with
  one rate for all clients of `local`, too. Validation examples are few, and kNN-Per and FedFomo had also fitted them.
- Then each runs with three seeds on the same clients, and counts after all rounds: at equal local steps.
- The interval of a difference has 95 %, and covers new seeds and new test examples of these clients. It says nothing about
  other clients. Each is for one difference: of twenty methods without any effect, one would be called better or worse.
- A method is *better* or *worse* than another where the interval of their difference leaves out 0. Otherwise it is not
  decided, whatever the ranks.
- The interval of a method's mean gain over federations is Student's, with the federations as units: it says what another
  federation like these may bring. The hospitals' gain is one of AUC, all others are of accuracy.
- Some methods have no row, since no federation here has their networks: FedSA-LoRA, FFA-LoRA and RoLoRA need adapters
  (measured [on tweets](../../benchmarks/notes/methods.md#adapters-of-tweets)), FedPNAS and its relatives bring networks of
  their own ([results](../results.md)), HeteroFL (among those [searched once more](federations.md)), FedRolex and DepthFL
  (not measured yet) need networks that are parts of one another.
- Each client's score, and its gain over training alone with an interval, is in the results:
  [benchmarks/results/leaderboard](../../benchmarks/results/leaderboard/).
"""

# A sentence, and what carries it: (federation, method, over, kind), whose intervals take the places of {}. A sentence whose
# federations were not all measured is left out, and one that its intervals do not carry stops the script. With "*" no method
# may be of that kind.
CONCLUSIONS = (
    ("Where two groups contradict one another, FedPAC is better than training alone, {}, and than FedAvg with "
     "fine-tuning, {}; kNN-Per {}, IFCA {}, FedBABU {}, GPFL {}, fine-tuning FedAvg {}, FedPer {} and FedMRL {} are "
     "better than training alone too.",
     (("groups", "fedpac", "local", "better"), ("groups", "fedpac", "fedavg_ft", "better"),
      ("groups", "knn_per", "local", "better"), ("groups", "ifca", "local", "better"),
      ("groups", "fedbabu", "local", "better"), ("groups", "gpfl", "local", "better"),
      ("groups", "fedavg_ft", "local", "better"), ("groups", "fedper", "local", "better"),
      ("groups", "fedmrl", "local", "better"))),
    ("One model for all does harm there: FedAvg {} over training alone, FedProx {}, SCAFFOLD {}.",
     (("groups", "fedavg", "local", "worse"), ("groups", "fedprox", "local", "worse"),
      ("groups", "scaffold", "local", "worse"))),
    ("Under mild label skew of digits one model is enough: FedAvg {} over training alone, and no method is better than "
     "FedAvg: FLHA-GHN {}, FedPAC {}, pFedLA {}.",
     (("digits-1", "fedavg", "local", "better"), ("digits-1", "*", "fedavg", "better"),
      ("digits-1", "flha_ghn", "fedavg", "not decided"), ("digits-1", "fedpac", "fedavg", "not decided"),
      ("digits-1", "pfedla", "fedavg", "not decided"))),
    ("Under strong label skew of digits nothing is better than training alone: kNN-Per {}, FedPAC {}, FedMD {}.",
     (("digits-0.1", "*", "local", "better"),
      ("digits-0.1", "knn_per", "local", "not decided"), ("digits-0.1", "fedpac", "local", "not decided"),
      ("digits-0.1", "fedmd", "local", "not decided"))),
    ("Methods made for drift are not better than FedAvg there: SCAFFOLD {}, FedProx {}, MOON {}.",
     (("digits-0.1", "scaffold", "fedavg", "worse"), ("digits-0.1", "fedprox", "fedavg", "not decided"),
      ("digits-0.1", "moon", "fedavg", "worse"))),
    ("Where each client's digits are turned by another angle HeurpFedLA is better than training alone, {}, and than FedAvg "
     "with fine-tuning, {}, and so are FedBABU, {} and {}, and FedGen, {} and {}; FedProto {} and FD {} are better than "
     "training alone too.",
     (("rotations", "heur_pfedla", "local", "better"), ("rotations", "heur_pfedla", "fedavg_ft", "better"),
      ("rotations", "fedbabu", "local", "better"), ("rotations", "fedbabu", "fedavg_ft", "better"),
      ("rotations", "fedgen", "local", "better"), ("rotations", "fedgen", "fedavg_ft", "better"),
      ("rotations", "fedproto", "local", "better"), ("rotations", "fd", "local", "better"))),
    ("With four architectures FedDF {}, TAKFL {}, FedMRL {} and FLHA-GHN {} are better than training alone; FedHeNN {}, "
     "FedMD {}, FedProto {} and LG-FedAvg {} are not decided.",
     (("architectures", "feddf", "local", "better"), ("architectures", "takfl", "local", "better"),
      ("architectures", "fedmrl", "local", "better"), ("architectures", "flha_ghn", "local", "better"),
      ("architectures", "fedhenn", "local", "not decided"), ("architectures", "fedmd", "local", "not decided"),
      ("architectures", "fedproto", "local", "not decided"), ("architectures", "lg_fedavg", "local", "not decided"))),
    ("Under mild label skew of Fashion-MNIST FedAvg is better than training alone, {}, and FedPAC {} and kNN-Per {} are "
     "better than FedAvg; pFedLA {}, GPFL {}, FedRoD {} and FedBABU {} are better than training alone.",
     (("fashion-1", "fedavg", "local", "better"), ("fashion-1", "fedpac", "fedavg", "better"),
      ("fashion-1", "knn_per", "fedavg", "better"), ("fashion-1", "pfedla", "local", "better"),
      ("fashion-1", "gpfl", "local", "better"), ("fashion-1", "fedrod", "local", "better"),
      ("fashion-1", "fedbabu", "local", "better"))),
    ("Under strong label skew of Fashion-MNIST kNN-Per {} and FedBABU {} are better than training alone; FedAvg is worse, "
     "{}, and SCAFFOLD {} and MOON {} too.",
     (("fashion-0.1", "knn_per", "local", "better"), ("fashion-0.1", "fedbabu", "local", "better"),
      ("fashion-0.1", "fedavg", "local", "worse"),
      ("fashion-0.1", "scaffold", "local", "worse"), ("fashion-0.1", "moon", "local", "worse"))),
    ("With four classes of Fashion-MNIST a client nothing is better than training alone: kNN-Per {}, FedPAC {}, FedMD {}.",
     (("fashion-4-classes", "*", "local", "better"),
      ("fashion-4-classes", "knn_per", "local", "not decided"), ("fashion-4-classes", "fedpac", "local", "not decided"),
      ("fashion-4-classes", "fedmd", "local", "not decided"))),
    ("These three are better than FedAvg with fine-tuning there, {}, {} and {}.",
     (("fashion-4-classes", "knn_per", "fedavg_ft", "better"), ("fashion-4-classes", "fedpac", "fedavg_ft", "better"),
      ("fashion-4-classes", "fedmd", "fedavg_ft", "better"))),
    ("On tweets with an LSTM FedPer {}, FedPAC {}, GPFL {}, FedAMP {} and IFCA {} are better than training alone; one model "
     "for all is worse: FedAvg {}, FedProx {}, SCAFFOLD {}.",
     (("tweets", "fedper", "local", "better"), ("tweets", "fedpac", "local", "better"),
      ("tweets", "gpfl", "local", "better"), ("tweets", "fedamp", "local", "better"),
      ("tweets", "ifca", "local", "better"),
      ("tweets", "fedavg", "local", "worse"), ("tweets", "fedprox", "local", "worse"),
      ("tweets", "scaffold", "local", "worse"))),
    ("With four classes of CIFAR-10 a client FedBABU {}, FedRoD {}, FedPer {}, kNN-Per {}, FedPAC {} and FedMRL {} are "
     "better than training alone, and than FedAvg with fine-tuning, {}, {}, {}, {}, {} and {}; FedAvg is worse than "
     "alone, {}.",
     (*(("cifar10", label, over, "better") for over in ("local", "fedavg_ft")
        for label in ("fedbabu", "fedrod", "fedper", "knn_per", "fedpac", "fedmrl")),
      ("cifar10", "fedavg", "local", "worse"))),
    ("The breast cancer table of 30 numbers, divided among four made sites, is learnt nearly perfectly alone, and no method "
     "is better (AUC): FedAvg {}, pFedLA {}.",
     (("hospitals", "*", "local", "better"),
      ("hospitals", "fedavg", "local", "not decided"), ("hospitals", "pfedla", "local", "not decided"))),
)  # fmt: skip
SECOND = (
    ("With logistic regression and two classes a client, as in SCAFFOLD's paper, nothing is decided against FedAvg: FedDyn "
     "{}, SCAFFOLD {}, FedProx {}, FedOpt {}, MOON {}.",
     (("drift", "feddyn", "fedavg", "not decided"), ("drift", "scaffold", "fedavg", "not decided"),
      ("drift", "fedprox", "fedavg", "not decided"), ("drift", "fedopt", "fedavg", "not decided"),
      ("drift", "moon", "fedavg", "not decided"))),
    ("With ten epochs a round FedAvg is better than training alone, {}, and no method is better than FedAvg: FedProx {}, "
     "MOON {}, FedDyn {}, SCAFFOLD {}; FedOpt is worse, {}.",
     (("long_local", "fedavg", "local", "better"), ("long_local", "*", "fedavg", "better"),
      ("long_local", "fedprox", "fedavg", "not decided"), ("long_local", "moon", "fedavg", "not decided"),
      ("long_local", "feddyn", "fedavg", "not decided"), ("long_local", "scaffold", "fedavg", "not decided"),
      ("long_local", "fedopt", "fedavg", "worse"))),
    ("With two groups of clients that have other classes FedAvg {} and Per-FedAvg {} are better than training alone, and "
     "no method is better than FedAvg: pFedMe {}, IFCA {}, FedAMP {}, FedFomo {}; Ditto {} and APFL {} are worse.",
     (("class_groups", "fedavg", "local", "better"), ("class_groups", "per_fedavg", "local", "better"),
      ("class_groups", "*", "fedavg", "better"), ("class_groups", "pfedme", "fedavg", "not decided"),
      ("class_groups", "ifca", "fedavg", "not decided"), ("class_groups", "fedamp", "fedavg", "not decided"),
      ("class_groups", "fedfomo", "fedavg", "not decided"), ("class_groups", "ditto", "fedavg", "worse"),
      ("class_groups", "apfl", "fedavg", "worse"))),
    ("With networks that differ in width only nothing is better than training alone: FML {}, FD {}, LG-FedAvg {}, FedGH {}, "
     "FedTGP {}, FedKD {}, FedHeNN {}, FedProto {}.",
     (("near_networks", "*", "local", "better"), ("near_networks", "fml", "local", "not decided"),
      ("near_networks", "fd", "local", "not decided"), ("near_networks", "lg_fedavg", "local", "not decided"),
      ("near_networks", "fedgh", "local", "not decided"), ("near_networks", "fedtgp", "local", "not decided"),
      ("near_networks", "fedkd", "local", "not decided"), ("near_networks", "fedhenn", "local", "not decided"),
      ("near_networks", "fedproto", "local", "not decided"))),
)  # fmt: skip


def write(results, docs):
    """Writes the leaderboard with its pictures, and the pages of details in docs/leaderboard."""
    folder = docs / "leaderboard"
    folder.mkdir(exist_ok=True)
    found, again = read(results, FEDERATIONS), read(results, REGIMES)
    parts, details = [HEAD], ["# Each federation\n\n[How it was measured](measured.md).\n"]
    if found:
        draw(docs / "images", found)
        parts += [summary(found), conclusions(found, CONCLUSIONS)]
        details += [federation(one) for one in found.values()]
    if again:
        details += [ONCE_MORE, conclusions(again, SECOND), *(federation(one) for one in again.values())]
    if missing := [title for name, title in {**FEDERATIONS, **REGIMES}.items() if name not in {**found, **again}]:
        details.append(f"Not measured yet: {'; '.join(missing)}.\n")
    (docs / "leaderboard.md").write_text("\n".join(parts), encoding="utf-8")
    (folder / "measured.md").write_text(MEASURED, encoding="utf-8")
    (folder / "federations.md").write_text("\n".join(details), encoding="utf-8")


def read(results, names):
    known = [name for name in names if (results / f"{name}.json").exists()]
    found = {name: json.loads((results / f"{name}.json").read_text(encoding="utf-8")) for name in known}
    if other := [name for name, one in found.items() if RULE not in one["tuning"]]:
        raise SystemExit(
            f"{', '.join(other)}: searched by another rule than {RULE!r}; measure again in an empty folder"
        )
    return found


def ranks(one):
    """The place of each method by its mean score, from 1."""
    order = sorted(one["methods"], key=lambda label: -one["methods"][label]["mean"])
    return {label: place for place, label in enumerate(order, 1)}


def by_median_rank(found):
    places = {name: ranks(one) for name, one in found.items()}
    share = {}
    for at in places.values():
        for label, place in at.items():
            share.setdefault(label, []).append((place - 1) / (len(at) - 1))
    return sorted(share, key=lambda label: (median(share[label]), fmean(share[label]))), places


def over(one, label, other):
    """The difference of two methods with its interval, or None."""
    method = one["methods"].get(label)
    if method is None or other not in one["methods"]:
        return None
    return method["against"].get(other)


def kind_of(gain):
    return "better" if gain["low"] > 0 else "worse" if gain["high"] < 0 else "not decided"


def gains_alone(found):
    """Returns the gains over training alone of each method, one for each federation, the best mean first; those of fewer
    than three federations are last.
    """
    methods = {label for one in found.values() for label in one["methods"]} - {"local"}
    gains = {
        label: [gain["gain"] for one in found.values() if (gain := over(one, label, "local"))] for label in methods
    }
    known = {label: of for label, of in gains.items() if of}
    return dict(sorted(known.items(), key=lambda item: (len(item[1]) < 3, -fmean(item[1]), item[0])))


def summary(found):
    """The pictures, and a table of how often each method is better and worse than local training."""
    _, places = by_median_rank(found)
    lines = [
        "![Gain of each method over training alone](images/leaderboard_gains.svg)\n",
        "| method | mean gain, points | median rank | federations | better than alone | not decided | worse "
        "| clients that lose |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, gains in gains_alone(found).items():
        at = [name for name in found if label in found[name]["methods"]]
        kinds = [kind_of(gain) for name in at if (gain := over(found[name], label, "local"))]
        own = [found[name]["methods"][label] for name in at]
        lose, many = (sum(one[key] or 0 for one in own) for key in ("losers", "participants"))
        mean, low, high = (None if value is None else signed(value) for value in gain_over_federations(gains))
        rank = median(places[name][label] for name in at)
        counts = [kinds.count(kind) for kind in ("better", "not decided", "worse")]
        cells = [
            mean if low is None else f"{mean} ({low} to {high})",
            f"{rank:g}",
            len(at),
            *counts,
            f"{lose} of {many}",
        ]
        lines.append(f"| `{label}` | " + " | ".join(map(str, cells)) + " |")
    return "\n".join([
        *lines, "",
        f"A client loses if its mean score is below what it has alone; that may be chance. {not_measured(found)}\n",
        "![Rank of each method in each federation](images/leaderboard.svg)\n",
        "The number is the rank by the mean score; 1 is best. `+` is better than training alone, `−` worse, by an interval",
        "that leaves out 0. Empty: the method does not suit, or diverged with every rate.\n",
    ])  # fmt: skip


def not_measured(found):
    """Names the methods that suit a federation by the recipe and have no row in it, and those that diverged in one."""
    recipe, suits = read_recipe("leaderboard"), {}
    for name, one in found.items():
        for baseline in recipe.configuration(variant=name)["baselines"]:
            label = baseline if isinstance(baseline, str) else baseline["name"]
            suits.setdefault(label, []).append(label in one["methods"] or label in one["failed"])
    missing = [
        f"`{label}` ({rows.count(False)} of {len(rows)})" for label, rows in sorted(suits.items()) if not all(rows)
    ]
    unmeasured = (
        f"Not measured yet, in so many of the federations that it suits: {', '.join(missing)}." if missing else ""
    )
    counts = Counter(label for one in found.values() for label in one["failed"])
    failed = [f"`{label}` ({count})" for label, count in sorted(counts.items())]
    diverged = (
        f"Diverged with another seed at the rate that it chose, in so many federations, which its mean leaves out: "
        f"{', '.join(failed)}."
        if failed
        else ""
    )
    return " ".join(text for text in (unmeasured, diverged) if text)


def signed(points):
    return f"{points:+.1f}".replace("-", "−")


def conclusions(found, sentences):
    lines = ["## In a few sentences\n"] if sentences is CONCLUSIONS else []
    for sentence, claims in sentences:
        if not all(name in found for name, *_ in claims):
            continue
        gains = []
        for name, label, other, kind in claims:
            if label == "*":  # no method at all
                against = {one: over(found[name], one, other) for one in found[name]["methods"]}
                if wrong := [one for one, gain in against.items() if gain and kind_of(gain) == kind]:
                    raise SystemExit(f"{sentence!r} is not carried: {', '.join(wrong)} in {name!r} are {kind}")
                continue
            gain = over(found[name], label, other)
            if gain is None or kind_of(gain) != kind:
                raise SystemExit(
                    f"{sentence!r} is not carried: {label} over {other} in {name!r} is {gain}, not {kind!r}"
                )
            gains.append(spanned(gain, found[name]))
        lines.append("- " + sentence.format(*gains))
    return "\n".join([*lines, "", "Differences of accuracy are in points, with the interval in brackets.\n"])


def federation(one):
    """One federation: every method's scores and costs."""
    unit = " (%)" if one["unit"] == "%" else ""
    against = "fedavg_ft" if "fedavg_ft" in one["methods"] else None
    limits = one["equal"]
    head = [f"{one['score']}{unit}", "95 %", "over `local`", *([f"over `{against}`"] if against else []), "worst client",
            "lose", "MB", "s", "at equal MB", "at equal s", "at best round", "rate"]  # fmt: skip
    lines = [
        f"{'##' if one['federation'] in FEDERATIONS else '###'} {(FEDERATIONS | REGIMES)[one['federation']]}\n",
        "| method | " + " | ".join(head) + " |",
        "|---|" + "---|" * len(head),
    ]
    for label in ranks(one):
        method = one["methods"][label]
        others = (limits[kind]["means"].get(label) for kind in ("bytes", "seconds", "best"))
        cells = [
            score(method["mean"], one), interval(method["interval"], one), spanned(over(one, label, "local"), one),
            *([spanned(over(one, label, against), one)] if against else []),
            score(method["worst"], one), "" if label == "local" else str(method["losers"]), f"{method['bytes'] / 2**20:.2f}",
            f"{method['seconds']:.0f}", *(score(mean, one) for mean in others), chosen(method["chosen"]),
        ]  # fmt: skip
        lines.append(f"| `{label}` | " + " | ".join(cells) + " |")
    lines.append(
        f"\n{one['clients']} clients, {one['test_examples']} test examples, {one['rounds']} rounds, {len(one['seeds'])} "
        f"seeds. MB and seconds are those of a run. Equal MB: at most "
        f"{limits['bytes']['limit'] / 2**20:.2f} in a run, a third of what FedAvg sends in all. Equal s: at most "
        f"{limits['seconds']['limit']:.0f} s, what FedAvg takes in all; each run had one core. "
        + (
            "At best round: at each method's by validation examples, which are so few that chance has its part in it."
            if any(mean is not None for mean in limits["best"]["means"].values())
            else "No client has validation examples of its own, so that no run has a best round by them."
        )
    )
    if one["failed"]:
        lines.append(f"Failed: {', '.join(f'`{label}` ({reason})' for label, reason in one['failed'].items())}.")
    again = one.get("renewed", {})
    later = {**again, **one.get("joined", {})}
    if one["federation"] in SEVERAL and (
        before := [f"`{m}`" for m in ONE_HEAD if m in one["methods"] and m not in later]
    ):
        lines.append(
            f"Rows of {' and '.join(before)} were measured before all clients began with one head: they are those of "
            "`first_head: architecture`."
        )
    if again:
        names = " and ".join(f"`{method}`" for method in again)
        lines.append(
            f"Rows of {names} were measured again later, next to other work: their seconds cannot be compared."
        )
    for method, joined in one.get("joined", {}).items():
        there, here = (score(joined["local"][key], one) for key in ("committed", "here"))
        lines.append(
            f"The row of `{method}` joined later, from runs of it and of `local` on another machine, where `local` is at "
            f"{here} instead of {there}. Its gain is over that one, and its seconds cannot be compared."
        )
    if one["edge"]:
        lines.append(f"The best rate was the smallest or largest that was tried: {', '.join(one['edge'])}.")
    return "\n".join([*lines, ""])


def chosen(fields):
    """The rate, and what else was searched."""
    others = [
        f"`{name}` {value:g}" if value is not None else f"no `{name}`" for name, value in fields.items() if name != "lr"
    ]
    return ", ".join([f"{fields['lr']:g}", *others])


def score(value, one):
    return "" if value is None else f"{100 * value:.1f}" if one["unit"] == "%" else f"{value:.3f}"


def interval(found, one):
    return "" if found is None else f"{score(found[0], one)} to {score(found[1], one)}"


def spanned(gain, one):
    if gain is None:
        return ""
    times, digits = (100, 1) if one["unit"] == "%" else (1, 3)
    mean, low, high = (f"{times * gain[key]:+.{digits}f}".replace("-", "−") for key in ("gain", "low", "high"))
    return f"{mean} ({low} to {high})"


def draw(folder, found):
    """The gains over training alone, and the ranks by federation, best methods above."""
    draw_gains(folder / "leaderboard_gains.svg", gains_alone(found))
    order, places = by_median_rank(found)
    rows = {}
    for label in order:
        rows[label] = []
        for name, one in found.items():
            if label not in (at := places[name]):
                rows[label].append(None)
                continue
            gain = None if label == "local" else over(one, label, "local")
            sign = {"better": "+", "worse": "−"}.get(kind_of(gain), "") if gain else ""
            rows[label].append(((at[label] - 1) / (len(at) - 1), f"{at[label]}{sign}"))
    draw_ranks(folder / "leaderboard.svg", list(found), rows)
