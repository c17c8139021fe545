"""Begins a method: its file, its page and its tests, which pass `make check METHOD=NAME` at once.

    python tools/new_method.py fedgen --family distillation [--base Averaging] [--class-name FedGen]
                               [--paper "Zhu et al. 2021"]

What is written computes what the base computes. Replace it line by line; the words in capitals say what belongs there.
"""

import argparse
import ast
import keyword
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Base:
    """What a method begins with on one of the bases.

    Args:
        module: where the base is, below `polyfed.algorithms`.
        about: what the base computes, as the end of a sentence.
        evaluated: which network is evaluated.
        imports: further lines that the code needs.
        code: members that the base leaves to the method, indented by four spaces.
        card: further lines of the card, indented by eight spaces.
        equation: the two halves in LaTeX, for the page.
    """

    module: str
    about: str
    evaluated: str
    equation: str
    imports: str = ""
    code: str = ""
    card: str = ""


BASES: Mapping[str, Base] = {
    "Averaging": Base(
        "base.averaging",
        "the clients train the global model, and the server averages",
        "the average",
        r"\text{client } i{:} &\quad \theta_i \leftarrow \theta \text{ after local training on } L_i \\"
        "\n"
        r"\text{server}{:} &\quad \theta \leftarrow \sum_i \tfrac{n_i}{n}\, \theta_i",
    ),
    "GlobalModelMethod": Base(
        "base.averaging",
        "the clients train the global model, and the server averages those of the round, or the latest of all clients",
        "the average",
        r"\text{client } i{:} &\quad \theta_i \leftarrow \theta \text{ after local training on } L_i \\"
        "\n"
        r"\text{server}{:} &\quad \theta \leftarrow \sum_i \tfrac{n_i}{n}\, \theta_i",
    ),
    "LocalPartMethod": Base(
        "base.local_parts",
        "biases stay at the client, all other tensors are averaged, and clients train both together",
        "the average with the client's own part",
        r"\text{client } i{:} &\quad (\theta_i, u_i) \leftarrow (\theta, u_i) \text{ after local training on } L_i \\"
        "\n"
        r"\text{server}{:} &\quad \theta \leftarrow \sum_i \tfrac{n_i}{n}\, \theta_i",
        imports="from torch import Tensor, nn",
        code='''    def _find_local_tensors(self, module: nn.Module, example: Tensor | None) -> list[str]:
        """WHICH TENSORS STAY AT THE CLIENT: so far its biases."""
        return [name for name, _ in module.named_parameters() if name.endswith("bias")]
''',
    ),
    "BodyAndHeadMethod": Base(
        "base.heads.body_and_head",
        "the last layer stays at the client, the body is averaged, and clients train both together",
        "the body with the client's head",
        r"\text{client } i{:} &\quad (\varphi_i, h_i) \leftarrow (\varphi, h_i) \text{ after local training on } L_i \\"
        "\n"
        r"\text{server}{:} &\quad \varphi \leftarrow \sum_i \tfrac{n_i}{n}\, \varphi_i",
        imports="from torch import Tensor, nn\nfrom polyfed.models.structure import find_head_modules",
        code='''    def _find_head_modules(self, module: nn.Module, example: Tensor) -> tuple[str, ...]:
        """WHICH MODULES ARE THE HEAD: so far the last layer with parameters."""
        return find_head_modules(module, example)
''',
    ),
    "AveragedHeadMethod": Base(
        "base.heads.shared_heads",
        "bodies of any architecture stay at their clients, and the server averages the heads",
        "the average head on the client's body",
        r"\text{client } i{:} &\quad (\varphi_i, h_i) \leftarrow (\varphi_i, h) \text{ after local training on } L_i \\"
        "\n"
        r"\text{server}{:} &\quad h \leftarrow \sum_i \tfrac{n_i}{n}\, h_i",
        card='        published=frozenset({"head"}),\n',
    ),
}
"""The bases that a method can begin with; `docs/add_a_method.md` says what each leaves to the method."""

METHOD = '''"""{title}: WHAT IT DOES, IN ONE SENTENCE ({paper})."""

from dataclasses import dataclass
from typing import ClassVar, final
{imports}
from polyfed.algorithms.{module} import {base}
from polyfed.core.methods.method_card import MethodCard
{own_imports}

@final
@dataclass(frozen=True, kw_only=True)
class {title}({base}):
    """WHAT IS DIFFERENT HERE.

    So far {about}.
    Evaluated model: {evaluated}.

    Args:
        weighted: by the number of training examples (polyfed's choice); False counts every client the same.

    The other fields are those of `LocalTraining`.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="{name}",
        summary="SAY WHAT IT DOES IN AT MOST 60 CHARACTERS",
        paper="{paper}",
        evaluated="{evaluated}",
{card}    )

    weighted: bool = True
{code}'''

