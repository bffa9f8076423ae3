"""Vectors instead of items: what is read, and what is refused."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from sylvan.api.media import native_media
from sylvan.media.precomputed import given_vectors
from sylvan.protocol.errors import RequestError

ROWS = np.arange(24, dtype=np.float32).reshape(6, 4)


def text_of(vectors) -> str:
    return base64.b64encode(vectors.astype("<f4").tobytes()).decode()


def item(**changes) -> dict:
    fields = {"format": "precomputed_embedding", "feature": text_of(ROWS), "shape": [6, 4]}
    return fields | changes


@pytest.mark.parametrize("feature", [text_of(ROWS), ROWS, ROWS.tolist()])
def test_vectors_stand_for_as_many_tokens(feature):
    [[source]] = native_media("image", item(feature=feature), "image_data", 1, is_batch=False)
    found = given_vectors(source, 7)
    assert (found.placeholder, found.tokens) == (7, (7,) * 6)
    np.testing.assert_array_equal(found.features["vectors"], ROWS)
    with_grid = item(grid=[1, 2, 3])
    [[other]] = native_media("image", with_grid, "image_data", 1, is_batch=False)
    assert given_vectors(other, 7).grid == (1, 2, 3)
    assert given_vectors(other, 7).digest != found.digest


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"shape": None}, "image_data.shape"),
        ({"shape": [6, 0]}, "image_data.shape"),
        ({"shape": [6, True]}, "image_data.shape"),
        ({"shape": [6, 5]}, "image_data.feature"),
        ({"feature": "?"}, "image_data.feature"),
        ({"feature": None}, "image_data.feature"),
        ({"feature": [[1.0], [2.0, 3.0]]}, "image_data.feature"),
        ({"feature": [1.0, 2.0]}, "image_data.feature"),
        ({"feature": [[float("nan")]]}, "image_data.feature"),
        ({"grid": [1, 2, 2]}, "image_data.grid"),
        ({"grid": "1"}, "image_data.grid"),
    ],
)
def test_other_forms_are_refused_by_their_field(changes, param):
    with pytest.raises(RequestError) as error:
        native_media("image", item(**changes), "image_data", 1, is_batch=False)
    assert error.value.param == param
