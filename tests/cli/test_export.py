"""Exports: each valid by its public schema, each true to the run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from gradveil.reports import exports
from gradveil.reports.exports._yaml import to_yaml
from gradveil.reports.facts import read_run
from small_runs import damaged, trained, with_attack

SCHEMAS = Path(os.environ.get("GRADVEIL_SCHEMAS", Path(__file__).resolve().parents[3] / "shared" / "schemas"))
PERSON = {
    "name": "Digits, private",
    "curator": "A university",
    "purpose": "Teaching",
    "data": "Scanned digits of volunteers",
    "unit": "one scanned digit",
    "region": "Nowhere",
    "publication_date": "2026-11-18",
    "owner": "Somebody: with a colon",
    "tuning": "3 runs, not charged",
    "license": "apache-2.0",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with_attack(trained(folder / "said", about=PERSON))
    trained(folder / "bare")
    trained(folder / "dyn-s-l2max", strategy="dyn-s-l2max")
    return folder


def exported(gradveil, run, form):
    done = gradveil("export", run, "--to", form)
    assert done.code == 0, done.err
    return done


@pytest.mark.parametrize("name", ["said", "bare"])
def test_the_registry_record_fits_the_registrys_schema(gradveil, made, name):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (gradveil[schemas])")
    done = exported(gradveil, made / name, "registry")
    record = yaml.safe_load(done.out)
    deployment, facts = record["deployment"], read_run(made / name)
    assert deployment["privacy_loss"]["privacy_parameters"]["epsilon"] >= facts.proved
    assert deployment["privacy_loss"]["privacy_parameters"]["delta"] == 1e-5
    assert facts.contents.head in deployment["administrative"]["notes"]
    if name == "said":
        assert deployment["basic"]["data_curators"] == ["A university"] and "fill in" not in done.err
        assert deployment["administrative"]["registry_authors"] == ["Somebody: with a colon"]
        assert "not stated" not in json.dumps({k: v for k, v in deployment.items() if k != "implementation"})
    else:
        assert "curator, intended use, data domain, region, publication date, registry author" in done.err
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed (gradveil[schemas])")
    path = SCHEMAS / "opendp-deployments-schema.yaml"
    if not path.exists():
        pytest.skip(f"the registry's schema is not at {SCHEMAS} (GRADVEIL_SCHEMAS)")
    schema = yaml.safe_load(path.read_text())
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(record)
    asked = {key: set(part["properties"]) for key, part in schema["properties"]["deployment"]["properties"].items()}
    optional = {
        "data_product_sector",
        "sources",
        "model_name_details",
        "data_source_type_details",
        "access_type_details",
    }
    for key, fields in asked.items():
        assert fields - optional <= set(deployment[key]), key


def test_the_statement_fits_its_schema(gradveil, made):
    found = json.loads(exported(gradveil, made / "said", "statement").out)
    facts = read_run(made / "said")
    assert found["ledger"]["head"] == facts.contents.head
    assert found["statement"]["proved"]["epsilon"] == facts.proved
    assert found["about"] == PERSON
    inf = json.loads(exported(gradveil, made / "dyn-s-l2max", "statement").out)
    assert inf["statement"]["proved"]["epsilon"] == "inf" and inf["tradeoff"] is None
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed (gradveil[schemas])")
    schema = json.loads((Path(exports.__file__).parent / "statement.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    for one in (found, inf):
        check.validate(one)
    wrong = found | {"statement": found["statement"] | {"paper_is_a_guarantee": True}}
    assert not check.is_valid(wrong)


def test_the_bill_of_materials_fits_cyclonedx(gradveil, made):
    found = json.loads(exported(gradveil, made / "said", "cyclonedx").out)
    model = found["metadata"]["component"]
    assert model["type"] == "machine-learning-model" and model["name"] == "Digits, private"
    properties = {entry["name"]: entry["value"] for entry in model["properties"]}
    assert float(properties["gradveil:epsilon"]) >= read_run(made / "said").proved
    validation = pytest.importorskip("cyclonedx.validation.json", reason="cyclonedx-python-lib is not installed")
    from cyclonedx.schema import SchemaVersion

    assert validation.JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(found)) is None


def test_the_model_card_reads_back_on_the_hub(gradveil, made):
    text = exported(gradveil, made / "said", "model-card").out
    assert "Not covered:" in text and "| Proved epsilon, at most |" in text
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed (gradveil[schemas])")
    card = hub.ModelCard(text)
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", round(read_run(made / "said").accuracy, 4))
    assert card.data.license == "apache-2.0" and "differential-privacy" in card.data.tags
    done = exported(gradveil, made / "bare", "model-card")
    assert "license, purpose, data" in done.err


def test_what_cannot_be_exported(gradveil, made, tmp_path):
    done = gradveil("export", made / "dyn-s-l2max", "--to", "registry")
    assert done.code == 2 and "none is proved" in done.message
    done = gradveil("export", made / "bare", "--to", "pdf")
    assert done.code == 2 and "unknown form 'pdf'" in done.message
    run = damaged(shutil.copytree(made / "bare", tmp_path / "damaged"))
    assert gradveil("export", run, "--to", "statement").code == 4
    run = shutil.copytree(made / "bare", tmp_path / "edited")
    (run / "metrics.jsonl").write_text("")
    assert gradveil("export", run, "--to", "statement").code == 4
    assert gradveil("export", tmp_path / "nowhere", "--to", "statement").code == 2
    done = gradveil("export", made / "bare", "--to", "statement", "--out", tmp_path / "s.json")
    assert done.out == "" and json.loads((tmp_path / "s.json").read_text())["format"] == "gradveil-statement/1"


@pytest.mark.parametrize(
    "value",
    [
        {"a": "yes", "b": "no: # x", "c": [], "d": {}, "e": None, "f": True, "g": 1e-5, "h": 1e22, "i": -0.0},
        {"list": [{"a": 1, "b": [1, 2]}, ["x", "y"], "é\u2028\n\ttab"], "odd key: x": "- a"},
    ],
)
def test_yaml_is_read_back_as_it_was(value):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (gradveil[schemas])")
    assert yaml.safe_load(to_yaml(value)) == value
