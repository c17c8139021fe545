"""The user's own files: Parquet, folders of images, npz archives."""

import io
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from polyfed.core.errors import UserError
from polyfed.data.formats.images import decode_images
from polyfed.data.sources.arrays import Npz, Parquet
from polyfed.data.sources.folders import ImageFolder

COLOUR = np.random.default_rng(0).integers(0, 256, (6, 8, 10, 3), dtype=np.uint8)


def write(file, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return str(file)


def test_parquet_of_numbers_with_names_and_users(tmp_path):
    path = write(
        tmp_path / "bank.parquet",
        features=[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
        kind=["yes", "no", "yes"],
        branch=["x", "y", "x"],
        amount=[0.5, 1.5, 2.5],
    )
    pool = Parquet(path=path, x="features", label="kind", user="branch").load()
    assert pool.train.x.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert pool.train.x.dtype == torch.float32
    assert pool.class_names == ("no", "yes")
    assert pool.train.y.tolist() == [1, 0, 1]
    assert list(pool.columns) == ["branch"]
    assert pool.test is None


def test_parquet_of_images_with_the_hub_s_class_names(tmp_path, write_images_parquet):
    file = tmp_path / "train-0.parquet"
    write_images_parquet(file, COLOUR, [0, 2, 1, 0, 0, 1])
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["cat", "dog", "owl"]}}
    table = pyarrow.parquet.read_table(file)
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), file)
    write_images_parquet(tmp_path / "test-0.parquet", COLOUR[:1], [2])
    pool = Parquet(path=str(tmp_path)).load()
    assert pool.class_names == ("cat", "dog", "owl")
    assert torch.equal(pool.train.x, torch.from_numpy(COLOUR).permute(0, 3, 1, 2))
    assert pool.test.y.tolist() == [2]
    batch, _ = pool.train.batch(torch.arange(6))
    assert batch.mean(dim=(0, 2, 3)).abs().max() < 0.01
    small = Parquet(path=str(tmp_path), image_size=4, grey=True).load()
    assert small.input_shape == (1, 4, 4)


