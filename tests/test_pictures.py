"""The pictures of README.md and the guides: all exist, all are used, and all are made by `make pictures`."""

from __future__ import annotations

import re

from tests.support import ROOT
from tests.support.pictures import FOLDER, PICTURES, architecture

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = [
    (page, alt, path)
    for page in PAGES
    for alt, path in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", page.read_text())
    if "://" not in path
]


def test_every_picture_that_a_page_names_exists_and_has_an_alternative_text():
    assert len(NAMED) > 6
    assert [(page, path) for page, alt, path in NAMED if not alt or not (page.parent / path).is_file()] == []


def test_every_picture_is_named_by_a_page_and_made_by_the_program():
    named = {(page.parent / path).resolve() for page, _, path in NAMED}
    made = {FOLDER / name for names in PICTURES.values() for name in names}
    assert named == made == set(FOLDER.iterdir())


def test_the_picture_of_the_architecture_is_up_to_date():
    (name,) = PICTURES["architecture"]
    assert (FOLDER / name).read_text() == architecture.drawing(), "run make pictures PARTS=architecture"
