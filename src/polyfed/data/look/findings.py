"""Reports differences between the sites of a `Look`, each as a sentence on what it means for federated training.

One finding is about one column, and names all of its sites, so that a hundred sites need no hundred sentences.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any, Literal, final, get_args

from polyfed.core.io.text.number_format import join_first_and_count_rest
from polyfed.core.io.text.site_words import name_sites
from polyfed.data.look.counts import MIN_COUNT, NOT_SHOWN
from polyfed.data.look.number_statistics import GRADES, NumberStatistics
from polyfed.data.look.site_columns import IMAGE_SIZE, LookColumn
from polyfed.data.look.summaries import SiteDataStatistics, SiteSummaries
from polyfed.data.look.units import describe_common_factor, describe_scale_difference, describe_unit_difference

FEW = 10
"""Sets the number of examples of a class, or of events, below which a site has few."""
_EMPTY, _OFTEN_MISSING = 0.9, 0.4  # shares of rows without a value
_FEW_ROWS = 30
_LEAST_ROWS_FOR_FOLDS = 5  # the folds of a comparison
_ENOUGH = 20  # values whose mean and spread can be compared
_NAMED = 5
_SHIFT = 1.0  # standard deviations between the means of two sites
_BALANCE = 0.4  # difference of a class's share between sites
_CODE_SHARE = 0.02
_ONLY_HERE = 0.15  # share of a number that no other site has
Kind = Literal["code", "unit", "empty", "classes", "few", "missing", "constant", "category", "balance", "shift"]
_ORDER: tuple[Kind, ...] = get_args(Kind)


@final
@dataclass(frozen=True)
class SiteDifferenceFinding:
    """Describes one difference between sites: the column, the sites, and what the difference means for federated
    training.

    Args:
        kind: which rule found it.
        column: its name; "" for all examples of a site.
        sites: where.
        text: a sentence on what was seen.
        meaning: a sentence on what follows for federating.
    """

    kind: Kind
    column: str
    sites: tuple[str, ...]
    text: str
    meaning: str

    def to_json_dict(self) -> dict[str, Any]:
        """Returns the finding as a dict that can be written as JSON."""
        return {"kind": self.kind, "column": self.column, "sites": list(self.sites), "text": self.text,
                "meaning": self.meaning}  # fmt: skip


def find_differences(look: SiteSummaries, identifiers: Collection[str] = ()) -> list[SiteDifferenceFinding]:
    """Returns the sites' differences, the most serious first: numbers of `identifiers` have no unit and no mean."""
    findings = list(_find_few_examples(look))
    for column in look.columns:
        if column.values is None:
            findings += _NumberColumn(look, column).find_all(is_identifier=column.name in identifiers)
        else:
            findings += _find_in_categories(look, column)
    return sorted(findings, key=lambda finding: _ORDER.index(finding.kind))


def _find_few_examples(look: SiteSummaries) -> Iterator[SiteDifferenceFinding]:
    untested = {name: f"{site.rows}" for name, site in look.sites.items() if site.parts and "test" not in site.parts}
    if untested:
        yield SiteDifferenceFinding(
            "few", "", tuple(untested),
            f"too few examples to be divided into training and test: {name_sites(untested, _NAMED)}",
            "a run refuses such a site; take its rows out of the data, or keep the largest sites alone (for four, "
            "--data.partition.order largest --data.clients 4)",
        )  # fmt: skip
    sites = {
        name: f"{site.rows}" for name, site in look.sites.items() if site.rows < _FEW_ROWS and name not in untested
    }
    if sites:
        is_too_small = any(look.sites[name].rows < _LEAST_ROWS_FOR_FOLDS for name in sites)
        alone = f"; with fewer than {_LEAST_ROWS_FOR_FOLDS} examples it only trains, and gets no answer" * is_too_small
        yield SiteDifferenceFinding(
            "few", "", tuple(sites), f"few examples: {name_sites(sites, _NAMED)}",
            "an answer about such a site rests on a handful of test examples; test each example once (folds=5, --folds 5), "
            f"and read its interval rather than its score{alone}",
        )  # fmt: skip


