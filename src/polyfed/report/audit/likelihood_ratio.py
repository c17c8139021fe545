"""Computes how likely an example was in a network's training set, from networks that were trained on known halves."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LEAST_VARIANCE = 1e-12
_LEAST_DIFFERENCE = 0.01  # of the means, in standard deviations


def logit_scaled_confidence(outputs: Tensor, labels: Tensor) -> NDArray[np.float64]:
    """Returns log(p / (1 − p)) of each example, where p is the probability that the network gives to its label.

    Source: Carlini et al. 2022, "Membership inference attacks from first principles", section V, equation 4.

    Args:
        outputs: logits, shape (n, classes).
        labels: int64, shape (n,).

    >>> logit_scaled_confidence(torch.tensor([[2.0, 2.0], [5.0, 2.0]]), torch.tensor([0, 0])).tolist()
    [0.0, 3.0]
    """
    logits = outputs.double()
    is_label = torch.nn.functional.one_hot(labels.long(), logits.shape[1]).bool()
    others = logits.masked_fill(is_label, -torch.inf).logsumexp(1)
    confidence: NDArray[np.float64] = (logits[is_label] - others).numpy()
    return np.nan_to_num(confidence, nan=0.0, posinf=1e6, neginf=-1e6)


def score_members(confidences: NDArray[np.float64], members: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns by run and example the log likelihood ratio of membership against none.

    Each run is attacked in turn, and what is known comes from the other runs alone. Under the two hypotheses an example's
    confidence is normal, with means of its own and one variance for all examples of the client.

    Source: LiRA with a fixed variance (Carlini et al. 2022, section V). With few runs the difference of an example's two
    means is mostly noise, so it is shrunk towards the client's mean difference (empirical Bayes),
    which is not negative.

    Args:
        confidences: `logit_scaled_confidence` of each run (rows) and example (columns), shape (runs, n).
        members: whether the run was trained on the example; drawn independently for each run. Shape (runs, n).

    >>> members = np.array([[1, 0], [0, 1], [1, 0], [0, 1]], dtype=bool)
    >>> noise = np.array([[0.1, 0.0], [0.0, 0.2], [0.0, 0.1], [0.1, 0.0]])
    >>> bool(((score_members(4.0 * members + noise, members) > 0) == members).all())
    True
    """
    scores = np.empty_like(confidences)
    for run in range(len(confidences)):
        others = np.arange(len(confidences)) != run
        difference, centre, variance = _difference_middle_and_variance(confidences[others], members[others])
        scores[run] = difference * (confidences[run] - centre) / variance
    return scores


def _difference_middle_and_variance(
    confidences: NDArray[np.float64], members: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Returns each example's mean of members minus non-members, the middle of both, and the variance."""
    num_in, num_out = members.sum(0), (~members).sum(0)
    mean_in = np.where(members, confidences, 0.0).sum(0) / np.maximum(num_in, 1)
    mean_out = np.where(members, 0.0, confidences).sum(0) / np.maximum(num_out, 1)
    residuals = confidences - np.where(members, mean_in, mean_out)
    freedom = confidences.size - int((num_in > 0).sum() + (num_out > 0).sum())
    variance = max(float((residuals**2).sum()) / max(freedom, 1), _LEAST_VARIANCE)
    both = (num_in > 0) & (num_out > 0)
    if not both.any():
        return np.zeros(len(both)), confidences.mean(0), variance
    noise = variance * (1 / np.maximum(num_in, 1) + 1 / np.maximum(num_out, 1))
    # Training does not make members less confident; were the sign free, errors of all runs would hang together.
    mean_difference = max(float((mean_in - mean_out)[both].mean()), _LEAST_DIFFERENCE * float(np.sqrt(variance)))
    spread = max(float(np.var((mean_in - mean_out)[both]) - noise[both].mean()), 0.0)
    weight = np.where(both, spread / (spread + noise), 0.0)
    difference = weight * (mean_in - mean_out) + (1 - weight) * mean_difference
    return difference, (confidences - difference * (members - 0.5)).mean(0), variance
