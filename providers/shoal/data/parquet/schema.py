"""Determine the columns of a dataset of several Parquet files, with their types. The columns come from the first file
that has rows, and from the names of the partition directories (``month=1/``). If files store a column in different
types, the column gets the type that holds the values of all files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.data.parquet.digest import kind_of
from shoal.data.parquet.footers import Footer
from shoal.data.parquet.types import common_type

if TYPE_CHECKING:
    import pyarrow as pa


def reference_footer(footers: Sequence[Footer], used: Iterable[Footer]) -> Footer:
    """Return the footer that defines the columns of a dataset: the footer of the first file that has rows.

    The column types of an empty file are not used, because pandas guesses the types of an empty DataFrame.
    """
    return next(iter(used), None) or _first_with_rows(footers)


def partition_fields(footers: Sequence[Footer], types: Mapping[str, str]) -> dict[str, pa.Field]:
    """Return the columns that exist only as partition directories (``month=1/``) and not in the files, as a dict by
    name.
    """
    import pyarrow as pa

    stored = set(_first_with_rows(footers).schema.names)
    return {name: pa.field(name, pa.type_for_alias(type_)) for name, type_ in types.items() if name not in stored}


def dataset_schema(reference: Footer, partitions: Mapping[str, pa.Field], used: Iterable[Footer]) -> pa.Schema:
    """Return the schema of a dataset: the columns of the reference file in their common types, then the partition
    columns.
    """
    schema = reference.schema
    for footer in distinct(used):
        schema = _widened(schema, footer.schema)
    for field in partitions.values():
        schema = schema.append(field)
    return schema


def distinct(footers: Iterable[Footer]) -> list[Footer]:
    """Return one footer for each different schema: the first footer with this schema."""
    # Footers with equal schemas share one object; see `read_footers`.
    return list({id(footer.schema): footer for footer in reversed(list(footers))}.values())[::-1]


def common_schema(schema: pa.Schema, partitions: Mapping[str, pa.Field], used: Iterable[Footer]) -> pa.Schema:
    """Return the columns that exist in every file with rows, and that have the same kind of type (such as integer or
    text) in all these files.
    """
    import pyarrow as pa

    kinds = {field.name: kind_of(field.type) for field in schema}
    common = set(kinds)
    for footer in used:
        found = {field.name: kind_of(field.type) for field in footer.schema}
        of_path = {name for name, _ in footer.partitions} & partitions.keys()
        common -= {name for name in common - of_path if found.get(name) not in (kinds[name], "null")}
    return pa.schema([field for field in schema if field.name in common])


def _widened(schema: pa.Schema, other: pa.Schema) -> pa.Schema:
    if other is schema:
        return schema
    for i, field in enumerate(schema):
        at = other.get_field_index(field.name)
        theirs = other.field(at) if at >= 0 else field
        type_ = common_type(field.type, theirs.type) or field.type
        nullable = field.nullable or theirs.nullable
        if type_ != field.type or nullable != field.nullable:
            schema = schema.set(i, field.with_type(type_).with_nullable(nullable))
    return schema


def _first_with_rows(footers: Sequence[Footer]) -> Footer:
    return next((footer for footer in footers if footer.rows), footers[0])
