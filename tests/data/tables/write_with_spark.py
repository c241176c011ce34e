"""Write Delta and Iceberg tables with Spark, for the tests of the table formats. Run by hand; not part of CI.

The tests read the result: ``tables.tar.xz`` (the tables), and ``expected.json`` (rows, sums and schemas as Spark itself
reads them). Needs Java 17, pyspark 4.1, and these jars of Maven Central in one folder:

    io.delta: delta-spark_4.1_2.13, delta-storage, delta-kernel-api, delta-kernel-defaults, delta-kernel-unitycatalog
        (4.3.0)
    io.unitycatalog: unitycatalog-client, unitycatalog-hadoop (0.5.0)
    org.apache.iceberg: iceberg-spark-runtime-4.1_2.13 (1.11.0)

    python tests/data/tables/write_with_spark.py FOLDER_OF_JARS

Iceberg's metadata contains absolute paths. The tables are written to a folder whose path has the length
``unpacking.PATH_LENGTH``, and nothing that contains paths is compressed, so that a test can replace the path in all
files by another one of the same length (see ``unpacking.py``).
"""

from __future__ import annotations

import datetime
import json
import math
import shutil
import sys
import tarfile
import time
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import types as t

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))
from tests.data.tables.unpacking import WRITTEN_AT  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

ROOT = Path(WRITTEN_AT)
MANY = 6_000
"""Rows of the tables with several row groups; only their sums are recorded."""

ODD = "a b/c=%ü'"
"""A partition value with characters that paths encode."""


def next_second() -> None:
    """Wait until the clock shows another second, so that the times of two commits differ, also in an archive."""
    second = int(time.time())
    wait_until(lambda: int(time.time()) > second, "the next second")


