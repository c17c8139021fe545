"""Builds clients from a table in memory or in a file, for use from Python code."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.examples.examples import Examples
from polyfed.core.io.text.number_format import join_first_and_count_rest
from polyfed.core.io.values.keyword_names import suggest_keywords
from polyfed.core.seeds import derive_seed
from polyfed.core.tasks.task import Loss
from polyfed.data.clients import ClientData, make_clients
from polyfed.data.look.site_statistics import warn_of_coded_values
from polyfed.data.partitioning.partitions import IID, Natural
from polyfed.data.partitioning.split import Split, SplitOrder
from polyfed.data.pooled_dataset import PooledDataset
from polyfed.data.sources.table_file import TableFile
from polyfed.data.tabular.schema import table_schema


@final
@dataclass(frozen=True, eq=False)
class ClientTables:
    """Holds a table divided among sites: the data of each site (`client_data`), and the sizes and names that a network
    for the table needs.
    """

    dataset: PooledDataset
    client_data: tuple[ClientData, ...]
    public: Examples | None = None

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{part.id}: {len(part.train)} rows to train and {len(part.test)} to test" for part in self.client_data
        )
        return f"ClientTables({parts})"  # shows no row

    @property
    def num_features(self) -> int:
        """Returns the number of input features that a network for this table needs."""
        return self.dataset.input_shape[0]

    @property
    def num_outputs(self) -> int:
        """Returns the number of outputs that a network for this table needs: one per class, label or target."""
        return self.dataset.num_outputs

    @property
    def class_names(self) -> tuple[str, ...]:
        """Returns the names of the classes, labels or targets, in the order of a network's outputs."""
        return self.dataset.class_names

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Returns the names of the input features of a network, in their order."""
        return () if self.dataset.preprocessor is None else self.dataset.preprocessor.feature_names

    @property
    def schema(self) -> dict[str, Any]:
        """Returns columns, categories and classes as a dict for JSON (see `polyfed.data.merge_schemas`).

        It holds no row, but the categories that occur.

        Raises:
            UserError: the data are not a table.
        """
        if self.dataset.preprocessor is None:
            raise UserError("only tables have a schema")
        return table_schema(self.dataset.preprocessor)

    @suggest_keywords
    def build_clients(
        self, model: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None, *, loss: Loss | None = None
    ) -> list[Client]:
        """Returns the list of clients for `polyfed.federate` and `polyfed.compare`; warns of coded values.

        Numbers at some sites that seem to stand for "not measured", such as a cholesterol of 0, are named with the option
        that empties them.

        Args:
            model: builds a network, as `Client.model`; or one such function per site, by its name.
            loss: what training minimises at each site, as `Client.loss`; None takes that of the task.

        Raises:
            UserError: a site without a network or test rows, a name that is not a site, or the name of a network.
        """
        names = [part.id for part in self.client_data]
        if isinstance(model, Mapping):
            check_model_per_client(model, names)
        networks: list[Any] = [*model.values()] if isinstance(model, Mapping) else [model]
        for network in networks:
            if isinstance(network, str):  # networks have names in a package above this one
                spec = f"pf.models.ModelSpec({network!r}, {{}}, {tuple(self.dataset.input_shape)}, {self.num_outputs})"
                raise UserError(
                    f"model must be a function that builds a network, got the name {network!r}; write {spec}"
                )
        if untested := [part.id for part in self.client_data if not len(part.test)]:
            sites = join_first_and_count_rest(list(map(repr, untested)), 10)
            raise UserError(f"too few rows to test on at {sites}; give them more, or leave these sites out")
        if self.dataset.preprocessor is not None:
            warn_of_coded_values(self.client_data)
        return [
            Client(
                part.id, model[part.id] if isinstance(model, Mapping) else model, part.train, part.test, part.val,
                task=self.dataset.task, loss=loss,
            )
            for part in self.client_data
        ]  # fmt: skip


def check_model_per_client(models: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises a `UserError` unless `models` (`{site: network}`) has a network for each site, and for no other name.

    >>> check_model_per_client({"north": None}, ["north", "south"])
    Traceback (most recent call last):
    polyfed.core.errors.UserError: model gives no network for 'south'; it names north
    """
    if unknown := [name for name in models if name not in names]:
        raise UserError(
            f"model names a network for {unknown[0]!r}, which is not a client; {did_you_mean(str(unknown[0]), names)}"
        )
    if without := [name for name in names if name not in models]:
        raise UserError(f"model gives no network for {', '.join(map(repr, without[:5]))}; it names {', '.join(models)}")


