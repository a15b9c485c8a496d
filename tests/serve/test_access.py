"""Which key opens which path."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from ringcore.errors import ConfigError
from ringcore.openai_api.errors import ApiError
from ringcore.serve import ServiceOptions
from ringcore.serve.access import ADMIN_PATHS, OPEN_PATHS, Access

BOTH = {"api_keys": ("data",), "admin_api_keys": ("admin", "second")}


def status(options: dict, path: str, key: str | None = None, root: str = "", header: str = "authorization") -> int:
    value = f"Bearer {key}" if header == "authorization" else key
    headers = Headers({} if key is None else {header: value})
    access, scope = Access(ServiceOptions(**options)), {"type": "http", "path": path, "root_path": root}
    try:
        access.check(scope, headers)
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_an_admin_path_takes_an_admin_key_alone(path):
    assert status(BOTH, path, "admin") == status(BOTH, path, "second") == 200
    assert status(BOTH, path, "admin", header="x-api-key") == 200
    assert [status(BOTH, path, key) for key in ("data", "other", "admi", "", None)] == [401] * 5
    for options in ({}, {"api_keys": ("data",)}):
        assert [status(options, path, key) for key in ("data", "", None)] == [403] * 3


def test_a_mounted_application_has_the_same_paths():
    assert status(BOTH, "/v/sleep", "data", "/v") == 401
    assert status(BOTH, "/v/sleep", "admin", "/v") == 200
    assert status(BOTH, "/v/health", None, "/v") == 200
    assert status(BOTH, "/vsleep", "data", "/v") == status(BOTH, "/v/v/sleep", "data", "/v") == 200  # no such path


def test_an_admin_key_opens_no_request():
    assert status(BOTH, "/v1/completions", "data") == 200
    assert status(BOTH, "/v1/completions", "admin") == status(BOTH, "/v1/completions") == 401
    assert status({"admin_api_keys": ("admin",)}, "/v1/completions") == 200  # no key is asked for


def test_metrics_by_a_key_where_it_is_wanted():
    assert {status(BOTH, path) for path in OPEN_PATHS} == {200}
    wanted = BOTH | {"metrics_need_key": True}
    assert [status(wanted, "/metrics", key) for key in ("data", "admin", "other", None)] == [200, 200, 401, 401]
    assert status({"admin_api_keys": ("admin",), "metrics_need_key": True}, "/metrics") == 401
    assert {status(wanted, path) for path in OPEN_PATHS - {"/metrics"}} == {200}


def test_the_refusal_has_the_remedy():
    with pytest.raises(ApiError, match=r"/sleep needs an admin key.*--admin-api-key-file") as caught:
        Access(ServiceOptions()).check({"type": "http", "path": "/sleep"}, Headers({}))
    assert caught.value.code == "no_admin_key"


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"api_keys": ("k1", "k2"), "admin_api_keys": ("k2",)}, "admin_api_keys"),
        ({"admin_api_keys": ("two words",)}, "admin_api_keys"),
        ({"admin_api_keys": ("",)}, "admin_api_keys"),
        ({"metrics_need_key": True}, "metrics_need_key"),
        ({"api_keys": ("a",), "metrics_need_key": 1}, "metrics_need_key"),
    ],
)
def test_wrong_options(options, option):
    with pytest.raises(ConfigError) as caught:
        ServiceOptions(**options)
    assert caught.value.details["option"] == option
    assert "k2" not in str(caught.value)
