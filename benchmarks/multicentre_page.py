"""docs/multicentre.md and the pages below it, from benchmarks/results/multicentre. `multicentre.py page` calls it.

No number of polyfed and no answer is written by hand: they are those of `comparison.json`. Published numbers are in
`multicentre_published.py`.
"""

import json
import re
from statistics import median

import multicentre_published as published

ANSWERS = {"join": "join", "stay": "stay alone", "undecided": "not decided"}
FEW_SITES = 8
HEAD = """# Real sites, answered with intervals

Would these sites gain by training together? Here are the answers of `polyfed compare` for federations that exist, and for some that
are made: the clinics of the Parkinson patients, the sites of the tweets, the images and scanners of the segmentation. An answer compares the best federated method with **the best that the sites have alone**: their network, or a simple model without one.
Better is positive. "Not decided" is no proof that there is no gain, and says nothing against a method at other sizes. [How it was measured](multicentre/measured.md).
"""  # noqa: E501
MEASURED = """# How the real sites were measured

What was compared with what, on which data, and with which code?

- `pf.compare(..., folds=5)`: every example of a site is [tested once](../intervals.md) in each repeat of the folds. All methods share folds, seeds, first
  weights, local epochs and batches; the learning rate of each is searched in the same way, `local`'s for each site.
- An answer is about the best federated method against **the best that a site has alone**: its own network, or a simple model without one (logistic regression,
  Cox regression with a ridge penalty, ridge regression, gradient boosting). Intervals hold together in 95 of 100 comparisons. There is no
  answer over or with a method whose validation loss still fell in the last rounds ("still learning"), whatever its interval. The best
  federated method is chosen by validation examples, among those that had converged; another may have the best mean in a table. Rows "pooled data" are of
  the first fold alone, and not compared.
- Methods with a **+** joined later, in a comparison of their own with `local` on the same sites, folds and seeds. Their gains are over that `local`, and their
  intervals hold together with each other. Where folds are others since, that `local` has a row of its own. The answers are about the methods without a +.
- Sites with different networks are federations of their own: `flha_ghn` and `fedhenn` take them, the methods for one architecture do not. Where FedHeNN needs public
  examples, 5 % of the rows (10 % of the images) are no site's there, and a table's scale is that of all sites. The network that FedMRL shares has 8 hidden units there,
  as the narrowest of the sites' last layers.
- The first comparisons had a budget of 90 minutes of one core, decided beforehand, so that networks are small, rounds 15 to 30, and the search is of the learning rate alone.

`python benchmarks/multicentre.py run --only NAME --data FOLDER` measures a federation again, and `page` writes these pages from
[the results](../../benchmarks/results/multicentre/).

Data: UCI Heart Disease (Janosi, Steinbrunn, Pfisterer, Detrano 1988; CC BY 4.0) ships with polyfed. TCGA-BRCA is read as `owkin/FLamby` publishes it (`brca.csv`,
`centers.csv`, `train_test_split.csv`; open-access clinical data of TCGA), `Exam.csv` and `Hsb82.csv` as `vincentarelbundock/Rdatasets` does (R package mlmRev), Parkinson Telemonitoring
(Tsanas, Little, McSharry, Ramig 2009, CC BY 4.0) as UCI does, with commas, and tweets as Sentiment140 without names of users. `multicentre_sites.py` says under which names.
"""  # noqa: E501
AGAIN = """## Computed again

In November 2026 all answers were computed again, with methods and intervals as they are now; where runs were not kept, the methods were trained again. No answer changed, neither of a mean nor of a site. Gains of methods
that had changed, or at sites that are assigned to folds in another way now, moved within the intervals of before; at the [four scanners](segmentation.md#segmentation-four-scanners), where training alone has converged now, `fedavg_ft` is
chosen instead of `fedavg`, and its gain is +0.013 instead of −0.079. Intervals of the mean are up to 37 % narrower or wider. One loss against training alone, of `flha_ghn` at
[63 schools with four networks](schools.md#65-schools-of-london-four-networks), is no longer decided."""  # noqa: E501
MARK = "¹ Of earlier code, which computed intervals in another way."
SECTIONS = {
    "heart": ("Heart disease, four hospitals",
              "920 patients, raw: 12 measures (without `ca`, which two hospitals hardly have), a network of 16 hidden "
              "units. `polyfed compare` takes the same patients with cholesterol of 0 emptied, two networks and one "
              "method: other numbers, the same answers."),
    "heart-flamby": ("Heart disease as FLamby prepares it",
                     "740 patients with complete rows, ten measures, logistic regression as the network, accuracy decides."),
    "heart-networks": ("Heart disease, four different networks", "Logistic regression, 16, 32, and 16 and 8 hidden units."),
    "brca": ("TCGA-BRCA, six regions, survival",
             "1,088 patients with breast cancer, a linear Cox network; the risk sets are all of a region's patients."),
    "brca-networks": ("TCGA-BRCA, six regions, four networks", "The four networks above in turn, as Cox networks."),
    "parkinson": ("Parkinson, 42 patients",
                  "About 140 recordings of each patient; **the six clinics are made**, of seven patients. `motor_UPDRS` in "
                  "standard deviations. Rows of a patient stay together and count as one: intervals are over patients. "
                  "Seven patients say little of a clinic: some intervals are wider than any error."),
    "parkinson-networks": ("Parkinson, four networks", "The same clinics, with the four networks above in turn."),
    "exam": ("65 schools of London", "`normexam` of pupils, in standard deviations, from four columns; 8 hidden units."),
    "exam-networks": ("65 schools of London, four networks", "The same schools, with the four networks above in turn."),
    "hsb": ("160 high schools", "Mathematics of pupils, in standard deviations; 8 hidden units."),
    "tweets": ("Tweets",
               "The sample names no users, so **the six sites are made**: Dirichlet 1.0 over the classes, 1,000 training "
               "tweets each, a small LSTM."),
    "segmentation": ("Segmentation, four scanners",
                     "**Made images** of blobs, 32 × 32 pixels, at four sites whose scanners differ in contrast and "
                     "blur, among others; one U-Net of width 6."),
    "segmentation-networks": ("Segmentation, U-Nets of four widths", "The same made images, widths 4, 6, 8 and 4."),
}  # fmt: skip
PAGES = {
    "heart": ("Heart disease", "Would hospitals gain by training together on their patients with suspected heart disease?",
              ["heart", "heart-flamby", "heart-networks"]),
    "brca": ("Breast cancer, survival", "Would six regions gain by training together on the survival of patients?",
             ["brca", "brca-networks"]),
    "parkinson": ("Parkinson", "Would clinics gain by training together on recordings of voices?",
                  ["parkinson", "parkinson-networks"]),
    "schools": ("Schools", "Would schools gain by training together on their pupils' marks?",
                ["exam", "exam-networks", "hsb"]),
    "tweets": ("Tweets", "Would sites with texts gain by training together?", ["tweets"]),
    "segmentation": ("Segmentation of images", "Would sites gain by training U-Nets together?",
                     ["segmentation", "segmentation-networks"]),
}  # fmt: skip