def test_parquet_of_several_labels(tmp_path):
    path = write(tmp_path / "a.parquet", image=[[1, 2], [3, 4]], label=[[0, 1, 1], [1, 0, 0]])
    pool = Parquet(path=path).load()
    assert pool.task == "multilabel"
    assert pool.train.x.dtype == torch.int64
    assert pool.train.y.tolist() == [[0, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("columns", "fields", "message"),
    [
        ({"image": [[1.0]], "label": [0]}, {"label": "y"}, "no label column 'y'; its columns: .*'image', 'label'"),
        ({"image": [[1.0]], "label": [0]}, {"x": "pixels"}, "no input column 'pixels'"),
        ({"image": [[1.0]], "label": [0]}, {"user": "site"}, "no user column 'site'"),
        ({"image": [[1.0], [1.0, 2.0]], "label": [0, 1]}, {}, "column 'image' holds lists of different lengths"),
        ({"image": [[1.0], [2.0]], "label": [0, None]}, {}, "column 'label' has 1 empty cells"),
        ({"image": [[1.0]], "label": [0.5]}, {}, "labels must be whole numbers or names, got type float64"),
        ({"image": [[1.0]], "label": [-1]}, {}, "labels run from -1 to -1"),
        ({"image": ["a text"], "label": [0]}, {}, "inputs must be numbers or encoded images"),
        ({"image": [b"junk"], "label": [0]}, {}, "cannot be decoded"),
    ],
)
def test_parquet_that_does_not_fit_is_refused(tmp_path, columns, fields, message):
    with pytest.raises(UserError, match=message):
        Parquet(path=write(tmp_path / "a.parquet", **columns), **fields).load()


def test_parquet_files_must_exist_and_be_parquet(tmp_path):
    with pytest.raises(UserError, match=r"give path=... with a Parquet file"):
        Parquet().load()
    with pytest.raises(UserError, match="holds no Parquet file of training data"):
        Parquet(path=str(tmp_path)).load()
    (tmp_path / "train.parquet").write_bytes(b"junk")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        Parquet(path=str(tmp_path)).load()


def test_jpeg_by_the_fast_decoder_has_the_pixels_of_pil(encode):
    for form, mode in (("JPEG", "RGB"), ("JPEG", "L"), ("PNG", "P"), ("JPEG", "CMYK")):
        blob = encode(COLOUR[0], form, mode)
        with Image.open(io.BytesIO(blob)) as image:
            reference = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        assert torch.equal(decode_images([blob], "RGB")[0], reference)
    with pytest.raises(UserError, match="images differ in size: 10×8 and 8×8; set image_size"):
        decode_images([encode(COLOUR[0]), encode(COLOUR[0][:, :8])], "RGB")
    with pytest.raises(UserError, match="has no images"):
        decode_images([], "RGB")


@pytest.fixture
def picture_folder(tmp_path):
    for i, name in enumerate(["train/owl/1.png", "train/cat/2.JPG", "train/cat/deep/3.bmp", "test/owl/4.png"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(COLOUR[i]).save(tmp_path / name)
    (tmp_path / "train/cat/notes.txt").write_text("no picture")
    return tmp_path


def test_imagefolder_reads_classes_and_test(picture_folder):
    pool = ImageFolder(path=str(picture_folder), image_size=6).load()
    assert pool.class_names == ("cat", "owl")
    assert pool.train.y.tolist() == [0, 0, 1]
    assert pool.test.y.tolist() == [1]
    assert pool.train.x.shape == (3, 3, 6, 6)
    flat = ImageFolder(path=str(picture_folder / "train"), grey=True).load()
    assert flat.test is None
    assert flat.input_shape == (1, 32, 32)


def test_imagefolder_that_does_not_fit_is_refused(picture_folder, tmp_path):
    (picture_folder / "test/dog").mkdir()
    with (
        pytest.warns(UserWarning, match="no pictures in dog"),
        pytest.raises(UserError, match="classes without training pictures: dog"),
    ):
        ImageFolder(path=str(picture_folder)).load()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no pictures; give path=..."):
        ImageFolder(path=str(tmp_path / "empty")).load()
    with pytest.raises(UserError, match="one folder of pictures per class"):
        ImageFolder().load()
    with pytest.raises(UserError, match="image_size must be at least 1"):
        ImageFolder(image_size=0)


def test_npz_keeps_types_and_columns(tmp_path):
    file = tmp_path / "a.npz"
    images = COLOUR.transpose(0, 3, 1, 2)
    np.savez(file, x_train=images, y_train=np.arange(6) % 3, x_test=images[:2], y_test=[0, 1], user=np.arange(6))
    pool = Npz(path=str(file)).load()
    assert torch.equal(pool.train.x, torch.from_numpy(images.copy()))
    assert pool.num_outputs == 3
    assert len(pool.test) == 2
    assert list(pool.columns) == ["user"]
    np.savez(file, x_train=np.ones((2, 5)), y_train=np.array([[0, 1], [1, 1]]))
    pool = Npz(path=str(file)).load()
    assert (pool.task, pool.train.x.dtype, pool.train.transform) == ("multilabel", torch.float32, None)


def test_npz_that_does_not_fit_is_refused(tmp_path):
    file = tmp_path / "a.npz"
    with pytest.raises(UserError, match=r"give path=... with an .npz file"):
        Npz().load()
    np.savez(file, x=np.ones(3))
    with pytest.raises(UserError, match="holds x; give"):
        Npz(path=str(file)).load()
    np.savez(file, x_train=np.array([{}], dtype=object), y_train=np.zeros(1, int))
    with pytest.raises(UserError, match="allow_pickle=False"):
        Npz(path=str(file)).load()
    file.write_bytes(b"junk")
    with pytest.raises(UserError, match="cannot read"):
        Npz(path=str(file)).load()
    np.savez(file, x_train=np.ones((3, 2)), y_train=np.zeros(2, int))
    with pytest.raises(UserError, match="one row per example"):
        Npz(path=str(file)).load()
