"""Trains the networks of many clients at once, or computes their outputs, from the calls that `deferred_calls` has
collected.

Networks are computed together only where a trial has shown that each then gets what it gets alone: in a network that polyfed
does not know, examples of a batch may meet, a decision may hang on a number, or chance may be drawn from elsewhere.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyfed.core.errors import describe_exception
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import input_spec_of, logits_of
from polyfed.core.nn.grad_mode import grad_enabled
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.nn.module_cache import architecture_hash
from polyfed.core.seeds import DropoutMaskGenerator, derive_seed, temporary_rng_seed
from polyfed.core.training.loop import fit
from polyfed.core.vectorized.cohort_batches import BatchSizes, CohortBatches, ValidRows, plan_batch_sizes
from polyfed.core.vectorized.deferred_calls import (
    FitCall,
    FitCallResult,
    PerClientTerm,
    PredictCall,
    copy_tensors_into_module,
)
from polyfed.core.vectorized.stacked_module import (
    CannotStackError,
    StackedNetworks,
    has_batch_statistics,
    stacking_obstacle,
)

MAX_COHORT_SIZE = 100
"""Clients that are computed at once: more do not save anything, and their numbers would leave the processor's cache."""
MIN_COHORT_SIZE = 3
"""Fewer are computed one by one, which takes as long."""
_MAX_STACK_BYTES = 2**27  # of one stack of parameters
_TERM_ROWS = 2**13  # of examples that a penalty takes through the networks at once
_ROWS_AT_ONCE = 512  # of examples that are computed at once
_OBSTACLES: dict[Hashable, str | None] = {}  # architecture, and how it is used -> why it cannot be computed together


