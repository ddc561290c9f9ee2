"""pytest on a machine that may lack its plugins: python testing.py [rehearse] ARGUMENTS"""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if rehearse := arguments[:1] == ["rehearse"]:
        importlib.import_module("pretended_gpu").install()
    plain = ["-p", "no:cacheprovider", "-m", "gpu"]
    if any(importlib.util.find_spec(name) is None for name in ("hypothesis", "pytest_timeout")):
        plain += ["-c", "/dev/null", "--rootdir", ".", "--noconftest"]  # which need them
    sys.exit(pytest.main([*plain, *arguments[rehearse:]]))
