"""Which hosts a service goes by, and the pages of which sites may call it."""

from __future__ import annotations

import httpx
import pytest
from fake_engine import make_model_folder
from running_service import http, served, text_of
from test_serve_command import Command

from ringcore.errors import ConfigError
from ringcore.serve import ServiceOptions
from ringcore.serve.hosts import AllowedHosts, hosts_of_listener

PAGE = "https://chat.example.com"
LOOPBACK = ["localhost", "LOCALHOST:8000", "localhost.:8000", "a.localhost", "127.0.0.1:8000", "127.1.2.3", "[::1]:80"]
ADDRESSES = ["192.168.1.5:8000", "8.8.8.8", "[2001:db8::1]:8000", "0.0.0.0"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "evil-localhost",
    "127.0.0.1.evil.example",
    "127.0.0.1@evil.example",
    "",
    "a b",
    "[::1",
    "localhost:80:80",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("host", "address", "own"),
    [
        ("127.0.0.1", "127.0.0.1", []),
        ("localhost", "127.0.0.1", []),
        ("::1", "::1", []),
        ("0.0.0.0", "0.0.0.0", ADDRESSES),
        ("::", "::", ADDRESSES),
        ("box.lan", "192.168.1.5", [*ADDRESSES, "box.lan:8000", "BOX.lan"]),
        ("fe80::1%eth0", "fe80::1%eth0", ADDRESSES),
    ],
)
def test_the_hosts_of_a_service_without_keys(host, address, own):
    allowed = AllowedHosts(hosts_of_listener(host, address, ["given.example"], has_keys=False))
    for name in (*LOOPBACK, *own, "given.example", "given.example:8000"):
        assert allowed.have(name), name
    for name in (*FOREIGN, "a.given.example", *(a for a in ADDRESSES if not own)):
        assert not allowed.have(name), name


def test_with_keys_only_what_is_given():
    assert hosts_of_listener("127.0.0.1", "127.0.0.1", [], has_keys=True) == ()
    allowed = AllowedHosts(hosts_of_listener("127.0.0.1", "127.0.0.1", ["*.example.com", "10.0.0.0/8"], has_keys=True))
    for name in ("api.example.com", "a.b.example.com:1", "10.2.3.4:8000", "localhost"):
        assert allowed.have(name), name
    for name in ("example.com", "notexample.com", "11.2.3.4", "evil.example"):
        assert not allowed.have(name), name


def test_any_host():
    allowed = AllowedHosts(hosts_of_listener("127.0.0.1", "127.0.0.1", ["*"], has_keys=False))
    assert all(allowed.have(name) for name in FOREIGN)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"allowed_hosts": ("http://a",)}, "allowed_hosts"),
        ({"allowed_hosts": ("a:8000",)}, "allowed_hosts"),
        ({"allowed_hosts": ("",)}, "allowed_hosts"),
        ({"allowed_hosts": ("a.*",)}, "allowed_hosts"),
        ({"allowed_hosts": ("10.0.0.0/33",)}, "allowed_hosts"),
        ({"allowed_origins": ("example.com",)}, "allowed_origins"),
        ({"allowed_origins": ("https://example.com/",)}, "allowed_origins"),
        ({"allowed_origins": ("https://example.com:443",)}, "allowed_origins"),
        ({"allowed_origins": ("https://Example.com",)}, "allowed_origins"),
        ({"allowed_origins": ("null",)}, "allowed_origins"),
    ],
)
def test_wrong_options(options, option):
    with pytest.raises(ConfigError) as caught:
        ServiceOptions(**options)
    assert caught.value.details["option"] == option


@pytest.fixture(scope="module")
def service(folder):
    """With a page of another site that may call it."""
    with served(
        folder, api_keys=("key",), allowed_origins=(PAGE,), allowed_hosts=("127.0.0.1", "a.example")
    ) as running:
        yield running