def group_fit_calls(calls: Sequence[FitCall]) -> list[list[int]]:
    """Returns lists of positions in `calls`; the calls of one list can be carried out together.

    The calls of a group have one architecture, the same options, and terms that are the same function. Calls with a
    minibatch of one example, which BatchNorm may refuse, are grouped apart.
    """
    groups_by_key: list[tuple[Hashable, FitCall, list[int]]] = []
    for place, call in enumerate(calls):
        key = _group_key(call)
        for group_key, first, members in groups_by_key:
            if key == group_key and call.options == first.options and _same_terms(call, first):
                members.append(place)
                break
        else:
            groups_by_key.append((key, call, [place]))
    parts: list[list[int]] = []
    for _, first, members in groups_by_key:
        size = sum(first.state[name].nbytes for name in first.trained_names)
        max_size = max(1, min(MAX_COHORT_SIZE, _MAX_STACK_BYTES // max(size, 1)))
        if first.penalty is not None and first.penalty.num_rows:
            max_size = min(max_size, max(MIN_COHORT_SIZE, _TERM_ROWS // first.penalty.num_rows))
        number = -(-len(members) // max_size)
        # Of like lengths, so that none waits for others.
        members.sort(key=lambda place: -len(_batch_sizes(calls[place])))
        starts = [len(members) * i // number for i in range(number + 1)]
        parts += [sorted(members[a:b]) for a, b in pairwise(starts)]
    return parts


def _group_key(call: FitCall) -> Hashable:
    data = call.examples
    data_spec = input_spec_of(data.x), data.y.shape[1:], data.y.dtype, data.device
    has_single_example_batch = has_batch_statistics(call.module) and any(1 in sizes for sizes in _batch_sizes(call))
    return (
        architecture_hash(call.module),
        call.trained_names,
        call.lr,
        call.task,
        call.batches_per_step,
        call.reported_loss,
        data_spec,
        has_single_example_batch,
    )


def _same_terms(first: FitCall, second: FitCall) -> bool:
    return all(
        a is b is None
        or (a is not None and b is not None and a.takes_network == b.takes_network and a.function == b.function)
        for a, b in ((first.penalty, second.penalty), (first.gradient, second.gradient))
    )


def _batch_sizes(call: FitCall) -> BatchSizes:
    options, at_least_two = call.options, has_batch_statistics(call.module)
    return plan_batch_sizes(
        len(call.examples),
        options.batch_size,
        options.local_epochs,
        options.local_steps,
        call.batches_per_step,
        at_least_two,
    )


@grad_enabled()
def train_cohort(calls: Sequence[FitCall]) -> list[FitCallResult]:
    """Trains a group's networks at once, with the results of separate training up to rounding.

    Raises:
        CannotStackError: that is impossible.

    Raises:
        CannotStackError: these networks cannot be computed together, or change a buffer of their own.
    """
    order = sorted(range(len(calls)), key=lambda place: -len(_batch_sizes(calls[place])))
    ordered = [calls[place] for place in order]
    first = ordered[0]
    if reason := cohort_training_obstacle(ordered):
        raise CannotStackError(reason)
    seeds = [call.seed for call in ordered]
    plans = [_batch_sizes(call) for call in ordered]
    streams = CohortBatches([call.examples for call in ordered], seeds, plans, first.batches_per_step)
    penalty, gradient = (_stack_terms([getattr(call, name) for call in ordered]) for name in ("penalty", "gradient"))
    dropout_rngs = [DropoutMaskGenerator(derive_seed(seed, "dropout"), first.examples.device) for seed in seeds]
    with StackedNetworks(first.module, [call.state for call in ordered], first.trained_names, dropout_rngs) as networks:
        fit(
            networks, streams, first.options, lr=first.lr, seed=0, task=first.task,
            penalty=penalty, gradient=gradient, batches_per_step=first.batches_per_step,
            reported_loss=first.reported_loss,  # type: ignore[arg-type]
        )  # fmt: skip
    networks.check_shared_buffers_unchanged()
    losses = networks.mean_losses().tolist()
    terms = [term for term in (penalty, gradient) if term is not None]
    result_by_place: dict[int, FitCallResult] = {}
    for row, place in enumerate(order):
        tensors = [tensor[row] for term in terms for tensor in term.tensors]
        result_by_place[place] = FitCallResult(networks.client_tensors(row), tensors, losses[row], len(plans[row]))
    return [result_by_place[place] for place in range(len(calls))]


def _stack_terms(terms: Sequence[PerClientTerm | None]) -> PerClientTerm | None:
    client_terms = [term for term in terms if term is not None]
    if not client_terms:
        return None
    return replace(
        client_terms[0],
        tensors=[
            torch.stack(client_tensors) for client_tensors in zip(*(t.tensors for t in client_terms), strict=True)
        ],
    )


def _first_obstacle(calls: Sequence[FitCall] | Sequence[PredictCall]) -> str | None:
    """Returns the first known reason why one of the calls' networks (a hook, say) cannot be stacked, or None."""
    modules = {id(call.module): call.module for call in calls}.values()
    return next((reason for module in modules if (reason := stacking_obstacle(module))), None)


def cohort_training_obstacle(calls: Sequence[FitCall]) -> str | None:
    """Returns why networks cannot be trained together, by a trial that runs once per process; None if they can."""
    call, data = calls[0], calls[0].examples
    if reason := _first_obstacle(calls):
        return reason
    key = (architecture_hash(call.module), call.trained_names, call.task, data.device, data.input_tensor.dtype)
    if key not in _OBSTACLES:
        _OBSTACLES[key] = _try_training_together([calls[0], calls[-1]])
    if _OBSTACLES[key] is None and call.penalty is not None and call.penalty.takes_network:
        # The penalty may put the network into evaluation mode, in which it may compute something else.
        return _prediction_obstacle([PredictCall(c.module, c.state, [c.examples]) for c in (calls[0], calls[-1])])
    return _OBSTACLES[key]


_READS_NUMBERS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__,
}  # fmt: skip


@final
class _RefuseScalarReads(TorchFunctionMode):
    """Raises an error when a network reads a number from a tensor: a choice by it would be made for all clients."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READS_NUMBERS:
            raise CannotStackError("the network reads numbers out of tensors")
        return func(*args, **(kwargs or {}))


def _try_training_together(calls: Sequence[FitCall]) -> str | None:
    """Trains a minibatch of two clients together and alone; returns why results differ, or None."""
    module, trained = calls[0].module, calls[0].trained_names
    rows = [min(4, len(call.examples)) for call in calls]
    rows = [max(min(2, rows[0]) if has_batch_statistics(module) else 1, rows[0] - 1), rows[1]]
    batches = [
        call.examples.batch(torch.arange(number, device=call.examples.device))
        for call, number in zip(calls, rows, strict=True)
    ]
    loss = calls[0].task.loss
    before = {name: p.requires_grad for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    try:
        alone = []
        for call, (x, y) in zip(calls, batches, strict=True):
            copy_tensors_into_module(module, call.state)
            module.train()
            attributes, arranged = _plain_attribute_values(module), to_preferred_memory_format(module, x)
            with temporary_rng_seed(call.seed, x.device), _RefuseScalarReads():
                outputs = logits_of(module(arranged))
            if _plain_attribute_values(module) != attributes:
                return "the network changes attributes of its own as it runs"
            parameters = [parameter for name, parameter in module.named_parameters() if name in trained]
            grads = torch.autograd.grad(loss(outputs, y), parameters, allow_unused=True)
            buffers = [buffer.clone() for buffer in module.buffers()]
            alone.append([outputs.detach(), *(s for s in grads if s is not None), *buffers])
        module.train()
        together = _train_step_together(calls, batches, loss)
    except CannotStackError as reason:
        return str(reason)
    except Exception as error:  # whatever a user's network raises; alone it is reported where it is used
        return describe_exception(error)
    finally:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(before[name])
    fits = all(_are_close(expected, actual) for expected, actual in zip(alone, together, strict=True))
    return None if fits else "it computes something else for many at once"


def _train_step_together(
    calls: Sequence[FitCall], batches: Sequence[tuple[Tensor, Tensor]], loss: Callable[[Tensor, Tensor], Tensor]
) -> list[list[Tensor]]:
    """Computes outputs, gradients and buffers of both clients' minibatches in one filled-up batch."""
    module, trained = calls[0].module, calls[0].trained_names
    rows = [len(y) for _, y in batches]
    max_rows = max(rows)
    filled = torch.cat([torch.cat([x, x[:1].expand(max_rows - len(x), *x.shape[1:])]) for x, _ in batches])
    device = batches[0][1].device
    dropout_rngs, random = [DropoutMaskGenerator(call.seed, device) for call in calls], torch.random.get_rng_state()
    with StackedNetworks(module, [call.state for call in calls], trained, dropout_rngs) as networks:
        module.train()
        networks.valid_rows = ValidRows(rows, torch.tensor(rows, device=device)) if min(rows) < max_rows else None
        with _RefuseScalarReads():
            outputs = logits_of(networks(filled))
        if not torch.equal(random, torch.random.get_rng_state()):
            raise CannotStackError("the network draws random numbers of its own")
        parts = [outputs[i * max_rows : i * max_rows + number] for i, number in enumerate(rows)]
        total_loss = torch.stack([loss(part, y) for part, (_, y) in zip(parts, batches, strict=True)]).sum()
        grads = torch.autograd.grad(total_loss, [p for _, p in networks.named_parameters()], allow_unused=True)
        grad_by_name = dict(zip((name for name, _ in networks.named_parameters()), grads, strict=True))
    ordered = [grad_by_name[name] for name, _ in module.named_parameters() if name in trained]
    buffers = dict(networks.named_buffers())
    return [
        [part.detach(), *(s[i] for s in ordered if s is not None),
         *(buffers[name][i] if name in buffers else buffer for name, buffer in module.named_buffers())]
        for i, part in enumerate(parts)
    ]  # fmt: skip


def _plain_attribute_values(module: nn.Module) -> dict[tuple[str, str], Any]:
    plain = int | float | str | bool
    return {(n, k): v for n, part in module.named_modules() for k, v in part.__dict__.items() if isinstance(v, plain)}


def _are_close(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> bool:
    """Returns whether tensors are equal up to rounding, relative to the largest value in `expected`."""
    if len(expected) != len(actual):
        return False
    scale = max((float(t.abs().max()) for t in expected if t.numel() and t.is_floating_point()), default=0.0)
    small = 1e-8 if any(t.dtype == torch.float64 for t in expected) else 1e-4
    return all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=10 * small, atol=small * scale + 1e-30)
        for a, b in zip(expected, actual, strict=True)
    )


def group_calls_to_predict_together(calls: Sequence[PredictCall]) -> list[list[int]]:
    """Returns lists of positions in `calls`; the calls of one list can be computed together."""
    places_by_key: dict[Hashable, list[int]] = {}
    for place, call in enumerate(calls):
        forms = tuple((input_spec_of(data.x), data.device) for data in call.sets)
        places_by_key.setdefault((architecture_hash(call.module), forms), []).append(place)
    size = {key: sum(t.nbytes for t in calls[places[0]].state.values()) for key, places in places_by_key.items()}
    parts: list[list[int]] = []
    for key, places in places_by_key.items():
        max_size = max(1, min(MAX_COHORT_SIZE, _MAX_STACK_BYTES // max(size[key], 1)))
        parts += [places[i : i + max_size] for i in range(0, len(places), max_size)]
    return parts


@torch.no_grad()
def predict_cohort(calls: Sequence[PredictCall]) -> list[list[Tensor]]:
    """Computes outputs for one group from `group_calls_to_predict_together`: for each call, one tensor per set of examples.

    They equal those of `predict` up to rounding. If all networks have the same weights, the weights are not stacked.

    Raises:
        CannotStackError: these networks cannot be computed together.
    """
    if reason := _first_obstacle(calls) or _prediction_obstacle(calls):
        raise CannotStackError(reason)
    same_weights = all(torch.equal(t, calls[0].state[n]) for call in calls[1:] for n, t in call.state.items())
    run = _predict_with_shared_weights if same_weights else _predict_with_stacked_weights
    by_set = [run(calls, [call.sets[k] for call in calls]) for k in range(len(calls[0].sets))]
    return [list(client_outputs) for client_outputs in zip(*by_set, strict=True)]


def _prediction_obstacle(calls: Sequence[PredictCall]) -> str | None:
    key = architecture_hash(calls[0].module), calls[0].sets[0].device
    if key not in _OBSTACLES:
        _OBSTACLES[key] = _try_predicting_together([calls[0], calls[-1]])
    return _OBSTACLES[key]


def _predict_with_shared_weights(calls: Sequence[PredictCall], sets: Sequence[Examples]) -> list[Tensor]:
    module = calls[0].module
    copy_tensors_into_module(module, calls[0].state)
    module.eval()
    results: list[Tensor] = []
    batches: list[Tensor] = []
    for data in sets:
        batches.append(data.batch(torch.arange(len(data), device=data.device))[0])
        if sum(map(len, batches)) >= _ROWS_AT_ONCE or len(results) + len(batches) == len(sets):
            parts = torch.split(torch.cat(batches), _ROWS_AT_ONCE)
            outputs = torch.cat([logits_of(module(to_preferred_memory_format(module, x))).float().cpu() for x in parts])
            results += torch.split(outputs, [len(part) for part in batches])
            batches = []
    return results


def _predict_with_stacked_weights(calls: Sequence[PredictCall], sets: Sequence[Examples]) -> list[Tensor]:
    order = sorted(range(len(sets)), key=lambda place: -len(sets[place]))
    longest = len(sets[order[0]])
    size = min(longest, max(8, _ROWS_AT_ONCE // len(calls)))
    parts: list[list[Tensor]] = [[] for _ in sets]
    with StackedNetworks(calls[0].module, [calls[place].state for place in order]) as networks:
        networks.eval()
        for start in range(0, longest, size):
            active = [place for place in order if len(sets[place]) > start]
            networks.keep_first_clients(len(active))
            rows = [min(size, len(sets[place]) - start) for place in active]
            xs = []
            for place, number in zip(active, rows, strict=True):
                x = sets[place].batch(torch.arange(start, start + number, device=sets[place].device))[0]
                xs += [x, x[:1].expand(max(rows) - number, *x.shape[1:])]
            outputs = logits_of(networks(torch.cat(xs))).float().cpu()
            for place, number, client_outputs in zip(active, rows, torch.split(outputs, max(rows)), strict=True):
                parts[place].append(client_outputs[:number])
    return [torch.cat(client_outputs) for client_outputs in parts]


@torch.no_grad()
def _try_predicting_together(calls: Sequence[PredictCall]) -> str | None:
    """Computes outputs of two clients' networks together and alone, and returns why they differ; None if they agree."""
    module = calls[0].module
    few_examples = [[data.select(torch.arange(min(k + 1, len(data)), device=data.device)) for data in call.sets]
           for k, call in enumerate(calls)]  # fmt: skip
    small_calls = [PredictCall(module, call.state, sets) for call, sets in zip(calls, few_examples, strict=True)]
    random = torch.random.get_rng_state()
    try:
        alone = []
        for call in small_calls:
            copy_tensors_into_module(module, call.state)
            attributes = _plain_attribute_values(module)
            with _RefuseScalarReads():
                alone.append([predict(module, data) for data in call.sets])
        together = [
            _predict_with_stacked_weights(small_calls, [call.sets[k] for call in small_calls])
            for k in range(len(few_examples[0]))
        ]
    except CannotStackError as reason:
        return str(reason)
    except Exception as error:
        return describe_exception(error)
    if _plain_attribute_values(module) != attributes or not torch.equal(random, torch.random.get_rng_state()):
        return "the network changes attributes of its own, or draws random numbers, as it runs"
    fits = all(_are_close(outputs, [of_set[i] for of_set in together]) for i, outputs in enumerate(alone))
    return None if fits else "it computes something else for many at once"