def start(jars: Path) -> SparkSession:
    """Start a Spark of one thread with both table formats."""
    builder = SparkSession.builder.master("local[1]")
    settings = {
        "spark.driver.memory": "1g",
        "spark.driver.extraClassPath": f"{jars}/*",
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.extraJavaOptions": "-Duser.timezone=UTC",
        "spark.sql.shuffle.partitions": "1",
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "1",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
        "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.catalog.ice": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.ice.type": "hadoop",
        "spark.sql.catalog.ice.warehouse": f"{ROOT}/iceberg",
        "spark.sql.warehouse.dir": f"{ROOT}/warehouse",
        "spark.databricks.delta.retentionDurationCheck.enabled": "false",
        "spark.hadoop.parquet.block.row.count.limit": "1000",
        "spark.hadoop.parquet.page.write-checksum.enabled": "false",
        "spark.sql.sources.default": "parquet",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it, in the form that ``unpacking.plain`` gives the values that shoal reads."""
    if isinstance(value, Row):
        return {name: plain(item) for name, item in value.asDict().items()}
    if isinstance(value, dict):
        return sorted([plain(key), plain(item)] for key, item in value.items())
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime.date | Decimal):
        return str(value)
    return value.hex() if isinstance(value, bytes | bytearray) else value


class Tables:
    """Tables of one run, and what Spark reads from them."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        self.sql = spark.sql
        self.cases: list[dict[str, Any]] = []

    def delta(self, name: str, columns: str, *, partitioned: str = "", cluster: str = "", **properties: str) -> str:
        """Create a Delta table and return its name in SQL."""
        at = f"LOCATION '{ROOT}/delta/{name}'"
        self.sql(f"CREATE TABLE {name} ({columns}) USING delta {partitioned} {cluster} {at} {_properties(properties)}")
        return name

    def iceberg(self, name: str, columns: str, *, partitioned: str = "", **properties: str) -> str:
        """Create an Iceberg table and return its name in SQL."""
        properties = {
            "format_version": "2",
            "write_avro_compression__codec": "uncompressed",
            "write_parquet_compression__codec": "uncompressed",
            "write_delete_parquet_compression__codec": "uncompressed",
            "write_parquet_row__group__size__bytes": "4096",
            "write_parquet_row__group__check__min__record__count": "1000",
            "write_parquet_row__group__check__max__record__count": "1000",
            **properties,
        }
        version = properties.pop("format_version")
        text = _properties({**properties, "format__version": version}).replace("delta.", "")
        self.sql(f"CREATE TABLE ice.db.{name} ({columns}) USING iceberg {partitioned} {text}")
        return f"ice.db.{name}"

    def rows(self, table: str, rows: list[tuple[Any, ...]], schema: str | None = None) -> None:
        """Append rows in one file."""
        into = self.spark.table(table).schema if schema is None else schema
        frame = self.spark.createDataFrame(rows, into).coalesce(1)
        frame.createOrReplaceTempView("added")
        names = ", ".join(f"`{name}`" for name in frame.columns)
        self.sql(f"INSERT INTO {table} ({names}) SELECT {names} FROM added")

    def record(self, name: str, frame: DataFrame, *, where: dict[str, str] | None = None, **read: Any) -> None:
        """Record what Spark reads.

        Args:
            name: Folder of the table, such as "delta/nested".
            frame: The rows.
            where: Filters of shoal as JSON -> the same condition in SQL.
            read: Arguments of from_delta or from_iceberg.
        """
        # Materialised first: Iceberg cannot push filters on renamed columns down to old versions.
        frame = frame.localCheckpoint()
        fields = frame.schema.fields
        numbers = [field.name for field in fields if isinstance(field.dataType, t.NumericType)]
        count = frame.count()
        sums = frame.selectExpr(*(f"sum(`{name}`)" for name in numbers)).first() if numbers else ()
        case: dict[str, Any] = {
            "table": name,
            "read": read,
            "schema": {field.name: field.dataType.simpleString() for field in fields},
            "count": count,
            "sums": {name: plain(value) for name, value in zip(numbers, sums or (), strict=True)},
            "valid": {field.name: frame.where(f"`{field.name}` IS NOT NULL").count() for field in fields},
            "filtered": {text: frame.where(sql).count() for text, sql in (where or {}).items()},
        }
        if count <= 100:
            case["rows"] = [[plain(value) for value in row] for row in frame.collect()]
        self.cases.append(case)
        print(name, read, count, flush=True)


def _properties(properties: dict[str, str]) -> str:
    """Return TBLPROPERTIES; in a name, "__" stands for "-" and "_" for "."."""
    if not properties:
        return ""
    named = {name.replace("__", "-").replace("_", "."): value for name, value in properties.items()}
    return "TBLPROPERTIES (" + ", ".join(f"'delta.{name}'='{value}'" for name, value in named.items()) + ")"


def _numbers(first: int, last: int) -> list[tuple[int, float]]:
    return [(i, (i * 37 % 101) / 4) for i in range(first, last)]


def _days(first: int) -> datetime.date:
    return datetime.date(2024, 2, 27) + datetime.timedelta(days=first)


def _times(first: int) -> datetime.datetime:
    return datetime.datetime(2024, 2, 27, 23, 59, 58, 123_456) + datetime.timedelta(hours=first)


ID_AND_X = {'[["id", ">=", 3]]': "id >= 3", '[["x", "<", 5.0]]': "x < 5.0"}


def delta_deletions(tables: Tables) -> None:
    """Deletion vectors that cross row groups, in several files; and a file of which every row is deleted."""
    table = tables.delta("deletions", "id INT, x DOUBLE", enableDeletionVectors="true")
    tables.rows(table, _numbers(0, MANY))
    tables.rows(table, _numbers(MANY, MANY + 500))
    tables.rows(table, _numbers(-20, 0))
    tables.sql(f"DELETE FROM {table} WHERE id % 7 = 0 OR (id > 1990 AND id < 3010)")
    tables.sql(f"DELETE FROM {table} WHERE id < 0")
    tables.sql(f"UPDATE {table} SET x = -1 WHERE id % 100 = 3")
    filters = {
        '[["id", ">=", 3000], ["id", "<", 5000]]': "id >= 3000 AND id < 5000",
        '[["x", "<", 5.0]]': "x < 5.0",
        '[["id", "<", 10]]': "id < 10",
    }
    tables.record("delta/deletions", tables.spark.table(table), where=filters)
    before = tables.sql(f"SELECT * FROM {table} VERSION AS OF 3")
    tables.record("delta/deletions", before, where={'[["id", "<", 10]]': "id < 10"}, version=3)


def delta_mapped(tables: Tables) -> None:
    """Column mapping: columns that are renamed, dropped, added, and added again under the name of a dropped one."""
    for mode in ("name", "id"):
        table = tables.delta(
            f"mapped_by_{mode}",
            "id INT, x DOUBLE, old STRING, s STRUCT<a: INT, b: STRING>, `sp ace, (odd)` INT",
            columnMapping_mode=mode,
        )
        tables.rows(table, [(i, i / 2, f"o{i}", (i, f"b{i}"), i * 3) for i in range(8)])
        tables.sql(f"ALTER TABLE {table} RENAME COLUMN x TO price")
        tables.sql(f"ALTER TABLE {table} RENAME COLUMN s.a TO first")
        tables.sql(f"ALTER TABLE {table} DROP COLUMN old")
        tables.sql(f"ALTER TABLE {table} ADD COLUMNS (x STRING, old INT, s.c BIGINT)")
        # Two columns exchange their names.
        tables.sql(f"ALTER TABLE {table} RENAME COLUMN id TO tmp")
        tables.sql(f"ALTER TABLE {table} RENAME COLUMN `sp ace, (odd)` TO id")
        tables.sql(f"ALTER TABLE {table} RENAME COLUMN tmp TO key")
        named = "key INT, price DOUBLE, s STRUCT<first: INT, b: STRING, c: BIGINT>, id INT, x STRING, old INT"
        tables.rows(table, [(i, i / 2, (i, None, i), i * 3, f"x{i}", None) for i in range(8, 14)], named)
        filters = {'[["key", ">=", 3]]': "key >= 3", '[["x", "=", "x9"]]': "x = 'x9'", '[["id", "<", 9]]': "id < 9"}
        tables.record(f"delta/mapped_by_{mode}", tables.spark.table(table), where=filters)
    table = tables.delta(
        "mapped_partitions",
        "id INT, p INT",
        partitioned="PARTITIONED BY (p)",
        columnMapping_mode="name",
        enableDeletionVectors="true",
    )
    tables.rows(table, [(i, i % 3) for i in range(12)])
    tables.sql(f"ALTER TABLE {table} RENAME COLUMN p TO part")
    tables.rows(table, [(i, None) for i in range(12, 15)])
    tables.sql(f"DELETE FROM {table} WHERE id % 4 = 1")
    filters = {'[["part", "=", 1]]': "part = 1", '[["part", ">=", 0], ["id", ">", 5]]': "part >= 0 AND id > 5"}
    tables.record("delta/mapped_partitions", tables.spark.table(table), where=filters)


def delta_widened(tables: Tables) -> None:
    """Columns whose types were widened; the first file has the narrow types."""
    table = tables.delta(
        "widened",
        "id INT, b BYTE, s SHORT, x FLOAT, d DECIMAL(5, 2), n INT, i INT, day DATE, l ARRAY<INT>",
        enableTypeWidening="true",
        feature_timestampNtz="supported",
    )
    tables.rows(table, [(i, i, -i, i / 8, Decimal(i) / 4, i, i, _days(i), [i]) for i in range(5)])
    wide = {
        "id": "BIGINT",
        "b": "INT",
        "s": "BIGINT",
        "x": "DOUBLE",
        "d": "DECIMAL(12, 4)",
        "n": "DOUBLE",
        "i": "DECIMAL(14, 2)",
        "day": "TIMESTAMP_NTZ",
        "l.element": "BIGINT",
    }
    for name, type_ in wide.items():
        tables.sql(f"ALTER TABLE {table} ALTER COLUMN {name} TYPE {type_}")
    many = [
        (2**40 + i, 2**20 + i, 2**41 + i, 1 / 3 + i, Decimal(10**7 + i), i / 3, Decimal(i), _times(i), [2**40])
        for i in range(5)
    ]
    tables.rows(table, many)
    filters = {'[["id", ">=", 3]]': "id >= 3", '[["x", "<", 0.5]]': "x < 0.5", '[["n", ">", 1]]': "n > 1"}
    tables.record("delta/widened", tables.spark.table(table), where=filters)


PARTITION_ROWS = [
    (i, *key)
    for i, key in enumerate(
        [
            (1, _days(0), _times(0), ODD),
            (1, _days(1), _times(0), "x"),
            (-2, _days(1), _times(1), "0007"),
            (None, None, None, None),
            (-2, _days(1), _times(1), "0007"),
            (30, _days(2), _times(2), "7"),
            (1, _days(0), _times(0), ODD),
            (None, _days(0), None, "__HIVE_DEFAULT_PARTITION_"),
        ]
    )
]
PARTITION_FILTERS = {
    '[["n", "<", 5]]': "n < 5",
    '[["day", "=", "2024-02-28"]]': "day = DATE'2024-02-28'",
    '[["at", ">", "2024-02-28T00:30:00+00:00"]]': "at > TIMESTAMP'2024-02-28 00:30:00'",
    '[["word", "=", "7"]]': "word = '7'",
    f'[["word", "=", "{ODD}"]]': f'word = "{ODD}"',
    '[["word", "!=", "7"], ["id", ">", 1]]': "word != '7' AND id > 1",
}


def delta_partitions(tables: Tables) -> None:
    """Several partition columns with nulls and odd characters."""
    table = tables.delta(
        "partitions",
        "id INT, n INT, day DATE, at TIMESTAMP, word STRING",
        partitioned="PARTITIONED BY (n, day, at, word)",
    )
    tables.rows(table, PARTITION_ROWS)
    tables.record("delta/partitions", tables.spark.table(table), where=PARTITION_FILTERS)
    columns = "id INT, flag BOOLEAN, price DECIMAL(8, 3), x DOUBLE, wall TIMESTAMP_NTZ"
    table = tables.delta("more_partitions", columns, partitioned="PARTITIONED BY (flag, price, x, wall)")
    tables.rows(table, [(1, True, Decimal("1.5"), 0.1, _times(0)), (2, False, Decimal("-7.125"), -2.0, _times(1))])
    tables.rows(table, [(3, None, None, None, None)])
    filters = {'[["flag", "=", true]]': "flag", '[["price", "<", 0]]': "price < 0", '[["x", "=", 0.1]]': "x = 0.1"}
    tables.record("delta/more_partitions", tables.spark.table(table), where=filters)


NESTED = "id INT, s STRUCT<a: INT, t: STRUCT<u: STRING>>, l ARRAY<STRUCT<v: DOUBLE>>, m MAP<STRING, INT>"


def _nested(first: int, last: int) -> list[tuple[Any, ...]]:
    return [(i, (i, (f"u{i}",)), [(i / 2,), (None,)][: i % 3], {"k": i, "l": None}) for i in range(first, last)] + [
        (last, None, None, None)
    ]


TYPES = (
    "id BIGINT NOT NULL, yes BOOLEAN, small DECIMAL(9, 2), large DECIMAL(38, 10), at TIMESTAMP, wall TIMESTAMP_NTZ, "
    "day DATE, raw BINARY, word STRING, f FLOAT, x DOUBLE"
)


def _types() -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [
        (
            2**53 + i,
            i % 2 == 0,
            Decimal(i) / 4,
            Decimal(10**20 + i) / 8,
            _times(i),
            _times(-i),
            _days(i),
            bytes([0, i, 255]),
            f"wörd {i}",
            i / 3,
            [math.nan, math.inf, -0.0, 0.1][i % 4],
        )
        for i in range(6)
    ]
    return [*found, (7, *(None for _ in range(10)))]


def delta_types(tables: Tables) -> None:
    """Nested columns; types with NOT NULL, decimals, both kinds of timestamps."""
    table = tables.delta("nested", NESTED)
    tables.rows(table, _nested(0, 6))
    tables.record("delta/nested", tables.spark.table(table), where={'[["id", ">=", 3]]': "id >= 3"})
    table = tables.delta("types", TYPES)
    tables.rows(table, _types())
    filters = {'[["small", ">=", 0.5]]': "small >= 0.5", '[["wall", "<", "2024-02-27"]]': "wall < '2024-02-27'"}
    tables.record("delta/types", tables.spark.table(table), where=filters)


def delta_log(tables: Tables) -> None:
    """Checkpoints of both kinds; versions; OPTIMIZE; VACUUM; in-commit timestamps."""
    for policy in ("classic", "v2"):
        table = tables.delta(
            f"checkpoint_{policy}", "id INT, x DOUBLE", checkpointInterval="3", checkpointPolicy=policy
        )
        for i in range(8):
            tables.rows(table, _numbers(4 * i, 4 * i + 4))
        tables.sql(f"DELETE FROM {table} WHERE id = 9")
        tables.record(f"delta/checkpoint_{policy}", tables.spark.table(table), where=ID_AND_X)
        tables.record(f"delta/checkpoint_{policy}", tables.sql(f"SELECT * FROM {table} VERSION AS OF 5"), version=5)
    for name, commit_times in (("optimized", "false"), ("vacuumed", "true")):
        table = tables.delta(name, "id INT, x DOUBLE", enableInCommitTimestamps=commit_times)
        for i in range(3):
            tables.rows(table, _numbers(10 * i, 10 * i + 10))
            next_second()
        then = datetime.datetime.now(datetime.UTC).isoformat()
        next_second()
        tables.sql(f"OPTIMIZE {table}")
        tables.rows(table, _numbers(30, 40))
        tables.sql(f"DELETE FROM {table} WHERE id % 5 = 0")
        if name == "vacuumed":
            tables.sql(f"VACUUM {table} RETAIN 0 HOURS")
        else:
            for version in (1, 2, 3, 4, 5):
                tables.record(
                    f"delta/{name}", tables.sql(f"SELECT * FROM {table} VERSION AS OF {version}"), version=version
                )
            tables.record(f"delta/{name}", tables.sql(f"SELECT * FROM {table} VERSION AS OF 3"), as_of=then)
        tables.record(f"delta/{name}", tables.spark.table(table), where=ID_AND_X)


def delta_features(tables: Tables) -> None:
    """Features that only writers need; clustering; and a reader feature that must be refused."""
    # Generated columns of a table with a location need Delta's own builder.
    delta, session = tables.spark._jvm.io.delta.tables.DeltaTable, tables.spark._jsparkSession
    day = delta.columnBuilder(session, "day").dataType("DATE").generatedAlwaysAs("CAST(at AS DATE)").build()
    number = delta.columnBuilder(session, "n").dataType("BIGINT").generatedAlwaysAsIdentity(1, 1).build()
    builder = delta.create(session).tableName("generated").location(f"{ROOT}/delta/generated")
    builder = builder.addColumn(number).addColumn("id", "INT").addColumn(day).addColumn("at", "TIMESTAMP")
    days = tables.spark.sparkContext._gateway.new_array(tables.spark._jvm.java.lang.String, 1)
    days[0] = "day"
    builder.partitionedBy(days).execute()
    table = "generated"
    properties = {
        "feature_allowColumnDefaults": "supported", "enableRowTracking": "true", "enableChangeDataFeed": "true",
    }  # fmt: skip
    tables.sql(f"ALTER TABLE {table} SET {_properties(properties)}")
    tables.sql(f"ALTER TABLE {table} ALTER COLUMN id SET DEFAULT 5")
    tables.sql(f"ALTER TABLE {table} ADD CONSTRAINT positive CHECK (id > 0)")
    tables.rows(table, [(i, _times(i)) for i in range(1, 9)], "id INT, at TIMESTAMP")
    tables.sql(f"INSERT INTO {table} (at) VALUES (TIMESTAMP'2024-02-27 10:00:00')")
    tables.sql(f"UPDATE {table} SET id = id + 10 WHERE id < 4")
    tables.record(
        "delta/generated", tables.spark.table(table), where={'[["day", "=", "2024-02-27"]]': "day = '2024-02-27'"}
    )
    table = tables.delta("clustered", "id INT, x DOUBLE", cluster="CLUSTER BY (x)")
    tables.rows(table, _numbers(0, 30))
    tables.rows(table, _numbers(30, 60))
    tables.sql(f"OPTIMIZE {table}")
    tables.sql(f"DELETE FROM {table} WHERE id = 59")
    tables.record("delta/clustered", tables.spark.table(table), where=ID_AND_X)
    table = tables.delta("variant", "id INT, v VARIANT")
    tables.sql(f"INSERT INTO {table} SELECT 1, parse_json('{{\"a\": 1}}')")
    table = tables.delta("empty", "id INT, x DOUBLE")
    tables.record("delta/empty", tables.spark.table(table))


MERGE = dict.fromkeys(("write_delete_mode", "write_update_mode", "write_merge_mode"), "merge-on-read")


def iceberg_deletions(tables: Tables) -> None:
    """Position deletes in files for one data file or for several, and deletion vectors, over several row groups."""
    filters = {
        '[["id", ">=", 3000], ["id", "<", 5000]]': "id >= 3000 AND id < 5000",
        '[["x", "<", 5.0]]': "x < 5.0",
        '[["id", "<", 10]]': "id < 10",
    }
    for name, version, granularity in (
        ("by_file", "2", "file"),
        ("by_partition", "2", "partition"),
        ("vectors", "3", "file"),
    ):
        table = tables.iceberg(
            f"deletions_{name}",
            "id INT, x DOUBLE",
            format_version=version,
            write_delete_granularity=granularity,
            **MERGE,
        )
        tables.rows(table, _numbers(0, MANY))
        tables.rows(table, _numbers(MANY, MANY + 500))
        tables.rows(table, _numbers(-20, 0))
        tables.sql(f"DELETE FROM {table} WHERE id % 7 = 0 OR (id > 1990 AND id < 3010)")
        before = tables.sql(f"SELECT snapshot_id FROM {table}.snapshots ORDER BY committed_at DESC").first()[0]
        tables.sql(f"DELETE FROM {table} WHERE id < 0 AND id > -15")
        tables.sql(f"UPDATE {table} SET x = -1 WHERE id % 100 = 3")
        tables.record(f"iceberg/deletions_{name}", tables.spark.table(table), where=filters)
        frame = tables.sql(f"SELECT * FROM {table} VERSION AS OF {before}")
        tables.record(f"iceberg/deletions_{name}", frame, version=before)


def iceberg_equality(tables: Tables) -> None:
    """Equality deletes, written with Iceberg's Java API, because Spark writes none."""
    table = tables.iceberg("equality_deletes", "id INT, x DOUBLE")
    tables.rows(table, _numbers(0, 10))
    jvm, java = tables.spark._jvm, _java_table(tables, "equality_deletes")
    ids = tables.spark.sparkContext._gateway.new_array(jvm.int, 1)
    ids[0] = 1
    factory = jvm.org.apache.iceberg.data.GenericAppenderFactory(
        java, java.schema(), java.spec(), jvm.java.util.HashMap(), ids, java.schema().select(["id"]), None
    )
    output = java.io().newOutputFile(f"{java.location()}/data/equality.parquet")
    encrypted = jvm.org.apache.iceberg.encryption.EncryptedFiles.encryptedOutput(
        output, jvm.org.apache.iceberg.encryption.EncryptionKeyMetadata.EMPTY
    )
    writer = factory.newEqDeleteWriter(encrypted, jvm.org.apache.iceberg.FileFormat.PARQUET, None)
    record = jvm.org.apache.iceberg.data.GenericRecord.create(java.schema().select(["id"]))
    record.setField("id", 3)
    writer.write(record)
    writer.close()
    java.newRowDelta().addDeletes(writer.toDeleteFile()).commit()
    tables.sql(f"REFRESH TABLE {table}")
    assert tables.spark.table(table).count() == 9


def _java_table(tables: Tables, name: str) -> Any:
    jvm = tables.spark._jvm
    return jvm.org.apache.iceberg.hadoop.HadoopTables(tables.spark._jsc.hadoopConfiguration()).load(
        f"{ROOT}/iceberg/db/{name}"
    )


def iceberg_evolution(tables: Tables) -> None:
    """Columns renamed, added, dropped and added again, reordered and widened; default values; partition evolution."""
    columns = "id INT, x FLOAT, old STRING, d DECIMAL(5, 2), s STRUCT<a: INT, b: STRING>, other INT"
    for version in ("1", "2"):
        table = tables.iceberg(f"evolved_v{version}", columns, format_version=version)
        tables.rows(table, [(i, i / 8, f"o{i}", Decimal(i) / 4, (i, f"b{i}"), -i) for i in range(8)])
        for change in (
            "RENAME COLUMN x TO price",
            "RENAME COLUMN s.a TO first",
            "DROP COLUMN old",
            "ADD COLUMNS (x STRING, old INT, s.c BIGINT)",
            "ALTER COLUMN id TYPE BIGINT",
            "ALTER COLUMN price TYPE DOUBLE",
            "ALTER COLUMN d TYPE DECIMAL(12, 2)",
            "ALTER COLUMN s.first TYPE BIGINT",
            "RENAME COLUMN id TO tmp",
            "RENAME COLUMN other TO id",
            "RENAME COLUMN tmp TO key",
            "ALTER COLUMN old FIRST",
            "ALTER COLUMN s AFTER old",
        ):
            tables.sql(f"ALTER TABLE {table} {change}")
        named = (
            "key BIGINT, price DOUBLE, d DECIMAL(12, 2), s STRUCT<first: BIGINT, b: STRING, c: BIGINT>, id INT, "
            "x STRING, old INT"
        )
        wide = [(2**40 + i, i / 3, Decimal(10**7 + i), (2**40, None, i), -i, f"x{i}", None) for i in range(8, 14)]
        tables.rows(table, wide, named)
        filters = {'[["key", ">=", 3]]': "key >= 3", '[["x", "=", "x9"]]': "x = 'x9'", '[["id", "<", -5]]': "id < -5"}
        tables.record(f"iceberg/evolved_v{version}", tables.spark.table(table), where=filters)
    # Spark's vectorized reader cannot read a default of a decimal.
    options = {"format_version": "3", "read_parquet_vectorization_enabled": "false", **MERGE}
    table = tables.iceberg("defaults", "id INT, x DOUBLE", **options)
    tables.rows(table, _numbers(0, 8))
    jvm, java = tables.spark._jvm, _java_table(tables, "defaults")
    types, literal = jvm.org.apache.iceberg.types.Types, jvm.org.apache.iceberg.expressions.Literal
    update = java.updateSchema()
    update.addColumn("n", types.IntegerType.get(), "", literal.of(5))
    update.addColumn("word", types.StringType.get(), "", literal.of("none"))
    update.addColumn("day", types.DateType.get(), "", literal.of("2024-02-29").to(types.DateType.get()))
    update.addColumn("price", types.DecimalType.of(9, 2), "", literal.of("1.25").to(types.DecimalType.of(9, 2)))
    update.addRequiredColumn("must", types.LongType.get(), "", literal.of(7).to(types.LongType.get()))
    update.addColumn("none", types.LongType.get())
    update.commit()
    tables.sql(f"REFRESH TABLE {table}")
    tables.rows(table, [(i, 0.5, None, "w", _days(0), None, i, i) for i in range(8, 12)])
    tables.sql(f"DELETE FROM {table} WHERE id = 3")
    filters = {'[["n", "=", 5]]': "n = 5", '[["word", "!=", "w"]]': "word != 'w'", '[["must", ">", 7]]': "must > 7"}
    tables.record("iceberg/defaults", tables.spark.table(table), where=filters)
    table = tables.iceberg(
        "partition_evolution",
        "id INT, n INT, day DATE, at TIMESTAMP, word STRING",
        partitioned="PARTITIONED BY (n)",
        **MERGE,
    )
    tables.rows(table, PARTITION_ROWS)
    for change in (
        "ADD PARTITION FIELD bucket(4, id)",
        "ADD PARTITION FIELD days(at)",
        "ADD PARTITION FIELD truncate(2, word)",
        "DROP PARTITION FIELD n",
    ):
        tables.sql(f"ALTER TABLE {table} {change}")
        tables.rows(table, [(100 * (len(change)) + row[0], *row[1:]) for row in PARTITION_ROWS])
    tables.sql(f"DELETE FROM {table} WHERE id % 4 = 1")
    tables.record("iceberg/partition_evolution", tables.spark.table(table), where=PARTITION_FILTERS)
    for version in ("1", "2"):
        table = tables.iceberg(
            f"partitions_v{version}",
            "id INT, n INT, day DATE, at TIMESTAMP, word STRING",
            partitioned="PARTITIONED BY (n, day, at, word)",
            format_version=version,
        )
        tables.rows(table, PARTITION_ROWS)
        tables.sql(f"ALTER TABLE {table} DROP PARTITION FIELD day")
        tables.rows(table, [(10 + row[0], *row[1:]) for row in PARTITION_ROWS])
        tables.record(f"iceberg/partitions_v{version}", tables.spark.table(table), where=PARTITION_FILTERS)


def iceberg_snapshots(tables: Tables) -> None:
    """Several snapshots, a branch, a tag, expired snapshots."""
    table = tables.iceberg("snapshots", "id INT, x DOUBLE")
    for i in range(4):
        tables.rows(table, _numbers(10 * i, 10 * i + 10))
        next_second()
        if i == 1:
            tables.sql(f"ALTER TABLE {table} CREATE TAG release")
            then = datetime.datetime.now(datetime.UTC).isoformat()
            next_second()
    tables.sql(f"ALTER TABLE {table} CREATE BRANCH audit")
    tables.sql(f"INSERT INTO {table}.branch_audit VALUES (1000, 1.5)")
    tables.sql(f"ALTER TABLE {table} RENAME COLUMN x TO y")
    tables.sql(f"DELETE FROM {table} WHERE id = 35")
    tables.record("iceberg/snapshots", tables.spark.table(table), where={'[["y", "<", 5.0]]': "y < 5.0"})
    for row in tables.sql(f"SELECT snapshot_id FROM {table}.snapshots").collect():
        tables.record("iceberg/snapshots", tables.sql(f"SELECT * FROM {table} VERSION AS OF {row[0]}"), version=row[0])
    for name in ("release", "audit"):
        tables.record("iceberg/snapshots", tables.sql(f"SELECT * FROM {table} VERSION AS OF '{name}'"), version=name)
    tables.record("iceberg/snapshots", tables.sql(f"SELECT * FROM {table} VERSION AS OF 'release'"), as_of=then)
    table = tables.iceberg("expired", "id INT, x DOUBLE")
    for i in range(3):
        tables.rows(table, _numbers(10 * i, 10 * i + 10))
    tables.sql(f"DELETE FROM {table} WHERE id < 12")
    tables.sql("CALL ice.system.rewrite_data_files(table => 'db.expired', options => map('rewrite-all', 'true'))")
    tables.sql("CALL ice.system.expire_snapshots(table => 'db.expired', older_than => TIMESTAMP'2999-01-01 00:00:00')")
    tables.record("iceberg/expired", tables.spark.table(table), where=ID_AND_X)


def iceberg_other(tables: Tables) -> None:
    """Nested columns, types, files without field ids, files in Avro, no files."""
    table = tables.iceberg("nested", NESTED)
    tables.rows(table, _nested(0, 6))
    tables.record("iceberg/nested", tables.spark.table(table), where={'[["id", ">=", 3]]': "id >= 3"})
    table = tables.iceberg("types", TYPES)
    tables.rows(table, _types())
    filters = {'[["small", ">=", 0.5]]': "small >= 0.5", '[["wall", "<", "2024-02-27"]]': "wall < '2024-02-27'"}
    tables.record("iceberg/types", tables.spark.table(table), where=filters)
    # Parquet files without field ids, whose partition column is only in their paths, taken over by add_files.
    folder = f"{ROOT}/iceberg/db/migrated_files"
    frame = tables.spark.createDataFrame(
        [(i, i / 2, f"w{i}", i % 3, ODD if i % 2 else "x") for i in range(12)],
        "id INT, x DOUBLE, word STRING, n INT, p STRING",
    )
    frame.coalesce(1).write.partitionBy("n", "p").option("compression", "none").parquet(folder)
    table = tables.iceberg(
        "migrated", "id INT, x DOUBLE, word STRING, n INT, p STRING", partitioned="PARTITIONED BY (n, p)"
    )
    tables.sql(f"CALL ice.system.add_files(table => 'db.migrated', source_table => '`parquet`.`{folder}`')")
    for change in (
        "RENAME COLUMN x TO price",
        "RENAME COLUMN n TO part",
        "ADD COLUMN extra STRING",
        "ALTER COLUMN id TYPE BIGINT",
    ):
        tables.sql(f"ALTER TABLE {table} {change}")
    tables.sql(f"INSERT INTO {table} (id, price, word, part, p, extra) VALUES (99, 1.5, 'w', 7, 'y', 'new')")
    filters = {
        '[["part", "=", 1]]': "part = 1",
        '[["price", ">", 2]]': "price > 2",
        f'[["p", "=", "{ODD}"]]': f'p = "{ODD}"',
    }
    tables.record("iceberg/migrated", tables.spark.table(table), where=filters)
    table = tables.iceberg("avro_files", "id INT, x DOUBLE", write_format_default="avro")
    tables.rows(table, _numbers(0, 5))
    table = tables.iceberg("empty", "id INT, x DOUBLE")
    tables.record("iceberg/empty", tables.spark.table(table))


def _long(content: bytes, at: int) -> tuple[int, int]:
    """Decode a number of Avro, and return it with the position after it."""
    value = shift = 0
    while True:
        value |= (content[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if content[at - 1] < 0x80:
            return (value >> 1) ^ -(value & 1), at


def _encoded(value: int) -> bytes:
    """Encode a number that is not negative for Avro."""
    value, found = value << 1, bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def decompress_avro(path: Path) -> None:
    """Rewrite an Avro file without compression: Iceberg always compresses its manifest lists."""
    content = path.read_bytes()
    codec = b"\x14avro.codec\x0edeflate"
    if codec not in content:
        return
    at = content.index(codec) + len(codec)
    # The header ends with the end of the map and 16 bytes that separate the blocks.
    while content[at] != 0:
        length, at = _long(content, at)
        at += length
    at += 17
    found = content[:at].replace(codec, b"\x14avro.codec\x08null")
    while at < len(content):
        count, at = _long(content, at)
        size, at = _long(content, at)
        block = zlib.decompress(content[at : at + size], wbits=-15)
        found += _encoded(count) + _encoded(len(block)) + block + content[at + size : at + size + 16]
        at += size + 16
    path.write_bytes(found)


def pack(cases: list[dict[str, Any]]) -> None:
    """Write the archive and what Spark has read."""
    for path in (ROOT / "iceberg").rglob("*.avro"):
        decompress_avro(path)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (HERE / "expected.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    with tarfile.open(HERE / "tables.tar.xz", "w:xz", preset=9) as archive:
        for kind in ("delta", "iceberg"):
            for path in sorted((ROOT / kind).rglob("*")):
                if path.is_file() and not path.name.endswith(".crc"):
                    info = archive.gettarinfo(path, str(path.relative_to(ROOT)))
                    info.uid = info.gid = 0
                    info.uname = info.gname = ""
                    with path.open("rb") as content:
                        archive.addfile(info, content)


def main() -> None:
    """Write all tables."""
    shutil.rmtree(ROOT, ignore_errors=True)
    spark = start(Path(sys.argv[1]).resolve())
    spark.sparkContext.setLogLevel("ERROR")
    tables = Tables(spark)
    for write in (
        delta_deletions, delta_mapped, delta_widened, delta_partitions, delta_types, delta_log, delta_features,
        iceberg_deletions, iceberg_equality, iceberg_evolution, iceberg_snapshots, iceberg_other,
    ):  # fmt: skip
        if len(sys.argv) == 2 or write.__name__ in sys.argv[2:]:
            write(tables)
    pack(tables.cases)
    spark.stop()
    shutil.rmtree(ROOT)


if __name__ == "__main__":
    main()
