"""Settings of Sphinx: `make docs` makes the site from the pages of this repository.

The source folder is the root of the repository, so that a link between two pages works here and in the site.
"""

import tomllib
from pathlib import Path

_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

project = _PROJECT["name"]
version = release = _PROJECT["version"]
author = _PROJECT["authors"][0]["name"]
html_title = f"{project} {version}"
html_baseurl = _PROJECT["urls"]["Documentation"]

extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "RELEASING.md", "CODE_OF_CONDUCT.md"),
    "docs/**.md",
]
exclude_patterns = [".*", "docs/pypi.md", "build", "providers", "tests", "docker", "**/__pycache__"]
html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "navbar_center": [],
    "logo": {"text": project, "image_light": "docs/_static/logo.png", "image_dark": "docs/_static/logo.png"},
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"**": ["contents.html"]}
html_copy_source = False
html_show_sourcelink = False
copyright = author
templates_path = ["_templates"]
html_additional_pages = {"index": "start.html"}
