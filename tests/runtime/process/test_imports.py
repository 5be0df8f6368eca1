"""Imports without the garbage collector."""

import gc

import pytest

from tasks.runtime.process.imports import uncollected


def test_the_collector_runs_again_after_an_import_that_fails():
    with pytest.raises(ModuleNotFoundError), uncollected():
        assert not gc.isenabled()
        import a_module_that_is_not_there  # noqa: F401
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