class _NumberColumn:
    """Compares one column of numbers between the sites."""

    def __init__(self, look: SiteSummaries, column: LookColumn) -> None:
        self._column, self._name, self._is_local = column, column.name, look.is_local
        self._is_of_images = any(other.name == IMAGE_SIZE for other in look.columns) and not column.is_target
        self._sites = {name: site.numbers[column.name] for name, site in look.sites.items()}
        self._rows = {name: site.rows for name, site in look.sites.items()}
        statistics = {name: summary.statistics for name, summary in self._sites.items()}
        self._statistics = {name: s for name, s in statistics.items() if s.count >= MIN_COUNT}
        self._codes = _find_hidden_codes(self._statistics)
        self._clean = {name: s.without(self._codes.get(name, ())) for name, s in self._statistics.items()}
        self._clean = {name: s for name, s in self._clean.items() if s.count >= MIN_COUNT}

    def _largest_count(self, site: str) -> float:
        """Returns how many values a site has at most: between sites, counts are rounded down where few rows have none."""
        count = max(self._sites[site].statistics.count, 0.0)
        return count if self._is_local or not count else min(count + MIN_COUNT - 1, self._rows[site])

    def find_all(self, *, is_identifier: bool) -> list[SiteDifferenceFinding]:
        """Returns all findings about this column."""
        return [
            *find_coded_values(self._name, self._statistics), *self._find_empty(), *self._find_constant(),
            *(() if is_identifier else self._find_units_and_shifts()),
        ]  # fmt: skip

    def _find_empty(self) -> Iterator[SiteDifferenceFinding]:
        shares = {name: 1 - self._largest_count(name) / rows for name, rows in self._rows.items() if rows >= MIN_COUNT}
        empty, often = dict[str, str](), dict[str, str]()
        too_few = False
        for name, share in shares.items():
            count = self._sites[name].statistics.count
            values = f"{count:.0f}" if count >= 0 else f"fewer than {MIN_COUNT}"
            too_few |= 0 < count < MIN_COUNT or count < 0
            if share >= _EMPTY:
                empty[name] = f"{values} of {self._rows[name]} rows have a value"
            elif share >= _OFTEN_MISSING and min(shares.values()) <= 0.1:
                often[name] = f"{100 * share:.0f} %"
        if empty:
            refusal = f"; with fewer than {MIN_COUNT} values at a site preprocess='federated' is refused" * too_few
            yield _build_empty_finding(self._name, empty, len(empty) == len(shares), refusal)
        if often:
            yield SiteDifferenceFinding(
                "missing", self._name, tuple(often), f"{self._name} has often no value at {name_sites(often, _NAMED)}",
                "that a value is missing then says which site a row is from; compare with the column left out",
            )  # fmt: skip

    def _find_constant(self) -> Iterator[SiteDifferenceFinding]:
        constant = {name: f"{s.mean:g}" for name, s in self._statistics.items() if s.sd == 0}
        varying = [name for name, s in self._statistics.items() if s.sd > 0]
        constant = {name: text for name, text in constant.items() if not self._codes.get(name)}
        if constant and (varying or len(set(constant.values())) > 1):
            yield SiteDifferenceFinding(
                "constant", self._name, tuple(constant),
                f"{self._name} has one value only at {name_sites(constant, _NAMED)}",
                "scaled by the site's own rows it becomes 0 there, whatever a later patient has; scale over all sites "
                "(preprocess='federated', --data.preprocess federated), or leave it out",
            )  # fmt: skip

    def _find_units_and_shifts(self) -> Iterator[SiteDifferenceFinding]:
        varying = {name: s for name, s in self._clean.items() if s.sd > 0 and s.count >= _ENOUGH}
        if len(varying) < 2:
            return
        reference = _weighted_median(varying)
        units, shifts = dict[str, str](), dict[str, str]()
        for name, site in varying.items():
            describe = describe_scale_difference if self._is_of_images else describe_unit_difference
            if text := describe(site, reference):
                units[name] = f"mean {site.mean:.3g}: {text}"
                continue
            factor = "" if self._is_of_images else describe_common_factor(site, reference)
            if factor or abs(site.mean - reference.mean) > _SHIFT * math.sqrt((site.sd**2 + reference.sd**2) / 2):
                shifts[name] = f"{site.mean:.3g} ± {site.sd:.2g}{factor and ', '}{factor}"
        if units:
            yield SiteDifferenceFinding(
                "unit", self._name, tuple(units),
                f"{self._name} seems to have another {'scale' if self._is_of_images else 'unit'} at "
                f"{name_sites(units, _NAMED)}; the middle site's mean is {reference.mean:.3g}",
                "another scanner or window, or pixels from 0 to 255 in place of 0 to 1? A common network takes these "
                "for other subjects; scale all sites' images alike before" if self._is_of_images
                else "a common network and a common scale take these for other patients; bring all sites to one unit before",
            )  # fmt: skip
        if shifts and not units:
            meaning = (
                "a model of all sites averages over different outcomes; each site's own part of a network can follow its own"
                if self._column.is_target
                else "another scanner, stain or exposure? Scale each image by its own mean and spread, or let sites "
                "have parts of a network of their own (fedbn)"
                if self._is_of_images
                else "scaled by its own rows a site loses this difference, and scaled over all sites it keeps it; try both"
            )
            if any(" times as " in text for text in shifts.values()):
                meaning = f"another unit? If not: {meaning}"
            yield SiteDifferenceFinding(
                "shift", self._name, tuple(shifts),
                f"{self._name} lies elsewhere at {name_sites(shifts, _NAMED)}; the middle site has {reference.mean:.3g} ± "
                f"{reference.sd:.2g}", meaning,
            )  # fmt: skip


