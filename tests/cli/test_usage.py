"""Help, version, and every way to call the command wrongly."""

import signal
import subprocess
import sys

import pytest

import shoal.cli
from shoal import __version__
from shoal.cli import output
from shoal.cli.output import InterruptedCommandError, on_interrupt
from shoal.errors import CapacityError, InvalidArgumentError, JobFailedError, PoolDownError, ScaleError
from tests.cli.conftest import document


def test_help_lists_every_command_and_the_exit_codes(shoal):
    result = shoal("--help")
    assert result.exit_code == 0
    for word in ("pool", "train", "jobs", "models", "sweep", "doctor", "init", "check-dags", "Exit codes", "130"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("group", "commands"),
    [
        ("pool", ["up", "list", "describe", "nodes", "scale", "alter", "retire", "quota", "down"]),
        ("jobs", ["list", "show", "logs", "cancel", "prune"]),
        ("models", ["list", "show", "history", "prune"]),
    ],
)
def test_the_help_of_a_group_lists_its_commands(shoal, group, commands):
    result = shoal(group, "--help")
    assert result.exit_code == 0
    for command in commands:
        assert f" {command} " in result.stdout
        assert "--json" in shoal(group, command, "--help").stdout


@pytest.mark.parametrize("command", ["train", "sweep", "doctor", "init"])
def test_every_command_takes_json(shoal, command):
    assert "--json" in shoal(command, "--help").stdout


@pytest.mark.parametrize("engine", ["airflow", "prefect"])
def test_init_writes_the_samples_of_an_engine_and_overwrites_nothing(shoal, tmp_path, engine):
    folder = tmp_path / "new" / "folder"
    result = shoal("init", engine, str(folder), "--json")
    written = sorted(folder.iterdir())
    assert document(result.stdout) == {"written": [str(path) for path in written]}
    assert shoal("init", engine, str(folder)).stdout == f"{folder} already has these files\n"
    written[1].write_text("mine")
    written[0].unlink()
    result = shoal("init", engine, str(folder))
    assert f"{written[1]} would be overwritten" in result.stderr
    assert not written[0].exists()
    assert "cannot be used as a folder" in shoal("init", engine, str(written[1] / "flows")).stderr


def test_init_knows_its_engines(shoal, tmp_path):
    result = shoal("init", "luigi", str(tmp_path))
    assert result.exit_code == 2
    assert 'there are no samples for "luigi": use airflow or prefect' in result.stderr


def test_version(shoal):
    assert shoal("--version").stdout == f"shoal {__version__}\n"
    assert document(shoal("--version", "--json").stdout) == {"version": __version__}


WRONG = [
    (["pool", "scale"], "Missing argument"),
    (["pool", "scale", "many"], "integer"),
    (["pool", "lst"], "Did you mean 'list'?"),
    (["pool", "list", "--colour"], "--colour"),
    (["jobs", "list", "--limit", "0"], "--limit"),
    (["pool", "up", "loca://x"], 'unknown backend "loca"'),
    (["pool", "up", "local://x?mx_nodes=3"], "did you mean max_nodes?"),
    (["pool", "alter", "x"], "--min-nodes, --max-nodes"),
    (["pool", "describe"], "the store contains no pool"),
    (["train", "/no/such/spec.json"], "cannot be read"),
]


