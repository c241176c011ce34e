"""Scripts travel with the files of their folders."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.pytorch.program import Program
from shoal.training.pytorch.script import Script

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
    monkeypatch.setattr(f"shoal.training.pytorch.script.{limit}", 1)
    program = Program.of(script, [tmp_path / "out"], {}).dumps()
    pickle.loads(program)()
    assert "rate: 1" in (tmp_path / "out").read_text() and "rows.csv" in (tmp_path / "out").read_text()
    assert sorted(file.name for file in script.parent.iterdir() if file.name != "__pycache__") == [
        *("conf", "helper.py", "main.py", "rows.csv")
    ]
    script.parent.rename(tmp_path / "gone")
    with pytest.raises(InvalidArgumentError, match=r"at least \d files of 0.0 MiB, but at most .* in \.shoalignore"):
        pickle.loads(program)()


@pytest.mark.parametrize(("code", "fails"), [("None", False), ("0", False), ("3", True), ("'no'", True)])
def test_a_scripts_exit_code_counts(code: str, fails: bool) -> None:
    script = Program(Script("main.py", "/", f"raise SystemExit({code})"))
    if fails:
        with pytest.raises(TrainingError, match=f"main.py exited with {code}"):
            script()
    else:
        script()