def _find_hidden_codes(statistics: Mapping[str, NumberStatistics]) -> dict[str, list[float]]:
    """Returns by site numbers that seem to mean "not measured": far from others, or frequent here alone."""
    codes: dict[str, list[float]] = {}
    total = _add_statistics(list(statistics.values()))
    for name, site in statistics.items():
        for code, count in site.codes.items():
            if count < MIN_COUNT or site.code_share(code) < _CODE_SHARE:
                continue
            others = _add_statistics([s for other, s in statistics.items() if other != name])
            is_far = total.without([code]).is_far_from_mean(code)
            is_only_here = (
                site.code_share(code) >= _ONLY_HERE
                and others.count >= 20
                and others.codes.get(code, 0.0) == 0
                and others.sd > 0
                and abs(code - others.mean) > (max(others.sd, GRADES) if others.is_whole else others.sd)
            )
            if is_far or is_only_here:
                codes.setdefault(name, []).append(code)
    return codes


def find_coded_values(column: str, statistics: Mapping[str, NumberStatistics]) -> Iterator[SiteDifferenceFinding]:
    """Finds numbers of a column that seem to mean "not measured", at sites with at least `MIN_COUNT` values."""
    codes_by_site = _find_hidden_codes(statistics)
    for code in sorted({code for codes in codes_by_site.values() for code in codes}):
        sites = {
            name: f"{statistics[name].codes[code]:.0f} of {statistics[name].count:.0f} values"
            for name, codes in codes_by_site.items()
            if code in codes
        }
        free, cells = [name for name, s in statistics.items() if s.codes.get(code, 0.0) == 0], f"{column}={code:g}"
        elsewhere = f", never at {name_sites(free, _NAMED)}" if free else ""
        yield SiteDifferenceFinding(
            "code", column, tuple(sites),
            f"{column} is {code:g} at {name_sites(sites, _NAMED)}{elsewhere}: does {code:g} stand for \"not measured\"?",
            f"networks would learn it as a value, and a mean and scale over all sites would be spoilt; if {code:g} means "
            f"not measured, empty these cells (missing={cells!r}, --data.missing {quote(cells)})",
        )  # fmt: skip


def _add_statistics(parts: Sequence[NumberStatistics]) -> NumberStatistics:
    codes: dict[float, float] = {}
    for part in parts:
        for code, count in part.codes.items():
            codes[code] = codes.get(code, 0.0) + max(count, 0.0)
    return NumberStatistics(
        sum(part.count for part in parts), sum(part.total for part in parts), parts[0].center if parts else 0.0,
        sum(part.squares for part in parts), codes, all(part.is_whole for part in parts),
    )  # fmt: skip