def number(value, unit, signed=False):
    if value is None:
        return "–"
    text = f"{100 * value:{'+' if signed else ''}.1f}" if unit == "%" else f"{value:{'+' if signed else ''}.3f}"
    return text.replace("-", "−")


def with_interval(value, interval, unit, signed=False):
    if value is None:
        return "–"
    if interval is None:
        return number(value, unit, signed)
    low, high = (number(end, unit, signed) for end in interval)
    return f"{number(value, unit, signed)} ({low} to {high})"


def page_of(name):
    """The page of a federation."""
    return next(page for page, (_, _, names) in PAGES.items() if name in names)


def slug(title):
    """The anchor of a heading."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def read(folder):
    files = {name: folder / f"{name}.json" for name in SECTIONS}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def other_local(found):
    """`local` of the methods that joined, where its scores are others than those of the first comparison; None if not."""
    joined = found.get("joined", {"methods": {}})["methods"].get("local")
    return None if joined is None or joined["mean"] == found["methods"]["local"]["mean"] else joined


def all_methods(found):
    """Rows of the methods compared first and of those that joined later, but for the `local` of the latter."""
    joined = found.get("joined", {"methods": {}})["methods"]
    return {**joined, **found["methods"]}


def alone(found):
    """The best that the sites have alone, in the mean: its label and its mean."""
    rivals = {
        "local": found["methods"]["local"],
        **{k: v for k, v in found["references"].items() if v["gain"] is not None},
    }
    sign = 1 if found["higher_is_better"] else -1
    return max(
        ((label, one["mean"]) for label, one in rivals.items() if one["mean"] is not None),
        key=lambda pair: sign * pair[1],
    )


def still_learning(found, *labels):
    """Words that methods had not converged, so that there is no answer over or with them; "" if they had."""
    slow = [f"`{label}`" for label in labels if found["convergence"].get(label, {}).get("converged") is False]
    return f"; {' and '.join(slow)} still learning" if slow else ""


def overview(results, folder=""):
    """A row for each federation; `folder` leads to the pages of federations."""
    titles = (
        "federation",
        "sites",
        "examples",
        "decides",
        "best alone",
        "federated, chosen by validation",
        "gain (95 %)",
        "answer",
    )
    lines = [f"| {' | '.join(titles)} |", "|---|---|---|---|---|---|---|---|"]
    for name, found in results.items():
        mean, unit, (label, best) = found["mean_answer"], found["score_unit"], alone(found)
        method = mean["method"]
        title, examples = SECTIONS[name][0], sum(site["examples"] for site in found["sites"].values())
        lines.append(
            f"| [{title}]({folder}{page_of(name)}.md#{slug(title)}) | {len(found['sites'])} | {examples:,} "
            f"| {found['score_label']} "
            f"| `{label}` {number(best, unit)} | `{method}` {number(found['methods'][method]['mean'], unit)} "
            f"| {with_interval(mean['gain'], mean['interval'], unit, True)} | {ANSWERS[mean['answer']]}"
            f"{' ¹' if is_earlier(found, 'first') else ''}{still_learning(found, 'local')} |"
        )
    return "\n".join(lines)


def counted(answers):
    counts = {kind: sum(one["answer"] == kind for one in answers) for kind in ANSWERS}
    return ", ".join(f"{n} {ANSWERS[kind]}" for kind, n in counts.items() if n)


def methods_table(found):
    unit = found["score_unit"]
    lines = [
        f"| method | {found['score_label']}, mean over sites (95 %) | gain over `local` (95 %) | sites better, worse |",
        "|---|---|---|---|",
    ]
    sign = -1 if found["higher_is_better"] else 1
    methods = all_methods(found)
    rows = methods | ({"local +": other} if (other := other_local(found)) else {})
    ranked = sorted(rows.items(), key=lambda pair: sign * pair[1]["mean"])
    simple = sorted(found["references"].items(), key=lambda pair: sign * (pair[1]["mean"] or 0))
    for label, one in [*ranked, *simple]:
        verdicts = [site.get("verdict") for site in one["sites"].values()]
        sites = f"{verdicts.count('gains')}, {verdicts.count('loses')}" if label in methods and label != "local" else ""
        kind = (
            f"`{label.removesuffix(' +')}`{'' if label in found['methods'] else ' +'}"
            if label in rows
            else f"{label.replace('_', ' ')}, {'pooled data' if label.startswith('pooled') else 'alone'}"
        )
        gain = "" if label in ("local", "local +") else with_interval(one["gain"], one["gain_interval"], unit, True)
        lines.append(f"| {kind} | {with_interval(one['mean'], one['interval'], unit)} | {gain} | {sites} |")
    return "\n".join(lines)


def sites_table(found):
    unit, answers = found["score_unit"], found["answers"]
    if len(answers) > FEW_SITES:
        gains = [one["gain"] for one in answers if one["gain"] is not None]
        least, middle, most = (number(of(gains), unit, True) for of in (min, median, max))
        text = (
            f"{len(answers)} sites: {counted(answers)}. The sites' best estimates go from {least} to {most}, half of them "
            f"are above {middle}."
        )
        decided = [one for one in answers if one["answer"] != "undecided"]
        text += "".join(f"\n- {one['sentence']}" for one in decided[:20])
        model = found["site_model"]
        if model and model["gain"] is not None:
            text += (
                f"\n\nWith sites as the unit (a random-effects model, gain over {model['over'].replace('_', ' ')}): mean "
                f"{with_interval(model['gain'], model['interval'], unit, True)}, standard deviation of the sites' gains "
                f"{number(model['deviation'], unit)}."
            )
        return text
    lines = ["| site | examples | answer | best method | over | gain (95 %) |", "|---|---|---|---|---|---|"]
    for one in answers:
        over = "" if one["over"] is None else one["over"].replace("_", " ")
        method = "" if one["method"] is None else f"`{one['method']}`"
        basis = one["basis"].replace(" test examples", "")
        gain = with_interval(one["gain"], one["interval"], unit, True)
        lines.append(f"| {one['client']} | {basis} | {ANSWERS[one['answer']]} | {method} | {over} | {gain} |")
    return "\n".join(lines)


def not_compared(skipped):
    """A line for each reason why methods do not suit the federation, with their labels."""
    reasons = {}
    for label, why in skipped.items():
        text = re.split(", but|; ", why.removeprefix(f"{label} "))[0] if why.startswith(f"{label} ") else why
        reasons.setdefault(text, []).append(f"`{label}`")
    return [
        f"- Not compared: {', '.join(labels)} {why.replace('needs', 'need', 1) if len(labels) > 1 else why}."
        if why.startswith("needs")
        else f"- Not compared: {', '.join(labels)}. {why}."
        for why, labels in reasons.items()
    ]


def section(name, found):
    title, text = SECTIONS[name]
    repeats = found["fold_repeats"] or 1
    minutes = found["minutes"] + found.get("joined", {"minutes": 0})["minutes"]
    runs = f"{found['folds']} folds" + (f" × {repeats} repeats" if repeats > 1 else "")
    parts = [
        f"## {title}",
        f"{text} {runs}, {found['rounds']} rounds, {minutes:.1f} minutes of a core.",
        methods_table(found),
    ]
    parts += ["\n".join(f"- {sentence}" for sentence in found["verdicts"] if sentence.startswith("mean over"))]
    parts += [sites_table(found)]
    notes = [f"- Left out: {what}: {why}." for what, why in found["without"].items()]
    scores = [one["sites"] for one in found["methods"].values()]
    unscored = [site for site in found["sites"] if all(of.get(site, {}).get("mean") is None for of in scores)]
    if unscored:
        notes.append(
            f"- Without a {found['score_label']} over the folds, for want of events or examples of a class: "
            f"{', '.join(unscored)}. Means are over the other {len(found['sites']) - len(unscored)} sites."
        )
    joined = found.get("joined", {"failed": {}, "skipped": {}, "convergence": {}})
    if other_local(found):
        notes.append(
            "- `local` + is `local` beside the methods that joined: their folds spread events over the sites' parts, which "
            "those of the first comparison did not. Compare rows with a + with it."
        )
    notes += not_compared({**found["skipped"], **joined["skipped"]})
    notes += [f"- Failed: `{label}`: {why}" for label, why in {**found["failed"], **joined["failed"]}.items()]
    both = {**joined["convergence"], **found["convergence"]}
    slow = [f"`{label}`" for label, one in both.items() if one["converged"] is False]
    notes += [f"- Still learning after the last round: {', '.join(slow)}."] if slow else []
    notes += earlier_code(found)
    parts += ["\n".join(notes)] if notes else []
    parts += [published.TABLES[name]] if name in published.TABLES else []
    return "\n\n".join(parts)


def summary(results):
    groups = {
        kind: [name for name, found in results.items() if found["mean_answer"]["answer"] == kind] for kind in ANSWERS
    }
    sites = [one for found in results.values() for one in found["answers"]]
    ahead = [name for name, found in results.items() if alone(found)[0] != "local"]
    text = [
        f"Of {len(results)} federations the mean over sites says "
        + ", ".join(f"*{ANSWERS[kind]}* in {len(names)}" for kind, names in groups.items() if names)
        + f". Of {len(sites)} answers for a site, {counted(sites)}."
    ]
    text.append(
        f"A simple model without a network is the best that sites have alone in {len(ahead)} of {len(results)} (best "
        "estimates): whoever compares networks with networks only does not see it."
    )
    return "\n\n".join(text)


def decided(results):
    """A line for each method whose gain over training alone is decided in the mean of a federation."""
    lines = []
    for name, found in results.items():
        for label, one in all_methods(found).items():
            if (
                label != "local"
                and one["gain_interval"]
                and not one["gain_interval"][0] <= 0 <= one["gain_interval"][1]
            ):
                gain = with_interval(one["gain"], one["gain_interval"], found["score_unit"], True)
                slow = still_learning(found, "local", label)
                lines.append(
                    f"- {SECTIONS[name][0]}: `{label}` {gain} of {found['score_label']}{slow and slow + ': no answer'}"
                )
    if not lines:
        return "No method's gain over `local` is decided in the mean of any federation."
    return "\n".join(["In the mean, intervals without 0 over `local` alone (a network of the same form):", "", *lines])


def missing(results):
    left = [f"`{name}`" for name in SECTIONS if name not in results]
    return f"**Not measured yet**: {', '.join(left)}. The script has them." if left else ""


def is_earlier(found, part):
    """Says whether a comparison ("first" or "joined") has rows that were not computed with today's code."""
    rows = found["methods"] if part == "first" else found.get("joined", {"methods": {}})["methods"]
    return bool(rows) and part not in found.get("again", ())


