"""Recognise, from its first and last bytes, the content of a file that is said to be a model.

The libraries' own errors do not name what they have read, and some files end the process: an empty one in XGBoost 3.2,
and one that was cut off or changed in LightGBM 4.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.training.boosting.request import Framework


def why_unreadable(framework: Framework, content: bytes) -> str | None:
    """Return what a file contains, and what to do, if it is no model of the library; None if it may be one."""
    kind = _kind(content)
    if kind == framework:
        return _why_damaged(content) if kind == "lightgbm" else None
    if kind is not None:
        return f"the file contains a model of {kind}: train with the library of the model, or name another model"
    if not content:
        return "the file is empty: write the model again"
    if content.startswith(b"\x80"):
        return "the file contains a pickled object: load it, and pass the model itself, or write it with save_model"
    if framework == "xgboost":
        return (
            "the file contains neither JSON nor UBJSON. If XGBoost has written it in its old binary format, which "
            "XGBoost 3.1 and newer cannot read, then load it with XGBoost 3.0 or older, and write it with "
            'save_model("model.ubj")'
        )
    return "the file is no model in LightGBM's text format: write it with Booster.save_model"


def _kind(content: bytes) -> Framework | None:
    if content.startswith(b"{"):
        return "xgboost"
    return "lightgbm" if content.startswith((b"tree\n", b"tree\r\n")) else None


def _why_damaged(content: bytes) -> str | None:
    """Return why LightGBM cannot load a text of its own; None if the text seems to be complete."""
    if b"\r\n" in content:
        # The text contains the length of each tree.
        return "the file's ends of lines were changed to those of Windows: write the model again, or copy it unchanged"
    if b"\nend of trees" not in content or (b"\nparameters:" in content and b"\nend of parameters" not in content):
        return "the file is cut off: write the model again"
    return None