PAGE = """# {title}

WHAT IT DOES, IN ONE SENTENCE THAT IS TRUE OF NO OTHER METHOD.

*{paper}.*

## When to use it

- **Use it if** WHICH CLIENTS IT IS FOR.
- **Not if** WHERE ANOTHER METHOD IS BETTER, AND WHICH.
- **Cost**: WHAT IS SENT AND COMPUTED BESIDE WHAT FEDAVG NEEDS.

```
polyfed run --algorithm {name} --data digits --model mlp --rounds 10
```

<!-- facts {name} -->
<!-- end -->

## Equation

```math
\\begin{{aligned}}
{equation}
\\end{{aligned}}
```

## Defaults

Where each default comes from is explained in [defaults.md](../defaults.md).

<!-- defaults {name} -->
<!-- end -->

## Details

Notation, local training and buffers: [methods.md](../methods.md).

- WHAT IT DOES OTHERWISE THAN THE PAPER, AND WHY. Evaluated model: {evaluated}.

## What proves it

- it learns classes that are far apart
  (`tests/algorithms/test_{name}.py::test_it_learns_classes_that_are_far_apart`)
- without a rate it keeps the first networks
  (`tests/algorithms/test_{name}.py::test_without_a_rate_it_keeps_the_first_networks`)

Every method also passes [the contract suite](../add_a_method.md#its-tests).

## Results

<!-- results {name} -->
<!-- end -->
"""

TESTS = '''"""{title}: closed forms, and what it is for special values of its fields: true of it, and of no other method."""

import torch

import polyfed as pf
from polyfed.algorithms import {title}
from polyfed.testing import small_clients


def test_it_learns_classes_that_are_far_apart():
    run = pf.federate(small_clients(), {title}(lr=0.1, batch_size=8), rounds=10, workers=0)
    assert run.table()[-1]["accuracy"] > 0.6  # 1/3 is chance


def test_without_a_rate_it_keeps_the_first_networks():
    """WRITE IDENTITIES OF THIS METHOD: with which values of its fields is it another method, bit for bit?"""
    runs = [pf.federate(small_clients(), {title}(lr=1e-30), rounds=rounds, workers=0) for rounds in (1, 3)]
    for client in small_clients():
        first, last = (dict(run.model(client.id).named_parameters()) for run in runs)
        for name, tensor in first.items():
            torch.testing.assert_close(last[name], tensor)
'''


def families() -> list[str]:
    """Returns the families: the folders of `algorithms`."""
    folders = [file.parent.name for file in (ROOT / "src/polyfed/algorithms").glob("*/__init__.py")]
    return sorted(name for name in folders if name != "base")


def class_names() -> set[str]:
    """Returns the names of all classes of `algorithms`."""
    files = (ROOT / "src/polyfed/algorithms").rglob("*.py")
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def build_files(name: str, family: str, base_name: str, title: str, paper: str) -> dict[str, str]:
    """Returns the text of each of the three files, by its place.

    Raises:
        SystemExit: a name that cannot be a method's, or that there is already, or an unknown family or base.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise SystemExit(f"a method's name is of small letters, digits and underscores, such as fedgen; got {name!r}")
    if family not in families():
        raise SystemExit(f"no family {family!r}; there are {', '.join(families())}")
    if base_name not in BASES:
        raise SystemExit(f"no base {base_name!r}; there are {', '.join(BASES)}")
    if not title.isidentifier() or title in class_names():
        raise SystemExit(f"the class needs a new name, such as --class-name FedGen; got {title!r}")
    base = BASES[base_name]
    words = {
        "name": name, "title": title, "base": base_name, "paper": paper, "module": base.module, "about": base.about,
        "evaluated": base.evaluated, "equation": base.equation, "card": base.card,
        "imports": "".join(f"{line}\n" for line in base.imports.splitlines() if not line.startswith("from polyfed")),
        "own_imports": "".join(f"{line}\n" for line in base.imports.splitlines() if line.startswith("from polyfed")),
        "code": f"\n{base.code}" if base.code else "",
    }  # fmt: skip
    if words["imports"]:
        words["imports"] = "\n" + words["imports"]
    files = {
        f"src/polyfed/algorithms/{family}/{name}.py": METHOD.format(**words),
        f"docs/methods/{name}.md": PAGE.format(**words),
        f"tests/algorithms/test_{name}.py": TESTS.format(**words),
    }
    if there := [place for place in files if (ROOT / place).exists()]:
        raise SystemExit(f"{there[0]} is there already; choose another name")
    return files


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="in the registry, in files and on the command line: fedgen")
    parser.add_argument("--family", required=True, help=f"one of {', '.join(families())}")
    parser.add_argument("--base", default="Averaging", help=f"one of {', '.join(BASES)} (Averaging)")
    parser.add_argument("--class-name", help="of the class; the name with a capital letter if not given")
    parser.add_argument("--paper", default="AUTHORS AND YEAR", help='such as "Zhu et al. 2021"')
    given = parser.parse_args()
    title = given.class_name or "".join(part.capitalize() for part in given.name.split("_"))
    for place, text in build_files(given.name, given.family, given.base, title, given.paper).items():
        (ROOT / place).write_text(text, encoding="utf-8")
        print(f"written: {place}")
    status = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "update_lists.py"), given.name], cwd=ROOT, check=False
    )
    if status.returncode == 0:
        print(f"now run: make check METHOD={given.name}; then write the method, and a line in CHANGELOG.md")
    return status.returncode


if __name__ == "__main__":
    sys.exit(main())
