"""Each extra alone, in an environment with nothing else, and the wheel under another name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.release import PROJECT

pytestmark = [
    pytest.mark.long,
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed, which makes the environments"),
    pytest.mark.timeout(900),
]

FRAME = "import pandas as pd; frame = pd.DataFrame({'x': [0.0, 1, 2, 3], 'y': [0.0, 1, 2, 3]}); "
STAGE = "frame.to_parquet('rows.parquet'); from shoal.data import DataConnector; "
USES = {
    "data": FRAME + STAGE + "assert DataConnector.from_parquet('rows.parquet').num_rows() == 4",
    "ray": "from shoal import ComputePool; p = ComputePool('local://one?max_nodes=1'); p.up(); p.down()",
    "airflow": "from shoal.airflow.operators import DistributedTrainOperator",
    "prefect": "from prefect import flow; import shoal.prefect; flow(lambda: None)",
    "xgboost": FRAME + "import xgboost; xgboost.XGBRegressor(n_estimators=2).fit(frame[['x']], frame['y'])",
    "lightgbm": FRAME + "import lightgbm; lightgbm.LGBMRegressor(n_estimators=2).fit(frame[['x']], frame['y'])",
    "mlflow": "import mlflow; mlflow.set_tracking_uri('sqlite:///m.db'); mlflow.start_run(); mlflow.log_metric('a', 1)",
    "postgres": "import psycopg; assert psycopg.pq.version()",
    "s3": "import fsspec; fsspec.filesystem('s3', anon=True)",
    "delta": FRAME + "import deltalake, pyarrow; deltalake.write_deltalake('t', pyarrow.Table.from_pandas(frame)); "
    "from shoal.data import DataConnector; assert DataConnector.from_delta('t').num_rows() == 4",
    "iceberg": "from pyiceberg.catalog import load_catalog; load_catalog('c', type='in-memory')",
    "adbc": "import adbc_driver_manager, adbc_driver_postgresql",
    "ui": "import shoal.ui.app",
    "kuberay": "import kubernetes.client; from shoal import ComputePool; ComputePool('kuberay://default/k')",
    "tune": "import optuna; optuna.create_study().ask()",
    "otel": "from opentelemetry.sdk.metrics import MeterProvider; MeterProvider().get_meter('shoal')",
}
"""One use of each extra. The GPU extras and PyTorch are left out for their size, and `all` is in `test_python`."""


def test_each_extra_has_a_use():
    assert set(PROJECT["optional-dependencies"]) - set(USES) == {"torch", "xgboost-gpu", "all"}


@pytest.mark.parametrize("extra", USES)
def test_an_extra_alone_is_enough(extra, in_new_environment):
    command = in_new_environment(sys.executable, extra)
    command("python", "-c", USES[extra])
    lines = command("shoal", "doctor", check=False).splitlines()
    assert any(re.match(rf"ok +{extra} ", line) for line in lines), lines
    if extra == "airflow":
        assert "shoal" in command("airflow", "providers", "list")


def test_hints_have_the_name_of_the_distribution(in_new_environment, tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
    project = tree / "pyproject.toml"
    text = project.read_text().replace('\nname = "shoal"', '\nname = "shoal-other"')
    project.write_text(text.replace('"shoal[', '"shoal-other['))
    command = in_new_environment(sys.executable, "data", distribution="shoal-other", tree=tree)
    said = command("shoal", "doctor", check=False)
    assert 'pip install "shoal-other[ray]"' in said
    assert not re.search(r'pip install "?shoal\b(?!-)', said)
    command("python", "-c", USES["data"])
