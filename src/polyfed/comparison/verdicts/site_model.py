"""Describes the gains of sites by a random-effects model: a mean over sites like these, and a deviation of each site."""

from collections.abc import Mapping
from typing import Any

from polyfed.comparison.statistics.evidence import Evidence, clip_interval_to_metric_range
from polyfed.comparison.verdicts.rival_gains import bracketed_simple_model_name
from polyfed.core.evaluation.metric import Metric

MANY_SITES = 10
"""Fewest sites for a sentence of its own: with fewer, an interval with sites as units is very wide."""


def build_random_effects_gain_entry(
    mean_answer: Mapping[str, Any] | None, evidence: Evidence, metric: Metric
) -> dict[str, Any] | None:
    """Builds the entry `site_model` on the best method's gain over the mean's rival, or None.

    Returns:
        None without an answer, with fewer than four sites, or where a client's name stands for other data with each seed.
    """
    if mean_answer is None or mean_answer["method"] is None:
        return None
    leader, over = mean_answer["method"], mean_answer["over"]
    rival = over if over in evidence.scores else bracketed_simple_model_name(over)
    if leader not in evidence.scores or rival not in evidence.scores:
        return None
    modelled = evidence.fit_random_effects_of_gains(leader, rival)
    if modelled is None:
        return None
    clients, model = modelled
    return {
        "over": over,
        "gain": model.mean.value,
        "interval": clip_interval_to_metric_range(model.mean, metric, is_difference=True),
        "p": model.mean.p,
        "deviation": model.deviation,
        "clients": {
            client: {"gain": site.value, "interval": clip_interval_to_metric_range(site, metric, is_difference=True)}
            for client, site in zip(clients, model.sites, strict=True)
        },
    }


def describe_mean_gain_over_similar_sites(content: Mapping[str, Any]) -> list[str]:
    """Returns the sentence on the mean gain over sites like these; none below `MANY_SITES` sites."""
    model = content.get("site_model")
    if model is None or model["interval"] is None or len(model["clients"]) < MANY_SITES:
        return []
    scale, unit = (100, " points") if content["score_unit"] == "%" else (1, f" of {content['score_label']}")
    digits = 1 if scale == 100 else 3
    low, high, gain, deviation = (
        f"{scale * value:+.{digits}f}".replace("-", "−")
        for value in (*model["interval"], model["gain"], model["deviation"])
    )
    leader, rival = content["leader"], "training" if model["over"] == "local" else model["over"].replace("_", " ")
    return [
        f"sites like these ({len(model['clients'])} sites as units): the mean gain of {leader} over {rival} alone is "
        f"{gain}, between {low} and {high}{unit}; true gains differ between sites by a standard deviation of about "
        f"{deviation.lstrip('+')}"
    ]
