"""What a migration may do: processes of the version before go on with the store, so it only adds or widens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from shoal.errors import StoreError
from shoal.state import Store, databases
from shoal.state.databases import SCHEMA_VERSION
from shoal.state.home import default_url
from shoal.state.schema import Base, create_tables

OLDEST = "0013"
"""Schema of shoal 0.1.0."""

DIALECTS = (sqlite.dialect, postgresql.dialect)

TABLES = {OLDEST: "99219adb03e59db9"}
"""By schema: the beginning of the SHA-256 of the statements that create its tables."""


def revisions() -> list[str]:
    """The schemas after the oldest, in their order."""
    scripts = ScriptDirectory(str(databases.SCRIPTS))
    return [script.revision for script in reversed(list(scripts.iterate_revisions("head", OLDEST)))]


@pytest.fixture
def fresh_home(empty_home):
    """A home without a store: these tests are about how one is made."""
    return empty_home


@pytest.fixture
def engine(either_store) -> sa.Engine:
    return databases.engine(default_url())


def create_oldest(engine: sa.Engine) -> None:
    """Create the tables of shoal 0.1.0."""
    assert OLDEST == SCHEMA_VERSION, "the schema has changed: let the wheel of shoal 0.1.0 create these tables"
    with engine.begin() as connection:
        create_tables(connection)
        # The fixture `later_schema` replaces the version that `create_tables` has written.
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{OLDEST}'")


def upgrade(engine: sa.Engine, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(databases.SCRIPTS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


@dataclass(frozen=True)
class Table:
    """A table as the database describes it.

    Attributes:
        columns: By name: type in SQL, whether it may be NULL, and its default in SQL.
        constraints: Keys, constraints and indexes.
    """

    columns: dict[str, tuple[str, bool, str | None]]
    constraints: list[str]


def described(connection: sa.Connection) -> dict[str, Table]:
    inspector = sa.inspect(connection)
    found = {}
    for name in inspector.get_table_names():
        columns = {
            column["name"]: (str(column["type"]), column["nullable"], column["default"])
            for column in inspector.get_columns(name)
        }
        constraints = [
            inspector.get_pk_constraint(name),
            *inspector.get_foreign_keys(name),
            *inspector.get_unique_constraints(name),
            *inspector.get_check_constraints(name),
            *inspector.get_indexes(name),
        ]
        found[name] = Table(columns, sorted(map(repr, constraints)))
    return found


def forbidden(before: dict[str, Table], after: dict[str, Table], dialect: str) -> Iterator[str]:
    """What a migration has done besides adding tables and columns, a sentence each."""
    yield from (f"table {name} is gone" for name in before.keys() - after.keys())
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        yield from (f"column {name}.{column} is gone" for column in old.columns.keys() - new.columns.keys())
        if old.constraints != new.constraints:
            yield f"keys, constraints or indexes of {name} have changed"
        for column, (kind, nullable, default) in new.columns.items():
            if column not in old.columns:
                if not nullable and default is None:
                    yield f"new column {name}.{column} is neither nullable nor has a server default"
                continue
            old_kind, *old_rest = old.columns[column]
            if old_rest != [nullable, default]:
                yield f"nullability or default of {name}.{column} has changed"
            if old_kind != kind and not (dialect == "postgresql" and _wider(old_kind, kind)):
                yield f"{name}.{column} was {old_kind} and is {kind}"


def _wider(old: str, new: str) -> bool:
    """Whether a type of PostgreSQL holds every value of another, and no reader notices the difference."""
    if not old.startswith("VARCHAR("):
        return (old, new) in {("SMALLINT", "INTEGER"), ("INTEGER", "BIGINT"), ("SMALLINT", "BIGINT")}
    return new in ("TEXT", "VARCHAR") or (new.startswith("VARCHAR(") and _length(new) > _length(old))


def _length(kind: str) -> int:
    return int(kind.removeprefix("VARCHAR(").removesuffix(")"))


def test_migrations_only_add_or_widen(engine, later_schema):
    create_oldest(engine)
    assert revisions()[-1] == later_schema
    for revision in revisions():
        with engine.connect() as connection:
            before = described(connection)
        upgrade(engine, revision)
        with engine.connect() as connection:
            after = described(connection)
        assert list(forbidden(before, after, engine.dialect.name)) == [], revision
        assert before != after, revision


def consequences(engine: sa.Engine, statement: str) -> list[str]:
    """What is said of a migration of one statement; it is taken back."""
    with engine.connect() as connection:
        before = described(connection)
    with engine.connect() as connection, connection.begin() as transaction:
        connection.exec_driver_sql(statement)
        found = list(forbidden(before, described(connection), engine.dialect.name))
        transaction.rollback()
    return found


def test_what_is_forbidden_is_found(engine):
    create_oldest(engine)
    for statement, said in [
        ("DROP TABLE demand", "table demand is gone"),
        ("ALTER TABLE jobs DROP COLUMN error", "column jobs.error is gone"),
        ("ALTER TABLE jobs RENAME COLUMN error TO reason", "column jobs.error is gone"),
        ("CREATE UNIQUE INDEX one ON leases (holder)", "keys, constraints or indexes of leases have changed"),
    ]:
        assert said in consequences(engine, statement)


def test_postgresql_may_widen_a_type_and_nothing_else(on_postgresql, fresh_home):
    engine = databases.engine(default_url())
    create_oldest(engine)
    for change in ("ALTER COLUMN name TYPE VARCHAR(300)", "ALTER COLUMN name TYPE TEXT", "ADD COLUMN extra TEXT"):
        assert consequences(engine, f"ALTER TABLE locks {change}") == []
    assert consequences(engine, "ALTER TABLE locks ADD COLUMN extra TEXT NOT NULL DEFAULT ''") == []
    assert consequences(engine, "ALTER TABLE locks ADD COLUMN extra TEXT NOT NULL") == [
        "new column locks.extra is neither nullable nor has a server default"
    ]
    assert consequences(engine, "ALTER TABLE locks ALTER COLUMN name TYPE VARCHAR(100)") == [
        "locks.name was VARCHAR(255) and is VARCHAR(100)"
    ]
    assert consequences(engine, "ALTER TABLE jobs ALTER COLUMN error SET NOT NULL") == [
        "nullability or default of jobs.error has changed"
    ]


def fill(connection: sa.Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Put a row with a value in every column into every table that the database has; returns all rows by table."""
    inspector = sa.inspect(connection)
    written: dict[str, list[tuple[Any, ...]]] = {}
    for table in Base.metadata.sorted_tables:
        if not inspector.has_table(table.name):
            continue
        there = [table.c[column["name"]] for column in inspector.get_columns(table.name)]
        row = sa.table(table.name, *[sa.column(column.name, column.type) for column in there])
        connection.execute(sa.insert(row).values({column.name: _value(column) for column in there}))
        written[table.name] = _rows(connection, row)
    return written


