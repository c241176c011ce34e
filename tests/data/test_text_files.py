"""CSV files and JSON lines: types from all rows, nulls, and errors that name file, line, column and value."""

from __future__ import annotations

import datetime as dt
import gzip
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shoal.data import DataConnector, csv_files, json_files, row_copies
from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import DataError, InvalidArgumentError
from tests.data.test_row_writer import TABLE

Read = Any
NOON = dt.datetime(2024, 1, 1, 10)


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Writes texts as files of one folder, and reads the folder."""

    def read(*texts: str | bytes, suffix: str = ".csv", **options: Any) -> pa.Table:
        for number, text in enumerate(texts):
            content = text.encode() if isinstance(text, str) else text
            (tmp_path / f"{number}{suffix}").write_bytes(gzip.compress(content) if suffix == ".gz" else content)
        from_files = DataConnector.from_json if suffix == ".jsonl" else DataConnector.from_csv
        return from_files(tmp_path, **options).to_arrow()

    return read


@pytest.mark.parametrize(
    ("values", "type_", "found"),
    [
        (["1", "", "NA", "-3"], "int64", [1, None, None, -3]),
        (["1", "2.5e3", "N/A", "NULL"], "double", [1, 2500, None, None]),
        (["007", "8"], "string", ["007", "8"]),
        (["+491", "2"], "string", ["+491", "2"]),
        (["0x1F", "2"], "string", ["0x1F", "2"]),
        (["12345678901234567890", "1.5"], "string", ["12345678901234567890", "1.5"]),
        (["1234567890123456789"], "int64", [1234567890123456789]),
        (["True", "FALSE", "None"], "bool", [True, False, None]),
        (["true", "1"], "string", ["true", "1"]),
        (["2024-01-01", "null"], "date32[day]", [dt.date(2024, 1, 1), None]),
        (["2024-01-01", "2024-01-01T10:00"], "timestamp[us]", [dt.datetime(2024, 1, 1), NOON]),
        (["2024-01-01 12:00:00+02:00"], "timestamp[us, tz=UTC]", [NOON.replace(tzinfo=dt.UTC)]),
        (["2024-01-01", "5"], "string", ["2024-01-01", "5"]),
        (["NA", "x", "", '""'], "string", ["NA", "x", None, ""]),
        (["", "NA"], "null", [None, None]),
    ],
)
@pytest.mark.parametrize("block_bytes", [16, 2**20])
def test_types_come_from_all_rows(
    read: Read, monkeypatch: pytest.MonkeyPatch, block_bytes: int, values: list[str], type_: str, found: list[Any]
) -> None:
    monkeypatch.setattr(csv_files, "_BLOCK_BYTES", max(block_bytes, 4 * max(map(len, values))))
    table = read("k,x\n" + "".join(f"{i},{value}\n" for i, value in enumerate(values)))
    assert str(table.schema.field("x").type) == type_
    assert table["x"].to_pylist() == found


def test_forms_of_csv(read: Read) -> None:
    table = read(b'\xef\xbb\xbfa,b\r\n"x\r\ny",1\r\n"q""z",nan\r\n', b"b,a\n2,\n")
    assert table["a"].to_pylist() == ["x\r\ny", 'q"z', None]
    assert table["b"].to_pylist()[::2] == [1, 2] and math.isnan(table["b"][1].as_py())
    assert read("a,b\n", "b,a\n1,2\n").num_rows == 1


def test_compressed_files_with_another_delimiter_and_given_types(read: Read) -> None:
    table = read("a;b\n007;1,5\n", suffix=".gz", delimiter=";", columns={"a": "int32"})
    assert table == pa.table({"a": pa.array([7], pa.int32()), "b": ["1,5"]})


@pytest.mark.parametrize(
    ("texts", "options", "said"),
    [
        (["a,b\n1,2\n3\n"], {}, r"0\.csv, line 3: the record has 1 fields, but the header has 2"),
        (['a,b\n1,"\n"\n\n1,2,3\n'], {}, r"0\.csv, line 5: the record has 3 fields"),
        ([b"a,b\n1,caf\xe9\n"], {}, 'line 2: column "b" has bytes that are not UTF-8'),
        (["a,b\n1,\n"], {"columns": {"c": "int64"}}, r'no column "c", which columns= names: it has a, b'),
        (["a\n1\n"], {"columns": {"a": "int"}}, "columns.a"),
        (['a,b\n1,"\n"\n\n2,x\nq,y\n'], {"columns": {"a": "int64"}}, r'0\.csv, line 6: column "a" has the value .q.,'),
        (
            ["a\n1\n", "a\n2024-02-30\n"],
            {"columns": {"a": "date32"}},
            r'column "a" has the value .1., which date32',
        ),
        (
            ["a\n1\n\n9007199254740993\n", "a\nnan\n"],
            {},
            r"0\.csv, line 4: .*9007199254740993., which double cannot hold",
        ),
        (["a,a\n1,2\n"], {}, r'0\.csv has several columns named "a"'),
        ([",a\n0,1\n"], {}, r"column 1 has no name"),
        ([""], {}, r"0\.csv is empty"),
        (["a,b\n1,2\n", "a,c\n1,2\n"], {}, r'the column "b" is in only one of .*0\.csv and .*1\.csv'),
        (["a;b\n1;2\n"], {}, "pass delimiter=';'"),
        (["a,b\n1,2\n".encode("utf-16")], {}, r"0\.csv, line 1: the header has bytes that are not UTF-8"),
        ([gzip.compress(b"a\n1\n")], {}, "give it the suffix .gz"),
        (["a\n1\n"], {"suffix": ".csv.GZ"}, "cannot be read"),
        (['a,b\n1,x\n2,"5 inch\n3,y\n4,w\n'], {}, r"0\.csv, line 3: a field begins with a quote that is not closed"),
        (['a,b\n1,x\n"5 inch,y\n4,w\n'], {"columns": {"a": "string"}}, r"0\.csv, line 3: a field begins"),
        (['a,b\n1,"x\n2,y\n3,"z"\n4,w\n'], {}, r"0\.csv, line 2: .* has text after its closing quote"),
    ],
)
def test_wrong_csv_is_refused_by_line_and_leaves_nothing(
    read: Read, shoal_home: Path, texts: list[str | bytes], options: dict[str, Any], said: str
) -> None:
    with pytest.raises((DataError, InvalidArgumentError), match=said):
        read(*texts, **options)
    assert not (shoal_home / "staging").exists() or list((shoal_home / "staging").iterdir()) == []


@pytest.mark.parametrize("block_bytes", [8, 2**20])
def test_json_lines(read: Read, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(json_files, "_BLOCK_BYTES", block_bytes)
    lines = [
        '{"i": 1, "f": 1, "d": "2024-01-01", "t": "2024-01-01", "s": {"x": 1}, "z": "007", "g": 1}',
        '{"i": null, "f": 2.5, "d": "2024-01-02", "t": "2024-01-01T10:00:00", "s": {"x": 0.5, "y": "q"}, "z": "8"}',
        "",
        '{"i": 3, "l": [1, 2]}',
    ]
    table = read("\n".join(lines), suffix=".jsonl", columns={"g": "float64"})
    types = {field.name: str(field.type) for field in table.schema}
    assert types["s"] == "struct<x: double, y: string>"
    assert {name: types[name] for name in "ifdtzg"} == {
        "i": "int64", "f": "double", "d": "date32[day]", "t": "timestamp[us]", "z": "string", "g": "double"
    }  # fmt: skip
    assert table["i"].to_pylist() == [1, None, 3]
    assert table["l"].to_pylist() == [None, None, [1, 2]]
    assert table["s"].to_pylist() == [{"x": 1, "y": None}, {"x": 0.5, "y": "q"}, None]


@pytest.mark.parametrize(
    ("text", "columns", "said"),
    [
        ('{"a": 1}\n\n{"a": "x"}\n', None, r'0\.jsonl, line 3: column "a" has the value .x.'),
        ('{"a": {"b": 1}}\n{"a": {"b": "x"}}\n', None, r'line 2: column "a" has the value .*Column\(/a/b\)'),
        ('{"a": 1}\n{"a": 9007199254740993}\n{"a": 1.5}\n', None, 'line 2: column "a" has the value 9007199254740993,'),
        ('{"a": {"b": [12345678901234567890]}}\n', None, 'line 1: column "a" has the value .*, which .* cannot hold'),
        ('{"a": 1}\n{"a": 1.5}\n', {"a": "int64"}, 'line 2: column "a" has the value 1.5'),
        ('{"a": "2024-01-01"}\n\n{"a": "x"}\n', {"a": "date32"}, 'line 3: column "a" has the value .x., which date32'),
        ('{"a": 1}\n{"a": 2,\n{"a": 3}\n', None, "line 2 is no JSON object"),
        (b'{"a": "\xff"}\n', None, "line 1 is no JSON object"),
        ('[{"a": 1}]', None, "is a JSON array"),
        ("5\n", None, "each line must have one JSON object"),
        ('{"a": 1}\nnull\n', None, "line 2 is no JSON object"),
        ('{"a": 1}\n{"a": 1}{"a": 2}\n', None, "line 2 is no JSON object"),
        ("", None, "has no rows"),
    ],
)
@pytest.mark.parametrize("block_bytes", [8, 2**20])
def test_wrong_json_is_refused_by_line(
    read: Read, monkeypatch: pytest.MonkeyPatch, block_bytes: int, text: str, columns: Any, said: str
) -> None:
    monkeypatch.setattr(json_files, "_BLOCK_BYTES", block_bytes)
    with pytest.raises(DataError, match=said):
        read(text, suffix=".jsonl", columns=columns)


def test_a_table_as_csv_and_json_has_the_digest_and_row_groups_of_the_table(tmp_path: Path) -> None:
    frame = TABLE.to_pandas().convert_dtypes()
    frame.to_csv(tmp_path / "a.csv.gz", index=False)
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True, double_precision=15)
    forms = [
        DataConnector.from_dataframe(TABLE),
        DataConnector.from_csv(tmp_path / "a.csv.gz", columns={"x": "float32"}),
        DataConnector.from_json(tmp_path / "a.jsonl"),
    ]
    assert len({form.digest() for form in forms}) == 1
    assert len({tuple(group.rows for group in form.source.row_groups()) for form in forms}) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"columns": {"a": "int64"}}, "columns can be given only with format csv or json"),
        ({"format": "json", "delimiter": ";"}, "delimiter can be given only with format csv"),
        ({"format": "csv", "columns": {"a": "int"}}, "columns.a"),
    ],
)
def test_wrong_options_of_specs_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        DatasetSpec.parse({"paths": ["/x"], **fields})


def test_columns_in_names_of_directories_are_refused(read: Read, tmp_path: Path) -> None:
    (tmp_path / "m=1").mkdir()
    (tmp_path / "m=1" / "a.jsonl").write_text('{"a": 1}')
    with pytest.raises(DataError, match='the column "m" is only in the name of a directory'):
        DataConnector.from_json(tmp_path)
    assert DataConnector.from_json(tmp_path / "m=1" / "a.jsonl").num_rows() == 1


def test_a_json_line_without_end_is_refused(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "_BLOCK_BYTES", 8)
    monkeypatch.setattr(json_files, "_LONGEST_LINE", 32)
    with pytest.raises(DataError, match="line 2 is longer than 32 bytes"):
        read('{"a": 1}\n' + '{"a": 1} ' * 9, suffix=".jsonl")


@pytest.mark.parametrize(
    ("files", "rows"),
    [
        (["a,b\n", "a,b\n1,x\n"], 10**6),  # the first file has no rows, the second one; more copies than links
        (["a,b\n" + '1,5" pipe\n' + "2,x\n" * 2000], 5000),  # a quote that is no beginning of a field
        (["a,b\n" + '1,"x\ny"\n' * 1000], 3),
    ],
)
def test_the_first_rows_of_odd_csv_files_are_repeated(files, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(row_copies, "_SAMPLE_BYTES", 1000)
    monkeypatch.setattr(row_copies, "_COPY_BYTES", 10**6)
    for number, text in enumerate(files):
        (tmp_path / f"{number}.csv").write_text(text)
    (tmp_path / "folder").mkdir()
    dataset = DatasetSpec(paths=[str(tmp_path / f"{number}.csv") for number in range(len(files))], format="csv")
    copies = row_copies.copy_first_rows(dataset, None, rows, str(tmp_path / "folder"))
    assert DataConnector.from_parquet(copies).num_rows() == rows


def test_an_error_in_the_first_rows_names_the_file(tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n3\n")
    (tmp_path / "folder").mkdir()
    dataset = DatasetSpec(paths=[str(tmp_path / "bad.csv")], format="csv")
    with pytest.raises(DataError, match=r"bad\.csv, line 3"):
        row_copies.copy_first_rows(dataset, None, 10, str(tmp_path / "folder"))
