"""Entrance: a pool as URI, mapping, spec, name; its options and sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from shoal import ComputePool, PoolSpec, alter_pool, describe_pool, get_nodes, scale_cluster
from shoal.pool.spec import ScaleOptions, checked_size
from tests.entrances.conftest import refusals
from tests.entrances.wrong_values import SECRET, many, names, number_texts, numbers, texts, urls

FIELDS = [*PoolSpec.model_fields, "max_node", "x", ""]
VALUES = st.one_of(number_texts, texts, urls())

uris = st.one_of(
    texts,
    urls(),
    st.builds(
        "{}{}{}".format,
        st.sampled_from(["local://", "ray://", "LOCAL://", "spark://", "local:", "://"]),
        st.one_of(names, texts),
        st.lists(st.builds("{}={}".format, st.sampled_from(FIELDS), VALUES), max_size=3).map(
            lambda options: "?" + "&".join(options) if options else ""
        ),
    ),
)

fields = st.dictionaries(st.sampled_from(FIELDS), st.one_of(numbers, VALUES, st.none(), st.just([1])), max_size=5)


@many
@example(uri="local://\ud800")
@given(uri=uris)
def test_uris(uri: str):
    with refusals():
        spec = PoolSpec.parse(uri)
        assert PoolSpec.parse(spec.uri) == spec
        assert SECRET not in spec.uri


@many
@given(fields=fields, named=st.booleans(), name=names)
def test_mappings(fields: dict[str, Any], named: bool, name: str):
    with refusals():
        spec = PoolSpec.parse({"name": name, **fields} if named else fields)
        assert PoolSpec.parse(spec.uri) == PoolSpec.parse(spec.model_dump(mode="json")) == spec


@many
@given(name=texts, use=st.sampled_from([ComputePool, get_nodes, describe_pool]))
def test_names_of_pools_that_do_not_exist(nothing_left, name: str, use: Callable[[str], Any]):
    assume("://" not in name)
    with refusals():
        use(name)
        pytest.fail(f"there is no pool {name!r}")
    nothing_left()


@many
@given(size=st.one_of(numbers, texts, st.none()), name=st.one_of(st.none(), texts))
def test_sizes(nothing_left, size: Any, name: str | None):
    with refusals():
        assert checked_size(size) >= 1
        alter_pool(name, min_nodes=size, max_nodes=size)
        pytest.fail("there is no pool")
    with refusals():
        scale_cluster(size, pool_name=name)
        pytest.fail("there is no pool")
    nothing_left()


@many
@given(
    options=st.one_of(
        st.none(),
        st.dictionaries(
            st.one_of(texts, st.sampled_from(list(ScaleOptions.model_fields))), st.one_of(numbers, texts, st.none())
        ),
    ),
    size=st.integers(1, 5),
)
def test_options(options: dict[str, Any] | None, size: int):
    with refusals():
        ScaleOptions.for_size(options, size)