def ask(service, **headers: str) -> httpx.Response:
    headers = {"authorization": "Bearer key"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return http.post(f"{service.url}/v1/completions", json={"prompt": "ab", "max_tokens": 3}, headers=headers)


def refusal_of(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["code"]


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/nowhere"])
def test_another_host(service, path):
    answer = http.get(service.url + path, headers={"host": "evil.example:8000", "authorization": "Bearer key"})
    assert answer.status_code == 421
    assert refusal_of(answer) == "host_not_allowed"
    assert "'evil.example:8000'" in answer.json()["error"]["message"]
    assert "--allowed-host" in answer.json()["error"]["message"]


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://chat.example.com", PAGE + ":1", "", "a"])
def test_another_origin(service, origin):
    answer = ask(service, origin=origin)
    assert answer.status_code == 403
    assert refusal_of(answer) == "origin_not_allowed"
    assert "--allowed-origin" in answer.json()["error"]["message"]
    assert "access-control-allow-origin" not in answer.headers
    preflight = {"origin": origin, "access-control-request-method": "POST"}
    assert http.request("OPTIONS", f"{service.url}/v1/completions", headers=preflight).status_code == 403


def test_its_own_origin(service):
    for headers in (
        {"origin": service.url},
        {"origin": "http://a.example", "host": "a.example:80"},
        {"origin": "http://a.example:8000", "host": "A.example:8000"},
        {"origin": "https://proxy.example", "sec_fetch_site": "same-origin"},  # the proxy has changed the host
        {"sec_fetch_site": "cross-site"},  # and no origin
        {},
    ):
        answer = ask(service, **headers)
        assert answer.status_code == 200, headers
        assert answer.json()["choices"][0]["text"] == text_of("ab", 3)
    assert ask(service, origin=service.url, host="a.example").status_code == 403
    assert ask(service, origin=service.url.replace("http", "https")).status_code == 403
    assert ask(service, origin="https://evil.example", sec_fetch_site="cross-site").status_code == 403


def test_an_allowed_origin(service):
    """A browser asks first, without the key."""
    answer = http.request(
        "OPTIONS",
        f"{service.url}/v1/completions",
        headers={
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        },
    )
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    answer = ask(service, origin=PAGE)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "Origin" in answer.headers["vary"]
    answer = ask(service, origin=PAGE, authorization="none")
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, PAGE)  # a page can read it


def test_any_origin(folder):
    with served(folder, allowed_origins=("*",)) as service:
        for origin in ("https://evil.example", "null"):
            answer = ask(service, origin=origin)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


def test_an_application_takes_every_host_and_its_own_origin(folder):
    with served(folder) as service:
        assert ask(service, host="any.example").status_code == 200
        assert ask(service, host="any.example", origin="http://any.example").status_code == 200
        assert ask(service, host="any.example", origin="http://evil.example").status_code == 403


def test_the_command_without_keys(folder):
    flags = ["--allowed-host", "model.example", "--allowed-host", "other.example", "--allowed-origin", PAGE]
    with Command(folder, *flags) as command:
        port = command.url.rpartition(":")[2]
        rebound = {"host": f"evil.example:{port}", "origin": f"http://evil.example:{port}"}
        for path in ("/v1/models", "/", "/health"):
            assert http.get(command.url + path, headers=rebound).status_code == 421
        for host in ("localhost", f"127.0.0.1:{port}", "model.example", "other.example"):
            assert http.get(f"{command.url}/v1/models", headers={"host": host}).status_code == 200
        for origin, status in ((None, 200), (command.url, 200), (PAGE, 200), ("http://evil.example", 403)):
            headers = {} if origin is None else {"origin": origin}
            assert http.get(f"{command.url}/v1/models", headers=headers).status_code == status


def test_the_command_with_a_key(folder):
    with Command(folder, "--api-key", "key") as command:
        headers = {"host": "any.example", "authorization": "Bearer key"}
        assert http.get(f"{command.url}/v1/models", headers=headers).status_code == 200