@pytest.mark.parametrize(("args", "said"), WRONG)
def test_wrong_usage_ends_with_2_and_one_line_on_stderr(shoal, args, said):
    result = shoal(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(("args", "said"), WRONG)
def test_wrong_usage_with_json_is_a_document_on_stdout(shoal, args, said):
    result = shoal(*args, "--json")
    assert result.exit_code == 2
    error = document(result.stdout)["error"]
    assert said in error["message"]
    assert error["exit_code"] == 2
    assert "error" not in result.stderr


def test_json_stands_after_the_command(shoal):
    result = shoal("--json", "pool", "list")
    assert result.exit_code == 2
    assert "must follow a command" in document(result.stdout)["error"]["message"]


UNKNOWN = [
    ["pool", "describe", "nope"],
    ["pool", "nodes", "nope"],
    ["pool", "scale", "2", "--pool", "nope"],
    ["pool", "alter", "nope", "--max-nodes", "3"],
    ["pool", "down", "nope"],
    ["pool", "up", "nope"],
    ["jobs", "list", "--pool", "nope"],
    ["jobs", "show", "nope"],
    ["jobs", "logs", "nope"],
    ["jobs", "cancel", "nope"],
]


@pytest.mark.parametrize("args", UNKNOWN)
def test_an_unknown_pool_or_job_ends_with_3(shoal, args):
    result = shoal(*args)
    assert result.exit_code == 3
    assert '"nope" does not exist' in result.stderr
    with_json = shoal(*args, "--json")
    assert with_json.exit_code == 3
    assert document(with_json.stdout)["error"]["exit_code"] == 3


def test_up_of_an_unknown_name_says_how_to_make_it(shoal):
    assert "shoal pool up local://nope" in shoal("pool", "up", "nope").stderr


def test_exit_codes_reach_the_shell(shoal_process):
    assert shoal_process("pool", "list").returncode == 0
    wrong = shoal_process("pool", "scale", "0")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    unknown = shoal_process("pool", "describe", "nope", "--json")
    assert unknown.returncode == 3
    assert document(unknown.stdout)["error"]["type"] == "PoolNotFoundError"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgumentError("x"), 2),
        (ScaleError("x", {"retrain-1": "killed"}), 4),
        (CapacityError("x"), 4),
        (PoolDownError("x"), 1),
        (JobFailedError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_is_a_line_and_its_code(shoal, monkeypatch, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("shoal.pool.api.list_pools", fail)
    result = shoal("pool", "list")
    assert result.exit_code == code
    assert "Traceback" not in result.output
    said = document(shoal("pool", "list", "--json").stdout)["error"]
    assert said["exit_code"] == code
    assert said.get("nodes") == getattr(error, "nodes", None)


@pytest.mark.processes
def test_a_bug_keeps_its_traceback(fresh_home):
    program = (
        "import shoal.pool.api as api, sys\n"
        "def fail(*_, **__): raise RuntimeError('a bug')\n"
        "api.list_pools = fail\n"
        "sys.argv = ['shoal', 'pool', 'list', '--json']\n"
        "from shoal.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "RuntimeError: a bug" in done.stderr
    assert document(done.stdout)["error"]["type"] == "RuntimeError"


def test_main_is_the_console_script():
    assert callable(shoal.cli.main)


def test_an_interrupt_says_what_became_of_it(capfd):
    with pytest.raises(InterruptedCommandError, match="it was undone"), on_interrupt("undoing", "it was undone"):
        output._interrupt(signal.SIGTERM, None)
    assert "interrupted: undoing" in capfd.readouterr().err


def test_an_interrupt_while_undoing_says_that_it_is_not_through(capfd):
    def interrupted_twice():
        try:
            output._interrupt(signal.SIGINT, None)
        finally:
            output._interrupt(signal.SIGINT, None)

    with pytest.raises(InterruptedCommandError, match="everything was undone"), on_interrupt("undoing", "undone"):
        interrupted_twice()
    assert capfd.readouterr().err.count("undoing") == 1


def test_no_control_character_of_data_reaches_the_terminal(capsys):
    output.show("a\x1b[2Jb\tc", output.table(["key"], [["d\x1b]0;title\x07"]]), output.fields([("name", "e\x9b1A")]))
    output.say("f\x08\u202e")
    output.print_error(ValueError("g\x1b[31m\nh\udc80"), as_json=False)
    written = "".join(capsys.readouterr())
    assert not {character for character in written if not character.isprintable()} - {"\n", "\t"}
    for shown in (r"a\x1b[2Jb", r"d\x1b]0;title\x07", r"e\x9b1A", r"f\x08\u202e", r"g\x1b[31m", r"h\udc80"):
        assert shown in written
