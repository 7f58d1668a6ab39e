"""What a tower is given before a projector."""

import torch

from rankfold.calibration.forward import _project

PIXELS = torch.zeros(2, 3, 4, 6)


class Tower:
    def __init__(self, see):
        self.get_image_features = see


def test_sizes_are_given_where_a_tower_must_have_them():
    assert _project(Tower(lambda pixels, image_sizes: image_sizes), PIXELS) == [(4, 6), (4, 6)]
    assert _project(Tower(lambda pixels, image_sizes=None: image_sizes), PIXELS) is None
    assert _project(Tower(lambda pixels: pixels), PIXELS) is PIXELS
