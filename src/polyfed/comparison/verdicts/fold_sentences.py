"""Builds the sentences that say what the confidence intervals of a cross-validation cover."""

from collections.abc import Mapping
from typing import Any


def describe_fold_interval_coverage(content: Mapping[str, Any]) -> list[str]:
    """Says what the intervals of a cross-validation in `comparison.json` cover."""
    folds, repeats = content["folds"], content["fold_repeats"]
    repeated = f", {repeats} times over" if repeats > 1 else ""
    others = "fold" if folds == 2 else f"{folds - 1} folds"
    sentences = [
        f"The examples of each site were divided into {folds} folds{repeated}: each example was tested by networks "
        f"that were trained on the other {others}. The intervals cover other test examples and other seeds, and other "
        "training examples as far as such folds can show (see the documentation on intervals)."
    ]
    if most := content.get("most_repeats"):
        sentences.append(
            f"The folds are drawn again until the mean's answer is decided, at most {most} times; the intervals allow for "
            "each look (O'Brien and Fleming's spending)."
        )
    if any("groups" in total for total in content["tested"].values()):
        sentences.append("All examples of a group went to one fold, and count as one unit in the intervals.")
    return sentences