def split_table(
    rows: Any,
    target: str | Sequence[str],
    site: str | None,
    *,
    test_fraction: float = 0.3,
    val_fraction: float = 0.0,
    public_fraction: float = 0.0,
    split: SplitOrder = "auto",
    seed: int = 0,
    name: str = "all",
    **options: Any,
) -> ClientTables:
    """Divides a table by site into training, validation and test rows, and fits preprocessing on the training rows.

    Args:
        rows: a pandas frame, a mapping from names to columns, a list of {name: value}, or the path of a CSV or Parquet file.
        target: column to predict, or several.
        site: column with the site of each row; None for one site, called `name`.
        test_fraction, val_fraction, public_fraction, split: see `polyfed.data.Split`.
        seed: of the random division.
        name: of the only site, if `site` is None.
        options: task, event, group, time, columns, drop, categorical, positive, missing, preprocess, subgroups, schema;
            for files delimiter, decimal and encoding: see `TableFile`.

    Raises:
        UserError: a column that does not exist, or that no network can take; rows without a site or target.

    >>> import torch
    >>> rows = {"age": [40, 50, None, 70] * 5, "sex": list("fmfm") * 5, "ill": [0, 1, 0, 1] * 5,
    ...         "hospital": ["north"] * 10 + ["south"] * 10, "number": range(20)}
    >>> sites = split_table(rows, "ill", "hospital", drop="number")
    >>> [part.id for part in sites.client_data], sites.feature_names
    (['north', 'south'], ('age', 'age is missing', 'sex=f', 'sex=m'))
    >>> clients = sites.build_clients(lambda: torch.nn.Linear(sites.num_features, sites.num_outputs))
    >>> clients[0].test.batch(torch.arange(1))[0].shape
    torch.Size([1, 4])
    """
    option_names = [f for f in TableFile.__dataclass_fields__ if f not in ("path", "target", "site")]
    if unknown := [option for option in options if option not in option_names]:
        raise UserError(f"table has no option {unknown[0]!r}; "
                        f"{did_you_mean(unknown[0], [*option_names, *(split_table.__kwdefaults__ or ())])}")  # fmt: skip
    names = list(target) if isinstance(target, Iterable) and not isinstance(target, str) else [target]
    if not all(isinstance(column, str) for column in [*names, *([] if site is None else [site])]):
        raise UserError("target and site must be names of columns, target also a list of names, got a "
                        f"{type(target if isinstance(site, str | None) else site).__name__}")  # fmt: skip
    source = TableFile(target=target if isinstance(target, str) else names, site=site, **options)
    pool = source.build_dataset(source.read(rows))
    config = Split(test_fraction=test_fraction, val_fraction=val_fraction, public_fraction=public_fraction, split=split)
    return divide_by_site(pool, site, config, seed, name)


def divide_by_site(pool: PooledDataset, site: str | None, split: Split, seed: int, name: str = "all") -> ClientTables:
    """Divides a table by its column `site`; without one, all rows belong to the site `name`.

    With a column of sites the division is that of the command line with this seed.

    Raises:
        UserError: a site with too few rows for the split.
    """
    if site is None:
        parts, public = make_clients(pool, replace(split, clients=1), IID(), seed)
        parts = [replace(parts[0], id=name)]
    else:
        parts, public = make_clients(pool, split, Natural(site), derive_seed(seed, "partition"))
    return ClientTables(pool, tuple(parts), public)
