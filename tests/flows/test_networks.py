"""The flow of the two networks on a real pool."""

from __future__ import annotations

import pytest
from prefect.flows import load_flow_from_entrypoint

pytestmark = [pytest.mark.ray, pytest.mark.server, pytest.mark.long]


def test_two_networks_are_trained_judged_and_registered(server, real_pool):
    train_networks = load_flow_from_entrypoint("flows/train_networks_flow.py:train_networks")
    digits, delays = train_networks(epochs=12, month=2, pool="tests")
    assert digits["metrics"]["holdout-accuracy"] > 0.9
    assert delays["metrics"]["holdout-rmse"] < 25
    assert digits["num_workers"] == delays["num_workers"] == 2
    status = real_pool.describe()
    assert not status.leases
