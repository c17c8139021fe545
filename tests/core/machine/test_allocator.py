"""Freed memory and compiled kernels are there for what comes next."""

import os
import subprocess
import sys

import pytest
import torch

from polyfed.core.machine.allocator import enlarge_onednn_kernel_cache, make_malloc_keep_freed_memory

resource = pytest.importorskip("resource")


@pytest.mark.skipif(sys.platform != "linux", reason="a matter of glibc")
def test_memory_is_taken_from_the_system_once():
    if not make_malloc_keep_freed_memory():
        pytest.skip("another C library than glibc")

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step = [torch.ones(2, 2**18) for _ in range(20)]  # 40 MB in pieces of 2
        del step
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for _ in range(3):
        faults()
    assert sum(faults() for _ in range(3)) < 10_000  # of three times 10,240 pages


SHAPES = """
import polyfed.algorithms, torch
kernel = torch.ones(8, 1, 3, 3)
for _ in range(2):
    print("again", flush=True)
    for width in range(3, 1203):
        torch.nn.functional.conv2d(torch.ones(1, 8, 3, width), kernel, groups=8)
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
def test_kernels_are_compiled_once():
    """1,200 shapes, more than oneDNN keeps by itself, each computed twice."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("ONEDNN")} | {"ONEDNN_VERBOSE": "2"}
    told = subprocess.run([sys.executable, "-c", SHAPES], env=own, capture_output=True, text=True, check=True).stdout
    first, second = told.split("again")[1:]
    if "create:cache_miss" not in first:
        pytest.skip("this torch does not compute these by oneDNN")
    assert "create:cache_miss" not in second


def test_the_environment_decides_how_many_kernels_are_kept(monkeypatch):
    for asked, kept in ((None, "16384"), ("100", "100")):
        monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
        if asked is not None:
            monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", asked)
        enlarge_onednn_kernel_cache()
        assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == kept
