"""The part of docs/results.md that is a curve: accuracy over the number of training examples a client."""

from itertools import pairwise
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from polyfed.data.plot import save_figure

OTHER = {  # further curves of a paper, by what is different
    "fedhenn_homo": "one network for all",
    "pfedla_cifar10": "CIFAR-10, four of five images are of two classes",
}
SHARES = ("%", "fraction")  # of examples
EVERY = 5  # rounds from one evaluation to the next
DIGITS = {"%": 1, "fraction": 3, "count": 0, "MB": 2, "s": 1, "ratio": 2}


def of_curve(paper, name, found, docs, remark):
    """Accuracy over the number of examples a client: a picture, tables, and where the method is ahead."""
    sizes = sorted(map(int, found["points"]))
    own, points = found["own"], found["points"]
    methods = list(dict.fromkeys(method for size in sizes for method in points[str(size)]["methods"]))
    methods.sort(key=lambda method: method != own)
    where = f", {OTHER[paper]}" if paper in OTHER else ""
    lines = [f"### Accuracy by the number of training examples a client{where}\n"]
    if len(sizes) > 1:
        draw(docs / "images" / f"examples_{paper}.svg", found, methods, own)
        lines += [
            f"![Accuracy of {name} and others over the number of examples a client](images/examples_{paper}.svg)\n"
        ]
    lines += [
        "| accuracy, % | " + " | ".join(map(str, sizes)) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    for method in methods:
        cells = [points[str(size)]["methods"].get(method) for size in sizes]
        lines.append(
            f"| {shown(method, own)} | " + " | ".join(f"{100 * c['mean']:.1f}" if c else "" for c in cells) + " |"
        )
    for form in (own, *forms_of(found)):
        lines += compared(found, sizes, form, [method for method in methods if method not in (own, form)], own)
    lines += after_all(found, sizes, own)
    lines += computed(found, sizes, methods, own)
    first = points[str(sizes[0])]
    seeds = len(first["seeds"].split(","))
    rounds = ", ".join(str(points[str(size)]["rounds"]) for size in sizes)
    tuned = {}
    for size in sizes:
        beyond = (
            " and, where the best was the smallest or largest, up to two beyond" if "tried" in points[str(size)] else ""
        )
        tuned.setdefault(f"{', '.join(f'{rate:g}' for rate in rates_of(points[str(size)]))}{beyond}", []).append(
            str(size)
        )
    rates = "; ".join(f"{r} (with {', '.join(at)} examples)" if len(tuned) > 1 else r for r, at in tuned.items())
    lines += [
        "How it was measured:\n",
        f"- Recipe `{found['recipe']}`, variant `{found['variant']}`, scale cpu, {seeds} seeds on the same clients, 100 "
        f"test examples a client, {rounds} rounds. Intervals cover new seeds and new test examples.",
        "- Every method has the rate, and is compared at the round, that was best on held-out training examples, one run a "
        "rate.",
        f"- Rates tried: {rates}.",
        *(f"- {one}" for one in besides(found, sizes)),
        "",
    ]
    for form, fields in forms_of(found).items():
        values = ", ".join(f"{name}: {word(value)}" for name, value in fields.items())
        lines.append(f"`{form}` is `{own}` with `{values}`.\n")
    lines += [f"{edges(found, sizes)}\n", f"{unfinished(found, sizes)}\n"]
    if remark:
        lines.append(f"{remark}\n")
    return "\n".join(lines)


def forms_of(found):
    """The further forms of the paper's method, by what each sets."""
    return {label: fields for point in found["points"].values() for label, fields in point.get("forms", {}).items()}


def word(value):
    """As YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def compared(found, sizes, form, others, own):
    """How far the paper's method, or a further form of it, is ahead of the others at each size."""
    others = [method for method in others if any(method in against(found, size, form) for size in sizes)]
    lines = ["", f"| `{form}` is ahead of it by (95 % interval) | " + " | ".join(map(str, sizes)) + " |",
             "|---|" + "---|" * len(sizes)]  # fmt: skip
    for method in others:
        gains = [against(found, size, form).get(method) for size in sizes]
        lines.append(f"| {shown(method, own)} | " + " | ".join(spanned(gain, 100) for gain in gains) + " |")
    return [*lines, "", *(f"- {crossing(found, sizes, form, other)}" for other in others), ""]


def after_all(found, sizes, own):
    """The scores after all rounds, and how far the paper's method and its further forms are ahead there."""
    known = {size: last for size in sizes if (last := found["points"][str(size)].get("after_all"))}
    if not known:
        return []
    head = [" | ".join(map(str, known)) + " |", "|---|" + "---|" * len(known)]
    lines = [
        "The same runs after all rounds, whatever the validation examples say. This is the fairer reading where methods "
        "still learn at the latest round that the search can choose.\n",
        f"| accuracy after all rounds, % | {head[0]}", head[1],
    ]  # fmt: skip
    for method in dict.fromkeys(name for last in known.values() for name in last["means"]):
        means = [last["means"].get(method) for last in known.values()]
        lines.append(f"| {shown(method, own)} | " + " | ".join(f"{100 * m:.1f}" if m else "" for m in means) + " |")
    for form in (own, *forms_of(found)):
        gains = [last["against"].get(form, {}) for last in known.values()]
        lines += ["", f"| `{form}` is ahead of it after all rounds by | {head[0]}", head[1]]
        for method in dict.fromkeys(name for of in gains for name in of):
            lines.append(f"| {shown(method, own)} | " + " | ".join(spanned(of.get(method), 100) for of in gains) + " |")
        others = dict.fromkeys(name for of in gains for name in of)
        lines += ["", *(f"- {crossing(found, sizes, form, other, after_all=True)}" for other in others)]
    return [*lines, ""]


def computed(found, sizes, methods, own):
    """What accuracy costs: seconds to the round at which methods are compared."""
    lines = [
        "Cost: the seconds that clients and server compute until that round, all clients one after another, mean over "
        "seeds. Several runs went at the same time, so that factors below 1.5 say little.\n",
        "| seconds | " + " | ".join(map(str, sizes)) + " |", "|---|" + "---|" * len(sizes),
    ]  # fmt: skip
    for method in methods:
        cells = [found["points"][str(size)]["methods"].get(method) for size in sizes]
        lines.append(
            f"| {shown(method, own)} | " + " | ".join(f"{c['seconds']:.0f}" if c else "" for c in cells) + " |"
        )
    return [*lines, ""]


def against(found, size, form, after_all=False):
    """How far this form of the paper's method is ahead of each other method at a size."""
    point = found["points"][str(size)]
    if after_all:
        return point.get("after_all", {"against": {}})["against"].get(form, {})
    return point["against"] if form == found["own"] else point.get("of_forms", {}).get(form, {})


def rates_of(point):
    """The rates that were tried of every method, the smallest first."""
    return sorted(map(float, fields_of(point)["lr"].removesuffix(",...").split(",")))


def fields_of(point):
    """What was searched: the values as they were given, by field."""
    return dict(part.split("=") for part in point["tuned"].split(";"))


def besides(found, sizes):
    """Returns what was searched besides the rate, and what was chosen, a sentence for each method."""
    told = []
    for name in dict.fromkeys(name for size in sizes for name in fields_of(found["points"][str(size)]) if name != "lr"):
        chosen = {}
        for size in sizes:
            for method, fields in found["points"][str(size)]["chosen"].items():
                if name in fields:
                    chosen.setdefault(method, []).append(f"{fields[name]:g} with {size} examples")
        given = next(of[name] for size in sizes if name in (of := fields_of(found["points"][str(size)])))
        values = given.replace(",", ", ")
        for method, of in chosen.items():
            told.append(f"Of {values} for `{name}` of `{method}`, in all combinations with the rates: {', '.join(of)}.")
    return told


def edges(found, sizes):
    """At which sizes methods took the smallest or largest rate that was tried, and might have taken another beyond it."""
    told = []
    for size in sizes:
        point = found["points"][str(size)]
        chosen = {name: fields["lr"] for name, fields in point["chosen"].items() if "lr" in fields}
        tried = {name: point.get("tried", {}).get(name) or rates_of(point) for name in chosen}
        for edge, kind in ((min, "smallest"), (max, "largest")):
            if names := [f"`{name}`" for name, lr in chosen.items() if lr == edge(tried[name])]:
                told.append(f"with {size} examples {', '.join(names)} took the {kind} rate")
    return listed("At the edge of what was tried", told)


def unfinished(found, sizes):
    """At which sizes methods are compared at the last round that the search can choose: the last but one that is evaluated,
    since a score is the mean of three."""
    told = []
    for size in sizes:
        point = found["points"][str(size)]
        last = point["rounds"] - EVERY
        if names := [f"`{name}`" for name, one in point["methods"].items() if max(one["rounds"]) >= last]:
            told.append(f"{', '.join(names)} with {size} examples ({last} of {point['rounds']})")
    return listed("At the latest round that the search can choose, so that more rounds may change it", told)


def listed(head, items):
    """Returns a list below what introduces it.

    >>> listed("Rates", ["0.1", "0.2"])
    'Rates:\\n\\n- 0.1\\n- 0.2'
    >>> listed("Rates", [])
    'Rates: none.'
    """
    return "\n".join([f"{head}:\n", *(f"- {item}" for item in items)]) if items else f"{head}: none."


def shown(method, own):
    name, _, rest = method.partition(" ")
    return f"**`{name}`**" if method == own else f"`{name}`{' ' + rest if rest else ''}"


def crossing(found, sizes, own, other, after_all=False):
    """At which sizes the method is ahead of another one, and between which their means cross."""
    known = {size: gain for size in sizes if (gain := against(found, size, own, after_all).get(other))}
    kinds = {"ahead": [], "behind": [], "not decided": []}
    for size, gain in known.items():
        kinds[kind_of(gain).removesuffix(" of").removesuffix(" against")].append(str(size))
    words = [f"{kind} with {', '.join(names)} examples" for kind, names in kinds.items() if names]
    every = [
        f"in every seed with {', '.join(names)}"
        for names in [[str(size) for size, gain in known.items() if min(gain["by_seed"]) > 0]] if names
    ]  # fmt: skip
    places = [
        f"between {here} and {there}" for here, there in pairwise(known)
        if known[here]["gain"] * known[there]["gain"] < 0
    ]  # fmt: skip
    crossed = (
        [f"the means cross {' and '.join(places)}" if places else "the means do not cross"] if len(known) > 1 else []
    )
    return f"against {shown(other, own)}: {'; '.join([*words, *every, *crossed])}."


def draw(file, found, methods, own):
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    sizes = sorted(map(int, found["points"]))
    for method in methods:
        cells = [found["points"][str(size)]["methods"].get(method) for size in sizes]
        if not all(cells):
            continue  # compared at one size only
        line = axes.plot(
            sizes, [100 * c["mean"] for c in cells], marker="o", label=method, linewidth=2.5 if method == own else 1.5
        )
        if all(c["interval"] for c in cells):
            axes.fill_between(
                sizes, *([100 * c["interval"][end] for c in cells] for end in (0, 1)),
                color=line[0].get_color(), alpha=0.12, linewidth=0,
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("training examples a client")
    axes.set_ylabel("accuracy on own test examples, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    Path(file).parent.mkdir(exist_ok=True)
    save_figure(figure, file)


def spanned(gain, times=1):
    if gain is None or gain["low"] is None:
        return ""
    mean, low, high = (signed(times * gain[key], gain.get("unit", "%")) for key in ("gain", "low", "high"))
    return f"{mean} ({low} to {high})"


def signed(value, unit):
    return f"{value:+.{DIGITS[unit]}f}".replace("-", "−")


def kind_of(gain):
    if gain["low"] is None:
        return "one seed only, against"
    digits = DIGITS[gain.get("unit", "fraction")]  # of a curve: fractions
    low, high = round(gain["low"], digits), round(gain["high"], digits)  # what is printed as 0 is none
    if low == high and gain.get("unit") in SHARES:  # which are alike in all seeds by chance
        return "not decided against"
    return "ahead of" if low > 0 else "behind" if high < 0 else "not decided against"
