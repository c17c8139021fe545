"""Holds the short help of `polyfed run` and `polyfed compare`, and the groups of the long one (`--help-all`)."""

from collections.abc import Sequence

RUN_HELP = """usage: polyfed run [RECIPE|config.yaml|DATA] [OPTIONS]

Runs a federation and its baselines, and prints a table. Without recipe, data, network and method: quickstart. DATA is
a CSV or Parquet file, or a data set (polyfed list data).

  --data NAME          where examples come from (polyfed list data); --data.clients N divides them among N clients
  --data.target, --data.site  columns of a table
  --model NAME         network of every client, or one for each: mlp,cnn_small (polyfed list models)
  --algorithm NAME     method (polyfed list algorithms); --algorithm.lr and others are its fields
  --baselines NAMES    methods to run as well: [local,fedavg]
  --rounds N           number of rounds
  --seed N             of every random choice
  --scale, --variant   of a recipe that has them (polyfed list recipes)
  -o, --out DIR        run directory to create (default: runs/NAME-DATE-TIME)
  -q, --quiet          print no progress
  --print-config       print the whole configuration as YAML and stop

examples
  polyfed run
  polyfed run heart --rounds 10 -o runs/heart
  polyfed run --algorithm fedprox --algorithm.mu 0.1 --data.partition.alpha 0.3
  polyfed run rows.csv --data.target outcome --data.site hospital

--help-all shows every option in groups; so does --help after a choice: polyfed run --algorithm fedprox --help
"""

COMPARE_HELP = """usage: polyfed compare [RECIPE|config.yaml|DATA|DIR] [OPTIONS]

Compares methods on the same clients, with several seeds and equal tuning. Says for each client: join, stay alone, or
not decided. DATA is a CSV or Parquet file, or a data set. With DIR it goes on with a stopped comparison, or shows one.

  --algorithms NAMES   methods, with commas between (default: the recipe's method and its baselines)
  --folds K            test every example once; the default, 5, where the clients are the data's own sites
  --fold-repeats R     draw the folds R times: more runs, and smaller gains are decided
  --seeds SEEDS        seeds in place of folds, or how many (default: 5); answers per client need --same-data
  --tune FIELDS        none, or what to search; default: each method's learning rate
  --budget BUDGET      best (default), steps, bytes or seconds
  --tables             print the tables of scores, gains and costs before the answers
  --plan               say, after a short pilot, how long it takes and which gains it can decide; compare nothing
  --parallel N         runs at the same time
  -o, --out DIR        directory to create or to continue (default: runs/compare-NAME-DATE-TIME)
  -q, --quiet          print no progress
All options of polyfed run are taken as well, except --seed.

examples
  polyfed compare heart --fold-repeats 2 -o runs/choice
  polyfed compare rows.csv --data.target outcome --data.site hospital
  polyfed compare fedavg_digits --algorithms fedprox,ditto --seeds 0,1,2 --same-data
  polyfed compare runs/choice --budget bytes

--help-all shows every option in groups; so does --help after an option.
"""

_GROUPS = {
    "engine and failures": (
        "engine", "workers", "ray_address", "gpus_per_worker", "device", "on_error", "min_replies", "checkpoint_every",
    ),
    "messages": ("compress", "compress_down", "secure", "regions"),
    "data": ("data",),
    "network": ("model",),
    "method": ("algorithm", "baselines", "loss"),
}  # fmt: skip


def find_help_group_title(key: str) -> str:
    """Returns the title of the group in which the long help shows an option.

    >>> find_help_group_title("data.partition.alpha"), find_help_group_title("secure"), find_help_group_title("rounds")
    ('data', 'messages', 'rounds and evaluation')
    """
    top = key.partition(".")[0]
    return next((title for title, keys in _GROUPS.items() if top in keys), "rounds and evaluation")


def asks_for_short_help(argv: Sequence[str]) -> bool:
    """Returns whether a command line asks for help and chooses nothing but a recipe.

    >>> asks_for_short_help(["--help"]), asks_for_short_help(["heart", "-h"]), asks_for_short_help(["--help", "--seed"])
    (True, True, False)
    """
    others = [word for word in argv if word not in ("-h", "--help")]
    return len(others) < len(argv) and not any(word.startswith("-") for word in others)


def replace_help_all_by_help(argv: Sequence[str]) -> list[str]:
    """Returns the words with `--help-all` as `--help`, which the parsers of options know."""
    return ["--help" if word in ("--help-all", "--help_all") else word for word in argv]
