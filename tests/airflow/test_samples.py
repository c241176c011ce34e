"""The sample DAGs that `shoal init airflow` writes."""

from __future__ import annotations

import runpy

from shoal.airflow.samples import samples
from shoal.sample_files import write_samples
from tests.support import ROOT


def test_the_files_are_all_dags_of_the_repository(tmp_path):
    texts = samples(tmp_path)
    assert texts == {path.name: path.read_text() for path in (ROOT / "dags").glob("*.py")}
    for path in write_samples(tmp_path, texts):
        runpy.run_path(str(path))
