"""Pictures of kinds that PIL would change in silence: more than 8 bits, turned by a tag, several pages."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image

from polyfed.core.errors import UserError
from polyfed.data.formats.images import decode_image, decode_images


def encode(picture, kind, **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize(
    ("dtype", "kind"), [("u2", "PNG"), ("u2", "TIFF"), (">u2", "TIFF"), ("i4", "TIFF"), ("f4", "TIFF")]
)
def test_more_than_eight_bits_are_refused_and_not_cut_off(dtype, kind, mode):
    levels = np.arange(0, 6400, 100).reshape(8, 8)
    with pytest.raises(UserError, match=r"p.png cannot be decoded \(its mode .* scale its values to 0 to 255"):
        decode_image(io.BytesIO(encode(Image.fromarray(levels.astype(dtype)), kind)), mode, 8, "p.png")
    if dtype != "f4":
        small = encode(Image.fromarray((levels // 100).astype(dtype)), kind)
        assert decode_image(io.BytesIO(small), "L", None, "p.png")[..., 0].tolist() == (levels // 100).tolist()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG"])
def test_pictures_are_turned_as_their_tag_says(kind):
    upright = Image.new("RGB", (16, 8))
    upright.paste((255, 255, 255), (0, 0, 8, 4))
    tags = Image.Exif()
    tags[0x0112] = 6  # a quarter turn clockwise shows it as it is
    turned = encode(
        upright.transpose(Image.Transpose.ROTATE_90), kind, exif=tags, **({} if kind != "JPEG" else {"quality": 95})
    )
    shown = decode_images([turned], "RGB")
    assert np.abs(shown[0].permute(1, 2, 0).numpy().astype(int) - np.asarray(upright).astype(int)).max() < 9
    assert decode_image(io.BytesIO(turned), "L", 8, "p")[[0, 0, -1, -1], [0, -1, 0, -1], 0].tolist() == [255, 0, 0, 0]


@pytest.mark.parametrize("inserted", [b"", b"\xff\xe2\x02\x00" + bytes(510)])
def test_a_tag_is_followed_wherever_it_stands_in_the_header(inserted):
    """As behind a colour profile, where the fast decoder, which ignores tags, is not asked."""
    tags = Image.Exif()
    tags[0x0112] = 6
    blob = encode(Image.new("RGB", (16, 8)), "JPEG", exif=tags)
    assert decode_images([blob[:2] + inserted + blob[2:]], "RGB").shape == (1, 3, 16, 8)


@pytest.mark.parametrize("kind", ["GIF", "TIFF"])
def test_further_pages_of_a_picture_are_told(kind):
    pages = [Image.new("L", (8, 8), level) for level in (10, 90)]
    with pytest.warns(UserWarning, match="several pages or frames, only the first is read"):
        first = decode_image(io.BytesIO(encode(pages[0], kind, save_all=True, append_images=pages[1:])), "L", 8, "p")
    assert set(first.flat) == {10}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode_image(io.BytesIO(encode(pages[0], kind)), "L", 8, "p")
