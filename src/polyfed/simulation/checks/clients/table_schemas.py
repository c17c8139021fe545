"""Checks before round 1 that the clients' tables have the same columns and classes, if a method trains them together
and so needs that; errors name the columns that differ.

Categories, classes and values are never shown. Tables are compared by their columns in order, their categories, where
cells may be empty, and their classes. All of this must agree where networks are averaged or read the same public
examples, since each input then needs one meaning. For other methods, which share class means or logits, say, only
classes must agree.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples, PartwiseTransform
from polyfed.core.io.text.number_format import join_first_and_count_rest
from polyfed.data.tabular.harmonise import merge_table_definitions, needs_common_preprocessing
from polyfed.data.tabular.preprocessing import TablePreprocessor

SCHEMA_ADVICE = (
    "agree on one schema and give it at each site: pf.data.split_table(..., schema=FILE), "
    "see docs/tabular/several_files.md"
)
FRAME_ADVICE = "give frame[NAMES] with the same names in one order"
_ONE_FORM = frozenset({"one_architecture", "one_data_spec", "one_input_spec", "one_family", "public_data"})
_LONGEST, _SHOWN = 60, 5  # characters of a name, names in a sentence


def needs_common_inputs(requirements: frozenset[str], discloses: frozenset[str]) -> bool:
    """Returns True if a method needs every column of the inputs to have the same meaning at all clients.

    So it is if networks are averaged, if all clients train a common network in addition to their own (its weights are sent,
    while the clients' own may be of any architecture), or if they read public examples.

    Args:
        requirements: `Algorithm.requires`.
        discloses: `Algorithm.discloses`.

    >>> from polyfed.algorithms import FML, FedAvg, FedProto, Local
    >>> [needs_common_inputs(method.requires, method.discloses) for method in (FedAvg, FML, FedProto, Local)]
    [True, True, False, False]
    """
    trains_shared_model = (
        "model" in requirements and "weights" in discloses and "one_representation" not in requirements
    )
    return trains_shared_model or bool(requirements & _ONE_FORM)


def table_preprocessors_by_part(examples: Examples) -> dict[str, TablePreprocessor]:
    """Returns `{part: table preprocessing}` for inputs that are tables; a single part is named ""."""
    transform = examples.transform
    parts = transform.transforms if isinstance(transform, PartwiseTransform) else {"": transform}
    return {
        name: part_transform for name, part_transform in parts.items() if isinstance(part_transform, TablePreprocessor)
    }


@final
class ColumnDefinition(NamedTuple):
    """Holds the categories of one column of a table (None for a column of numbers), and whether its cells may be empty."""

    categories: tuple[str, ...] | None
    may_be_empty: bool


def column_definitions_by_name(examples: Examples) -> dict[str, ColumnDefinition]:
    """Returns `{column: definition}` of the examples' tables or frames; of several parts PART/COLUMN."""
    return dict.fromkeys(examples.features or (), ColumnDefinition(None, False)) | {
        f"{part}/{column.name}" if part else column.name: ColumnDefinition(column.categories, column.missing)
        for part, table in table_preprocessors_by_part(examples).items()
        for column in table.columns
    }


def table_class_names(examples: Examples) -> tuple[str, ...]:
    """Returns the names of a table's classes, labels or targets; empty if the examples are of no table."""
    return next((table.classes for table in table_preprocessors_by_part(examples).values()), ())


def have_same_columns(first: Examples, second: Examples) -> bool:
    """Returns whether two sets have the same columns and classes in the same order, or neither is a table's.

    Names of a frame's columns are compared where both sets have them.
    """
    if not (first.features and second.features):
        first, second = replace(first, features=None), replace(second, features=None)
    return _schema_key(first) == _schema_key(second)


def check_table_schemas(clients: Sequence[Client], algorithm: Algorithm[Any, Any]) -> None:
    """Raises a `UserError` if tables differ in columns or classes that the method needs alike.

    Tables that have yet to agree on one preprocessing need the same columns only: categories and classes are merged.
    """
    for client in clients:
        _check_sets_of_client(client)
    tables = {client.id: client.train for client in clients if table_preprocessors_by_part(client.train)}
    if not tables:
        frames = {client.id: client.train for client in clients if client.train.features}
        if frames and needs_common_inputs(algorithm.requires, algorithm.discloses):
            _check_same_schema({i: train.features for i, train in frames.items()}, frames)
        return
    table_by_client = {
        i: table
        for i, train in tables.items()
        for part, table in table_preprocessors_by_part(train).items()
        if not part
    }
    if needs_common_preprocessing(list(table_by_client.values())):
        merge_table_definitions(table_by_client)
        return
    if not needs_common_inputs(algorithm.requires, algorithm.discloses):
        _check_same_schema({i: table_class_names(train) for i, train in tables.items()}, tables, classes_only=True)
        return
    if ids_without_table := [client.id for client in clients if client.id not in tables]:
        raise UserError(f"client {ids_without_table[0]!r} has no table, as {next(iter(tables))!r} has; {SCHEMA_ADVICE}")
    _check_same_schema({i: _schema_key(train) for i, train in tables.items()}, tables)
    scopes = {
        i: tuple(table.scope for table in table_preprocessors_by_part(train).values()) for i, train in tables.items()
    }
    if pair := find_deviating_pair(scopes):
        raise UserError(
            f"the numbers of client {pair.deviating!r} are scaled differently from those of {pair.typical!r}: "
            "preprocess='federated' scales by the rows of all sites, preprocess='site' "
            "by each site's own; give one of them to all tables"
        )


def check_public_table(client: Client, public: Examples) -> None:
    """Raises a `UserError` unless client and public examples have the same columns and scaling, or no table."""
    ours, theirs = table_preprocessors_by_part(client.train), table_preprocessors_by_part(public)
    if ours.keys() != theirs.keys():
        subject = "the public examples (public=...) are" if theirs else f"the inputs of client {client.id!r} are"
        raise UserError(f"{subject} rows of a table, and the others are not; {_PUBLIC}")
    client_schema, public_schema = ({"columns": column_definitions_by_name(part)} for part in (client.train, public))
    both_named = all(schema["columns"] for schema in (client_schema, public_schema))
    if both_named and list(client_schema["columns"].items()) != list(public_schema["columns"].items()):
        raise UserError(
            f"the public examples (public=...) are of another table than client {client.id!r}: "
            f"{'; '.join(describe_table_differences(client_schema, public_schema))}; {_PUBLIC}"
        )
    if any((ours[part].mean, ours[part].spread) != (theirs[part].mean, theirs[part].spread) for part in ours):
        raise UserError(
            "the numbers of the public examples (public=...) are scaled differently from the inputs of client "
            f"{client.id!r}; {_PUBLIC}"
        )


_PUBLIC = "take both from one table: pf.data.split_table(..., preprocess='federated', public_fraction=...)"


@final
class DeviatingPair(NamedTuple):
    """Holds the ids of two clients: one with the value that most clients have, and one with a different value."""

    typical: str
    deviating: str


def find_deviating_pair(value_by_client: Mapping[str, Hashable]) -> DeviatingPair | None:
    """Returns two clients of different values, first the more frequent; None if all are equal.

    >>> find_deviating_pair({"a": 1, "b": 2, "c": 2}), find_deviating_pair({"a": 1})
    (DeviatingPair(typical='b', deviating='a'), None)
    """
    majority_mark = Counter(value_by_client.values()).most_common(1)[0][0]
    deviant = next((i for i, mark in value_by_client.items() if mark != majority_mark), None)
    if deviant is None:
        return None
    return DeviatingPair(next(i for i, mark in value_by_client.items() if mark == majority_mark), deviant)


def describe_table_differences(reference: Mapping[str, Any], deviant: Mapping[str, Any]) -> list[str]:
    """Returns short phrases on the differences of two tables' columns and classes.

    Args:
        reference, deviant: `columns`, name -> (categories or their hash, whether cells may be empty); and `classes`.

    >>> north = {"columns": {"age": (None, False), "sex": (("f", "m"), False)}, "classes": ("no", "yes")}
    >>> describe_table_differences(north, {**north, "columns": {"age": (None, True), "lab": (None, False)}})
    ["it has no column 'sex', and 'lab' more", "only one of the two has empty cells in 'age'"]
    """
    ours, theirs, sentences = reference["columns"], deviant["columns"], []
    missing_names, extra_names = [n for n in ours if n not in theirs], [n for n in theirs if n not in ours]
    if missing_names or extra_names:
        parts = [f"it has no column {_format_names(missing_names)}"] if missing_names else []
        parts += (
            [f"{_format_names(extra_names)} more" if missing_names else f"it has {_format_names(extra_names)} more"]
            if extra_names
            else []
        )
        sentences.append(", and ".join(parts))
    common_names = [name for name in ours if name in theirs]
    if differing_names := [name for name in common_names if ours[name][0] != theirs[name][0]]:
        sentences.append(f"it has other categories in {_format_names(differing_names)}")
    if differing_names := [name for name in common_names if ours[name][1] != theirs[name][1]]:
        sentences.append(f"only one of the two has empty cells in {_format_names(differing_names)}")
    if reference.get("classes") != deviant.get("classes"):
        sentences.append("its classes are others")
    if sentences:
        return sentences
    differing = ((n, *names) for n, names in enumerate(zip(ours, theirs, strict=True), 1) if names[0] != names[1])
    number, name, other_name = next(differing, (0, "", ""))
    place = f", first at column {number}: {_format_names([other_name])} in place of {_format_names([name])}"
    return [f"its columns are in another order{place if number else ''}"]


def _schema_of(examples: Examples) -> dict[str, Any]:
    return {"columns": column_definitions_by_name(examples), "classes": table_class_names(examples)}


def _schema_key(examples: Examples) -> Hashable:
    return tuple(column_definitions_by_name(examples).items()), table_class_names(examples)


def _check_sets_of_client(client: Client) -> None:
    """Checks that a client's training, test and validation tables have the same columns and classes."""
    for name, part in (("test", client.test), ("val", client.val), ("global_test", client.global_test)):
        if part is None or have_same_columns(client.train, part):
            continue
        if not column_definitions_by_name(client.train) or not column_definitions_by_name(part):
            continue  # prepared by hand: only the form of inputs is checked
        differences = describe_table_differences(_schema_of(client.train), _schema_of(part))
        raise UserError(
            f"client {client.id!r}: its {name} examples are of another table than its training examples: "
            f"{'; '.join(differences)}; {_advice_on_columns(client.train)}"
        )


def _check_same_schema(
    marks: Mapping[str, Hashable], tables: Mapping[str, Examples], *, classes_only: bool = False
) -> None:
    """Raises a `UserError` with the difference unless all clients have the same mark.

    A mark is a value that stands for the columns and classes of a table.
    """
    if (pair := find_deviating_pair(marks)) is None:
        return
    if classes_only:
        sentences = ["its classes are others, or in another order"]
    else:
        sentences = describe_table_differences(*(_schema_of(tables[i]) for i in pair))
    raise UserError(
        f"client {pair.deviating!r} has another table than {pair.typical!r}: {'; '.join(sentences)}; "
        f"{_advice_on_columns(tables[pair.deviating])}"
    )


def _advice_on_columns(examples: Examples) -> str:
    return FRAME_ADVICE if examples.features else SCHEMA_ADVICE


def _format_names(names: Sequence[str]) -> str:
    return join_first_and_count_rest([repr(name[:_LONGEST]) for name in names], _SHOWN)
