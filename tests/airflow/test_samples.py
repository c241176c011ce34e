"""The sample DAGs that `shoal init airflow` writes."""

from __future__ import annotations

import runpy

import pytest

from shoal.airflow.samples import SAMPLES, write_samples
from shoal.errors import InvalidArgumentError


def test_the_files_are_dags_and_are_written_once(tmp_path):
    folder = tmp_path / "airflow" / "dags"
    assert [path.name for path in write_samples(folder)] == list(SAMPLES)
    assert write_samples(folder) == []
    for name in SAMPLES:
        runpy.run_path(str(folder / name))


def test_no_file_of_the_users_is_overwritten(tmp_path):
    (tmp_path / SAMPLES[1]).write_text("mine")
    with pytest.raises(InvalidArgumentError, match=f"{SAMPLES[1]} would be overwritten"):
        write_samples(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [SAMPLES[1]]
    with pytest.raises(InvalidArgumentError, match="cannot be used as a folder of DAGs"):
        write_samples(tmp_path / SAMPLES[1] / "dags")
