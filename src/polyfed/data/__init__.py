"""Turns published data sets and users' files into the data of clients: reads examples, divides them among clients, and
splits them into sets.
"""

from polyfed.core.examples.as_examples import as_examples
from polyfed.core.examples.examples import Examples, Normalise, PartwiseTransform
from polyfed.data.augment import PadCropFlip
from polyfed.data.clients import ClientData, make_clients
from polyfed.data.partitioning.listed_classes import ListedClasses
from polyfed.data.partitioning.partitions import (
    IID,
    ClassesPerClient,
    Dirichlet,
    DominantClasses,
    Natural,
    Partition,
    QuantitySkew,
    Shards,
)
from polyfed.data.partitioning.split import ClientRows, Split, class_counts, partition_fingerprint
from polyfed.data.plot import draw_class_counts
from polyfed.data.pooled_dataset import PooledDataset, Source
from polyfed.data.shifts import Shift
from polyfed.data.sources.by_client.synthetic_clients import SyntheticClients
from polyfed.data.sources.by_client.table_clients import ArrowClients, DatasetClients, ParquetClients
from polyfed.data.sources.client_source import ClientSource, SourceManifest
from polyfed.data.sources.published.heart import heart
from polyfed.data.sources.registry import SOURCES
from polyfed.data.table import ClientTables, split_table
from polyfed.data.tabular.schema import merge_schemas
from polyfed.data.windows import WindowSets, split_windows, windows, windows_by_series

PARTITIONS: dict[str, type[Partition]] = {
    "iid": IID,
    "dirichlet": Dirichlet,
    "classes_per_client": ClassesPerClient,
    "dominant_classes": DominantClasses,
    "shards": Shards,
    "quantity_skew": QuantitySkew,
    "natural": Natural,
    "listed_classes": ListedClasses,
}

__all__ = [
    "IID",
    "PARTITIONS",
    "SOURCES",
    "ArrowClients",
    "ClassesPerClient",
    "ClientData",
    "ClientRows",
    "ClientSource",
    "ClientTables",
    "DatasetClients",
    "Dirichlet",
    "DominantClasses",
    "Examples",
    "ListedClasses",
    "Natural",
    "Normalise",
    "PadCropFlip",
    "ParquetClients",
    "Partition",
    "PartwiseTransform",
    "PooledDataset",
    "QuantitySkew",
    "Shards",
    "Shift",
    "Source",
    "SourceManifest",
    "Split",
    "SyntheticClients",
    "WindowSets",
    "as_examples",
    "class_counts",
    "draw_class_counts",
    "heart",
    "make_clients",
    "merge_schemas",
    "partition_fingerprint",
    "split_table",
    "split_windows",
    "windows",
    "windows_by_series",
]


def __dir__() -> list[str]:
    return sorted(__all__)
