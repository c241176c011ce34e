"""Provide the sample flows and their deployments, for the command `shoal init prefect FOLDER`.

The samples are files in the top-level folder ``flows`` of the source code. The wheel contains them beside this file.
"""

from __future__ import annotations

import json
from pathlib import Path

from shoal.new_files import read_samples


def samples(folder: Path) -> dict[str, str]:
    """Return the texts of the files by name; the deployments run the flows in the given folder."""
    texts = read_samples(__file__, "flows")
    where = json.dumps(str(folder.absolute()))
    return {**texts, "prefect.yaml": texts["prefect.yaml"].replace("directory: FOLDER", f"directory: {where}")}
