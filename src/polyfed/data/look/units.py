"""Recognises a column that one site has in another unit than the other sites, by the ratio of means and of spreads."""

from polyfed.data.look.number_statistics import NumberStatistics

_FACTORS = {
    10.0: "", 100.0: "m and cm, or a share and per cent", 1000.0: "g and kg, or m and mm", 1e6: "",
    2.54: "inches and cm", 2.2046: "kg and pounds", 30.48: "feet and cm", 12.0: "months and years", 60.0: "minutes",
    365.25: "days and years", 18.016: "glucose in mmol/L and mg/dL", 38.67: "cholesterol in mmol/L and mg/dL",
    88.42: "creatinine in mg/dL and µmol/L", 7.5006: "kPa and mmHg", 4.184: "kcal and kJ",
}  # fmt: skip
_MEANS, _SPREADS = 1.25, 2.0  # largest ratios to a factor
_LARGE = 8.0  # factors that natural differences between sites hardly reach
_APART = 1.5  # sums of standard deviations between the means, for small factors
_SPREAD_ALONE = 50.0  # least ratio of spreads, around means that cannot be compared, as of standardised columns
_COMMON, _ALIKE, _ERRORS = 1.8, 1.5, 4.0  # least factor; largest ratio of its two estimates; standard errors of means


def describe_unit_difference(site: NumberStatistics, reference: NumberStatistics) -> str:
    """Returns the factor between a site and the reference if it looks like a unit; else "".

    >>> metres, centimetres = NumberStatistics(50.0, 85.0, 1.7, 0.5), NumberStatistics(50.0, 8500.0, 170.0, 5000.0)
    >>> describe_unit_difference(metres, centimetres)
    'a factor of about 100 (m and cm, or a share and per cent?)'
    """
    means, spreads = _ratios_of_means_and_spreads(site, reference)
    factor = min(_FACTORS, key=lambda candidate: max(means / candidate, candidate / means))
    is_near = max(means / factor, factor / means) <= _MEANS and max(spreads / factor, factor / spreads) <= _SPREADS
    are_apart = abs(site.mean - reference.mean) > _APART * (site.sd + reference.sd)
    if not is_near or not (factor >= _LARGE or are_apart):
        return ""
    examples = f" ({_FACTORS[factor]}?)" if _FACTORS[factor] else ""
    return f"a factor of about {factor:g}{examples}"


def describe_common_factor(site: NumberStatistics, reference: NumberStatistics) -> str:
    """Returns the factor by which mean and spread differ alike, as in a unit that is not known; "" if they do not.

    Around means of about 0 it is that of the spreads, if it is large.

    >>> north, south = NumberStatistics(90.0, 45.0, 0.5, 9.0), NumberStatistics(90.0, 90.0, 1.0, 36.0)
    >>> describe_common_factor(south, north)
    'mean and spread 2 times as large'
    >>> describe_common_factor(NumberStatistics(90.0, -9.0, 0.0, 9e7), NumberStatistics(90.0, 9.0, 0.0, 90.0))
    'spread 1000 times as large'
    >>> describe_common_factor(south, NumberStatistics(90.0, 45.0, 0.5, 0.0))  # a constant has no scale
    ''
    """
    smaller, larger = sorted((site.sd, reference.sd))
    if smaller > 0 and larger >= _SPREAD_ALONE * smaller:
        return f"spread {float(f'{larger / smaller:.2g}'):g} times as {'large' if site.sd == larger else 'small'}"
    means, spreads = _ratios_of_means_and_spreads(site, reference)
    error = (site.sd**2 / site.count + reference.sd**2 / reference.count) ** 0.5
    is_alike = max(means / spreads, spreads / means) <= _ALIKE
    if not is_alike or means < _COMMON or abs(site.mean - reference.mean) <= _ERRORS * error:
        return ""
    return f"mean and spread {means:.2g} times as {'large' if site.mean > reference.mean else 'small'}"


def describe_scale_difference(site: NumberStatistics, reference: NumberStatistics) -> str:
    """Returns the factor between intensities if a site's pixels seem scaled otherwise; else "".

    >>> shares, bytes_of_pixels = NumberStatistics(50.0, 25.0, 0.5, 0.5), NumberStatistics(50.0, 6375.0, 127.5, 32512.5)
    >>> describe_scale_difference(shares, bytes_of_pixels)
    'a factor of about 255'
    """
    means, spreads = _ratios_of_means_and_spreads(site, reference)
    is_near = max(means / spreads, spreads / means) <= _SPREADS
    return f"a factor of about {means:.0f}" if is_near and means >= _LARGE else ""


def _ratios_of_means_and_spreads(site: NumberStatistics, reference: NumberStatistics) -> tuple[float, float]:
    """Returns the ratio of the means, at least 1, and that of the spreads; ones if there are no such ratios."""
    if not (site.mean * reference.mean > 0 and site.sd > 0 and reference.sd > 0):
        return 1.0, 1.0
    means, spreads = site.mean / reference.mean, site.sd / reference.sd
    return (means, spreads) if means >= 1 else (1 / means, 1 / spreads)