def _weighted_median(sites: Mapping[str, NumberStatistics]) -> NumberStatistics:
    """Returns the statistics of the site whose mean is the median over all rows."""
    ordered = sorted(sites.values(), key=lambda site: site.mean)
    half, weight_so_far = sum(site.count for site in ordered) / 2, 0.0
    for site in ordered:
        weight_so_far += site.count
        if weight_so_far >= half:
            return site
    return ordered[-1]


def _find_in_categories(look: SiteSummaries, column: LookColumn) -> Iterator[SiteDifferenceFinding]:
    """Finds rare and absent classes in a target, and in a feature categories that a site lacks or has alone."""
    name, values = column.name, column.values or ()
    counts = {site: look.sites[site].categories[name] for site in look.sites}
    rows = {site: float(look.sites[site].rows) for site in counts}
    if not column.is_target:
        yield from _find_in_features(name, values, counts, rows)
        return
    absent: dict[tuple[str, ...], list[str]] = {}
    few: list[str] = []
    few_sites: dict[str, None] = {}
    for value in values:
        lacking = tuple(site for site in counts if counts[site][value] == 0 and rows[site])
        if lacking and len(lacking) < len(counts):
            absent.setdefault(lacking, []).append(repr(value))
        for site in counts:
            if counts[site][value] < FEW and counts[site][value] not in (0, NOT_SHOWN):
                few.append(
                    f"{value!r} at {name_sites([site])} ({_count_text(counts[site][value])} of {rows[site]:.0f})"
                )
                few_sites[site] = None
    if len(absent) > 3:
        count_by_value = {value: len(sites) for sites, absent_values in absent.items() for value in absent_values}
        all_sites = tuple(site for site in counts if any(site in sites for sites in absent))
        listed = [f"{value} at {count} of {len(counts)} sites" for value, count in sorted(count_by_value.items())]
        texts = {all_sites: f"{name} is never {join_first_and_count_rest(listed, _NAMED)}"}
    else:
        texts = {
            sites: f"{name} is never {join_first_and_count_rest(absent_values, _NAMED)} at {name_sites(sites, _NAMED)}"
            for sites, absent_values in absent.items()
        }
    for sites, text in texts.items():
        yield SiteDifferenceFinding(
            "classes", name, sites, text,
            "such a site cannot learn it alone or be tested on it; a common network can still say it there",
        )  # fmt: skip
    if few:
        yield SiteDifferenceFinding(
            "few", name, tuple(few_sites), f"{name} has few examples of {join_first_and_count_rest(few, _NAMED)}",
            "scores and intervals rest on these few and not on the number of rows: one example more or less can turn a "
            "choice; expect \"not decided\", and let no such site choose learning rates for all",
        )  # fmt: skip
    big = [site for site in counts if rows[site] >= 20]
    if len(big) > 1:
        shares = {
            v: {site: max(counts[site][v], 0.0) / rows[site] for site in big if counts[site][v] != NOT_SHOWN}
            for v in values
        }
        known_shares = {v: by_site for v, by_site in shares.items() if by_site} or {"": {"": 0.0}}
        value, by_site = max(known_shares.items(), key=lambda item: max(item[1].values()) - min(item[1].values()))
        low, high = min(by_site, key=lambda site: by_site[site]), max(by_site, key=lambda site: by_site[site])
        if by_site[high] - by_site[low] >= _BALANCE:
            yield SiteDifferenceFinding(
                "balance", name, (low, high),
                f"{name} {value!r} makes up {100 * by_site[low]:.0f} % of {name_sites([low])} and "
                f"{100 * by_site[high]:.0f} % of {name_sites([high])}",
                "a common network's probabilities fit neither; scores that depend on a threshold gain from a part of the "
                "network of one's own",
            )  # fmt: skip


def _count_text(count: float) -> str:
    limit = "at least" if count == NOT_SHOWN else "fewer than"
    return f"{limit} {MIN_COUNT}" if count < 0 else f"{count:.0f}"


