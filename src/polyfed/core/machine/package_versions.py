"""Reads the versions of the packages on which results depend."""

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("polyfed", "torch", "numpy", "safetensors")


def package_versions() -> dict[str, str]:
    """Returns `{package name: version}` for Python and the packages that affect results."""
    version_by_package = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            version_by_package[package] = version(package)
        except PackageNotFoundError:
            version_by_package[package] = "not installed"
    return version_by_package
