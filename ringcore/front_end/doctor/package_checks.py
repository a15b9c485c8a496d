"""Checks of Python and of the installed packages, against the ranges that ringcore's own metadata has."""

from __future__ import annotations

import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ringcore.host.resources import Host
from ringcore.protocol.finding import Finding

__all__ = ["check_compiler", "check_packages", "check_python"]

_OF_DEVELOPERS = ("dev", "docs")
_NOT_INSTALLED = Finding(
    "packages", "warning", "ringcore is not installed: its ranges are not known", "pip install -e ."
)


def check_python() -> Iterator[Finding]:
    found = f"{platform.python_version()}, {sys.executable}"
    try:
        asked = metadata.metadata("ringcore")["Requires-Python"] or ""
    except metadata.PackageNotFoundError:
        asked = ""
    if platform.python_version() in SpecifierSet(asked, prereleases=True):
        yield Finding("Python", "ok", found)
    else:
        yield Finding("Python", "error", f"{found}; ringcore needs {asked}", f"a virtual environment of Python {asked}")


def check_packages(
    requires: Sequence[str] | None = None, versions: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """requires, versions: in place of those of the installed packages."""
    if requires is None:
        try:
            requires = metadata.requires("ringcore") or []
        except metadata.PackageNotFoundError:
            found = "ringcore is not installed: the ranges of its packages are not known"
            yield Finding("packages", "warning", found, "pip install ringcore")
            return
    by_extra: dict[str, list[Requirement]] = {}
    for text in requires:
        requirement = Requirement(text)
        by_extra.setdefault(_extra(requirement.marker), []).append(requirement)
    for extra, requirements in by_extra.items():
        if extra not in _OF_DEVELOPERS:
            yield from _check(extra, requirements, versions)


def _check(extra: str, requirements: Sequence[Requirement], versions: Mapping[str, str] | None) -> Iterator[Finding]:
    """extra: "" for what is always needed."""
    name = f"extra {extra}" if extra else "packages"
    fine, missing, wrong = [], [], []
    for one in requirements:
        version = _version(one.name) if versions is None else versions.get(one.name)
        if version is None:
            missing.append(one.name)
        elif one.specifier.contains(version, prereleases=True):
            fine.append(f"{one.name} {version}")
        else:
            wrong.append(f"{one.name} {version}, tested with {one.specifier}")
    mend = f"pip install --upgrade 'ringcore[{extra}]'" if extra else "pip install --upgrade ringcore"
    lacks = [f"not installed: {', '.join(missing)}"] if missing else []
    if not missing and not wrong:
        yield Finding(name, "ok", ", ".join(fine))
    elif extra:
        yield Finding(name, "warning" if wrong else "ok", "; ".join(lacks + wrong), mend)
    else:
        yield Finding(name, "error" if missing else "warning", "; ".join(lacks + wrong), mend)


def _extra(marker: Marker | None) -> str:
    """The extra that a requirement belongs to."""
    return str(marker).rpartition("extra ==")[2].strip(" \"'()") if marker is not None else ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_compiler() -> Iterator[Finding]:
    """Triton compiles a small C program that launches kernels, and needs Python's headers; a worker on a CPU compiles
    its kernels in C."""
    compiler, has_gpu = Host().c_compiler(), Host().has_gpu()
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    lacks = [] if compiler else ["no C compiler"]
    if has_gpu and not header.exists():
        lacks.append(f"no {header}")
    if not lacks:
        yield Finding("C compiler", "ok", f"{compiler}, and Python's headers" if has_gpu else f"{compiler}")
        return
    found = ", ".join(lacks) + (", which Triton needs" if has_gpu else "; steps on a CPU take 5 to 20% longer without")
    mend = "apt-get install gcc python3-dev, or the like" if has_gpu else "apt-get install gcc, or the like"
    yield Finding("C compiler", "error" if has_gpu else "warning", found, mend)
