"""Reads data sets from a user's image files, in folders of classes and sites, or listed in a table of paths, labels and
sites.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import UserError, warn_of_data
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.text_labels import warn_of_names_that_look_alike
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.io.text.number_format import count_with_noun, format_row_numbers, join_first_and_count_rest
from polyfed.core.io.values.validation import check_field_types
from polyfed.data.formats.files import resolve_existing_path
from polyfed.data.formats.images import Mode, measure_normalisation, read_images
from polyfed.data.formats.lazy_images import build_image_keys_and_decoder, open_image_files_lazily
from polyfed.data.pooled_dataset import PooledDataset, Source, build_pooled_dataset
from polyfed.data.sources.table_file import parse_column_names
from polyfed.data.tabular.columns import check_task_option, has_few_values, read_targets
from polyfed.data.tabular.table_reader import (
    check_columns_exist,
    check_no_missing_values,
    column_as_texts,
    column_as_times,
    read_table,
)

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_COMPANIONS = (".txt", ".md", ".csv", ".json", ".xml", ".yaml", ".yml", ".ini", ".db")  # files that go with pictures
Layout = Literal["class", "site/class", "class/site"]


@final
@dataclass(frozen=True)
class ImageFolder(Source):
    """Reads images from folders: one per class, or one per site with a folder per class in it.

    The layout is PATH/CLASS/*.png or PATH/SITE/CLASS/*.png, each also below PATH/train and PATH/test.

    Args:
        path: the folder.
        image_size: images are resized to this many pixels a side.
        grey: one grey channel instead of three colours.
        layout: meaning of the folders: "class"; "site/class" for PATH/SITE/CLASS/*, "class/site" for PATH/CLASS/SITE/*.
            Sites are then the clients.
        lazy: images stay in their files and are decoded whenever a batch needs them, for sets that do not fit into memory.
    """

    path: str = ""
    image_size: int = 32
    grey: bool = False
    layout: Layout = "class"
    lazy: bool = False

    def __post_init__(self) -> None:
        check_image_size(self.image_size)
        check_field_types(self, "layout")

    def load(self) -> PooledDataset:
        """Reads the images from the folders; raises a `UserError` if there is no such folder or it has another layout."""
        advice = "give path=... (--data.path) with a folder that has one folder of pictures per class"
        if not self.path:
            raise UserError(advice)
        root = resolve_existing_path(self.path, advice)
        if not root.is_dir():
            raise UserError(f"{self.path!r} is not a folder; {advice}")
        train = root / "train" if (root / "train").is_dir() else root
        train_pictures = self._find_pictures(train, advice)
        names = tuple(subfolder.name for subfolder in _list_subfolders(train)) if self.layout == "class" else ()
        names = names or tuple(sorted({label for _, label, _ in train_pictures}))
        parts = [train_pictures]
        if train != root and (root / "test").is_dir():
            parts.append(self._find_pictures(root / "test", advice))
            test_labels = (
                {subfolder.name for subfolder in _list_subfolders(root / "test")} if self.layout == "class" else set()
            )
            if extra := sorted((test_labels or {label for _, label, _ in parts[1]}) - set(names)):
                raise UserError(f"{str(root / 'test')!r} has classes without training pictures: {', '.join(extra)}")
        sites = dict.fromkeys(site for *_, site in train_pictures)
        warn_of_names_that_look_alike({"the folders of classes are": names, "the folders of sites are": [*sites]})
        code = {name: number for number, name in enumerate(names)}
        y = [torch.tensor([code[label] for _, label, _ in part]) for part in parts]
        x, transform = load_images_and_transform(
            [[file for file, *_ in part] for part in parts], self.grey, self.image_size, self.lazy
        )
        columns = {} if self.layout == "class" else {"site": np.array([site for *_, site in train_pictures])}
        sets = list(zip(x, y, strict=True))
        return build_pooled_dataset(sets[0], sets[1] if len(sets) > 1 else None, names, transform, columns)

    def _find_pictures(self, folder: Path, advice: str) -> list[tuple[Path, str, str]]:
        """Returns the file, class and site of each image."""
        entries, other_files, empty = [], list[Path](), list[Path]()
        for outer in _list_subfolders(folder):
            inner = [outer] if self.layout == "class" else _list_subfolders(outer)
            if self.layout != "class" and (loose := _list_pictures(outer, recursive=False)):
                raise UserError(f"{str(loose[0])!r} lies in no folder of the layout {self.layout}; move it into one")
            for leaf in inner or [outer]:
                site, label = (leaf.name, outer.name) if self.layout == "class/site" else (outer.name, leaf.name)
                pictures = _list_pictures(leaf, recursive=True)
                entries += [(file, label, site) for file in pictures]
                files = _list_files(leaf, recursive=True)
                other_files += [file for file in files if file.suffix.lower() not in _SUFFIXES + _COMPANIONS]
                empty += [] if pictures else [leaf]
        kinds = join_first_and_count_rest(sorted({file.suffix.lower() or "no suffix" for file in other_files}))
        unread = f"{count_with_noun(len(other_files), 'file')} of other kinds ({kinds})" if other_files else ""
        if not entries:
            raise UserError(f"{str(folder)!r} holds no pictures{unread and f', but {unread}'}; {advice}")
        if empty or unread:
            names = join_first_and_count_rest([str(leaf.relative_to(folder)) for leaf in empty])
            remarks = [f"no pictures in {names}" if empty else "", unread and f"{unread}, which are not read"]
            warn_of_data(
                f"{str(folder)!r} has {' and '.join(filter(None, remarks))}; polyfed reads {', '.join(_SUFFIXES)}"
            )
        if self.layout == "class":
            _check_one_level(folder)
        return sorted(entries, key=lambda entry: (entry[1], entry[2])) if self.layout != "class" else entries


def _list_subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _list_files(folder: Path, *, recursive: bool) -> list[Path]:
    """Returns the files in a folder but for hidden ones, such as those that macOS adds to archives."""
    paths = folder.rglob("*") if recursive else folder.iterdir()
    return sorted(path for path in paths if not path.name.startswith(".") and not path.is_dir())


def _list_pictures(folder: Path, *, recursive: bool) -> list[Path]:
    return [file for file in _list_files(folder, recursive=recursive) if file.suffix.lower() in _SUFFIXES]


def _check_one_level(folder: Path) -> None:
    """Checks that the folders hold images of one class or site each, and not two levels of folders (sites and classes).

    Raises:
        UserError: several folders have subfolders of the same names.
    """
    names_by_folder = {
        outer.name: {subfolder.name for subfolder in _list_subfolders(outer)} for outer in _list_subfolders(folder)
    }
    shared = set.intersection(*names_by_folder.values()) if len(names_by_folder) > 1 else set()
    if len(shared) > 1 and not any(_list_pictures(outer, recursive=False) for outer in _list_subfolders(folder)):
        outer, inner = ", ".join(sorted(names_by_folder)[:3]), ", ".join(sorted(shared)[:3])
        raise UserError(
            f"the folders of {str(folder)!r} ({outer}) have folders of the same names in them ({inner}): give "
            f"layout='site/class' (--data.layout site/class) if {outer} are sites, or class/site if they are classes"
        )


@final
@dataclass(frozen=True)
class ImageTable(Source):
    """Reads images whose paths, labels and sites are listed in columns of a CSV or Parquet file.

    Args:
        path: CSV or Parquet file.
        target: column of labels; several with commas between are several labels of 0 and 1.
        site: column with the client of each image.
        image: column of the images' paths.
        folder: base of relative paths; null for the folder of the table.
        task: see the source `table`.
        group: column whose equal values never come into both training and test sets, such as the patient.
        time: column of numbers or dates by which images are split into earlier and later ones (see `split`).
        positive: value, values or condition of the target that is class 1 of two; see the source `table`.
        image_size: images are resized to this many pixels a side.
        grey: one grey channel instead of three colours.
        lazy: images stay in their files and are decoded whenever a batch needs them, for sets that do not fit into memory.
    """

    path: str = ""
    target: list[str] | str = "label"
    site: str | None = None
    image: str = "path"
    folder: str | None = None
    task: str = "auto"
    group: str | None = None
    time: str | None = None
    positive: str | None = None
    image_size: int = 32
    grey: bool = False
    lazy: bool = False

    def __post_init__(self) -> None:
        check_image_size(self.image_size)
        check_field_types(self)
        check_task_option(self.task)

    def load(self) -> PooledDataset:
        """Reads the table and the images that it lists; raises a `UserError` if a column or an image is missing."""
        advice = "give path=... (--data.path) with a CSV or Parquet file that lists pictures, a row each"
        if not self.path:
            raise UserError(advice)
        table = read_table(self.path)
        target_names = parse_column_names(self.target, table)
        roles = {"image": self.image, "site": self.site, "group": self.group, "time": self.time}
        for role, column in [*roles.items(), *(("target", name) for name in target_names)]:
            if column is not None:
                check_columns_exist(table, [column], role)
                check_no_missing_values(column_as_texts(table, column), column, role, may_drop=False)
        picture_folder = (
            expand_user_path(self.path).parent
            if self.folder is None
            else resolve_existing_path(self.folder, "give folder=... (--data.folder)")
        )
        files = [picture_folder / name for name in column_as_texts(table, self.image).tolist()]
        if absent := [row for row, file in enumerate(files) if not file.is_file()]:
            raise UserError(
                f"column {self.image!r} names pictures that do not exist in {format_row_numbers(np.array(absent))}, such as "
                f"{str(files[absent[0]])!r}; give folder=... (--data.folder) with the folder where "
                "relative paths begin"
            )
        y, names, task = read_targets(table, target_names, self.task, self.positive)
        x, transform = load_images_and_transform([files], self.grey, self.image_size, self.lazy)
        columns = {}
        for name in table.column_names:
            if (
                name not in target_names
                and name != self.image
                and (has_few_values(table, name) or name in (self.site, self.group))
            ):
                columns[name] = np.array(
                    ["" if value is None else value for value in column_as_texts(table, name).tolist()]
                )
        if self.time is not None:
            columns[self.time] = column_as_times(table, self.time)
        return PooledDataset(
            Examples(x[0], y, transform=transform), None, names, task, columns, group=self.group, time=self.time
        )


def check_image_size(image_size: int) -> None:
    """Raises a `UserError` unless `image_size` is at least 1 pixel."""
    if image_size < 1:
        raise UserError(f"image_size must be at least 1 pixel, got {image_size}")


def load_images_and_transform(
    parts: Sequence[Sequence[Path]], is_grey: bool, size: int, is_lazy: bool
) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
    """Loads images of each list of files; returns them and a transform that normalises by the first list."""
    mode: Mode = "L" if is_grey else "RGB"
    if not is_lazy:
        x = [read_images(part, mode, size) for part in parts]
        return x, measure_normalisation(x[0])
    stored, transform = build_image_keys_and_decoder(
        open_image_files_lazily([file for part in parts for file in part]), mode, size, len(parts[0])
    )
    return list(torch.split(stored, [len(part) for part in parts])), transform
