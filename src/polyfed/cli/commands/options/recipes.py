"""Reads recipes, which are YAML files of experiments, with variants (such as the columns of a table) and scales (how
much of the experiment to run).

A file's sections `variants` and `scales` hold partial configurations. What is run is the file without these two, with the
variant laid over it, with the scale laid over that, and with what the scale says of this variant laid over all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, final

import yaml

from polyfed.cli.commands.argv import CommandParser, option_name
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.directory import read_config

RECIPE_FOLDER = Path(__file__).parents[2] / "recipes"
_LISTING = "polyfed list recipes"
SCALES = ("paper", "cpu", "smoke")
_SOURCES_BY_SUFFIX = dict.fromkeys((".csv", ".tsv", ".txt", ".parquet", ".pq"), "table") | {".npz": "npz"}
_SPREADSHEETS = (".xlsx", ".xls", ".xlsm", ".ods", ".numbers")
_ARCHIVES = (".gz", ".zip", ".bz2", ".xz", ".zst", ".7z")
_DEFAULT_SCALE = "cpu"
_SECTIONS_OF_ONE_EXPERIMENT = ("--data", "--model", "--algorithm", "--baselines")  # without one, it is quickstart
_CHOICES = ("data", "partition", "model", "algorithm")  # sections of which a bare text is the `name`


@final
@dataclass(frozen=True)
class Recipe:
    """Holds an experiment's configuration, its variants (columns of a table, say), and its scales.

    Args:
        name: as the user gave it.
        description: one line; empty if the file has none.
        base: what holds for all variants and scales.
        variants: partial configurations by name, laid over `base`; the first is the default.
        scales: partial configurations by name, laid over that; each may hold `reduction_note`, a sentence, and
            `variants`, what
            it says of one variant only. The default is "cpu", or the first if there is no such scale.

    >>> read_recipe("quickstart").configuration()["algorithm"]["name"]
    'fml'
    """

    name: str
    description: str
    base: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]
    scales: Mapping[str, Mapping[str, Any]]

    def chosen_or_first_variant(self, name: str | None = None) -> str | None:
        """Returns `name`, or the first variant by default; None for a recipe without variants.

        Raises:
            UserError: the recipe has no such variant.
        """
        return _resolve_choice(self.name, "variant", name, self.variants, next(iter(self.variants), None))

    def resolve_scale_name(self, name: str | None = None) -> str | None:
        """Returns the name of the scale to run: `name`, or "cpu" by default; None for a recipe without scales.

        Raises:
            UserError: the recipe has no such scale.
        """
        default = _DEFAULT_SCALE if _DEFAULT_SCALE in self.scales else next(iter(self.scales), None)
        return _resolve_choice(self.name, "scale", name, self.scales, default)

    def configuration(self, scale: str | None = None, variant: str | None = None) -> dict[str, Any]:
        """Returns the base, in which values of the variant and then of the scale replace others.

        Raises:
            UserError: there is no such scale or variant.
        """
        chosen_scale, chosen_variant = self.resolve_scale_name(scale), self.chosen_or_first_variant(variant)
        config = dict(self.base)
        if chosen_variant is not None:
            config = merge_configurations(config, self.variants[chosen_variant])
        if chosen_scale is not None:
            layer = dict(self.scales[chosen_scale])
            layer.pop("reduced", None)
            by_variant = layer.pop("variants", {})
            config = merge_configurations(config, layer)
            if chosen_variant in by_variant:
                config = merge_configurations(config, by_variant[chosen_variant])
        return config

    def reduction_note(self, scale: str | None = None) -> str:
        """Returns a note on what a scale leaves out of the paper's experiment; empty if the recipe names nothing."""
        chosen_scale = self.resolve_scale_name(scale)
        return "" if chosen_scale is None else " ".join(str(self.scales[chosen_scale].get("reduced") or "").split())

    def title(self, scale: str | None = None, variant: str | None = None) -> str:
        """Returns a heading: the recipe's name with the variant and the scale.

        >>> read_recipe("quickstart").title()
        'quickstart'
        """
        parts = {"variant": self.chosen_or_first_variant(variant), "scale": self.resolve_scale_name(scale)}
        return ", ".join([self.name, *(f"{kind} {name}" for kind, name in parts.items() if name is not None)])


