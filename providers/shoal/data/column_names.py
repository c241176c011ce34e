"""Check that a column with a given name exists, and suggest similar names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from shoal.errors import DataError


def check_present(path: str, name: str, present: Sequence[str]) -> None:
    """Check that a file has exactly one column of a given name.

    Raises:
        DataError: If the file has no column or several columns with this name. The message contains similar names.
    """
    if present.count(name) > 1:
        raise DataError(f'{path} has several columns named "{name}": rename all but one')
    if name in present:
        return
    lower = {column.lower(): column for column in present}
    near = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3)]
    if near:
        hint = "; did you mean " + " or ".join(f'"{column}"' for column in near) + "?"
    else:
        shown = ", ".join(present[:20]) + (", ..." if len(present) > 20 else "")
        hint = f"; its columns are {shown}" if present else "; it has no columns"
    raise DataError(f'{path} has no column "{name}"{hint}')
