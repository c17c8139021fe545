"""Cells of a table as they are measured, and the differences of methods with their intervals."""

import math
from fnmatch import fnmatchcase as fnmatch
from statistics import fmean, stdev

from scipy.special import stdtrit


def completed(cells, before, add=False):
    """The table's cells that were measured, now or else before, in the table's order; and the places of the latter."""
    earlier = {(cell["row"], cell["column"]): cell for cell in before}
    merged, kept = [], set()
    for cell in cells:
        place = cell["row"], cell["column"]
        if place in earlier and (add or cell["ours"] is None):
            kept.add(place)
            cell = more_seeds(earlier[place], cell) if cell["ours"] is not None else earlier[place]
        if cell["ours"] is not None:
            merged.append(cell)
    return merged, kept


def more_seeds(earlier, cell):
    """A cell of the seeds measured earlier, and of those measured now."""
    if both := earlier["seeds"].keys() & cell["seeds"].keys():
        raise SystemExit(f"{cell['row']}, {cell['column']}: seeds {', '.join(sorted(both))} are in the results already")
    seeds = earlier["seeds"] | cell["seeds"]
    values = list(seeds.values())
    ours, paper = fmean(values), cell["paper"]
    return {**cell, "ours": ours, "ours_spread": stdev(values), "difference": None if paper is None else ours - paper,
            "seeds": seeds, "runs": [*earlier["runs"], *cell["runs"]]}  # fmt: skip


def gains(cells, plan):
    """Of the paper's method over every other one, in each column (or row, or mean of several), by seed with an interval."""
    lines = {}  # name of the method's row -> name of the other direction -> cell
    for cell in cells:
        method, place = (cell["row"], cell["column"]) if plan.by == "row" else (cell["column"], cell["row"])
        lines.setdefault(method, {})[place] = cell
    places = [
        place
        for place in dict.fromkeys(place for line in lines.values() for place in line)
        if not any(fnmatch(place, pattern) for pattern in plan.but)
    ]
    merged = plan.means or tuple((place, place) for place in places)
    found = []
    for group in plan.groups:
        for own in (f"{group}{name}" for name in plan.own):
            for over in lines:
                others = over not in plan.own if not plan.over else over.removeprefix(group) in plan.over
                others = others and (not plan.pairs or (own, over) in plan.pairs)
                told = any((gain["own"], gain["over"]) == (over, own) for gain in found)
                if own not in lines or over == own or not over.startswith(group) or not others or told:
                    continue
                for called, pattern in merged:
                    both = [p for p in places if fnmatch(p, pattern) and p in lines[own] and p in lines[over]]
                    if pairs := [
                        (lines[own][p], lines[over][p])
                        for p in both
                        if lines[own][p]["unit"] == lines[over][p]["unit"]
                        and not one_setting(lines[own][p], lines[over][p])
                    ]:
                        found.append(gain_of(own, over, called, pairs))
    return found


def one_setting(cell, other):
    """Whether two variants are the same runs, as the default of a sweep and its base are."""
    same = ("runs", "method", "metric", "seeds")
    return cell["variant"] != other["variant"] and all(cell[key] == other[key] for key in same)


def gain_of(own, over, called, pairs):
    """The difference of two methods by seed, mean over the pairs of cells."""
    seeds = [s for s in pairs[0][0]["seeds"] if all(s in cell["seeds"] for pair in pairs for cell in pair)]
    by_seed = [fmean(mine["seeds"][s] - other["seeds"][s] for mine, other in pairs) for s in seeds]
    return {
        "own": own, "over": over, "at": called, "unit": pairs[0][0]["unit"], "by_seed": by_seed, **interval(by_seed),
    }  # fmt: skip


def interval(values, level=0.95):
    """Student's, of the mean."""
    if len(values) < 2:
        return (
            {"gain": fmean(values), "low": None, "high": None} if values else {"gain": None, "low": None, "high": None}
        )
    half = float(stdtrit(len(values) - 1, (1 + level) / 2)) * stdev(values) / math.sqrt(len(values))
    return {"gain": fmean(values), "low": fmean(values) - half, "high": fmean(values) + half}
