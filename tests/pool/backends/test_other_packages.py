"""Backends that other packages bring, by the entry point `shoal.backends`."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.errors import InvalidArgumentError
from shoal.pool.api import ComputePool
from shoal.pool.backends import all_backends, backend_of
from shoal.pool.options import missing, options_of
from shoal.pool.reconciling import sweep
from shoal.pool.spec import PoolSpec, _with_options_of
from shoal.state import Store
from tests.support.tiny_backend import TinyBackend

OPTIONS = '''
from typing import ClassVar
from pydantic import Field
from shoal.pool.options.base import PoolOptions


class QuayOptions(PoolOptions):
    """Options of a quay:// pool."""

    place: ClassVar[tuple[str, ...]] = ("harbour", "name")
    backend_class: ClassVar[str] = "tests.support.tiny_backend:TinyBackend"

    harbour: str = Field(description="Where the nodes are.")
    depth: int | None = Field(default=None, ge=1, description="Depth in metres.")

    def check_options(self) -> None:
        if self.depth and self.depth > 40:
            raise ValueError(f"depth={self.depth} is too deep: give at most 40")
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Install a package with the entry point `quay`, from its code and the name of its object."""

    def installed(code: str, name: str) -> None:
        (tmp_path / "quay_options.py").write_text(code)
        described = tmp_path / "quay-1.0.dist-info"
        described.mkdir(exist_ok=True)
        (described / "METADATA").write_text("Metadata-Version: 2.1\nName: quay\nVersion: 1.0\n")
        (described / "entry_points.txt").write_text(f"[shoal.backends]\nquay = quay_options:{name}\n")
        monkeypatch.syspath_prepend(tmp_path)

    yield installed
    sys.modules.pop("quay_options", None)
    options_of.cache_clear()
    _with_options_of.cache_clear()


def test_its_pools_have_their_own_options(install):
    install(OPTIONS, "QuayOptions")
    spec = PoolSpec.parse("quay://north/stock?depth=12&max_nodes=3")
    assert (spec.harbour, spec.depth, spec.max_nodes) == ("north", 12, 3)
    assert spec.uri == "quay://north/stock?max_nodes=3&depth=12"
    assert PoolSpec.model_validate(spec.model_dump()) == spec  # as the store does it
    assert isinstance(backend_of(spec), TinyBackend)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert [type(each) for each in all_backends()][-1] is TinyBackend


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("quay://north/stock?depth=0", "depth='0'"),
        ("quay://north/stock?depth=41", "depth=41 is too deep: give at most 40"),
        ("quay://north/stock?dept=4", 'unknown option "dept": did you mean depth'),
        ("quay://north/stock?image=x", "allowed only for kuberay:// pools: image"),
        ("quay://north/stock?python=/bin/python", "that are allowed only for local:// pools: python;"),
        ("quay://north/stock?ray=false", "that are allowed only for local:// pools: ray;"),
        ("quay://stock", "quay://HARBOUR/NAME"),
        ("quai://north/stock", "unknown backend \"quai\": it can be 'local' or 'ray' or 'kuberay' or 'quay'"),
        ("local://stock?depth=4", 'unknown option "depth"'),
    ],
)
def test_wrong_options_are_refused(install, uri, reason):
    install(OPTIONS, "QuayOptions")
    with pytest.raises(InvalidArgumentError) as refused:
        PoolSpec.parse(uri)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_client", r"quay_options:Quay\) cannot be imported: ModuleNotFoundError"),
        ("class Quay: pass", "is no subclass of shoal.pool.options.base.PoolOptions"),
    ],
)
def test_a_package_that_cannot_be_used_is_named(install, code, reason):
    install(code, "Quay")
    with pytest.raises(InvalidArgumentError, match=reason):
        PoolSpec.parse("quay://north/stock")


def test_a_backend_that_cannot_be_imported_stops_no_other_pool(install, tiny):
    install(OPTIONS.replace("tiny_backend:", "no_such_module:"), "QuayOptions")
    spec = PoolSpec.parse("quay://north/stock")
    assert "no_such_module:TinyBackend) cannot be imported: ModuleNotFoundError" in str(missing("quay"))
    with pytest.raises(InvalidArgumentError, match="cannot be imported"):
        backend_of(spec)
    assert [type(each).__name__ for each in all_backends()][1:] == ["RayBackend", "KubeRayBackend"]
    ComputePool("local://tiny").up()
    assert sweep(Store()) == []