def _build_empty_finding(
    name: str, sites: Mapping[str, str], is_everywhere: bool, refusal: str = ""
) -> SiteDifferenceFinding:
    cure = f"leave it out (drop={name!r}, --data.drop {quote(name)})"
    return SiteDifferenceFinding(
        "empty", name, tuple(sites), f"{name} is empty or nearly so at {name_sites(sites, _NAMED)}",
        f"there it is a constant, and a common network learns it from the other sites alone; {cure}, or let sites have "
        f"networks of their own{refusal}" if not is_everywhere
        else f"networks learn it from these few rows, or learn which rows have a value; {cure}{refusal}",
    )  # fmt: skip


def _find_in_features(
    name: str, values: Sequence[str], counts: Mapping[str, Mapping[str, float]], rows: Mapping[str, float]
) -> Iterator[SiteDifferenceFinding]:
    present = {site: rows[site] - max(counts[site][""], 0.0) for site in counts}
    filled = [site for site in counts if present[site] >= MIN_COUNT]
    empty = {
        site: f"{max(present[site], 0):.0f} of {rows[site]:.0f} rows have a value"
        for site in counts
        if rows[site] and present[site] < (1 - _EMPTY) * rows[site]
    }
    if empty:
        yield _build_empty_finding(name, empty, len(empty) == sum(count > 0 for count in rows.values()))
    values_by_site = {site: [value for value in values if counts[site][value] != 0] for site in filled}
    only_value = {site: some[0] for site, some in values_by_site.items() if len(some) == 1}
    if 2 * len(only_value) > len(filled) and len({value for some in values_by_site.values() for value in some}) > 1:
        yield SiteDifferenceFinding(
            "constant", name, tuple(only_value),
            f"{name} has one value only at {len(only_value)} of {len(filled)} sites: "
            f"{name_sites({site: repr(value) for site, value in only_value.items()}, _NAMED)}",
            f"it says which site a row is from rather than something about the row: such a site cannot learn what it means; "
            f"leave it out (drop={name!r}, --data.drop {quote(name)}), or compare with and without it"
            if len(set(only_value.values())) > 1
            else "such a site cannot learn what another value means; a common network learns it from the other sites alone",
        )  # fmt: skip
        return
    lacking_sites: dict[str, list[str]] = {}
    for value in values:
        total = sum(max(counts[site][value], 0.0) for site in filled)
        for site in filled:
            others = sum(present[other] for other in filled if other != site)
            count = max(counts[site][value], 0.0)
            share_elsewhere = (total - count) / others if others else 0.0
            if counts[site][value] == 0 and share_elsewhere * present[site] >= MIN_COUNT and share_elsewhere >= 0.05:
                lacking_sites.setdefault(value, []).append(site)
    if lacking_sites:
        before, after = (" (at ", ")") if len(lacking_sites) > 1 else (" at ", "")
        places = [f"{value!r}{before}{name_sites(sites, _NAMED)}{after}" for value, sites in lacking_sites.items()]
        yield SiteDifferenceFinding(
            "category", name, tuple(dict.fromkeys(site for sites in lacking_sites.values() for site in sites)),
            f"{name} is never {join_first_and_count_rest(places, _NAMED)}, and often elsewhere",
            "the weights of such a category are learned at the other sites alone; if it is only written differently, give "
            "it one name before",
        )  # fmt: skip


def find_most_serious_kind_per_site_column(findings: Sequence[SiteDifferenceFinding]) -> dict[tuple[str, str], str]:
    """Returns `{(column, site): kind}` of the most serious findings, which come first in `findings`."""
    marks: dict[tuple[str, str], str] = {}
    for finding in findings:
        for site in finding.sites:
            marks.setdefault((finding.column, site), finding.kind)
    return marks


def describe_class_counts_of_site(look: SiteSummaries, site: SiteDataStatistics) -> str:
    """Returns text with the number of a site's examples of each class; "" if all targets are numbers."""
    parts = []
    for column in look.columns:
        if column.is_target and column.values is not None:
            counts = site.categories[column.name]
            counts_of_values = [f"{value}: {_count_text(counts[value])}" for value in column.values[:8]]
            parts.append(f"{column.name} {', '.join(counts_of_values)}{' …' if len(column.values) > 8 else ''}")
    return "; ".join(parts[:3])
