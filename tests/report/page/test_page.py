"""The page of `polyfed report`: what it tells of known scores, that it needs nothing else, and what it refuses."""

import json
import math
import re
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest
from rich.console import Console

from polyfed.cli.commands.results.report_command import show_report
from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.report.data.run_groups import read_run_groups
from polyfed.report.data.small_counts import format_counts_of_parts
from polyfed.report.page.charts.svg_charts import ChartBar, ChartLine, svg_bar_chart, svg_heat_map, svg_line_chart
from polyfed.report.page.panels import method_views

EVIL = ["</script><script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "a & b", "]]><!--"]


class Page(HTMLParser):
    """What a browser's parser would see: elements with their attributes and texts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.stack = [], [], []
        self.scripts = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.stack.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        self.stack.pop()

    def handle_data(self, data):
        if self.stack and self.stack[-1][0] == "script":
            self.scripts[self.stack[-1][1].get("id")] = data
        else:
            self.texts.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def page(tmp_path):
    """The page of run directories, and what was printed."""

    def page(*folders):
        console = Console(record=True, width=200, quiet=True)
        show_report(folders, console, out=tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text(encoding="utf-8")
        return text, Page(text)

    return page


def test_scores_gains_and_costs_of_known_runs(write_run, tmp_path):
    write_run(tmp_path / "a", "fedavg", {"x": [0.2, 0.7], "y": [0.4, 0.5]}, megabytes=3)
    write_run(tmp_path / "a/baselines/local", "local", {"x": [0.1, 0.5], "y": [0.2, 0.6]}, megabytes=0)
    ((setting,), notes) = read_run_groups([tmp_path / "a"])
    fedavg, local = setting.methods
    assert (setting.local_method, notes, setting.clients) == (local, [], ("x", "y"))
    assert fedavg.mean_score_by_run == (pytest.approx(0.6),)
    assert [(gain.client, round(gain.mean, 9)) for gain in setting.gains_over_local(fedavg)] == [
        ("x", 0.2),
        ("y", -0.1),
    ]
    assert fedavg.learning_curve_columns["mean"] == pytest.approx((0.3, 0.6))
    assert fedavg.learning_curve_columns["megabytes"] == (3, 6)
    assert fedavg.learning_curve_columns["seconds"] == (0.5, 1.0)  # of clients and server, not of the evaluation
    assert fedavg.runs[0].cost_until_scored_round == (6, 1.0)


def test_runs_that_differ_in_seed_alone_are_one_line_with_a_band(write_run, tmp_path):
    for seed, last in enumerate((0.5, 0.6, 0.9)):
        write_run(tmp_path / f"a{seed}", "fedavg", {"x": ["not evaluated", last]}, seed=seed)
        write_run(tmp_path / f"b{seed}", "local", {"x": ["not evaluated", 0.4 + 0.1 * seed]}, seed=seed)
    ((setting,), _) = read_run_groups(sorted(tmp_path.iterdir()))
    line = setting.methods[0]
    assert [run.seed for run in line.runs] == [0, 1, 2]
    course = {name: line.learning_curve_columns[name] for name in ("rounds", "mean", "low", "high")}
    assert course == {"rounds": (2,), "mean": pytest.approx((2 / 3,)), "low": (0.5,), "high": (0.9,)}
    # Each seed divides the data again, so that each client of each seed is compared with itself.
    assert {gain.client: round(gain.mean, 9) for gain in setting.gains_over_local(line)} == {
        "x, seed 0": 0.1, "x, seed 1": 0.1, "x, seed 2": 0.3
    }  # fmt: skip


def test_compressed_messages_are_another_line_of_the_same_setting(write_run, tmp_path):
    for name, compress in {"a": "", "b": "compress: none\n", "c": "compress: int8\n"}.items():  # the first is older
        file = write_run(tmp_path / name, "fedavg", {"x": [0.5]}, seed=ord(name)) / "config.yaml"
        file.write_text(file.read_text() + compress)
    ((setting,), _) = read_run_groups(sorted(tmp_path.iterdir()))
    assert [(line.label, len(line.runs)) for line in setting.methods] == [
        ("fedavg (compress none)", 2), ("fedavg (compress int8)", 1)
    ]  # fmt: skip


def test_other_data_are_another_setting_and_other_fields_another_line(write_run, tmp_path):
    scores = {"x": [0.5]}
    write_run(tmp_path / "a", "fedprox", scores, fields={"mu": 1})
    write_run(tmp_path / "b", "fedprox", scores, fields={"mu": 2})
    write_run(tmp_path / "c", "fedprox", scores, fields={"mu": 2})
    write_run(tmp_path / "d", "fedprox", scores, data={"name": "mnist", "partition": {"name": "iid"}})
    found, _ = read_run_groups([tmp_path / name for name in "abcd"])
    labels = [[line.label for line in setting.methods] for setting in found]
    assert labels == [["fedprox (mu 1)", f"fedprox ({tmp_path / 'b'})", f"fedprox ({tmp_path / 'c'})"], ["fedprox"]]


def test_names_of_clients_stay_text(write_run, page, tmp_path):
    scores = {name: [0.1 * k + 0.1] for k, name in enumerate(EVIL)}
    write_run(tmp_path / "a", "fedavg", scores)
    write_run(tmp_path / "a/baselines/local", "local", {name: [0.3] for name in EVIL})
    write_run(tmp_path / "b", "fedavg", scores, fields={"</script>": "<b>"})
    text, found = page(tmp_path / "a", tmp_path / "b")
    assert len(found.all("script")) == text.count("<script") == 2
    assert not found.all("img")
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    cells = set(found.texts)
    assert cells.issuperset(EVIL)
    labels = [line["label"] for line in json.loads(found.scripts["data"])["p0"]["lines"]]
    assert "fedavg (</script> <b>)" in labels
    assert text.count("</script>") == 2


def test_nothing_is_fetched_and_everything_is_named(write_run, learning, page, tmp_path):
    write_run(tmp_path / "a", "fedavg", learning(5, 4, 0.7))
    write_run(tmp_path / "a/baselines/local", "local", learning(5, 4, 0.6))
    text, found = page(tmp_path / "a")
    for tag, attributes in found.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        for name in ("src", "href", "srcset", "action"):
            assert attributes.get(name, "data:").startswith(("data:", "#"))
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    names = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(names) == len(set(names))
    pictures = [attributes for attributes in found.all("svg") if attributes.get("role") == "img"]
    assert len(pictures) == 4  # three axes and the bars
    for attributes in pictures:
        assert set(attributes["aria-labelledby"].split()) <= set(names)
    for attributes in found.all("select"):
        assert attributes["id"] in [label.get("for") for label in found.all("label")]
    assert files("polyfed.report.page").joinpath("assets", "page.css").is_file()


def test_the_first_sentence_names_the_highest_mean_and_one_seed_carries_no_verdict(write_run, page, tmp_path):
    write_run(tmp_path / "a", "fedavg", {"x": [0.75], "y": [0.5]}, wanted=3)
    write_run(tmp_path / "a/baselines/local", "local", {"x": [0.5], "y": [0.55]})
    texts = " ".join(page(tmp_path / "a")[1].texts)
    assert "fedavg has the highest mean, 62.5 %; training alone has 52.5 %." in texts
    assert "+10.0 points on average; 2 sites: 1 gain, 1 lose (most: y −5.0 points)" in texts
    assert "One seed: differences of a few points can be chance" in texts
    assert f"fedavg has 1 of 3 rounds and can go on: polyfed resume {tmp_path / 'a'}" in texts


def test_a_run_without_a_round_is_refused_and_a_baseline_without_one_left_out(write_run, page, tmp_path, capsys):
    write_run(tmp_path / "killed", "fedavg", {})
    assert main(["report", str(tmp_path / "killed")]) == 2
    error = capsys.readouterr().err
    assert f"has no evaluated round yet; go on with it: polyfed resume {tmp_path / 'killed'}" in error
    assert not (tmp_path / "killed" / "report.html").exists()
    write_run(tmp_path / "a", "fedavg", {"x": [0.5]})
    write_run(tmp_path / "a/baselines/local", "local", {})
    text, _ = page(tmp_path / "a")
    assert f"{tmp_path / 'a/baselines/local'} has no evaluated round yet and is left out" in text
    assert "Training alone was not run" in text
    (tmp_path / "a" / "config.yaml").write_text("rounds: 3\n")
    with pytest.raises(UserError, match="names no algorithm"):
        page(tmp_path / "a")
    with pytest.raises(UserError, match="is not a run directory"):
        page(tmp_path)


def test_a_page_that_cannot_be_written(write_run, tmp_path):
    write_run(tmp_path / "a", "fedavg", {"x": [0.5]})
    with pytest.raises(UserError, match=r"give another out=\.\.\."):
        show_report([tmp_path / "a"], Console(quiet=True), out=tmp_path / "nowhere" / "page.html")


@pytest.mark.parametrize("clients", [1, pytest.param(200, marks=pytest.mark.slow)])
def test_one_client_and_two_hundred(write_run, learning, page, tmp_path, clients):
    methods = ("pfedla", *(f"method_{k}" for k in range(11)), "local")
    for k, name in enumerate(methods):
        place = tmp_path / "a" if k == 0 else tmp_path / "a/baselines" / name
        write_run(place, name, learning(clients, 30 if clients > 1 else 1, 0.4 + 0.03 * k, seed=k))
    text, found = page(tmp_path / "a")
    assert len(text) < 1_500_000
    assert sum(attributes.get("class") in ("more", "less") for attributes in found.all("rect")) == 12 * clients
    assert "nan" not in "".join(re.findall(r"<svg.*?</svg>", text)).lower()


def test_trainings_that_diverged(write_run, page, tmp_path):
    write_run(tmp_path / "a", "fedavg", {"x": [0.5, None], "y": [None, None]}, score="auc")
    write_run(tmp_path / "a/baselines/local", "local", {"x": [0.5, 0.6], "y": [0.5, None]}, score="auc")
    text, found = page(tmp_path / "a")
    assert "nan" not in "".join(re.findall(r"<svg.*?</svg>", text)).lower()
    assert "fedavg has no score for 2 sites (x, y), left out of its mean." in found.texts
    assert "No site of fedavg has a score both ways." in found.texts
    assert json.loads(found.scripts["data"])["p0"]["lines"][0]["mean"] == [0.5, None]
    write_run(tmp_path / "b", "fedavg", {"x": [None]}, score="r2")
    assert "No method has a mean score: all trainings diverged" in page(tmp_path / "b")[0]


def test_a_comparison(comparison_of, page, tmp_path):
    scores = {
        "local": {0: {"north": 0.5, "east": 0.6}, 1: {"north": 0.5, "east": 0.6}},
        "fedavg": {0: {"north": 0.7, "east": 0.5}, 1: {"north": 0.8, "east": 0.5}},
    }
    (tmp_path / "comparison.yaml").write_text("title: mine\n")
    (tmp_path / "comparison.json").write_text(json.dumps(comparison_of(scores)))
    ((setting,), _) = read_run_groups([tmp_path])
    north, east = setting.gains_over_local(setting.methods[0])
    assert (north.client, round(north.mean, 9), round(north.low, 9), round(north.high, 9)) == ("north", 0.25, 0.2, 0.3)
    assert (east.client, round(east.mean, 9)) == ("east", -0.1)
    _, found = page(tmp_path)
    texts = found.texts
    assert "north gains 4.1 to 6.0 points with fedavg." in texts
    assert "Left out: fedbn needs one architecture." in texts
    assert "60.5 % to 64.5 %" in texts  # the interval
    assert "0.043" in texts
    assert "cat" in texts
    assert "Training examples by site and class; a site has 10." in " ".join(texts)
    for damage in ('{"format": 1, "methods": {}}', '{"methods": {}}', "{", "[1]"):
        (tmp_path / "comparison.json").write_text(damage)
        with pytest.raises(UserError, match="make it again: polyfed compare"):
            page(tmp_path)


def test_classes_of_clients_are_those_of_the_run(page, tmp_path, monkeypatch, capsys):
    from polyfed.simulation.experiment import build_experiment, load_participants
    from polyfed.simulation.storage.directory import read_config

    monkeypatch.chdir(tmp_path)
    words = (
        "--data digits --data.clients 3 --data.examples_per_client 100 --algorithm local --rounds 1 --workers 0 --quiet"
    )
    assert main(["run", *words.split(), "--out", "a"]) == 0
    _, found = page(tmp_path / "a")
    known = load_participants(build_experiment(read_config(tmp_path / "a")))
    told = [attributes["data-t"] for attributes in found.all("rect") if "data-t" in attributes]
    for client in known.clients:
        counts = format_counts_of_parts(known.classes[client.id])
        assert [f"{client.id}, {k}: {n}" for k, n in enumerate(counts)] == [t for t in told if t.startswith(client.id)]
    config = (tmp_path / "a/config.yaml").read_text()
    (tmp_path / "a/config.yaml").write_text(config.replace("seed: 0", "seed: 1"))
    assert "The data are no longer divided as in the run" in page(tmp_path / "a")[0]
    capsys.readouterr()


def test_weights_and_warm_starts_from_files(tmp_path):
    (tmp_path / "analysis").mkdir()
    clients = np.array(["a", "b", "c"])
    for number, own in ((0, 0.5), (1, 1.0)):
        alpha = np.full((3, 1, 3), (1 - own) / 2, np.float32)
        alpha[range(3), 0, range(3)] = own
        np.savez(
            tmp_path / f"analysis/round-00000{number}.npz", alpha=alpha, rows=clients, layers=["conv"], clients=clients
        )
    html = method_views.html_aggregation_weights(tmp_path, "w")
    assert "a site&#39;s own has the weight 1.00" in html
    assert 'data-t="a, a: 1.000"' in html
    assert 'data-t="a, b: 0.000"' in html
    assert "<td>0.500</td><td>1.000</td>" in html  # its course, in the table
    assert method_views.html_warm_starts(tmp_path, "n") == ""
    (tmp_path / "unseen").mkdir()
    curves = {"<new>": {"score": "accuracy", "warm": [0.5, 0.8], "scratch": [0.1, None]}}
    (tmp_path / method_views.WARM_START_FILE).write_text(json.dumps(curves))
    html = method_views.html_warm_starts(tmp_path, "n")
    assert "&lt;new&gt;" in html
    assert "<td>50.0 %</td><td>10.0 %</td>" in html
    assert "<td>80.0 %</td><td>–</td>" in html
    (tmp_path / method_views.WARM_START_FILE).write_text("[1]")
    with pytest.raises(UserError, match="is damaged"):
        method_views.html_warm_starts(tmp_path, "n")


# -- charts -----------------------------------------------------------------------------------------------------------


def test_lines_bands_and_gaps_stand_where_the_values_say():
    x, y = [0.0, 1.0, 2.0, 4.0], [0.0, 0.5, math.nan, 1.0]
    chart = svg_line_chart(
        [ChartLine("a", x, y, y, [0.0, 0.75, math.nan, 1.0], 3)], key="k", title="t", x_label="x", y_label="y"
    )
    left, right, top, bottom, x0, x1, y0, y1 = map(float, re.search(r'data-box="([^"]+)"', chart)[1].split())
    assert (x0, x1, y0, y1) == (0, 4, 0, 1)
    points = [tuple(map(float, found)) for found in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', chart)]
    assert points == [
        (left, bottom),
        (pytest.approx(left + (right - left) / 4, abs=0.1), (top + bottom) / 2),
        (right, top),
    ]
    assert len(re.findall('class="line"', chart)) == 1  # the third piece is a single point
    band = re.search(r'class="band" d="M([^"]+)Z"', chart)[1].split("L")
    assert [float(corner.split()[1]) for corner in band] == pytest.approx(
        [bottom, (top + bottom) / 2, bottom - 0.75 * (bottom - top), bottom], abs=0.1
    )


def test_what_costs_nothing_is_a_level():
    def curve(x, y):
        return ChartLine("a", x, y, y, y, 0)

    chart = svg_line_chart(
        [curve([0, 0], [0.1, 0.5]), curve([1, 2], [0, 1.0])], key="k", title="t", x_label="MB", y_label="y"
    )
    # At its last value, the middle of the frame from 10 to 236.
    assert re.findall('class="line level" d="M[0-9]+ ([0-9.]+)H', chart) == ["123.0"]
    assert chart.count("<circle") == 2


def test_bars_have_the_length_of_their_values():
    chart = svg_bar_chart(
        [ChartBar("a", 0.2, 0.2, 0.2), ChartBar("b", -0.1, -0.3, 0.1)], key="k", title="t", x_label="x", signed=True
    )
    (kind_a, x_a, width_a), (kind_b, x_b, width_b) = re.findall(
        r'class="(more|less)" x="([\d.]+)" .*? width="([\d.]+)"', chart
    )
    assert (kind_a, kind_b) == ("more", "less")
    assert float(width_a) / float(width_b) == pytest.approx(2, rel=0.01)
    assert float(x_b) + float(width_b) == pytest.approx(float(x_a), abs=0.2)  # they meet at 0
    start, end = map(float, re.search(r'class="whisker" d="M([\d.]+) [\d.]+H([\d.]+)"', chart).groups())
    assert (end - start) / float(width_a) == pytest.approx(2, rel=0.01)


def test_colours_of_a_heat_map_are_those_of_the_values():
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    values = np.array([[0.0, 1.0], [0.25, math.nan]])
    chart = svg_heat_map(
        values, ["r", "s"], ["c", "d"], key="k", title="t", x_label="x", y_label="y", sqrt_colours=True
    )
    found = dict(re.findall(r'data-t="([^"]+)".*?fill="([^"]+)"', chart))
    viridis = colormaps["viridis"]
    assert found == {
        "r, c: 0.000": to_hex(viridis(0)), "r, d: 1.000": to_hex(viridis(255)), "s, c: 0.250": to_hex(viridis(128)),
    }  # fmt: skip
    large = svg_heat_map(
        np.ones((200, 200)), [f"r{k}" for k in range(200)], [f"c{k}" for k in range(200)], key="k", title="t",
        x_label="x", y_label="y",
    )  # fmt: skip
    assert "<rect" not in large
    assert len(large) < 60_000


def test_colours_of_lines_can_be_told_apart_by_everyone():
    """Eight colours, light and dark: at least 3:1 against the card, and a distance of at least 15 in CIELAB under normal
    sight and the three kinds of colour blindness, as Machado et al. (2009) simulate them."""
    kinds = [
        np.eye(3),
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    ]

    def linear(colour):
        part = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
        return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)

    def lab(rgb):
        to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
        t = to_xyz @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089]
        x, y, z = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    style = files("polyfed.report.page").joinpath("assets", "page.css").read_text()
    for part, card in zip(style.split("@media")[:2], ("#fff", "#1c1f25"), strict=True):
        assert f"--card:{card}" in part
        colours = [linear(re.search(rf"--c{k}:(#\w{{6}})", part)[1]) for k in range(8)]
        ground = linear(card if len(card) == 7 else "#ffffff") @ [0.2126, 0.7152, 0.0722]
        for colour in colours:
            low, high = sorted((colour @ [0.2126, 0.7152, 0.0722], ground))
            assert (high + 0.05) / (low + 0.05) >= 3
        for kind in kinds:
            seen = [lab(kind @ colour) for colour in colours]
            assert min(np.linalg.norm(a - b) for k, a in enumerate(seen) for b in seen[:k]) >= 15
