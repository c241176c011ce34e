"""The models that jobs have registered: measure them on a holdout, decide which is the champion, and report on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shoal.models.catalog import DeletedVersion as DeletedVersion
    from shoal.models.catalog import HistoryEntry as HistoryEntry
    from shoal.models.catalog import ModelDetails as ModelDetails
    from shoal.models.catalog import ModelPruning as ModelPruning
    from shoal.models.catalog import ModelStatus as ModelStatus
    from shoal.models.catalog import SliceStatus as SliceStatus
    from shoal.models.catalog import VersionStatus as VersionStatus
    from shoal.models.catalog import describe_model as describe_model
    from shoal.models.catalog import list_models as list_models
    from shoal.models.catalog import model_history as model_history
    from shoal.models.catalog import prune_models as prune_models
    from shoal.models.gate import promote_model as promote_model
    from shoal.models.gate import withdraw_promotion as withdraw_promotion

__getattr__ = lazy_exports(__name__)
