"""Databricks' names: how decorated functions are written and called."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.compat.databricks import distributed, ray_launch
from shoal.distributors.decorators import Site
from shoal.errors import InvalidArgumentError


def add(left: int, right: int = 1) -> int:
    return left + right


def site(**arguments: Any) -> Site:
    return distributed(**arguments)(add)._site


def test_the_function_itself_is_called_by_its_attribute_alone() -> None:
    for decorated in (distributed()(add), ray_launch(num_accelerators=1)(add)):
        assert decorated.func(1) == 2 and decorated.__name__ == "add"
        with pytest.raises(InvalidArgumentError, match=r"add.distributed\(...\) .* or add.func\(...\)"):
            decorated(1)


@pytest.mark.parametrize("kind", ["GPU_8xH100", "gpu_8xh100"])
def test_a_type_of_node_gives_the_number_and_the_type(kind: str) -> None:
    for arguments in ({"accelerator_type": kind}, {"gpu_type": kind, "remote": True}):
        requested = site(**arguments).requested
        each = requested.resource_requirements_per_worker
        assert (requested.num_workers, each.num_gpus, each.gpu_type) == (8, 1, "H100")
    assert site(num_accelerators=2, accelerator_type="GPU_1xA10").requested.num_workers == 2


def test_all_gpus_of_the_machine_by_default_and_a_limit_of_time_there_alone() -> None:
    assert site().one_per_gpu and site().run_config.timeout == 10_800
    assert site(num_accelerators=4, gpus=4, remote=True).run_config.timeout is None


def test_overrides_are_arguments_of_the_decorator() -> None:
    decorated = distributed(num_accelerators=1)(add)
    assert decorated.with_overrides(num_accelerators=4, remote=True)._site.requested.num_workers == 4
    assert decorated._site.requested.num_workers == 1
    with pytest.raises(InvalidArgumentError, match="no argument workers: choose from num_accelerators,"):
        decorated.with_overrides(workers=4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"remote": True}, "number of GPUs is missing"),
        ({"accelerator_type": "H100"}, "number of GPUs is missing"),
        ({"num_accelerators": 2, "gpus": 4}, "num_accelerators=2 and gpus=4 are two names"),
        ({"accelerator_type": "H100", "gpu_type": "A10"}, "are two names of one argument"),
    ],
)
def test_what_contradicts_itself_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        site(**arguments)


@pytest.mark.parametrize("decorator", [distributed, ray_launch])
def test_a_decorator_without_parentheses_is_refused_by_its_own_name(decorator: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"@{decorator.__name__} needs parentheses"):
        decorator(add)
    with pytest.raises(InvalidArgumentError, match="number of GPUs is missing"):  # before there is a function
        decorator(remote=True)
