"""Pictures in folders of sites, pictures that a table lists, and pictures that stay encoded."""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import polyfed as pf
from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.data import PadCropFlip, Split, make_clients
from polyfed.data.concat import concat_examples, concatenation_obstacle
from polyfed.data.formats.lazy_images import EncodedArrowImages, copy_parquet_images_to_arrow_file
from polyfed.data.partitioning.partitions import IID, Natural
from polyfed.data.sources.arrays import Parquet
from polyfed.data.sources.folders import ImageFolder, ImageTable
from polyfed.simulation.storage.directory import read_config, read_metrics

PLACES = [(site, label) for site in ("north", "south") for label in ("cat", "owl")]


def save(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path):
    """Five pictures of each class at each site, in both layouts."""
    for i, (site, label) in enumerate(PLACES):
        for k in range(5):
            save(tmp_path / "a" / site / label / f"{k}.png", 10 * i + k)
            save(tmp_path / "b" / label / site / f"{k}.png", 10 * i + k)
    return tmp_path


def pictures_of(pool):
    """(site, label) -> its pictures as sums of pixels, sorted: the same whatever the order of rows."""
    x = pool.train.batch(torch.arange(len(pool.train)))[0].double().sum((1, 2, 3))
    rows = zip(pool.columns["site"], pool.train.y.tolist(), x.tolist(), strict=True)
    found = {}
    for site, label, total in rows:
        found.setdefault((str(site), pool.class_names[label]), []).append(total)
    return {place: sorted(totals) for place, totals in found.items()}


def test_both_layouts_give_the_same_sites_and_classes(folder):
    one = ImageFolder(str(folder / "a"), 8, layout="site/class").load()
    other = ImageFolder(str(folder / "b"), 8, layout="class/site").load()
    assert one.class_names == other.class_names == ("cat", "owl")
    assert pictures_of(one) == pictures_of(other)
    assert sorted(pictures_of(one)) == sorted(PLACES)
    clients, _ = make_clients(one, Split(), Natural("site"), 0)
    assert [c.id for c in clients] == ["north", "south"]


def test_folders_of_sites_are_not_taken_for_classes(folder):
    with pytest.raises(
        UserError, match=r"\(north, south\) have folders of the same names .*\(cat, owl\): give layout='site/class'"
    ):
        ImageFolder(str(folder / "a")).load()
    save(folder / "a" / "north" / "loose.png", 1)
    with pytest.raises(UserError, match=r"loose.png' lies in no folder of the layout site/class"):
        ImageFolder(str(folder / "a"), layout="site/class").load()
    with pytest.raises(UserError, match="ImageFolder: layout must be class, site/class or class/site, got 'sites'"):
        ImageFolder(layout="sites")
    with pytest.raises(UserError, match="is not a folder"):
        ImageFolder(str(folder / "a" / "north" / "loose.png")).load()


def test_a_layout_makes_sites_the_clients_of_a_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    command = (
        "run --data imagefolder --data.path a --data.layout site/class --data.image_size 8 --rounds 1 --quiet --out r"
    )
    assert main(command.split()) == 0
    assert read_config("r")["data"]["partition"]["column"] == "site"
    assert sorted(read_metrics(folder / "r/metrics.jsonl")[0]["clients"]) == ["north", "south"]


@pytest.fixture
def listed(folder):
    rows = [
        {"path": f"{site}/{label}/{k}.png", "label": label, "site": site, "patient": f"{site}{k % 3}", "device": "x"}
        for site, label in PLACES
        for k in range(5)
    ]
    pd.DataFrame(rows).to_csv(folder / "a" / "list.csv", index=False)
    return folder / "a" / "list.csv"


def test_a_table_lists_pictures(listed, folder):
    pool = ImageTable(str(listed), site="site", image_size=8, group="patient").load()
    assert pictures_of(pool) == pictures_of(ImageFolder(str(folder / "a"), 8, layout="site/class").load())
    assert sorted(pool.columns) == ["device", "patient", "site"]
    clients, _ = make_clients(pool, Split(), Natural("site"), 0)
    for client in clients:
        assert not set(client.train.column("patient")) & set(client.test.column("patient"))
    elsewhere = folder / "list.csv"
    elsewhere.write_bytes(listed.read_bytes())
    assert len(ImageTable(str(elsewhere), folder=str(folder / "a")).load().train) == 20
    (folder / "a/south/owl/4.png").unlink()
    with pytest.raises(UserError, match=r"pictures that do not exist in row 20, such as .*4.png.*give folder=..."):
        ImageTable(str(listed)).load()
    with pytest.raises(UserError, match="image: the table has no column 'file'"):
        ImageTable(str(listed), image="file").load()


def same(lazy, loaded):
    for part, other in ((lazy.train, loaded.train), (lazy.test, loaded.test)):
        if other is not None:
            rows = torch.tensor([len(part) - 1, 0, 0])
            assert torch.equal(part.transform.decode_pixels(part.x[rows]), other.x[rows])
            assert torch.equal(part.batch(rows)[1], other.batch(rows)[1])
    assert lazy.input_shape == loaded.input_shape
    assert lazy.class_names == loaded.class_names
    assert lazy.train.transform.normalise == loaded.train.transform


