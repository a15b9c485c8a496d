"""Allowed hosts (against DNS rebinding) and allowed origins (CORS)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from ringcore.errors import ConfigError

__all__ = ["ANY", "AllowedHosts", "check_origins", "hosts_of_listener", "is_same_origin"]

ANY = "*"
_LOOPBACK = ("localhost", "*.localhost", "127.0.0.0/8", "::1")
_ANY_ADDRESS = ("0.0.0.0/0", "::/0")

_NAME = re.compile(r"(\*\.)?[^\s:/@*\[\]]+")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+)(:[0-9]*)?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/]+")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class AllowedHosts:
    """A list of names ("example.com", "*.example.com"), addresses and networks ("10.0.0.0/8"), or "*" for every host.

    Raises `ConfigError` for any other entry.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.are_all = ANY in hosts
        self._networks = []
        self._names = set()
        for host in hosts:
            try:
                self._networks.append(ip_network(host.strip("[]")))
            except ValueError:
                if host != ANY and not _NAME.fullmatch(host):
                    raise _bad_host(host) from None
                self._names.add(host.lower())

    def have(self, header: str) -> bool:
        """Whether a Host header, with or without a port, matches the list."""
        found = _HOST.fullmatch(header)
        if self.are_all or found is None:
            return self.are_all
        name = found[1].strip("[]").lower().removesuffix(".")
        address = _address(name)
        if address is not None:
            return any(address in network for network in self._networks)
        labels = name.split(".")
        wildcards = (f"*.{'.'.join(labels[i:])}" for i in range(1, len(labels)))
        return name in self._names or not self._names.isdisjoint(wildcards)


def hosts_of_listener(host: str, address: str, hosts: Sequence[str], *, has_keys: bool) -> tuple[str, ...]:
    """The allowed hosts of a service that listens at `address`, which the name `host` resolved to; () for all.

    A page of another site can make the service same-origin only by pointing its own DNS name at it (DNS rebinding). So
    without API keys only known names are allowed: those of loopback, `host`, and the user's `hosts`.
    """
    if has_keys and not hosts:
        return ()
    is_loopback = ip_address(address.partition("%")[0]).is_loopback
    named = (host,) if _NAME.fullmatch(host) else ()
    return (*_LOOPBACK, *(() if is_loopback else _ANY_ADDRESS), *named, *hosts)


def check_origins(origins: Sequence[str]) -> None:
    """Raises `ConfigError` for a value that no browser sends as an Origin."""
    for origin in origins:
        if origin != ANY and not (_ORIGIN.fullmatch(origin) and origin == _normalized(origin)):
            raise ConfigError(
                f"allowed_origins={origin!r}: give an origin as browsers send it, such as 'https://example.com' or "
                "'http://localhost:3000' (in lower case, without a path or the scheme's own port), or '*' for any",
                option="allowed_origins",
                value=origin,
            )


def is_same_origin(origin: str, scheme: str, host: str) -> bool:
    """Whether `origin` is the service's own, as called by this scheme and Host header."""
    return _normalized(origin) == _normalized(f"{scheme}://{host}")


def _normalized(origin: str) -> str:
    lower = origin.lower()
    return lower.removesuffix(_DEFAULT_PORTS.get(lower.partition(":")[0], ":"))


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _bad_host(host: str) -> ConfigError:
    return ConfigError(
        f"allowed_hosts={host!r}: give a name without scheme and port, such as 'example.com' or '*.example.com', an "
        "address, a network such as '10.0.0.0/8', or '*' for every host",
        option="allowed_hosts",
        value=host,
    )