def _value(column: sa.Column[Any]) -> Any:
    if column.foreign_keys:
        return _value(next(iter(column.foreign_keys)).column)
    if isinstance(column.type, sa.Enum):
        assert column.type.enum_class is not None
        return next(iter(column.type.enum_class))
    kinds = {sa.String: f"{column.name} é", sa.LargeBinary: b"\x00", sa.Boolean: True, sa.Integer: 7, sa.Float: 1.5}
    type_ = column.type.impl_instance if isinstance(column.type, sa.TypeDecorator) else column.type
    plain = (value for kind, value in kinds.items() if isinstance(type_, kind))
    return next(plain, {"a": [1, "é", None]})  # all others are JSON


def _rows(connection: sa.Connection, table: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in connection.execute(sa.select(table))]


def test_all_rows_survive_an_upgrade(engine, later_schema):
    create_oldest(engine)
    with engine.begin() as connection:
        before = described(connection)
        written = fill(connection)
    assert written.keys() == before.keys() - {"alembic_version"}

    store = Store()

    with store.reading() as session:
        connection = session.connection()
        for name, rows in written.items():
            table = Base.metadata.tables[name]
            kept = [table.c[column] for column in before[name].columns]
            assert _rows(connection, sa.select(*kept).subquery()) == rows
        assert connection.execute(sa.text("SELECT added_later FROM jobs")).scalars().all() == [None]
        # As today's code reads them.
        for mapper in Base.registry.mappers:
            assert len(session.scalars(sa.select(mapper.class_)).all()) == (mapper.local_table.name in written)


def test_tables_that_change_get_a_migration():
    """A column that was added to `schema` alone would be missing in every database there is."""
    tables = Base.metadata.sorted_tables
    created = [CreateTable(table) for table in tables] + [
        CreateIndex(index) for table in tables for index in sorted(table.indexes, key=lambda index: str(index.name))
    ]
    text = "".join(str(each.compile(dialect=dialect())) for dialect in DIALECTS for each in created)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == TABLES[SCHEMA_VERSION], "write a migration: RELEASING.md"


def test_the_schema_is_what_the_migrations_make(engine):
    create_oldest(engine)
    upgrade(engine, "head")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_an_upgrade_that_fails_changes_nothing(engine, later_schema, monkeypatch):
    create_oldest(engine)
    upgrade_all = databases.upgrade

    def fail(connection: sa.Connection) -> None:
        upgrade_all(connection)
        raise sa.exc.OperationalError("DDL", {}, Exception("cut off"))

    with monkeypatch.context() as patch:
        patch.setattr(databases, "upgrade", fail)
        with pytest.raises(StoreError, match="cut off"):
            Store()
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalars().all() == [OLDEST]
        assert "added_later" not in described(connection)["jobs"].columns


def test_the_newest_migration_is_the_schemas_version():
    assert ScriptDirectory(str(databases.SCRIPTS)).get_current_head() == SCHEMA_VERSION


def test_a_store_of_an_unreleased_version_is_refused(engine):
    Store()
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0009'")
    with pytest.raises(StoreError, match=r"before 0\.1\.0"):
        Store()
