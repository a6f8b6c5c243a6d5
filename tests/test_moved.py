"""Modules that moved: their old paths still import, are the same module, and say where they are now."""

import importlib
import sys

import pytest

import gradveil


@pytest.mark.parametrize("old", sorted(gradveil._MOVED))
def test_the_old_path_is_the_new_module(old):
    sys.modules.pop(f"gradveil.{old}", None)
    new = importlib.import_module(f"gradveil.{gradveil._MOVED[old]}")
    spec, name = new.__spec__, new.__name__
    with pytest.warns(DeprecationWarning, match=f"gradveil.{old} has moved to {name}"):
        assert importlib.import_module(f"gradveil.{old}") is new
    assert (new.__spec__, new.__name__) == (spec, name)


def test_a_submodule_and_a_class_at_their_old_paths():
    sys.modules.pop("gradveil.data._idx", None)
    with pytest.warns(DeprecationWarning, match="has moved"):
        _idx = importlib.import_module("gradveil.data._idx")
    assert _idx.__name__ == "gradveil.training.data._idx"
    with pytest.warns(DeprecationWarning, match="AuxiliaryRelease"):
        assert gradveil.SideRelease is gradveil.AuxiliaryRelease


def test_what_never_was_is_not_there():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("gradveil.nothing")
    with pytest.raises(AttributeError):
        gradveil.nothing  # noqa: B018
