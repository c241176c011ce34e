"""What a worker prints gets into the log line by line, also if it prints no newlines, and secrets are not divided."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.secrets.known_secrets import KnownSecrets
from shoal.secrets.redaction import hiding
from shoal.training.host import output_lines
from shoal.training.host.output_lines import OutputLines


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"one\ntwo\r\nrest", ["one", "two", "rest"]),
        (b"\r10%\r50%\r100%\n10%\r50%\r", ["100%", "50%"]),
        (b"\xff caf\xc3\xa9\n", ["\ufffd café"]),
    ],
)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_output_is_divided_into_lines(written: bytes, shown: list[str], chunk: int) -> None:
    assert _lines(written, chunk) == shown


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_a_text_without_newlines_is_divided_but_no_secret(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lines, "_LONGEST_LINE", 100)
    written = b"a" * 95 + b"hunter22xyz" + b"word " * 1000
    lines = _lines(written, chunk)
    assert "".join(lines).replace(" ", "") == "a" * 95 + "***" + "word" * 1000
    assert len(lines) > 40 and all(line in ("word", *lines[:2]) or line.endswith("word") for line in lines)


def test_a_text_without_spaces_is_divided_between_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lines, "_LONGEST_LINE", 100)
    assert "".join(_lines("学習".encode() * 500, 7)) == "学習" * 500


def test_lines_of_several_threads_are_neither_lost_nor_doubled() -> None:
    lines: list[str] = []
    stream = OutputLines(lines.extend)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            for thread in range(3):
                threads.submit(lambda of: [stream.write(f"{of} {n}\n".encode()) for n in range(5_000)], thread)
    finally:
        sys.setswitchinterval(interval)
    assert sorted(lines) == sorted(f"{of} {n}" for of in range(3) for n in range(5_000))


def _lines(written: bytes, chunk: int) -> list[str]:
    lines: list[str] = []
    stream = OutputLines(lines.extend)
    with hiding(KnownSecrets(["hunter22xyz"]).hide):
        for start in range(0, len(written), chunk):
            stream.write(written[start : start + chunk])
        stream.end()
    return lines


@pytest.mark.parametrize(
    ("first", "visible", "then", "line"),
    [
        (b"loading the model", "loading the model ...", b", done\n", "loading the model, done"),
        (b"\r10%\r20%", "10%", b"\r30%\n", "30%"),
        (b"the pin is hunt", "the pin is ...", b"er22xyz\n", "the pin is ***"),
        (b"at http://me:hunt", "at ...", b"er22@host\n", "at http://me:hunter22@host"),  # the log hides such words
        (b"at http://me:hunt er", "at ...", b"22@host\n", "at http://me:hunt er22@host"),
        (b'{"password": "hunt er', "{ ...", b'22"}\n', '{"password": "hunt er22"}'),
        ("of münche".encode() + b"\xc3", "of ...", b"\xbcst\n", "of ***"),
    ],
)
def test_a_line_in_progress_is_shown_without_the_beginning_of_a_secret(
    first: bytes, visible: str, then: bytes, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_lines, "PROGRESS_LINE_PERIOD_S", 0)
    lines: list[str] = []
    stream = OutputLines(lines.extend)
    with hiding(KnownSecrets(["hunter22xyz", "müncheüst"]).hide):
        stream.write(first)
        for _ in range(3):
            stream.look()
        assert lines == [visible]
        stream.write(then)
        stream.look()
    assert [line.replace("hunter22xyz", "***").replace("müncheüst", "***") for line in lines] == [visible, line]
