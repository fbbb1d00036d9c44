"""The adapter without JetStream."""

import importlib
import sys

import pytest


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jetstream", None)
    monkeypatch.setitem(sys.modules, "jetstream.engine", None)
    monkeypatch.delitem(sys.modules, "jaxrl.engine.jetstream", raising=False)
    with pytest.raises(ImportError, match=r"extra `jetstream`.*`make jetstream`"):
        importlib.import_module("jaxrl.engine.jetstream")
