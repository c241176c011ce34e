"""Scripts travel with the files of their folders."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.host import own_process
from shoal.training.pytorch import worker
from shoal.training.pytorch.program import MAX_BYTES, Program, Script, ScriptFolder, may_call_ray

SCRIPT = Path(__file__).with_name("script.py")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that imports a module beside it, and reads files by its own folder."""
    folder = tmp_path / "project"
    (folder / "conf" / ".git").mkdir(parents=True)
    (folder / "helper.py").write_text("def answer():\n    return 42\n")
    (folder / "conf" / "base.yaml").write_text("rate: 1")
    (folder / "conf" / ".git" / "objects").write_text("x")
    (folder / "rows.csv").write_text("1,2")
    (folder / "main.py").write_text(
        "import os, sys\nfrom helper import answer\n"
        "if __name__ == '__main__':\n"
        "    here = os.path.dirname(__file__)\n"
        "    found = sorted(os.path.relpath(os.path.join(at, name), here) for at, _, names in os.walk(here,"
        " followlinks=True) for name in names if '__pycache__' not in at)\n"
        "    rate = open(os.path.join(here, 'conf', 'base.yaml')).read()\n"
        "    open(sys.argv[1], 'w').write(f'{answer()} {sys.argv[2:]} {rate} {found}')\n"
    )
    return folder / "main.py"


def test_a_script_travels_with_the_files_of_its_folder(script: Path, tmp_path: Path) -> None:
    (script.parent / ".shoalignore").write_text("# data\n*.csv\nlogs/\n")
    (script.parent / "logs").mkdir()
    (script.parent / "logs" / "1").write_text("x")
    argv, path = list(sys.argv), list(sys.path)
    program = Program.of(script, [tmp_path / "out", 1.5], {}).dumps()
    script.parent.rename(tmp_path / "gone")
    assert pickle.loads(program)() is None
    expected = "42 ['1.5'] rate: 1 ['conf/base.yaml', 'helper.py', 'main.py']"
    assert (tmp_path / "out").read_text() == expected
    assert (sys.argv, sys.path) == (argv, path)
    with pytest.raises(InvalidArgumentError, match="no keyword arguments: \\['epochs'\\]"):
        Program.of(SCRIPT, [], {"epochs": 1})
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        Program.of(tmp_path / "no.py", [], {})


