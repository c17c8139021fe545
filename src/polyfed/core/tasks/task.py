"""Defines what a prediction task is: which targets are valid, the loss, what a network's outputs mean, and how they are
scored.

A task is a frozen dataclass on `Task`; its fields are its options. The tasks of polyfed are in `polyfed.tasks`, one file
each, and a user's own needs no registration: give clients an object of it (`Client(task=Counts())`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.simple_model import ConstantModel, SimpleModel
from polyfed.core.examples.pytree import Inputs
from polyfed.core.io.text.number_format import format_batch_shape
from polyfed.core.io.values.validation import check_field_types
from polyfed.core.tasks.task_registry import LOADED_TASK_CLASSES, registered_task_classes, task_class_path

Loss = Callable[[Tensor, Tensor], Tensor]
TaskSpec = str | dict[str, Any]
"""A task as files and messages name it: its name, or its name and those options that are not the default."""
DEFAULT_TASK = "classification"


@dataclass(frozen=True)
class Task(ABC):
    """Defines how targets are checked and trained on, and outputs become predictions and scores.

    Only `loss` and `metrics` must be defined. A task equals its name if its options are the default ones, so that
    `client.task == "survival"` works.

    A whole task, for counts whose logarithm a network predicts:

    >>> import torch
    >>> @dataclass(frozen=True)
    ... class Counts(Task):
    ...     def loss(self, outputs, targets): return (outputs.exp() - targets * outputs).mean()
    ...     @property
    ...     def metrics(self):
    ...         return (Metric("count_error", lambda outputs, targets: float((outputs.exp() - targets).abs().mean()),
    ...                        higher_is_better=False),)
    >>> float(Counts().loss(torch.zeros(2, 1), torch.ones(2, 1))), Counts().default_metric.name
    (1.0, 'count_error')
    """

    name: ClassVar[str] = ""
    """The name in files, messages and tables; that of the class, in lower case, if the task sets none."""

    one_class_per_example: ClassVar[bool] = False
    """Whether targets are class indices of shape (n,), as methods with the requirement "classification" need them."""

    outputs_are_classes: ClassVar[bool] = False
    """Whether a network has one output for each class, so that a client that lacks the last classes needs as many."""

    has_output_at_each_place: ClassVar[bool] = False
    """Whether a network has outputs at each place of its input, such as each pixel; networks that methods bring have not."""

    loss_may_vanish: ClassVar[bool] = False
    """Whether the loss of a minibatch can be 0 whatever the network predicts, so that no method may divide by it."""

    output_axis: ClassVar[int] = 1
    """The axis of a network's outputs that counts classes, labels or targets; the batch is axis 0."""

    standardises_targets: ClassVar[bool] = False
    """Whether targets of a table are scaled by mean and standard deviation of the training rows."""

    has_target_moments: ClassVar[bool] = False
    """Whether tables of the data show the mean and standard deviation of targets, in place of counts."""

    counts_title: ClassVar[str] = "by client"
    """The end of the title of the table of the clients' data, after "training examples"."""

    rarest_limits_score: ClassVar[bool] = False
    """Whether few examples of one class (`rarest_class`) make a score uncertain, however many others there are."""

    limiting_examples: ClassVar[str] = "test examples"
    """The word for those whose number limits a score: "too few test examples for an interval"."""

    counts_each_example_once: ClassVar[bool] = False
    """Whether `class_counts` divides the examples, so that the page shows the counts as parts of a whole."""

    target_columns: ClassVar[tuple[str, ...]] = ()
    """The roles of the columns that targets have in a table, in their order, where the task fixes them."""

    target_word: ClassVar[str] = "target"
    """The word for one column of the outputs: "class", "label" or "target"."""

    outputs_meaning: ClassVar[str] = "the outputs of the task."
    """The sentence about a network's outputs in the model card and signature of an exported network."""

    no_curves_reason: ClassVar[str] = "ROC curves and counts are of classes; these networks predict something else."
    """The sentence that the page shows in place of curves, where the task has no yes/no questions (`yes_no_columns`)."""

    page_sections: ClassVar[tuple[str, ...]] = ()
    """Names of further sections of the page that suit the task, of `polyfed.report.page`."""

    def __post_init__(self) -> None:
        check_field_types(self)

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()
        # `dataclass` would replace them by methods that know no names of tasks.
        cls.__eq__, cls.__hash__ = Task.__eq__, Task.__hash__  # type: ignore[method-assign]
        LOADED_TASK_CLASSES[task_class_path(cls)] = cls

    # -- identity -------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> TaskSpec:
        """Returns the task for files and messages: its name, or a dict of name and options (see `get_task`)."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        changed = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        name = self.name if registered_task_classes().get(self.name) is type(self) else task_class_path(type(self))
        return {"name": name, **changed} if changed else name

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.spec == other
        return type(self) is type(other) and all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self))

    def __hash__(self) -> int:
        return hash(self.spec if isinstance(self.spec, str) else repr(self.spec))

    def __str__(self) -> str:
        spec = self.spec
        if isinstance(spec, str):
            return spec
        return f"{spec['name']}({', '.join(f'{key}={value}' for key, value in spec.items() if key != 'name')})"

    # -- targets --------------------------------------------------------------------------------------------------

    @property
    def makes_targets(self) -> bool:
        """Returns whether the user need not give targets, since `complete_targets` makes them; False by default."""
        return False

    def complete_targets(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """Returns the targets with what the task adds to them from the inputs; by default unchanged.

        Args:
            inputs: as stored, before any transform; n rows.
            targets: of the same rows; zeros of shape (n,) where the user gave none (`makes_targets`). They may be complete
                already.

        Raises:
            UserError: the inputs do not suit the task; the sentence does not name the client.
        """
        return targets

    def prepare_targets(self, targets: Tensor) -> Tensor:
        """Returns the targets in the type and shape of the loss; the same object if they are so.

        They may be wrong, since `check_targets` comes after it. By default (n,) becomes (n, 1), and integers floats.
        """
        targets = targets.unsqueeze(1) if targets.dim() == 1 else targets
        return targets if targets.is_floating_point() else targets.float()

    def check_targets(self, targets: Tensor, name: str, num_outputs: int | None = None) -> None:
        """Raises a `UserError` if targets (after `prepare_targets`) have a wrong type, shape or value for the task.

        Args:
            targets: of some examples, finite, shape (n, ...) with n of at least 1.
            name: whose targets they are, the beginning of errors: "client 'north': train".
            num_outputs: the outputs that the data set names, if the targets belong to one; None otherwise.

        Raises:
            UserError: the message has the row where a target is wrong, and what to give. By default only targets
                of a data set are checked, which need a column for each output.
        """
        if num_outputs is not None and (targets.dim() != 2 or targets.shape[1] != num_outputs):
            raise UserError(
                f"{name} targets have type {targets.dtype} and shape {tuple(targets.shape)}; {num_outputs} targets need "
                f"floats of shape (num, {num_outputs})"
            )

    def num_outputs(self, targets: Tensor, names: Sequence[str] = ()) -> int:
        """Returns the number of outputs that a network needs: the number of `names` if given, else as the targets show.

        Args:
            targets: of a client's examples.
            names: of classes, labels or targets, where the data set has them.
        """
        return len(names) or (1 if targets.dim() == 1 else targets.shape[1])

    def check_outputs(self, shape: tuple[int, ...], targets: Tensor, name: str) -> None:
        """Raises a `UserError` if outputs do not fit the targets; by default, if shapes differ.

        Args:
            shape: of the outputs for one example, without the batch.
            targets: of some examples.
            name: as in `check_targets`.
        """
        if shape != tuple(targets.shape[1:]):
            raise UserError(f"{name}: the network's output is {format_batch_shape(shape)}, the labels are "
                            f"{tuple(targets.shape)}; they must have the same form")  # fmt: skip

    def target_warning(self, train: Tensor, test: Tensor) -> str | None:
        """Returns what a client's valid targets lack, after "client 'north' has"; None if nothing.

        Args:
            train, test: its training and test targets.
        """
        return None

    def check_table_column(self, values: NDArray[np.float64], name: str) -> None:  # noqa: B027  # most take any number
        """Raises a `UserError` if a number in a target column does not suit; by default all do.

        Raises:
            UserError: a number does not suit the task; the message has the column's name and the rows.
        """

    # -- loss -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of a minibatch as a scalar tensor, which need not be a mean over examples."""

    def elementwise_loss(self, outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor | None:
        """Returns the losses of which `loss` is the mean, (n,) or (n, ...); None if it is no mean.

        With them the networks of many clients can be trained as one.
        """
        return None

    def training_loss(self, targets: Tensor, class_weights: Any = None, label_smoothing: float = 0.0) -> Loss:
        """Returns the function (outputs, targets) -> loss that training minimises.

        Args:
            targets, class_weights, label_smoothing: of the training examples; the others as in `LocalTraining`.

        Raises:
            UserError: weights of classes, or label smoothing, and the task has no classes.
        """
        if class_weights is not None:
            raise UserError(f"class_weights={class_weights!r}: the task is {self}, which has no classes; leave it out")
        if label_smoothing:
            raise UserError(f"label_smoothing={label_smoothing!r} is for classes, and the task is {self}; leave it out")
        return self.loss

    def minibatch_weight(self, targets: Tensor, class_weights: Any = None) -> Callable[[Tensor], float]:
        """Returns (targets) -> a minibatch's weight in the mean loss; by default its number of examples.

        The arguments are those of `training_loss`.
        """
        return len

    def trim_minibatch(self, inputs: Inputs, targets: Tensor) -> tuple[Inputs, Tensor]:
        """Returns a training minibatch without columns that are padding in all examples; here unchanged."""
        return inputs, targets

    def output_distance(self, teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
        """Returns the distance of a student's outputs from a teacher's, which distillation minimises.

        By default the squared difference over 2·temperature², averaged over all outputs.
        """
        return (teacher - student).square().mean() / (2 * temperature**2)

    # -- what outputs mean ----------------------------------------------------------------------------------------

    def prediction_network(self, network: nn.Module) -> nn.Module:
        """Returns the module that computes outputs at evaluation and prediction; by default the network itself."""
        return network

    def stored_outputs(self, outputs: Tensor, targets: Tensor, metrics: Sequence[Metric]) -> Tensor:
        """Returns what a run keeps of a network's outputs, float32 of shape (n, ...); by default the outputs.

        `metrics` are computed from it again, with `stored_targets`, for intervals and pages.
        """
        return outputs

    def stored_targets(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Returns what a run keeps of the targets beside the stored outputs; by default the targets."""
        return targets

    def to_predictions(self, outputs: Tensor) -> NDArray[np.float64]:
        """Converts a network's outputs to numbers for people, such as probabilities: a float64 array.

        By default the outputs themselves.
        """
        return np.asarray(outputs.double().numpy())

    def prediction_columns(self, outputs: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Returns `{column name: one value per row}`, the columns that the command `polyfed predict` writes.

        Args:
            outputs: of a network, for targets in their own unit, shape (n, outputs).
            names: of classes, labels or targets.
        """
        predictions = self.to_predictions(outputs)
        return {name: predictions[:, i].tolist() for i, name in enumerate(names)}

    def output_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns the names of a network's outputs; by default `names`, those of classes, labels or targets."""
        return tuple(names)

    def yes_no_columns(self, num_outputs: int) -> tuple[int, ...]:
        """Returns the positions of outputs that each answer a yes/no question, for ROC and calibration curves."""
        return ()

    # -- scores ---------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """Returns the metrics that can score the task; the first is the default."""

    @property
    def default_metric(self) -> Metric:
        """Returns the metric by which models and methods are compared if the user names none."""
        return self.metrics[0]

    @property
    def comparison_metrics(self) -> tuple[Metric, ...]:
        """Returns the metrics that a comparison of methods shows if the user names none; the first decides."""
        return (self.default_metric,)

    def find_metric(self, name: str) -> Metric | None:
        """Returns the task's metric with this name; None if the task has none."""
        return next((metric for metric in self.metrics if metric.name == name), None)

    @property
    def unavailable_metrics(self) -> Mapping[str, str]:
        """Returns `{metric: sentence}`: which options the task needs for each metric that it lacks."""
        return {}

    # -- splits and counts ----------------------------------------------------------------------------------------

    def strata(self, targets: Tensor) -> NDArray[Any]:
        """Returns a whole number per example (a class, say), (n,), which splits keep in proportion.

        An array of two dimensions means that there is none.

        An array of two dimensions, as by default, means that there are no strata.
        """
        values: NDArray[Any] = targets.cpu().reshape(len(targets), -1).numpy()
        return values

    def class_counts(self, targets: Tensor, num_classes: int) -> tuple[int, ...] | None:
        """Returns the number of examples of each class or other value of `strata`; None if there are none."""
        return None

    def count_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns the names of the entries of `class_counts`; by default `names`, those of classes, labels or targets."""
        return tuple(names)

    def rarest_class(self, targets: Tensor) -> tuple[int, int] | None:
        """Returns (examples, index) of the rarest class or value of `strata`; None if there is none.

        A class without examples does not count, unless there is only one: then (0, that class).
        """
        return None

    def describe_rarest(self, number: int, class_name: str, num_classes: int) -> str:
        """Returns words for the number of examples of the rarest class, such as "12 of the rarer class (ill)"."""
        return f"{number} of the rarer kind"

    # -- models without a network ---------------------------------------------------------------------------------

    def constant_model(self) -> ConstantModel | None:
        """Returns a model that ignores the input and is fitted to a client's data; None if there is none."""
        return None

    def simple_models(self) -> tuple[SimpleModel, ...]:
        """Returns the models without a network (such as linear ones) that a client can fit to its own rows."""
        return ()

    def simple_models_obstacle(self, num_outputs: int) -> str | None:
        """Returns a sentence that says why `simple_models` are not fitted for this number of outputs; None if they are."""
        return None