def merge_configurations(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with values replaced by those of `overrides`, also within nested mappings.

    A mapping that names another choice than the one below replaces it, since the fields belong to the choice.

    >>> merge_configurations({"data": {"name": "mnist", "path": "x"}, "rounds": 9}, {"data": {"name": "digits"}})
    {'data': {'name': 'digits'}, 'rounds': 9}
    >>> merge_configurations({"algorithm": {"name": "fedprox", "mu": 1}}, {"algorithm": {"lr": 0.1}})
    {'algorithm': {'name': 'fedprox', 'mu': 1, 'lr': 0.1}}
    """
    result = dict(base)
    for key, value in overrides.items():
        under, over = _expand_name(key, result.get(key)), _expand_name(key, value)
        if isinstance(under, Mapping) and isinstance(over, Mapping):
            replaces = "name" in under and over.get("name", under["name"]) != under["name"]
            result[key] = dict(over) if replaces else merge_configurations(under, over)
        else:
            result[key] = value
    return result


def shipped_recipe_files() -> dict[str, Path]:
    """Returns {recipe's name: path of its YAML file} for the recipes that polyfed ships; `heart` is `quickstart`."""
    files = {path.stem: path for path in RECIPE_FOLDER.glob("*.yaml")}
    return dict(sorted((files | {"heart": files["quickstart"]}).items()))


def load_shipped_yaml(file: Path) -> Any:
    """Loads a YAML file that is part of polyfed.

    It takes the parser in C where that is installed, which is six times as fast.
    """
    return yaml.load(file.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_recipe(name_or_path: str) -> Recipe:
    """Reads a recipe by name, from a YAML file, or from a run's `config.yaml`.

    Raises:
        UserError: there is no such recipe or file, or its variants or scales are not what they should be, or it is of a run
            and does not say its data.
    """
    recipe_paths = shipped_recipe_files()
    if name_or_path in recipe_paths:
        return _parse_recipe(name_or_path, load_shipped_yaml(recipe_paths[name_or_path]))
    if not name_or_path.strip():
        raise UserError(
            f"there is no recipe or file {name_or_path!r}; {did_you_mean(name_or_path, recipe_paths, _LISTING)}"
        )
    place = expand_user_path(name_or_path, "the recipe or file")
    if place.is_dir() and not (place / "config.yaml").exists():
        if runs := sorted(file.parent for file in (*place.glob("*/config.yaml"), *place.glob("*/comparison.yaml"))):
            raise UserError(f"{name_or_path} is a folder of runs; give one of them, such as {runs[-1]}")
        if not any(place.iterdir()):
            hint = did_you_mean(name_or_path, recipe_paths, _LISTING)
            raise UserError(f"{name_or_path} is an empty folder, and no recipe; {hint}")
        has_sites = any(inner.is_dir() for inner in place.glob("*/*"))
        data_hint = (
            "or if it holds data, say of which kind (polyfed list data), such as --data imagefolder --data.path "
            f"{name_or_path}{' --data.layout site/class' if has_sites else ''}"
        )
        raise UserError(
            f"{name_or_path} is a folder without config.yaml; give a run directory, a YAML file or a recipe; {data_hint}"
        )
    if name_or_path.endswith((".yaml", ".yml")) or place.exists():
        config = read_config(place) if place.suffix in (".yaml", ".yml") or place.is_dir() else _read_other_file(place)
        _require_data_section(place, config)
        return _parse_recipe(name_or_path, config)
    from polyfed.cli.static_registry import SOURCES

    hint = did_you_mean(name_or_path, {*recipe_paths, *SOURCES}, f"{_LISTING}, polyfed list data")
    raise UserError(f"there is no recipe or file {name_or_path!r}; {hint}")


def _read_other_file(file: Path) -> dict[str, Any]:
    """Returns the configuration in a file of another suffix; refuses all else, since its suffix is not one of data."""
    try:
        config = read_config(file)
    except UserError as error:
        if isinstance(error.__cause__, OSError) or not file.is_file():
            raise
        config = {}
    keys = {*_CHOICES, "variants", "scales", *(field.name for field in fields(Settings))}
    if keys & config.keys() and isinstance(config.get("data", ""), str | Mapping):
        return config
    table = f"--data table --data.path {quote(str(file))} for a CSV file"
    if file.suffix.startswith(".json"):
        table = f"save it as CSV (pandas.read_json({file.name!r}).to_csv({file.stem + '.csv'!r}, index=False))"
    raise UserError(
        f"{file} is neither data nor a configuration by its ending; {table}, or give a table (.csv, .tsv, .txt, .parquet), "
        "arrays (.npz), a configuration (.yaml), a run directory, or a name of polyfed list data or polyfed list recipes"
    )


def _require_data_section(path: Path, config: Mapping[str, Any]) -> None:
    """Refuses a configuration without a data section, which would run on the default data.

    Runs made in Python have none, and runs of a comparison whose data another seed divided.
    """
    folder = path if path.is_dir() else path.parent
    if "data" in config or "deployment" in config or not (folder / "manifest.json").is_file():
        return
    raise UserError(
        f"{path} belongs to a run and does not say which data its clients had: they were given in Python, or divided by "
        "another seed of a comparison, which `polyfed compare` continues. To use its settings with other data, copy the "
        "file to another folder and add a section `data`"
    )


def load_recipe_configuration(
    name_or_path: str, scale: str | None = None, variant: str | None = None
) -> dict[str, Any]:
    """Returns a recipe's configuration at a scale and for a variant, with any "description".

    Raises:
        UserError: there is no such recipe, file, scale or variant.

    >>> load_recipe_configuration("pfedla_table1", scale="paper", variant="cifar10-100")["rounds"]
    2500
    """
    recipe = read_recipe(name_or_path)
    described = {"description": recipe.description} if recipe.description else {}
    return described | recipe.configuration(scale, variant)


def add_scale_and_variant_options(parser: CommandParser) -> None:
    """Adds the options --scale and --variant to a command's parser; their values are passed to `pop_recipe`."""
    parser.add_option("--scale", "SCALE", "of a recipe that has them (polyfed list recipes); default: cpu")
    parser.add_option("--variant", "NAME", "of a recipe that has them; default: the first")


@final
class ChosenRecipe(NamedTuple):
    """Holds the name of the recipe on the command line, the configuration to run, and a headline.

    Attributes:
        name: "quickstart" for a command line without a recipe and without options of data, networks and methods; None for
            one with such options.
        configuration: the recipe's, at the chosen scale and variant.
        headline: names scale, variant and what is reduced against the paper; empty for a recipe without either.
    """

    name: str | None
    configuration: dict[str, Any]
    headline: str


def pop_recipe(argv: list[str], scale: str | None, variant: str | None) -> ChosenRecipe:
    """Removes the recipe's name from the front of `argv`, and returns its configuration.

    Raises:
        UserError: a scale or variant is given without a recipe.

    A data file or the name of a data set there is replaced by the options that stand for it.
    """
    name = argv.pop(0) if argv and not argv[0].startswith("-") else None
    data_options = _data_options(name) if name is not None else []
    if data_options:
        if argv and not argv[0].startswith("-") and _data_options(argv[0]):
            raise UserError(
                f"one table holds the rows of all sites, got {name} and {argv[0]}; put them into one file with a column of "
                "the site's name: pandas.concat({'a': pandas.read_csv('a.csv'), 'b': pandas.read_csv('b.csv')}, "
                "names=['site']).reset_index('site').to_csv('all.csv', index=False)"
            )
        argv[:0] = data_options
        name = None
    if name is None:
        if scale is not None or variant is not None:
            option = "--variant" if scale is None else "--scale"
            raise UserError(f"{option} needs a recipe before it; `polyfed list recipes` shows which have one")
        if any(option_name(word).partition(".")[0] in _SECTIONS_OF_ONE_EXPERIMENT for word in argv):
            return ChosenRecipe(None, {}, "")
        name = "quickstart"
    recipe = read_recipe(name)
    config, reduced = recipe.configuration(scale, variant), recipe.reduction_note(scale)
    if not (recipe.scales or recipe.variants):
        return ChosenRecipe(name, config, "")
    headline = recipe.title(scale, variant) + (f"; against the paper: {reduced}" if reduced else "")
    return ChosenRecipe(name, config, headline)


def _data_options(word: str) -> list[str]:
    """Returns the options that stand for a data file or for the name of a data set that is not a recipe; else nothing.

    Raises:
        UserError: a spreadsheet, or an archive.

    >>> _data_options("heart.csv")
    ['--data', 'table', '--data.path', 'heart.csv']
    """
    suffix = Path(word).suffix.lower()
    if suffix in _SPREADSHEETS:
        raise UserError(
            f"{word} is a spreadsheet; save its sheet as CSV (in Excel: Save As, CSV UTF-8), and give that file"
        )
    if suffix in _ARCHIVES:
        raise UserError(f"{word} is compressed; unpack it, and give the file that is in it")
    if source := _SOURCES_BY_SUFFIX.get(suffix):
        return ["--data", source, "--data.path", word]
    from polyfed.cli import static_registry

    return ["--data", word] if word in static_registry.SOURCES and word not in shipped_recipe_files() else []


def _parse_recipe(name: str, content: Mapping[str, Any]) -> Recipe:
    base = dict(content)
    description = " ".join(str(base.pop("description", None) or "").split())
    variants = _partial_configurations(name, "variants", base.pop("variants", None))
    scales = _partial_configurations(name, "scales", base.pop("scales", None))
    for scale, layer in scales.items():
        if scale not in SCALES:
            raise UserError(f"{name}: unknown scale {scale!r}; {did_you_mean(scale, SCALES)}")
        for variant in _partial_configurations(name, f"scales.{scale}.variants", layer.get("variants")):
            if variant not in variants:
                raise UserError(
                    f"{name}: scale {scale} speaks of a variant {variant!r}; {did_you_mean(variant, variants)}"
                )
    return Recipe(name, description, base, variants, scales)


def _partial_configurations(name: str, section: str, content: Any) -> dict[str, Mapping[str, Any]]:
    """Returns a section as partial configurations by name; an empty one (`emnist:` and nothing more) changes nothing."""
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise UserError(f"{name}: {section} must be a mapping from names to settings, got {content!r}")
    for key, part in content.items():
        if not (part is None or isinstance(part, Mapping)):
            raise UserError(f"{name}: {section}.{key} must be a mapping of settings, got {part!r}")
    return {str(key): part or {} for key, part in content.items()}


def _resolve_choice(
    recipe: str, kind: str, name: str | None, choices: Mapping[str, Any], default: str | None
) -> str | None:
    if name is None:
        return default
    if not choices:
        raise UserError(f"{recipe} has no {kind}s; leave --{kind} {name} out")
    if name not in choices:
        raise UserError(f"{recipe} has no {kind} {name!r}; {did_you_mean(name, choices)}")
    return name


def _expand_name(key: str, value: Any) -> Any:
    return {"name": value} if key in _CHOICES and isinstance(value, str) else value
