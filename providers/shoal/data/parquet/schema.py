"""Columns and types of a dataset, and how types are compared and converted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.data.parquet.footers import Footer
from shoal.data.parquet.rows_digest import kind_of
from shoal.errors import DataError
from shoal.lazy_imports import pa


def distinct(footers: Iterable[Footer]) -> list[Footer]:
    """Return one footer for each different schema: the first footer with this schema."""
    # Footers with equal schemas share one object; see `read_footers`.
    return list({id(footer.schema): footer for footer in reversed(list(footers))}.values())[::-1]


def common_schema(schema: pa.Schema, partitions: Mapping[str, pa.Field], used: Iterable[Footer]) -> pa.Schema:
    """Return the columns that exist in every file with rows, and that have the same kind of type (such as integer or
    text) in all these files.
    """
    kinds = {field.name: kind_of(field.type) for field in schema}
    common = set(kinds)
    for footer in used:
        found = {field.name: kind_of(field.type) for field in footer.schema}
        of_path = {name for name, _ in footer.partitions} & partitions.keys()
        common -= {name for name in common - of_path if found.get(name) not in (kinds[name], "null")}
    return pa.schema([field for field in schema if field.name in common])


def widened(schema: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return a schema with the common types of its columns and of the other schema's columns of the same names."""
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


def first_with_rows(footers: Sequence[Footer]) -> Footer:
    """Return the footer of the first file that has rows, or of the first file if none has."""
    return next((footer for footer in footers if footer.rows), footers[0])


_DIGITS = {8: 3, 16: 5, 32: 10, 64: 20}
"""Width of an integer in bits -> largest number of its decimal digits."""
EXACT_INTEGER = 2**53
"""Largest integer up to which float64 represents every integer."""
_EXACT_DIGITS = 15
"""Number of decimal digits that every float64 keeps."""


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the Arrow type to which the values of two types can be converted without a loss.

    The conversion of an integer to float64 loses values above 2**53, and the conversion of a uint64 to int64 is not
    possible above 2**63. :func:`to_schema` finds such values.

    Returns:
        The common type; None if there is none, such as for text and numbers, or for timestamps with and without a time
        zone. Timestamps get the finer unit, and the first type's time zone.
    """
    types = pa.types
    if one == other:
        return one
    if types.is_null(one) or types.is_null(other):
        return other if types.is_null(one) else one
    if types.is_dictionary(one) or types.is_dictionary(other):
        both = types.is_dictionary(one) and types.is_dictionary(other)
        values = common_type(*(type_.value_type if types.is_dictionary(type_) else type_ for type_ in (one, other)))
        if values is None or not both:
            return values
        index = _common_number(one.index_type, other.index_type)
        return pa.dictionary(index, values, ordered=one.ordered and other.ordered)
    if is_number(one) and is_number(other):
        return _common_number(one, other)
    for kind, wide in (("text", pa.large_string()), ("bytes", pa.large_binary())):
        if kind_of(one) == kind_of(other) == kind:
            return wide
    if types.is_date(one) and types.is_date(other):
        return pa.date32()
    if types.is_timestamp(one) and types.is_timestamp(other):
        unit = max(one.unit, other.unit, key=("s", "ms", "us", "ns").index)
        return pa.timestamp(unit, one.tz) if (one.tz is None) == (other.tz is None) else None
    return _common_nested(one, other)


def plain_type(type_: pa.DataType) -> pa.DataType:
    """Return the type of a column's values, without dictionaries and views."""
    value = type_.value_type if pa.types.is_dictionary(type_) else type_
    return {"string_view": pa.large_string(), "binary_view": pa.large_binary()}.get(str(value), value)


