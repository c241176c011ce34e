"""Search for the parameters of a model with Optuna, as one job on a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shoal.distributors.search import search as search
    from shoal.distributors.search import submit_search as submit_search
    from shoal.distributors.search_result import SearchResult as SearchResult
    from shoal.jobs.specs.tuning import Range as Range
    from shoal.training.trial_context import TrialContext as TrialContext
    from shoal.training.trial_context import TrialPruned as TrialPruned

__getattr__ = lazy_exports(__name__)