def mark(results):
    return MARK if any(is_earlier(found, "first") for found in results.values()) else ""


def earlier_code(found):
    """A line for a section: which of its rows were not computed with today's code."""
    rows = {"first": "the answers and the rows without a +", "joined": "the rows with a +"}
    parts = [text for part, text in rows.items() if is_earlier(found, part)]
    return [f"- Of earlier code: {', and '.join(parts)}."] if parts else []


def write(folder, docs):
    results = read(folder)
    minutes = sum(found["minutes"] + found.get("joined", {"minutes": 0})["minutes"] for found in results.values())
    spent = f"These {len(results)} took {minutes:.0f} minutes of a core of a busy machine."
    parts = [HEAD.rstrip(), summary(results), "## All answers", overview(results, "multicentre/"), mark(results),
             "## Decided over training alone", decided(results), missing(results)]  # fmt: skip
    save(docs / "multicentre.md", parts)
    save(docs / "multicentre" / "measured.md", [MEASURED.rstrip(), spent, AGAIN])
    for page, (title, question, names) in PAGES.items():
        of_page = {name: results[name] for name in names if name in results}
        head = [f"# {title}: who should join?", f"{question} {short_answer(of_page)}", overview(of_page)]
        sections = [section(name, found) for name, found in of_page.items()]
        marked = any(is_earlier(found, "first") for found in of_page.values())
        how = f"[How this was measured](measured.md), and what {'+ and ¹ mean' if marked else 'a + means'}."
        save(docs / "multicentre" / f"{page}.md", [*head, how, *sections])


def short_answer(results):
    """The answers for the mean over sites, in a sentence."""
    texts = [f"{SECTIONS[name][0]}: **{ANSWERS[found['mean_answer']['answer']]}**" for name, found in results.items()]
    return f"In the mean over sites: {'; '.join(texts)}."


def save(file, parts):
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
