"""Whether tables of several clients can be trained on together: found before round 1, and said with the names of columns.
Categories, classes and values are never shown.

A table is compared by its columns in their order, their categories, where cells may be empty, and its classes. Networks that
are averaged, and networks that read the same public examples, give one meaning to each input and so need all of it.
What other methods share, such as means of classes or logits, needs the same classes alone.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.core.examples import ByPart, Examples
from polyfed.data.common import merged, unsettled
from polyfed.data.features import Prepared

CURE = "agree on one schema and give it at each site: pf.data.table(..., schema=FILE), see docs/tabular.md"
_ONE_FORM = frozenset({"one_architecture", "one_data_spec", "one_input_spec", "one_family", "public_data"})
_LONGEST, _SHOWN = 60, 5  # characters of a name, names in a sentence


def shares_inputs(needs: frozenset[str], discloses: frozenset[str]) -> bool:
    """Whether networks of different clients read inputs of one meaning: networks that are averaged, a network that all train
    beside their own (its weights travel, and the clients' own may be of any architecture), or readers of public examples.

    Args:
        needs: `Algorithm.requires`.
        discloses: `Algorithm.discloses`.

    >>> from polyfed.algorithms import FML, FedAvg, FedProto, Local
    >>> [shares_inputs(method.requires, method.discloses) for method in (FedAvg, FML, FedProto, Local)]
    [True, True, False, False]
    """
    beside = "model" in needs and "weights" in discloses and "one_representation" not in needs
    return beside or bool(needs & _ONE_FORM)


def tables_of(examples: Examples) -> dict[str, Prepared]:
    """The preprocessing of a table by the part of the inputs that it is; the name of a lone one is empty."""
    transform = examples.transform
    parts = transform.of if isinstance(transform, ByPart) else {"": transform}
    return {name: one for name, one in parts.items() if isinstance(one, Prepared)}


def columns_of(examples: Examples) -> dict[str, tuple[tuple[str, ...] | None, bool]]:
    """Categories, and whether cells may be empty, by column; columns of a part of the inputs are called PART/COLUMN."""
    return {
        f"{part}/{column.name}" if part else column.name: (column.categories, column.missing)
        for part, table in tables_of(examples).items()
        for column in table.columns
    }


def classes_of(examples: Examples) -> tuple[str, ...]:
    """Names of the classes, labels or targets of a table; none where there is no table."""
    return next((table.classes for table in tables_of(examples).values()), ())


def same_columns(one: Examples, other: Examples) -> bool:
    """Whether two sets of examples are of tables of the same columns and classes in one order, or both of none."""
    return _whole(one) == _whole(other)


def check_tables(clients: Sequence[Client], algorithm: Algorithm[Any, Any]) -> None:
    """Raises a `UserError` unless the clients' tables have in common what the method needs; see the module.

    Tables that have yet to agree on one preprocessing need the same columns: their categories and classes become common.
    """
    for client in clients:
        _check_sets(client)
    tables = {client.id: client.train for client in clients if tables_of(client.train)}
    if not tables:
        return
    whole = {i: table for i, train in tables.items() for part, table in tables_of(train).items() if not part}
    if unsettled(list(whole.values())):
        merged(whole)
        return
    if not shares_inputs(algorithm.requires, algorithm.discloses):
        _compare({i: classes_of(train) for i, train in tables.items()}, tables, classes_alone=True)
        return
    if without := [client.id for client in clients if client.id not in tables]:
        raise UserError(f"client {without[0]!r} has no table, as {next(iter(tables))!r} has; {CURE}")
    _compare({i: _whole(train) for i, train in tables.items()}, tables)
    scopes = {i: tuple(table.scope for table in tables_of(train).values()) for i, train in tables.items()}
    if pair := odd_pair(scopes):
        raise UserError(
            f"the numbers of client {pair[1]!r} are scaled otherwise than those of {pair[0]!r}: preprocess='federated' "
            "scales by the rows of all sites, preprocess='site' by each site's own; give one of them to all tables"
        )


def check_public_table(client: Client, public: Examples) -> None:
    """Raises a `UserError` unless a client's inputs and public examples are of tables of the same columns, scaled alike; or
    both of no table."""
    ours, theirs = tables_of(client.train), tables_of(public)
    if ours.keys() != theirs.keys():
        which = "the public examples (public=...) are" if theirs else f"the inputs of client {client.id!r} are"
        raise UserError(f"{which} rows of a table, and the others are not; {_PUBLIC}")
    one, other = ({"columns": columns_of(part)} for part in (client.train, public))
    if list(one["columns"].items()) != list(other["columns"].items()):
        raise UserError(
            f"the public examples (public=...) are of another table than client {client.id!r}: "
            f"{'; '.join(differences(one, other))}; {_PUBLIC}"
        )
    if any((ours[part].mean, ours[part].spread) != (theirs[part].mean, theirs[part].spread) for part in ours):
        raise UserError(
            f"the numbers of the public examples (public=...) are scaled otherwise than the inputs of client {client.id!r}; "
            f"{_PUBLIC}"
        )


_PUBLIC = "take both from one table: pf.data.table(..., preprocess='federated', public_fraction=...)"


def odd_pair(marks: Mapping[str, Hashable]) -> tuple[str, str] | None:
    """Somebody whose mark most have, and the first whose mark is another; None where all have the same.

    >>> odd_pair({"a": 1, "b": 2, "c": 2}), odd_pair({"a": 1})
    (('b', 'a'), None)
    """
    most = Counter(marks.values()).most_common(1)[0][0]
    other = next((i for i, mark in marks.items() if mark != most), None)
    return None if other is None else (next(i for i, mark in marks.items() if mark == most), other)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What tells one table from another, each in a few words.

    Args:
        one, other: `columns`, by name a pair of categories (or their hash) and whether cells may be empty; `classes`.

    >>> north = {"columns": {"age": (None, False), "sex": (("f", "m"), False)}, "classes": ("no", "yes")}
    >>> differences(north, {**north, "columns": {"age": (None, True), "lab": (None, False)}})
    ["it has no column 'sex', and 'lab' more", "only one of the two has empty cells in 'age'"]
    """
    ours, theirs, found = one["columns"], other["columns"], []
    less, more = [n for n in ours if n not in theirs], [n for n in theirs if n not in ours]
    if less or more:
        parts = [f"it has no column {_listed(less)}"] if less else []
        parts += [f"{_listed(more)} more" if less else f"it has {_listed(more)} more"] if more else []
        found.append(", and ".join(parts))
    both = [name for name in ours if name in theirs]
    if odd := [name for name in both if ours[name][0] != theirs[name][0]]:
        found.append(f"it has other categories in {_listed(odd)}")
    if odd := [name for name in both if ours[name][1] != theirs[name][1]]:
        found.append(f"only one of the two has empty cells in {_listed(odd)}")
    if one.get("classes") != other.get("classes"):
        found.append("its classes are others")
    return found or ["its columns are in another order"]


def _whole(examples: Examples) -> Hashable:
    return tuple(columns_of(examples).items()), classes_of(examples)


def _check_sets(client: Client) -> None:
    """What trains a client and what tests it are of one table."""
    for name, part in (("test", client.test), ("val", client.val), ("global_test", client.global_test)):
        if part is None or same_columns(client.train, part):
            continue
        if not tables_of(client.train) or not tables_of(part):
            continue  # prepared by hand, and checked by the form of inputs
        one, other = (
            {"columns": columns_of(examples), "classes": classes_of(examples)} for examples in (client.train, part)
        )
        raise UserError(
            f"client {client.id!r}: its {name} examples are of another table than its training examples: "
            f"{'; '.join(differences(one, other))}; {CURE}"
        )


def _compare(marks: Mapping[str, Hashable], tables: Mapping[str, Examples], *, classes_alone: bool = False) -> None:
    if (pair := odd_pair(marks)) is None:
        return
    if classes_alone:
        found = ["its classes are others, or in another order"]
    else:
        one, other = ({"columns": columns_of(tables[i]), "classes": classes_of(tables[i])} for i in pair)
        found = differences(one, other)
    raise UserError(f"client {pair[1]!r} has another table than {pair[0]!r}: {'; '.join(found)}; {CURE}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name[:_LONGEST]) for name in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
