"""Every planted fault still fits the code, and its test is there. `make mutants` plants them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("mutants_run", Path(__file__).with_name("run.py"))
assert _spec is not None and _spec.loader is not None
run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run)


@pytest.mark.parametrize("mutant", run.mutants(), ids=lambda mutant: mutant["name"])
def test_a_planted_fault_fits_and_its_test_exists(mutant):
    text = (run.ROOT / mutant["file"]).read_text()
    assert run.planted(mutant, text) != text
    file, _, test = mutant["test"].partition("::")
    assert f"def {test}" in (run.ROOT / file).read_text()
