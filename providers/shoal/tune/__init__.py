"""Search for the parameters of a model with Optuna, as one job on a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shoal.distributors.search import search as search
    from shoal.distributors.search import submit_search as submit_search
    from shoal.kinds.search.call import SearchResult as SearchResult
    from shoal.kinds.search.spec import Range as Range
    from shoal.training.trial_worker import TrialContext as TrialContext
    from shoal.training.trial_worker import TrialPruned as TrialPruned

__getattr__ = lazy_exports(__name__)
