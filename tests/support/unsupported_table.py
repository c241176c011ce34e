"""Write the table of unsupported parameters in docs/training.md.

Run ``python -m tests.support.unsupported_table`` after a change of `UNSUPPORTED` in a library's module `params`.
"""

from __future__ import annotations

from pathlib import Path

from shoal.training.boosting.library import libraries
from shoal.training.boosting.params import Unsupported

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
_BEGIN = "<!-- written by python -m tests.support.unsupported_table -->\n"
_END = "<!-- end of the written table -->\n"


def page() -> str:
    """Return the text of the page, with the table of the code."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    rows = "".join(
        f"| {library.title} {' | '.join(_cells(entry))} |\n" for library in libraries() for entry in library.unsupported
    )
    head = "| library and parameter | workers | reason |\n| --- | --- | --- |\n"
    return f"{before}{_BEGIN}\n{head}{rows}\n{_END}{after}"


def _cells(entry: Unsupported) -> tuple[str, ...]:
    values = ", ".join(f"`{value}`" for value in entry.values)
    name = f"`{entry.name}`" + (f": {values}" if values else "")
    if entry.allowed:
        name += f" other than {', '.join(f'`{value}`' for value in entry.allowed)}"
    workers = "several" if entry.only_several_workers else "any"
    return name, workers, entry.reason


if __name__ == "__main__":
    PAGE.write_text(page())
