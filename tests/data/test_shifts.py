"""Shifts and augmentation, against torch and kornia."""

import kornia.augmentation
import pytest
import torch
from kornia.enhance import adjust_hue
from kornia.geometry.transform import rotate

from polyfed.core.errors import UserError
from polyfed.data import IID, SOURCES, Examples, Normalise, PadCropFlip, Shift, Split, make_clients


def images(num=6, channels=3, height=12, width=12) -> Examples:
    x = torch.randint(0, 256, (num, channels, height, width), generator=torch.Generator().manual_seed(0))
    return Examples(x.to(torch.uint8), torch.arange(num), transform=Normalise((0.5,) * channels, (0.5,) * channels))


@pytest.mark.parametrize("degrees", [-270, -180, -90, 90, 180, 270, 450])
def test_quarter_turns_are_exact_and_agree_with_kornia(degrees):
    examples = images()
    turned = Shift(rotation=degrees).apply(examples).x
    assert torch.equal(turned, torch.rot90(examples.x, degrees // 90, (2, 3)))
    reference = rotate(examples.x.float(), torch.full((6,), float(degrees)))
    assert (turned.float() - reference).abs().max() < 0.5


def test_other_rotations_are_kornia_s_and_negative_ones_undo_them():
    smooth = torch.linspace(0, 255, 32).view(1, 1, 1, 32).expand(2, 1, 32, 32).to(torch.uint8)
    examples = Examples(smooth, torch.tensor([0, 1]))
    turned = Shift(rotation=30).apply(examples)
    assert (turned.x.float() - rotate(smooth.float(), torch.full((2,), 30.0))).abs().max() <= 0.5
    back = Shift(rotation=-30).apply(turned)
    middle = slice(12, 20)
    assert (back.x[..., middle, middle].float() - smooth[..., middle, middle].float()).abs().max() <= 3


def test_hue_turns_the_colour_circle():
    red = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    red[:, 0] = 255
    examples = Examples(red, torch.tensor([0]))
    for hue in (0.5, -0.5):  # both ends: the complementary colour, cyan
        assert Shift(hue=hue).apply(examples).x[0, :, 0, 0].tolist() == [0, 255, 255]
    assert Shift(hue=1 / 3).apply(examples).x[0, :, 0, 0].tolist() == [0, 255, 0]
    some = images()
    reference = adjust_hue(some.x / 255, 0.1 * 2 * torch.pi) * 255
    assert (Shift(hue=0.1).apply(some).x.float() - reference).abs().max() <= 0.5


def test_a_shift_makes_a_store_of_its_own_rows_only_and_keeps_the_transform():
    examples = images().select(torch.tensor([4, 1]))
    before = examples.x.clone()
    shifted = Shift(rotation=90).apply(examples)
    assert len(shifted.x) == 2
    assert shifted.labels.tolist() == [4, 1]
    assert torch.equal(shifted.x, torch.rot90(before[[4, 1]], 1, (2, 3)))
    assert torch.equal(examples.x, before)
    assert shifted.transform is examples.transform
    assert Shift(rotation=360).apply(examples) is examples


def test_large_sets_are_changed_in_chunks():
    x = torch.arange(2500).remainder(256).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 3, 3)
    shifted = Shift(rotation=45).apply(Examples(x, torch.zeros(2500, dtype=torch.int64)))
    assert torch.equal(shifted.x[:, 0, 1, 1], x[:, 0, 1, 1])


def test_shifts_that_cannot_be_are_refused():
    with pytest.raises(UserError, match=r"needs RGB images, but these have 1 channel"):
        Shift(hue=0.5).apply(images(channels=1))
    with pytest.raises(UserError, match="needs square images, got 12×6 pixels"):
        Shift(rotation=-90).apply(images(height=6))
    with pytest.raises(UserError, match=r"transforms uint8 images .* torch.float32 of shape \(2, 3\)"):
        Shift(rotation=5).apply(Examples(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(UserError, match=r"hue must be between -0.5 and 0.5, got 0.6"):
        Shift(hue=0.6)
    with pytest.raises(UserError, match="rotation must be a number of degrees"):
        Shift(rotation=float("nan"))
    assert Shift(rotation=180).apply(images(height=6)).x.shape == (6, 3, 6, 12)


def test_every_augmented_image_is_a_crop_of_the_padded_one():
    batch = images(num=50, height=8, width=6).x
    out = PadCropFlip(padding=2)(batch, torch.Generator().manual_seed(3))
    assert out.shape == batch.shape
    assert out.dtype == torch.uint8
    seen = set()
    for image, result in zip(batch, out, strict=True):
        matches = [
            (top, left, mirrored)
            for mirrored in (False, True)
            for padded in [torch.nn.functional.pad(image.flip(2) if mirrored else image, [2] * 4)]
            for top in range(5)
            for left in range(5)
            if torch.equal(padded[:, top : top + 8, left : left + 6], result)
        ]
        assert matches
        seen.add(matches[0])
    assert len(seen) > 20


def test_augmentation_has_kornia_s_shape_and_depends_on_the_generator_alone():
    batch = images().x
    reference = torch.nn.Sequential(
        kornia.augmentation.RandomCrop((12, 12), padding=4), kornia.augmentation.RandomHorizontalFlip()
    )(batch / 255)
    augment = PadCropFlip()
    state = torch.random.get_rng_state()
    first, again, other = (augment(batch, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert reference.shape == first.shape
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_augmentation_can_do_one_thing_or_nothing():
    batch = images(num=40).x
    mirrored = PadCropFlip(padding=0)(batch, torch.Generator().manual_seed(0))
    flips = [torch.equal(a.flip(2), b) for a, b in zip(batch, mirrored, strict=True)]
    assert 5 < sum(flips) < 35
    assert torch.equal(PadCropFlip(padding=0, flip=False)(batch, torch.Generator()), batch)
    with pytest.raises(UserError, match="padding must be 0 or more pixels, got -1"):
        PadCropFlip(padding=-1)
    with pytest.raises(UserError, match=r"got shape \(2, 3\)"):
        PadCropFlip()(torch.zeros(2, 3), torch.Generator())


def test_labels_turn_by_client_and_leave_the_common_store_alone():
    pool = SOURCES["digits"]().load()
    before = pool.train.labels.clone()
    split = Split(clients=4, val_fraction=0.1)
    plain, _ = make_clients(pool, split, IID(), seed=0)
    turned, _ = make_clients(pool, split, IID(), seed=0, shifts=(Shift(), Shift(labels=1, rotation=90)))
    for i, (own, other) in enumerate(zip(plain, turned, strict=True)):
        for part in ("train", "test", "val"):
            labels = getattr(own, part).labels
            assert torch.equal(getattr(other, part).labels, (labels + i % 2) % 10)
        assert torch.equal(other.test.raw_inputs, torch.rot90(own.test.raw_inputs, i % 2, (2, 3)))
    assert torch.equal(pool.train.labels, before)


@pytest.mark.parametrize(("classes", "targets"), [(None, torch.arange(6)), (3, torch.zeros(6, 3))])
def test_labels_of_no_classes_are_refused(classes, targets):
    with pytest.raises(UserError, match="a shift with labels=1 needs class labels, which these data do not have"):
        Shift(labels=1).apply(Examples(images().x, targets), classes)


def test_half_a_label_is_refused():
    with pytest.raises(UserError, match=r"labels must be a whole number to add to each label, got 0\.5"):
        Shift(labels=0.5)
