"""`shoal.airflow.testing`: each wrong DAG of a folder is found, at its line, and nothing else is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.airflow.testing import DagReport, Finding, Rule, check_dags
from shoal.airflow.testing.plugin import fail_on_findings
from shoal.errors import InvalidArgumentError, ShoalError
from tests.cli.conftest import shoal  # noqa: F401
from tests.support.waiting import wait_until

FOLDER = Path(__file__).with_name("wrong_dags")
FILES = sorted(FOLDER.glob("*.py"))
ARGUMENTS = ["--always-up", "always-up", "--connection", "only_in_production", "--import-budget"]


def written() -> set[tuple[str, int | None, str]]:
    """What is wrong, as the comments in the files say."""
    found = set()
    for file in FILES:
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            if said := re.search(r"# wrong( in the file)?: ([a-z-]+)", line):
                found.add((file.name, None if said[1] else number, said[2]))
    return found


@pytest.mark.processes
def test_the_command_finds_each_wrong_dag_at_its_line(shoal, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.chdir(FOLDER)
    child = tmp_path / "child"
    monkeypatch.setenv("CHILD_FILE", str(child))
    monkeypatch.setenv("AIRFLOW_CONN_WRONG_POOL", "compute-pool://retrain/local?max_node=2")
    result = shoal("check-dags", ".", "--format", "json", *ARGUMENTS, "0")
    wait_until(lambda: child.exists() and child.read_text(), "the process that a DAG file has forked")
    os.kill(int(child.read_text()), signal.SIGKILL)
    assert result.exit_code == 1, result.stderr
    report = json.loads(result.stdout)
    assert report["files"] == [file.name for file in FILES]
    assert {"always_up", "the_night", "same_id"} <= set(report["dags"])
    found = {(one["file"], one["line"], one["rule"]) for one in report["findings"]}
    slow = {one for one in found if one[2] == Rule.SLOW_IMPORT}
    # With a budget of 0 s, every file that does not end its process is too slow.
    assert {file for file, _, _ in slow} == {file.name for file in FILES} - {"ends_its_process.py"}
    assert found - slow == written()
    assert {rule for _, _, rule in found} == set(Rule)
    said = {one["file"]: one["message"] for one in report["findings"] if one["rule"] != Rule.SLOW_IMPORT}
    assert said["misspelt_option.py"].startswith('task train: unknown option "n_estimator": did you mean n_estimators')
    assert said["missing_module.py"] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert said["ends_its_process.py"] == "the process that loaded the file ended with exit code 3"
    assert "did you mean max_nodes" in said["wrong_connection.py"]
    assert "did you mean retrain" in said["lease_of_another_pool.py"]


FINDING = Finding("dags/a,b.py", 3, Rule.NO_LEASE, "100 % wrong:\nuse pool_for_run", "a")


def test_a_report_is_printed_as_text_and_for_github():
    report = DagReport(("dags/a,b.py", "dags/c.py"), ("a",), (FINDING, Finding("dags/c.py", None, Rule.CYCLE, "x")))
    assert str(report).splitlines() == [
        "dags/a,b.py:3: no-lease: 100 % wrong:",
        "use pool_for_run",
        "dags/c.py: cycle: x",
        "2 problems in 2 DAG files",
    ]
    assert report.annotations().splitlines() == [
        "::error file=dags/a%2Cb.py,line=3,title=shoal no-lease::100 %25 wrong:%0Ause pool_for_run",
        "::error file=dags/c.py,line=1,title=shoal cycle::x",
    ]
    assert str(DagReport(("dags/c.py",), ("c",), ())) == "1 DAG file, no problems"


def test_the_fixture_fails_a_test_with_the_problems():
    reports = {"wrong": DagReport(("a.py",), ("a",), (FINDING,)), "right": DagReport(("b.py",), ("b",), ())}
    fail_on_findings(reports.get, "right")
    with pytest.raises(pytest.fail.Exception, match=r"a,b.py:3: no-lease: 100 % wrong(.|\n)*1 problem in 1 DAG file"):
        fail_on_findings(reports.get, "wrong")


@pytest.mark.parametrize(
    ("paths", "options", "said"),
    [
        ([], {}, "no path is given"),
        (["/no/such/folder"], {}, "/no/such/folder does not exist"),
        ([FOLDER], {"ignore": ["no-leese"]}, "ignore='no-leese' is not the name of a rule: did you mean no-lease"),
        ([FOLDER], {"ignore": ["tabs"]}, "the rules are import-error, wrong-argument"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_loaded(paths, options, said, monkeypatch):
    monkeypatch.setattr("subprocess.run", None)
    with pytest.raises(InvalidArgumentError, match=said):
        check_dags(*paths, **options)


def test_a_check_that_fails_is_not_a_check_without_findings(monkeypatch):
    def run(*args, stderr, **options):
        stderr.write("RuntimeError: no store")
        return subprocess.CompletedProcess(args, 1)

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(ShoalError, match="could not be checked:\nRuntimeError: no store"):
        check_dags(FOLDER)


@pytest.mark.processes
def test_the_plugin_and_the_command_load_nothing_until_they_are_used():
    check = (
        "import sys, shoal.airflow.testing.plugin, shoal.airflow.testing.command;"
        "print([name for name in ('airflow', 'pydantic', 'sqlalchemy', 'httpx') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
