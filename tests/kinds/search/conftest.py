from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

COLUMNS = ("a", "b", "c")


def table(rows: int, seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    features = pd.DataFrame(random.normal(size=(rows, 3)), columns=list(COLUMNS))
    noise = random.normal(scale=0.3, size=rows)
    return features.assign(y=features.a * 2 + np.sin(features.b * 3) + features.c.clip(0) + noise)


@pytest.fixture(scope="session")
def tuned_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `train.parquet` and `holdout.parquet`."""
    folder = tmp_path_factory.mktemp("tuned")
    table(2000, 1).to_parquet(folder / "train.parquet", row_group_size=500)
    table(800, 2).to_parquet(folder / "holdout.parquet")
    return folder
