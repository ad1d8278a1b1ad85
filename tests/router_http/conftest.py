"""One site for all tests of a module, with a fresh script for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.router_http.toys import ScriptedWorker, Site


@pytest.fixture(scope="module")
def shared_site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.fixture
def site(shared_site: Site) -> Site:
    fresh = ScriptedWorker()
    for name in vars(fresh):
        if name != "num_open":
            setattr(shared_site.worker, name, getattr(fresh, name))
    return shared_site
