"""Computes the losses of survival models: Cox's partial likelihood, and the likelihood of hazards in intervals of time.

This is the one place that decides the risk set of a patient: all patients of the same minibatch who are still followed at
the patient's time. With batch_size=0 it is all of the client's patients; no risk set ever crosses clients, as in the
stratified Cox model with one stratum a client.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def cox_loss(log_risk: Tensor, targets: Tensor, *, efron: bool = True) -> Tensor:
    """Returns the negative logarithm of Cox's partial likelihood, divided by the number of events; 0 without an event.

    Without an event the gradient is 0, too. The loss depends on the order of times alone.

    Args:
        log_risk: shape (n, 1) or (n,).
        targets: time and event (1, or 0 for censored) of each patient, shape (n, 2).
        efron: whether tied events are treated by Efron (1977); if not, by Breslow (1974).

    >>> round(float(cox_loss(torch.zeros(3, 1), torch.tensor([[1.0, 1], [2.0, 0], [3.0, 1]]))), 4)  # (log 3 + log 1) / 2
    0.5493
    """
    log_risk = log_risk.reshape(-1)
    order = targets[:, 0].argsort(descending=True, stable=True)
    log_risk, time, event = log_risk[order], targets[order, 0], targets[order, 1] > 0.5
    if not bool(event.any()):
        return log_risk.sum() * 0
    _, tie_group, tie_sizes = torch.unique_consecutive(time, return_inverse=True, return_counts=True)
    last_of_group = tie_sizes.cumsum(0) - 1
    # All patients up to the last of a tie group are followed at its time.
    denominators = log_risk.logcumsumexp(0)[last_of_group][tie_group][event]
    if efron:
        denominators = _without_half_of_tied_events(denominators, log_risk[event], tie_group[event], len(tie_sizes))
    return (denominators - log_risk[event]).mean()


def _without_half_of_tied_events(log_sums: Tensor, log_risk: Tensor, tie_group: Tensor, num_groups: int) -> Tensor:
    """Subtracts from the risk set of the k-th of d tied events the share k/d of these events' risks, k = 0, ..., d - 1.

    Args:
        log_sums: logarithm of the sum of risks in the risk set of each event.
        log_risk, tie_group: of each event; events of a group are neighbours.
        num_groups: of all patients.
    """
    num_tied = torch.bincount(tie_group, minlength=num_groups)
    if int(num_tied.max()) < 2:
        return log_sums
    first_position = num_tied.cumsum(0) - num_tied
    place = torch.arange(len(tie_group), device=tie_group.device) - first_position[tie_group]
    share = place.to(log_risk.dtype) / num_tied[tie_group].to(log_risk.dtype)
    # The tied events' risks are part of the sums, so that these ratios are at most 1 and their sum over a group, too.
    ratio = torch.zeros(num_groups, dtype=log_risk.dtype, device=log_risk.device)
    ratio = ratio.index_add(0, tie_group, (log_risk - log_sums).exp())
    return log_sums + torch.log1p(-share * ratio[tie_group])


def hazard_loss(logits: Tensor, targets: Tensor, cuts: Sequence[float]) -> Tensor:
    """Returns the mean negative log-likelihood of hazards over patients.

    Source: Gensheimer and Narasimhan 2019, "A scalable discrete-time survival model for neural networks".

    Args:
        logits: of the probability of an event in each interval, given no event before, shape (n, intervals).
        targets: time and event of each patient, shape (n, 2).
        cuts: ends of the intervals, ascending. A patient who is followed beyond the last one survives all; a censored
            patient counts as a survivor of those intervals that ended by then.

    >>> round(float(hazard_loss(torch.zeros(1, 2), torch.tensor([[5.0, 1]]), (3.0, 6.0))), 4)  # survives one, not the other
    1.3863
    """
    ends = torch.tensor(cuts, dtype=targets.dtype, device=targets.device)
    time, event = targets[:, 0].contiguous(), targets[:, 1] > 0.5
    survived = torch.where(event, torch.bucketize(time, ends), torch.bucketize(time, ends, right=True))
    interval = torch.arange(len(ends), device=targets.device)
    happened = (interval == survived[:, None]) & event[:, None]
    counted = (interval < survived[:, None]) | happened
    losses = F.binary_cross_entropy_with_logits(logits, happened.to(logits.dtype), reduction="none")
    return (losses * counted).sum() / len(logits)
