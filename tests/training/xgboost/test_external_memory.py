"""The folder of matrices on disk, and what is left of files of killed workers."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.training.xgboost.worker import page_folder


def test_the_folder_is_removed_and_so_are_files_of_a_killed_worker(own_temp: Path) -> None:
    (own_temp / "shoal-pages-999999999-x").mkdir()
    with page_folder(on_disk=True) as folder:
        assert [*own_temp.iterdir()] == [folder]
        assert folder.name.split("-")[2] == str(os.getpid())
    assert [*own_temp.iterdir()] == []
    with page_folder(on_disk=False) as folder:
        assert folder is None