def test_lazy_pictures_are_those_in_memory(listed, folder, write_images_parquet, tmp_path):
    root = str(folder / "a")
    same(ImageFolder(root, 8, layout="site/class", lazy=True).load(), ImageFolder(root, 8, layout="site/class").load())
    same(
        ImageTable(str(listed), image_size=8, grey=True, lazy=True).load(),
        ImageTable(str(listed), image_size=8, grey=True).load(),
    )
    draw = np.random.default_rng(0)
    for split, number in (("train", 7), ("test", 3)):
        pixels = draw.integers(0, 256, (number, 6, 7, 3), dtype=np.uint8)
        write_images_parquet(tmp_path / "p" / f"{split}-0.parquet", pixels, [i % 3 for i in range(number)])
    options = {"path": str(tmp_path / "p"), "image_size": 5}
    lazy = {"lazy": True, "cache": str(tmp_path / "images.arrow"), **options}
    for _ in range(2):  # the second time from the cache
        same(Parquet(**lazy).load(), Parquet(**options).load())
    (tmp_path / "p" / "test-0.parquet").unlink()
    with pytest.raises(UserError, match="holds 10 images, and the data 7; delete it"):
        Parquet(**lazy).load()
    with pytest.raises(
        UserError, match=r"lazy images need image_size=..., and cache=... .* \.arrow, got image_size=None"
    ):
        Parquet(lazy=True, cache="a.arrow")


def test_a_run_on_lazy_pictures_is_that_on_pictures_in_memory(folder):
    def run(lazy):
        pool = ImageFolder(str(folder / "a"), 8, layout="site/class", lazy=lazy).load()
        parts, _ = make_clients(pool, Split(val_fraction=0.2), Natural("site"), 0, augment=PadCropFlip(1))
        model = torch.nn.Sequential
        clients = [
            pf.Client(p.id, lambda: model(torch.nn.Flatten(), torch.nn.Linear(192, 2)), p.train, p.test, p.val)
            for p in parts
        ]
        return pf.federate(clients, pf.algorithms.FedAvg(lr=0.1), rounds=2, workers=0)

    lazy, loaded = run(True), run(False)
    assert [r["summary"] for r in lazy.history] == [r["summary"] for r in loaded.history]
    new = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(lazy.predict("north", new), loaded.predict("north", new))


def test_equal_lazy_pictures_are_found_as_in_memory(folder):
    for k in range(5):
        save(folder / "a" / "north" / "owl" / f"copy{k}.png", k)  # north's cats
    pool = ImageFolder(str(folder / "a"), 8, layout="site/class", lazy=True).load()
    assert len(pool.train.x.unique()) == 20
    assert len(pool.train) == 25


def test_lazy_pictures_of_two_sets_are_not_mixed(folder):
    a, b = (ImageFolder(str(folder / "a" / site), 8, lazy=True).load().train for site in ("north", "south"))
    assert concatenation_obstacle(a, b) == "inputs are prepared by different transforms"
    with pytest.raises(UserError, match="of other images than their transform decodes"):
        a.transform(b.x)
    assert concatenation_obstacle(a, concat_examples([a, a])) is None


def test_lazy_pictures_that_fail_are_named(folder):
    path = folder / "a/north/cat/2.png"
    source = ImageFolder(str(folder / "a"), 8, layout="site/class", lazy=True)
    pool = source.load()
    path.unlink()
    with pytest.raises(UserError, match=r"cannot read the image .*north/cat/2.png"):
        pool.train.batch(torch.arange(20))
    path.write_bytes(b"junk")
    with pytest.raises(UserError, match=r"2.png' cannot be decoded \(it is no picture\); take it out"):
        source.load()
    (folder / "x.arrow").write_bytes(b"junk")
    with pytest.raises(UserError, match="cannot be read as an Arrow file of images"):
        len(EncodedArrowImages(str(folder / "x.arrow")))
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        copy_parquet_images_to_arrow_file([path], "image", folder / "y.arrow")
    assert not (folder / "y.arrow").exists()


def test_shifts_of_lazy_pictures_are_refused(folder):
    from polyfed.data import Shift

    pool = ImageFolder(str(folder / "a"), 8, layout="site/class", lazy=True).load()
    with pytest.raises(UserError, match=r"a shift transforms uint8 images .*leave lazy out"):
        make_clients(pool, Split(clients=2), IID(), 0, [Shift(rotation=90)])


def test_what_a_folder_holds_beside_pictures_is_told(folder):
    for file in (folder / "a/north/owl").iterdir():
        file.rename(file.with_suffix(".dcm"))
    (folder / "a/south/cat/._0.png").write_bytes(b"of macOS")
    (folder / "a/east").mkdir()
    source = ImageFolder(str(folder / "a"), 8, layout="site/class")
    with pytest.warns(
        UserWarning, match=r"no pictures in east, north/owl and 5 files of other kinds \(.dcm\), which are"
    ):
        pool = source.load()
    assert len(pool.train) == 15
    for file in (folder / "a").rglob("*.png"):
        file.rename(file.with_suffix(".dcm"))
    with pytest.raises(UserError, match=r"holds no pictures, but 20 files of other kinds \(.dcm\)"):
        source.load()


def test_folders_whose_names_look_alike_are_told(folder):
    (folder / "a/south/cat").rename(folder / "a/south/Cat ")
    (folder / "a/south").rename(folder / "a/NORTH")
    with pytest.warns(UserWarning, match="spell them alike") as told:
        ImageFolder(str(folder / "a"), 8, layout="site/class").load()
    texts = [str(warning.message) for warning in told]
    assert texts[0].startswith("the folders of classes are 'Cat ' and 'cat', which are two different values here")
    assert texts[1].startswith("the folders of sites are 'NORTH' and 'north'")


@pytest.mark.parametrize("lazy", [False, True])
def test_a_loop_of_links_is_refused(folder, lazy):
    (folder / "a/north/cat/9.png").symlink_to("9.png")
    with pytest.raises(UserError, match=r"cannot read .*9.png: Too many levels of symbolic links"):
        ImageFolder(str(folder / "a"), 8, layout="site/class", lazy=lazy).load()