@pytest.mark.parametrize("limit", ["MAX_FILES", "MAX_BYTES"])
def test_a_folder_that_is_too_large_to_travel_is_used_where_it_is(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(f"shoal.training.pytorch.program.{limit}", 1)
    program = Program.of(script, [tmp_path / "out"], {}).dumps()
    pickle.loads(program)()
    assert "rate: 1" in (tmp_path / "out").read_text() and "rows.csv" in (tmp_path / "out").read_text()
    assert sorted(file.name for file in script.parent.iterdir() if file.name != "__pycache__") == [
        *("conf", "helper.py", "main.py", "rows.csv")
    ]
    script.parent.rename(tmp_path / "gone")
    with pytest.raises(InvalidArgumentError, match=r"at least \d files of 0.1 MiB, but at most .* in \.shoalignore"):
        pickle.loads(program)()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder of a job, which this process has entered as a worker does."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    yield folder
    own_process._entered = None


def in_worker(program: bytes, work: Path) -> None:
    with chdir(work):  # back at the end
        own_process.enter_folder(str(work), "gang")
        pickle.loads(program)()


def test_relative_paths_lead_to_the_files_that_travel(script: Path, tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "rate.yaml").write_text("2")
    (tmp_path / "rows.csv").write_text("1,2")
    script.write_text(
        "import sys\n"
        "paths = (sys.argv[1], sys.argv[2].partition('=')[2], 'project/conf/base.yaml')\n"
        "text = [open(path).read() for path in paths]\n"
        "open('project/conf/base.yaml', 'w').write('changed')\n"
        "open('out', 'w').write(str(text))\n"
    )
    program = Program.of("project/main.py", ["shared/rate.yaml", "--rows=rows.csv", "no/file", "a\0b", "../x"], {})
    sent = program.dumps()
    script.parent.rename(tmp_path / "gone")
    (tmp_path / "shared" / "rate.yaml").unlink()
    in_worker(sent, elsewhere)
    assert (elsewhere / "out").read_text() == "['2', '1,2', 'rate: 1']"
    in_worker(sent, elsewhere)  # as another worker of the host, or after a restart: what has changed stays
    assert (elsewhere / "out").read_text() == "['2', '1,2', 'changed']"


def test_a_script_from_another_folder_finds_its_files_and_the_callers_folder_stays_as_it_is(
    script: Path, tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = tmp_path / "caller"
    caller.mkdir()
    monkeypatch.chdir(caller)
    script.write_text("rate = open('conf/base.yaml').read()\nopen('out', 'w').write(rate)")
    sent = Program.of(script, [], {}).dumps()
    in_worker(sent, elsewhere)
    assert (elsewhere / "out").read_text() == "rate: 1"
    with pytest.raises(FileNotFoundError):
        in_worker(sent, caller)  # an embedded pool
    assert list(caller.iterdir()) == []


def test_the_project_in_whose_folder_the_caller_runs_travels(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    for folder in ("src", "configs", ".git"):
        (project / folder).mkdir(parents=True)
    (project / "configs" / "base.yaml").write_text("rate: 1")
    (project / "src" / "answers.py").write_text("ANSWER = 42")
    (project / ".project-root").touch()
    (project / "src" / "train.py").write_text(
        "import os, sys\nfrom answers import ANSWER\n"
        "root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))\n"
        "said = [ANSWER, sorted(os.listdir(root))]\n"
        "said += [open(path).read() for path in (root + '/configs/base.yaml', 'configs/base.yaml')]\n"
        "open('out', 'w').write(str(said))\n"
    )
    monkeypatch.chdir(project)
    sent = Program.of("src/train.py", ["configs/base.yaml"], {}).dumps()
    project.rename(tmp_path / "gone")
    in_worker(sent, elsewhere)
    expected = [42, [".project-root", "configs", "src"], "rate: 1", "rate: 1"]
    assert (elsewhere / "out").read_text() == str(expected)


def test_a_project_that_is_too_large_to_travel_stays_and_the_folder_of_the_script_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    (tmp_path / "src" / "helper.py").touch()
    monkeypatch.chdir(tmp_path)
    script = Script.read("src/train.py")
    assert script.with_files().beside.files == {"helper.py": b""}  # type: ignore[union-attr]  # not a project
    (tmp_path / "setup.py").touch()
    assert set(script.with_files().beside.files) == {"setup.py", "src/helper.py"}  # type: ignore[union-attr]
    absolute = Script.read(tmp_path / "src" / "train.py")  # as in a DAG: the working folder is that of Airflow
    assert set(absolute.with_files().beside.files) == {"helper.py"}  # type: ignore[union-attr]
    with (tmp_path / "rows").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    sent = script.with_files()
    assert (sent.beside.files, sent.place) == ({"helper.py": b""}, "src")  # type: ignore[union-attr]


def test_only_code_shows_that_a_script_calls_ray(script: Path) -> None:
    notes = script.parent / "requirements.txt"
    notes.write_bytes(b"ray[default]\n\xff\xff\1 ray \xff\0 shoal.distributors.xgboost\xff")
    sent = Program.of(script, [], {}).dumps()
    assert not may_call_ray(sent)
    assert pickle.loads(sent).target.beside.files["requirements.txt"] == notes.read_bytes()
    (script.parent / "helper.py").write_text("import ray")
    assert may_call_ray(Program.of(script, [], {}).dumps())


def test_links_names_and_modes_travel(script: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "weights").write_text("w")
    folder = script.parent
    (folder / "données (1)").mkdir()
    (folder / "données (1)" / "größe 🐟.txt").write_text("fish")
    (folder / os.fsdecode(b"latin-\xe9")).write_text("e")
    (folder / "logs").mkdir()
    (folder / "run.sh").write_text("#!/bin/sh\necho ran")
    (folder / "run.sh").chmod(0o755)
    (folder / "same").symlink_to("conf")
    (folder / "model").symlink_to(outside)
    (folder / "weights").symlink_to(outside / "weights")
    (folder / "gone").symlink_to("nowhere")
    (folder / "loop").symlink_to(folder)
    script.write_text(
        "import os, subprocess, sys\n"
        "os.chdir(os.path.dirname(__file__))\n"
        "names = ['données (1)/größe 🐟.txt', os.fsdecode(b'latin-\\xe9'), 'same/base.yaml', 'model/weights']\n"
        "names.append('weights')\n"
        "said = [open(name).read() for name in names] + os.listdir('logs') + [os.path.exists('gone')]\n"
        "said.append(subprocess.run(['./run.sh'], capture_output=True, text=True).stdout)\n"
        "open(sys.argv[1], 'w').write(repr(said))\n"
    )
    sent = Program.of(script, [tmp_path / "out"], {}).dumps()
    folder.rename(tmp_path / "moved")
    before = os.getcwd()
    pickle.loads(sent)()
    assert os.getcwd() == before
    assert (tmp_path / "out").read_text() == repr(["fish", "e", "rate: 1", "w", "w", False, "ran\n"])


def test_a_file_that_is_too_large_is_not_read(script: Path, tmp_path: Path, elsewhere: Path) -> None:
    for folder in (script.parent, tmp_path):
        with (folder / "large").open("wb") as file:
            file.truncate(MAX_BYTES + 1)  # without blocks
    script.write_text("import os, sys\nopen('out', 'w').write(str([os.path.getsize(name) for name in sys.argv[1:]]))")
    program = Program.of("project/main.py", ["project/large", "large"], {}).dumps()
    assert len(program) < 10_000
    in_worker(program, elsewhere)
    assert (elsewhere / "out").read_text() == str([MAX_BYTES + 1] * 2)
    script.parent.rename(tmp_path / "gone")
    with pytest.raises(InvalidArgumentError, match=r"at least \d files of 16.1 MiB, but at most 1,000 files of 16 MiB"):
        pickle.loads(program)()
    (tmp_path / "gone" / ".shoalignore").write_text("large")
    in_worker(Program.of("gone/main.py", ["large"], {}).dumps(), elsewhere)


def test_a_link_to_a_large_file_stays_a_link(script: Path, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    (script.parent / "model").symlink_to(tmp_path / "large")
    found = ScriptFolder.read(str(script.parent))
    assert found.links == {"model": str(tmp_path / "large")} and not found.too_large


def test_a_file_that_cannot_be_read_is_named(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root can read all files
    with pytest.raises(InvalidArgumentError, match=r"project/\S+, which travels with .* name it in .*/\.shoalignore"):
        Program.of(script, [], {}).dumps()


@pytest.mark.parametrize(("code", "fails"), [("None", False), ("0", False), ("3", True), ("'no'", True)])
def test_a_scripts_exit_code_counts(code: str, fails: bool) -> None:
    script = Program(Script("main.py", "/", f"raise SystemExit({code})"))
    if fails:
        with pytest.raises(TrainingError, match=f"main.py exited with {code}"):
            script()
    else:
        script()


def test_the_error_before_an_exit_is_named() -> None:
    script = Program(Script("main.py", "/", "try:\n    1 / 0\nexcept Exception:\n    raise SystemExit(1)"))  # Hydra
    with pytest.raises(TrainingError, match=r"main.py exited with 1 after ZeroDivisionError: division by zero: only"):
        script()


def test_what_a_script_writes_into_the_working_folder_of_its_job_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, work, model = (tmp_path / name for name in ("source", "work", "model"))
    for folder in (source / "src", work, model):
        folder.mkdir(parents=True)
    (source / "src/train.py").write_text(
        "import os, helper\nos.makedirs('output')\nopen('output/model.bin', 'w').write('weights')\n"
        "open('src/rows.csv', 'a').write('3')\nopen('log.txt', 'w').write('x')\n"
    )
    (source / "src/helper.py").write_text("")
    (source / "src/rows.csv").write_text("1,2")
    (source / "base.yaml").write_text("rate: 1")
    with chdir(source):
        script = Script.read("src/train.py", ["--config", "base.yaml"]).with_files()
    monkeypatch.setattr(own_process, "_entered", str(work))
    with chdir(work):
        script()
    (work / "src/__pycache__").mkdir()
    (work / "src/__pycache__/helper.pyc").write_text("x")
    (model / "log.txt").write_text("of the model folder")
    monkeypatch.setattr(worker, "_folder", model)
    monkeypatch.setattr(worker, "_placed", script.placed())
    for variables, limit, kept, lost in (
        ({"LOCAL_RANK": "1"}, 2**30, {"log.txt"}, {}),
        ({}, 2, {"log.txt"}, {"output/model.bin": 7, "src/rows.csv": 4, "log.txt": 1}),
        ({}, 2**30, {"log.txt", "output/model.bin", "src/rows.csv"}, {"log.txt": 1}),
    ):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(worker, "KEEP_BYTES", limit)
        digests, found = worker.keep_written()
        assert (set(digests), found) == (kept, lost)
    assert (model / "output/model.bin").read_text() == "weights"
    assert (model / "log.txt").read_text() == "of the model folder"
    monkeypatch.setattr(worker, "_placed", None)  # a function
    assert worker.keep_written()[1]["output/model.bin"] == 7
