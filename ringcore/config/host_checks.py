"""Checks of the options that say where ranks run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from ringcore.config.admin_keys import check_endpoint, read_server_keys
from ringcore.config.rank_layout import LOCALHOST
from ringcore.config.value_checks import bad_value, check_seconds

__all__ = ["check_hosts"]


def check_hosts(options: Mapping[str, Any]) -> None:
    """Where ranks run, and how hosts join. Raises `ConfigError`."""
    if options["executor"] == "ray":
        _check_found_by_ray(options)
    else:
        _check_given(options["hosts"], options["join_endpoint"], options["join_keys"])
    _check_ray(options)


def _check_given(hosts: Any, endpoint: Any, keys: Any) -> None:
    """Other hosts need a place to join, and keys, which only they have a use for."""
    if hosts is not None and not (isinstance(hosts, list | tuple) and all(isinstance(h, str) and h for h in hosts)):
        raise bad_value("hosts", hosts, "give a list of names, one for each rank")
    if not set(hosts or ()) - {LOCALHOST}:
        for name, value in (("join_endpoint", endpoint), ("join_keys", keys)):
            if value is not None:
                raise bad_value(name, value, "it is for other hosts; give hosts with them too, or leave this out")
        return
    if endpoint is None or keys is None:
        name = "join_keys" if endpoint is not None else "join_endpoint"
        raise bad_value("hosts", hosts, f"give {name} too, so that the other hosts can join")
    _check_join_endpoint(endpoint)
    if not isinstance(keys, str | os.PathLike) or not os.fspath(keys):
        raise bad_value("join_keys", keys, "give a directory made by 'ringcore keys DIR'")
    read_server_keys(keys, "join_keys")


def _check_join_endpoint(endpoint: Any) -> None:
    check_endpoint("join_endpoint", endpoint, to_listen=True)
    if endpoint.startswith(("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")):
        raise bad_value("join_endpoint", endpoint, "give the address of this host that the others reach")


def _check_found_by_ray(options: Mapping[str, Any]) -> None:
    """The keys by which they join are made for the run."""
    if importlib.util.find_spec("ray") is None:
        raise bad_value("executor", "ray", "Ray is not installed; run pip install 'ringcore[ray]'")
    for name in ("hosts", "join_keys", "device_ids"):
        if options[name] is not None:
            raise bad_value(name, options[name], "with executor='ray' Ray finds hosts and GPUs; leave it out")
    if options["join_endpoint"] is not None:
        _check_join_endpoint(options["join_endpoint"])


def _check_ray(options: Mapping[str, Any]) -> None:
    for name in ("ray_address", "ray_resources", "ray_runtime_env"):
        if options[name] is not None and options["executor"] in ("multiproc", "uniproc"):
            raise bad_value(name, options[name], "it is for executor='ray'; give that too, or leave this out")
    address, resources, environment = (options[f"ray_{name}"] for name in ("address", "resources", "runtime_env"))
    if address is not None and (not isinstance(address, str) or not address or "://" in address):
        remedy = "give HOST:PORT of the cluster's head; this host must be one of its nodes"
        raise bad_value("ray_address", address, remedy)
    if resources is not None and not _are_resources(resources):
        remedy = 'give amounts above 0 by name, as {"GPU": 1, "CPU": 4}; of GPUs one'
        raise bad_value("ray_resources", resources, remedy)
    if environment is not None and not (isinstance(environment, dict) and all(isinstance(k, str) for k in environment)):
        raise bad_value("ray_runtime_env", environment, 'give a dict, as {"env_vars": {"NCCL_DEBUG": "INFO"}}')
    check_seconds("ray_timeout_s", options["ray_timeout_s"])


def _are_resources(given: Any) -> bool:
    return (
        isinstance(given, dict)
        and bool(given)
        and all(isinstance(name, str) and isinstance(n, int | float) and n > 0 for name, n in given.items())
        and given.get("GPU", 1) == 1
    )
