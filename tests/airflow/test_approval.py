"""The guide's DAG with an approval, run by Airflow: its question is answered as its API answers it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest

from shoal import history
from tests.support.guides import examples, run

PERSON = """
import runpy, sys, threading, time
from types import SimpleNamespace

from airflow.__main__ import main
from sqlalchemy import select

sys.argv[1:], answers = ["db", "migrate"], sys.argv[1:]
main()

def answer():
    from airflow.api_fastapi.core_api.datamodels.hitl import UpdateHITLDetailPayload
    from airflow.api_fastapi.core_api.routes.public.hitl import update_hitl_detail
    from airflow.models.hitl import HITLDetail
    from airflow.utils.session import create_session

    anna = SimpleNamespace(get_id=lambda: "anna", get_name=lambda: "Anna")
    while answers:
        time.sleep(0.2)
        with create_session() as session:
            for asked in session.scalars(select(HITLDetail).where(HITLDetail.responded_at.is_(None))):
                ti = asked.task_instance
                if ti.state == "awaiting_input":
                    print("asked:", asked.subject, asked.body, flush=True)
                    given = UpdateHITLDetailPayload(chosen_options=[answers.pop(0)], params_input={})
                    update_hitl_detail(ti.dag_id, ti.run_id, ti.task_id, given, anna, session, -1)

threading.Thread(target=answer, daemon=True).start()
runs = len(answers)
found = runpy.run_path("dags/approved.py")["found"]
for _ in range(runs):
    ended = found.test()
    print("ended:", {ti.task_id: str(ti.state) for ti in ended.get_task_instances()}, flush=True)
"""


@pytest.mark.long
def test_a_person_approves_or_rejects_the_guides_version(fresh_home: Path, tmp_path: Path) -> None:
    for seed, month in enumerate(("2013-01", "2013-02")):
        values = np.random.default_rng(seed).random((500, 2))
        rows = pd.DataFrame(values, columns=["distance", "dep_delay"])
        rows.assign(arr_delay=rows.sum(axis=1)).to_parquet(tmp_path / f"{month}.parquet")
    code = examples()["airflow-approvals.md:airflow-approval"]
    changes = {
        "max_nodes=2": "max_nodes=1&ray=false",
        "size=2": "size=1",
        "/data/flights": str(tmp_path),
        "spec=JOB": "spec=JOB, skip_if_unchanged=False",
        "\napproved_delays()": "\nfound = approved_delays()",
    }
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "approved.py").write_text(code)

    said = run(tmp_path, "-c", PERSON, "Reject", "Approve")

    asked = re.findall(r"asked: (Promote version \d of delays\?) (delays version \d .* waits for a decision)", said)
    assert [subject for subject, _ in asked] == ["Promote version 1 of delays?", "Promote version 2 of delays?"]
    rejected, approved = re.findall(r"ended: (.*)", said)
    assert "'approve': 'success'" in rejected and "'promote': 'skipped'" in rejected
    assert "'promote': 'success'" in approved and "'clean_up_pool': 'success'" in approved
    client = mlflow.MlflowClient(f"sqlite:///{os.environ['SHOAL_HOME']}/mlflow/mlflow.db")
    assert client.get_registered_model("delays").aliases == {"champion": 2}
    reasons = [client.get_model_version("delays", version).tags["shoal.reason"] for version in "12"]
    assert reasons == ["waiting", "first"]
    [action] = history.read(kind="promoted")
    assert re.fullmatch(r"airflow:.+:approved_delays/.+", action.actor)
