from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.errors import InvalidArgumentError
from shoal.training.xgboost.params import joined


def test_the_values_of_all() -> None:
    assert joined([]) is None
    metric = joined([lambda predt, matrix: ("one", predt + matrix), lambda *_: [("two", np.float32(2)), ("three", 3)]])
    assert metric is not None
    assert metric(3, 4) == [("one", 7.0), ("two", 2.0), ("three", 3.0)]


@pytest.mark.parametrize("returned", [3.0, ("a", 1.0, True), ("a", "b"), ("a", None)])
def test_what_is_no_metric(returned: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must return \(name, value\)"):
        joined([lambda *_: returned])(0, 0)  # type: ignore[misc]


@pytest.mark.parametrize("name", ["", "my metric", "f1:macro", 3])
def test_a_name_that_xgboost_could_not_read_back(name: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="the name of a custom_metric must be"):
        joined([lambda *_: (name, 1.0)])(0, 0)  # type: ignore[misc]
