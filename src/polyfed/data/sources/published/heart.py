"""Reads UCI's Heart Disease data of four hospitals, which are part of polyfed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.values.validation import build_dataclass, check_field_types
from polyfed.data.formats.files import Table
from polyfed.data.partitioning.split import Split
from polyfed.data.pooled_dataset import PooledDataset, Source
from polyfed.data.sources.table_file import TableFile
from polyfed.data.table import ClientTables, divide_by_site
from polyfed.data.tabular.preprocessing import Scope

_FOLDER = Path(__file__).with_name("heart_disease")
_HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Hungary", "switzerland": "Switzerland", "va": "VA"}  # by file
COLUMNS = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal", "num"
)  # fmt: skip
SITE = "hospital"
POSITIVE = ">0"
_CLASSES = ("no disease", "disease")  # as UCI's documentation calls num = 0, and 1 to 4


@final
@dataclass(frozen=True)
class Heart(Source):
    """Reads 920 patients of four hospitals, with 13 measurements and a diagnosis of heart disease each; the data are
    part of polyfed.

    The files are those of UCI's Heart Disease (Janosi, Steinbrunn, Pfisterer and Detrano 1988; CC BY 4.0) with no value
    changed. Many values are missing: `ca`, `thal` and `slope` at three hospitals, and cholesterol is 0 for all of
    Switzerland.

    Args:
        site: column that says which client a patient belongs to: the hospital.
        positive: which values of `num` (0 to 4) are the class of the ill; null keeps five classes.
        columns: features; none takes all 13.
        drop: columns that are not features.
        categorical: columns of numbers that are codes.
        missing, preprocess, subgroups: see the source `table`; chol=0 is for the cholesterol of Switzerland.

    >>> pool = Heart().load()
    >>> len(pool.train), pool.class_names, sorted(set(pool.columns["hospital"].tolist()))
    (920, ('no disease', 'disease'), ['Cleveland', 'Hungary', 'Switzerland', 'VA'])
    """

    target = "num"  # the diagnosis; the same for all, and so no field
    site: str | None = SITE
    positive: str | None = POSITIVE
    columns: list[str] | str = ""
    drop: list[str] | str = ""
    categorical: list[str] | str = "cp,restecg,thal"
    missing: list[str] | str = ""
    preprocess: Scope = "site"
    subgroups: list[str] | str = ""

    def __post_init__(self) -> None:
        check_field_types(self, "preprocess")

    def load(self) -> PooledDataset:
        """Reads the patients of all four hospitals as one data set."""
        options = {name: getattr(self, name) for name in self.__dataclass_fields__}
        reader = TableFile(target=self.target, **options)
        pool = reader.build_dataset(reader.read(read_heart_table()), warn=False)
        if self.positive != POSITIVE or pool.preprocessor is None:
            return pool
        return replace(pool, class_names=_CLASSES, preprocessor=replace(pool.preprocessor, classes=_CLASSES))


def read_heart_table() -> Table:
    """Reads all patients as one table of 14 columns and the column `hospital`; missing values are null.

    >>> read_heart_table().column("ca").null_count
    611
    """
    import pyarrow
    import pyarrow.csv

    reading = pyarrow.csv.ReadOptions(column_names=COLUMNS)
    converting = pyarrow.csv.ConvertOptions(null_values=["?"], column_types=dict.fromkeys(COLUMNS, pyarrow.float64()))
    parts = []
    for file, hospital in _HOSPITALS.items():
        rows = pyarrow.csv.read_csv(_FOLDER / f"processed.{file}.data", reading, convert_options=converting)
        parts.append(rows.append_column(SITE, pyarrow.array([hospital] * rows.num_rows)))
    return pyarrow.concat_tables(parts)


def heart(
    *,
    test_fraction: float = 0.3,
    val_fraction: float = 0.0,
    public_fraction: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> ClientTables:
    """Returns the patients of four hospitals (`Heart`) in three sets, a client per hospital.

    Args:
        test_fraction, val_fraction, public_fraction: see `polyfed.data.Split`.
        seed: of the random division.
        options: positive, columns, drop, categorical, missing, preprocess, subgroups: see `Heart`.

    Raises:
        UserError: an unknown option, or one of a wrong type.

    >>> sites = heart(val_fraction=0.15, drop="ca")
    >>> [(part.id, len(part.train)) for part in sites.client_data]
    [('Cleveland', 167), ('Hungary', 162), ('Switzerland', 68), ('VA', 110)]
    """
    for name in options.keys() - Heart.__dataclass_fields__.keys():
        choices = [*Heart.__dataclass_fields__, *(heart.__kwdefaults__ or ())]
        raise UserError(f"heart has no option {name!r}; {did_you_mean(name, choices)}")
    pool = build_dataclass(Heart, options, "heart").load()
    split = Split(test_fraction=test_fraction, val_fraction=val_fraction, public_fraction=public_fraction)
    return divide_by_site(pool, SITE, split, seed)
