from __future__ import annotations

import pytest

from shoal.errors import InvalidArgumentError
from shoal.pool.spec import PoolSpec


def test_a_uri_and_its_spec_say_the_same():
    spec = PoolSpec.parse("local://retrain?max_nodes=6&cpus_per_node=2&idle_timeout=none")
    assert (spec.name, spec.max_nodes, spec.cpus_per_node, spec.idle_timeout) == ("retrain", 6, 2, None)
    assert PoolSpec.parse(spec.uri) == spec
    assert PoolSpec.parse(spec.model_dump()) == spec


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("retrain", "no pool URI"),
        ("local://", "no legal pool name"),
        ("local://Retrain_1", "no legal pool name"),
        ("local://-x", "no legal pool name"),
        ("local://" + "x" * 41, "no legal pool name"),
        ("local://x?max_node=3", "did you mean max_nodes"),
        ("local://x?colour=red", "legal: "),
        ("local://x?max_nodes=0", "max_nodes"),
        ("local://x?max_nodes=two", "max_nodes"),
        ("local://x?min_nodes=5&max_nodes=3", "min_nodes=5 is above max_nodes=3"),
        ("local://x?max_nodes=3&max_nodes=4", "twice"),
        ("local://x/y", "nothing else"),
        ("local://x?idle_timeout=-1", "idle_timeout"),
        ("slurm://x", 'unknown backend "slurm"'),
    ],
)
def test_a_wrong_uri_says_what_is_wrong(uri, said):
    with pytest.raises(InvalidArgumentError, match=said):
        PoolSpec.parse(uri)
