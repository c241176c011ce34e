"""The block `ComputePool`: Prefect's own checks of a block, and that it is `PoolSpec` in all but name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from prefect import flow
from prefect.blocks.system import Secret
from prefect.exceptions import ParameterTypeError
from prefect.testing.standard_test_suites import blocks as suite
from pydantic import SecretStr, ValidationError

from shoal.data.connections import parse_settings
from shoal.errors import InvalidArgumentError
from shoal.pool.endpoint import token_path
from shoal.pool.spec import PoolSpec
from shoal.prefect import ComputePool
from shoal.prefect.blocks import database_url, pool_of, secret_block

DOCS = Path(__file__).parents[2] / "docs"
LAB = {"name": "lab", "backend": "ray", "address": "https://ray.example", "token": "s3cret"}
"""Fields of a block of a Ray cluster with a token."""


class TestComputePool(suite.BlockStandardTestSuite):
    @pytest.fixture(autouse=True)
    def logo_as_it_lies_here(self, monkeypatch):
        def local(url):
            return (DOCS / "_static" / url.rsplit("/", 1)[1]).open("rb")

        monkeypatch.setattr(suite, "urlopen", local)

    @pytest.fixture
    def block(self):
        return ComputePool


def test_its_fields_are_those_of_a_spec_and_the_team_and_token():
    fields = {name: (field.annotation, field.default, field.description) for name, field in spec_fields(ComputePool)}
    assert fields.pop("team")[:2] == (str | None, None)
    assert fields.pop("token")[:2] == (SecretStr | None, None)
    assert fields == {
        name: (field.annotation, field.default, field.description) for name, field in spec_fields(PoolSpec)
    }


def spec_fields(model):
    return model.model_fields.items()


def test_it_is_the_pool_that_the_uri_means():
    uri = "local://retrain?max_nodes=6&cpus_per_node=2&idle_timeout=none"
    block = ComputePool(name="retrain", max_nodes=6, cpus_per_node=2, idle_timeout=None)
    assert block.spec == PoolSpec.parse(uri)
    assert block.spec.uri == uri


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_node": 3}, 'unknown option "max_node": did you mean max_nodes?'),
        ({"min_nodes": 5}, "min_nodes=5 is above max_nodes=4"),
        ({"max_nodes": 0}, "max_nodes=0"),
        ({"name": "Flights"}, '"Flights" is not a valid pool name'),
        ({"token": "s3cret"}, "the block has a token, which is allowed only for ray:// pools"),
        ({**LAB, "token_file": "/run/token"}, "a token and the option token_file: use only one"),
    ],
)
def test_a_wrong_field_is_refused_in_the_words_of_the_parser(fields, said):
    with pytest.raises(ValidationError) as refused:
        ComputePool(**{"name": "retrain", **fields})
    assert said in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_the_token_is_kept_in_a_private_file_only(fresh_home):
    block = ComputePool(**LAB)
    pool = block.get_pool()
    assert block.spec.uri == "ray://lab?address=https://ray.example&token_file=tokens/lab"
    assert token_path(block.spec).read_text() == "s3cret"
    assert pool.name == "lab"
    assert "s3cret" not in f"{block!r} {block.model_dump()}"


def test_a_setting_leaves_the_definition_of_pools_to_blocks(fresh_home, monkeypatch):
    monkeypatch.setenv("SHOAL_POOL_URIS", "refuse")
    with pytest.raises(InvalidArgumentError, match="pass the id of a connection or a block, or the name of a pool"):
        pool_of("local://lab")
    assert pool_of(ComputePool(name="lab")).name == "lab"


def test_a_block_that_arrives_as_a_dict_is_no_pool():
    with pytest.raises(InvalidArgumentError, match="Annotate the parameter with ComputePool"):
        pool_of(LAB)


@pytest.mark.server
def test_saved_and_loaded_it_is_the_same(server):
    block = ComputePool(name="retrain", max_nodes=6, idle_timeout=None)
    block.save("retrain", overwrite=True)
    assert ComputePool.load("retrain").spec == block.spec


@flow
def of_a_block(pool: ComputePool) -> None:
    """Take a block as a parameter."""


@pytest.mark.server
def test_a_block_is_a_parameter_of_a_deployment_unless_it_has_a_token(server):
    def arrived(block: ComputePool) -> ComputePool:
        return of_a_block.validate_parameters(json.loads(json.dumps(of_a_block.serialize_parameters({"pool": block}))))[
            "pool"
        ]

    plain, secret = ComputePool(name="retrain", max_nodes=6), ComputePool(**LAB)
    for block in (plain, secret):
        block.save(f"as-{block.name}", overwrite=True)  # a saved block has fields of Prefect's, too
    assert arrived(plain).spec == plain.spec
    with pytest.raises(ParameterTypeError, match=r'load it in the flow with ComputePool.load\("as-lab"\)'):
        arrived(secret)
    assert ComputePool.load("as-lab").token.get_secret_value() == "s3cret"


@pytest.mark.server
def test_a_secret_block_is_the_url_of_a_database(server):
    Secret(value="postgresql+psycopg://me:hunter2@db/warehouse").save("warehouse", _sync=True)

    async def in_an_async_flow() -> str | None:
        return database_url("warehouse")

    assert (
        database_url("warehouse") == asyncio.run(in_an_async_flow()) == "postgresql+psycopg://me:hunter2@db/warehouse"
    )
    assert database_url("no-such-block") is None
    Secret(value="hf-s3cret").save("hf-token", _sync=True)
    assert (secret_block("HF_TOKEN"), secret_block("NOT_THERE")) == ("hf-s3cret", None)


@pytest.mark.server
def test_a_block_has_the_settings_of_a_storage(server):
    aws = pytest.importorskip("prefect_aws")  # the environment with the newest Prefect does not have it
    keys = {"aws_access_key_id": "AKIA", "aws_secret_access_key": "s3cret", "region_name": "eu-west-1"}
    endpoint = {"endpoint_url": "http://s3:9000"}
    Secret(value=keys).save("lake", _sync=True)
    aws.AwsCredentials(**keys, aws_client_parameters=endpoint).save("sea", _sync=True)
    assert parse_settings("SHOAL_STORAGE_LAKE", database_url("lake")) == keys
    assert parse_settings("SHOAL_STORAGE_SEA", database_url("sea")) == {**keys, **endpoint}
    aws.AwsCredentials(profile_name="dev").save("profile", _sync=True)
    with pytest.raises(InvalidArgumentError, match="the unknown settings profile_name"):
        parse_settings("SHOAL_STORAGE_PROFILE", database_url("profile"))