def united(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """Return a schema with all columns of several schemas, each of the common type."""
    fields: dict[str, pa.Field] = {}
    for field in (field for schema in schemas for field in schema):
        known = fields.get(field.name, field).type
        if (type_ := common_type(known, field.type)) is None:
            raise DataError(
                f'column "{field.name}" is of type {known} in some rows and of type {field.type} in others, which have '
                "no common type: return one type for all rows"
            )
        fields[field.name] = pa.field(field.name, type_)
    return pa.schema(list(fields.values()))


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with the columns of a schema of :func:`united`. A column that the rows lack is null."""
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            columns.append(pa.nulls(len(table), field.type))
            continue
        try:
            columns.append(table.column(field.name).cast(field.type))
        except pa.ArrowInvalid as error:
            raise DataError(
                f'column "{field.name}" has values of type {table.schema.field(field.name).type} that the common type '
                f"{field.type} of all rows cannot represent ({error}): return one type for all rows"
            ) from None
    return pa.table(columns, schema=schema)


def largest_integer(type_: pa.DataType, wide: pa.DataType) -> int | None:
    """Return the largest integer of a type that can be converted to a wider type without a loss.

    Returns:
        The integer; None if every value of the type can be converted.
    """
    types = pa.types
    if types.is_float64(wide) and (types.is_int64(type_) or types.is_uint64(type_)):
        return EXACT_INTEGER
    return 2**63 - 1 if types.is_int64(wide) and types.is_uint64(type_) else None


def to_schema(table: pa.Table, fields: Mapping[str, pa.Field], path: str) -> pa.Table:
    """Convert the columns of a file's table to the dataset's common types; a column of the right type is not copied."""
    schema = table.schema
    wanted = pa.schema([fields.get(field.name, field) for field in schema])
    if schema == wanted:
        return table
    columns = []
    for i, (field, values) in enumerate(zip(wanted, table.columns, strict=True)):
        type_ = values.type
        if common_type(type_, field.type) is None:
            wanted = wanted.set(i, schema.field(i))
        elif type_ != field.type:
            try:
                values = values.cast(field.type)
            except pa.ArrowInvalid as exc:
                raise lossy(path, field.name, type_, field.type, str(exc)) from None
        columns.append(values)
    return pa.table(columns, schema=wanted)


def lossy(path: str, column: str, type_: pa.DataType, wide: pa.DataType, reason: str) -> DataError:
    """Return the error for a column whose values cannot be converted to the common type of all files."""
    return DataError(
        f'{path}: column "{column}" is of type {type_}, but other files make it {wide}, in which values of this file '
        f"would be lost ({reason}): write the column in the same type in all files"
    )


def is_number(type_: pa.DataType) -> bool:
    """Return whether a type is one of integers, floats or decimals."""
    types = pa.types
    return bool(types.is_integer(type_) or types.is_floating(type_) or types.is_decimal(type_))


def is_time(type_: pa.DataType) -> bool:
    """Return whether a type is one of dates or timestamps."""
    return bool(pa.types.is_date(type_) or pa.types.is_timestamp(type_))


def _common_number(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    types = pa.types
    if types.is_integer(one) and types.is_integer(other):
        wide = max(one, other, key=lambda type_: type_.bit_width)
        if types.is_signed_integer(one) == types.is_signed_integer(other):
            return wide
        # A signed type holds all values of an unsigned type only if it is wider. int64 is the widest signed type.
        return wide if types.is_signed_integer(wide) and one.bit_width != other.bit_width else pa.int64()
    if types.is_floating(one) and types.is_floating(other):
        return max(one, other, key=lambda type_: type_.bit_width)
    decimals = [type_ for type_ in (one, other) if types.is_decimal(type_)]
    if any(types.is_floating(type_) for type_ in (one, other)):
        return pa.float64() if all(type_.precision <= _EXACT_DIGITS for type_ in decimals) else None
    scale = max(type_.scale for type_ in decimals)
    digits = max(
        type_.precision - type_.scale if types.is_decimal(type_) else _DIGITS[type_.bit_width] for type_ in (one, other)
    )
    if digits + scale > 76:
        return None
    return pa.decimal128(digits + scale, scale) if digits + scale <= 38 else pa.decimal256(digits + scale, scale)


def _common_nested(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the common type of two list or struct types, whose parts may differ in type and nullability."""
    types = pa.types
    if types.is_struct(one) and types.is_struct(other):
        if [field.name for field in one] != [field.name for field in other]:
            return None
        fields = [_common_field(mine, theirs) for mine, theirs in zip(one, other, strict=True)]
        return None if any(field is None for field in fields) else pa.struct(fields)
    fixed = types.is_fixed_size_list(one) and types.is_fixed_size_list(other) and one.list_size == other.list_size
    if not fixed and not all(types.is_list(type_) or types.is_large_list(type_) for type_ in (one, other)):
        return None
    if (value := _common_field(one.value_field, other.value_field)) is None:
        return None
    if fixed:
        return pa.list_(value, one.list_size)
    return pa.list_(value) if types.is_list(one) and types.is_list(other) else pa.large_list(value)


def _common_field(one: pa.Field, other: pa.Field) -> pa.Field | None:
    type_ = common_type(one.type, other.type)
    return None if type_ is None else pa.field(one.name, type_, one.nullable or other.nullable)
