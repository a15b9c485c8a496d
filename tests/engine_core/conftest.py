"""An admin endpoint and a client of it, on the loopback interface."""

from __future__ import annotations

import pytest
from admin_peers import RawPeer, make_keys, open_endpoint


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("admin"))


@pytest.fixture
def endpoint(keys):
    made = open_endpoint(keys)
    yield made
    made.close()


@pytest.fixture
def peer(endpoint, keys):
    with RawPeer(endpoint.address, keys) as made:
        yield made
