"""Signatures: keys of ssh-keygen sign and verify; whatever was changed after it fails, by name."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from forged import louder, rehash
from small_runs import trained

pytest.importorskip("cryptography", reason="the extra gradveil[sign] is not installed")
if shutil.which("ssh-keygen") is None:
    pytest.skip("ssh-keygen is not installed", allow_module_level=True)


def make_key(path, passphrase="", kind="ed25519"):
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "somebody", "-f", str(path)]
    subprocess.run(command, check=True, timeout=60)
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    return make_key(folder / "mine"), make_key(folder / "other")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


@pytest.fixture
def signed(run, keys, gradveil):
    done = gradveil("sign", run, "--key", keys[0])
    assert done.code == 0, done.err
    return run


def public(key):
    return key.with_suffix(".pub")


def test_a_signed_run_verifies_and_passes_the_gate(gradveil, signed, keys):
    done = gradveil("verify", signed, "--key", public(keys[0]))
    assert done.code == 0 and "signed by SHA256:" in done.out
    printed = subprocess.run(["ssh-keygen", "-lf", public(keys[0])], capture_output=True, text=True, check=True).stdout
    assert printed.split()[1] in done.out
    assert gradveil("ledger", "verify", signed, "--key", public(keys[0])).code == 0
    done = gradveil("check", signed, "--max-epsilon", 10, "--min-accuracy", 0, "--signed-by", public(keys[0]))
    assert done.code == 0 and "pass  run  signature: " in done.out


def test_ssh_keygen_accepts_the_signature_and_gradveil_that_of_ssh_keygen(gradveil, signed, keys, tmp_path):
    allowed = tmp_path / "allowed"
    allowed.write_text("me " + public(keys[0]).read_text())
    (text,) = signed.glob("signatures/*.txt")
    verify = ["ssh-keygen", "-Y", "verify", "-f", allowed, "-I", "me", "-n", "gradveil", "-s", f"{text}.sig"]
    done = subprocess.run(verify, input=text.read_bytes(), capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (text.parent / f"{text.name}.sig").unlink()
    subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-f", keys[0], "-n", "gradveil", text], check=True, timeout=60)
    assert gradveil("verify", signed, "--key", allowed).code == 0


def test_a_wrong_key_and_no_signature_are_exit_code_1(gradveil, signed, made, keys):
    done = gradveil("verify", signed, "--key", public(keys[1]))
    assert done.code == 1 and "is not signed by SHA256:" in done.err and "it is signed by SHA256:" in done.err
    assert gradveil("check", signed, "--max-epsilon", 10, "--signed-by", public(keys[1])).code == 1
    done = gradveil("verify", made, "--key", public(keys[0]))
    assert done.code == 1 and "it has no signature" in done.err


def test_a_changed_byte_in_any_bound_file_fails_by_name(gradveil, signed, keys, tmp_path):
    names = ["config.toml", "environment.json", "metrics.jsonl", "checkpoints/step-00000006.safetensors"]
    for name in names:
        run = shutil.copytree(signed, tmp_path / "copy")
        data = bytearray((run / name).read_bytes())
        data[-2] ^= 1
        (run / name).write_bytes(data)
        done = gradveil("verify", run, "--key", public(keys[0]))
        assert done.code == 4 and name in done.err, name
        done = gradveil("check", run, "--max-epsilon", 10, "--signed-by", public(keys[0]))
        assert done.code == 4 and name in done.out
        assert gradveil("sign", run, "--key", keys[0]).code == 4
        shutil.rmtree(run)


def forged(run):
    """Everything rewritten so that it fits together: only the signature, or the head, is of before."""
    config = (run / "config.toml").read_text().replace("sigma = 3.0", "sigma = 30.0")
    (run / "config.toml").write_text(config)
    looks = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    louder_looks = [look | {"sigma": look["sigma"] * 10, "noise_std": look["noise_std"] * 10} for look in looks]
    (run / "metrics.jsonl").write_text("".join(json.dumps(look) + "\n" for look in louder_looks))
    return louder(run)


def test_a_forgery_that_fits_together_is_seen_by_the_signature_and_by_the_head_alone(gradveil, signed, keys):
    head = json.loads(gradveil("verify", signed, "--json").out)["head"]
    assert gradveil("check", signed, "--max-epsilon", 0.1, "--head", head).code == 1
    forged(signed)
    assert gradveil("check", signed, "--max-epsilon", 0.1).code == 0  # as docs/evidence.md says
    for options in (("--signed-by", public(keys[0])), ("--head", head)):
        done = gradveil("check", signed, "--max-epsilon", 0.1, *options)
        assert done.code == 4, done.out
        assert "ledger.jsonl" in done.out and "has been rewritten" in done.out
    assert gradveil("verify", signed, "--key", public(keys[0])).code == 4
    assert gradveil("verify", signed, "--head", head).code == 4


def test_a_ledger_that_was_cut_after_it_was_signed_fails(gradveil, signed, keys):
    rehash(signed, lambda kind, body: None if kind == "end" else body)
    assert (
        gradveil("check", signed, "--allow-unfinished", "--max-epsilon", 10, "--signed-by", public(keys[0])).code == 4
    )


@pytest.mark.parametrize("what", ["text", "signature", "nonsense"])
def test_a_changed_signature_fails(gradveil, signed, keys, what):
    (text,) = signed.glob("signatures/*.txt")
    path = text if what == "text" else text.parent / f"{text.name}.sig"
    data = path.read_text()
    path.write_text({"text": data.replace("lines ", "lines 1"), "signature": data, "nonsense": "?"}[what])
    if what == "signature":
        lines = data.splitlines()
        lines[-2] = lines[-2][:4] + ("A" if lines[-2][4] != "A" else "B") + lines[-2][5:]
        path.write_text("\n".join(lines))
    done = gradveil("verify", signed, "--key", public(keys[0]))
    assert done.code == 4 and text.name in done.err


def test_what_is_bound_after_the_signature_is_not_judged_by(gradveil, signed, keys):
    done = gradveil("attack", signed, "--attack", "map", "--victims", 2, "--iterations", 1)
    assert done.code == 0, done.err
    limits = ("--max-epsilon", 10, "--max-attack-psnr", 99, "--signed-by", public(keys[0]))
    done = gradveil("check", signed, *limits)
    assert done.code == 1 and "was bound after the ledger was signed" in done.out
    assert "pass  run  signature" in done.out
    assert gradveil("sign", signed, "--key", keys[0]).code == 0
    assert gradveil("check", signed, *limits).code == 0


@pytest.mark.parametrize("head", ["", "zz", "abc", "A" * 64])
def test_a_head_that_is_none_is_bad_input(gradveil, made, head):
    assert gradveil("verify", made, "--head", head).code == 2
    assert gradveil("check", made, "--max-epsilon", 10, "--head", head).code == 2


def test_keys_that_are_none_are_bad_input(gradveil, made, keys, tmp_path):
    rsa = make_key(tmp_path / "rsa", kind="rsa")
    (tmp_path / "text").write_text("hello")
    for path in (rsa, tmp_path / "text", tmp_path / "nowhere", public(keys[0])):
        done = gradveil("sign", made, "--key", path)
        assert done.code == 2, path
    for path in (public(rsa), tmp_path / "text", tmp_path / "nowhere", keys[0]):
        done = gradveil("verify", made, "--key", path)
        assert done.code == 2, path


def test_an_encrypted_key_asks_for_its_passphrase(gradveil, run, tmp_path, monkeypatch):
    pytest.importorskip("bcrypt", reason="encrypted keys need bcrypt")
    key = make_key(tmp_path / "locked", passphrase="correct horse")
    for told, code in (("wrong", 2), ("correct horse", 0)):
        monkeypatch.setattr("gradveil.cli.sign._passphrase", lambda key, told=told: told)
        assert gradveil("sign", run, "--key", key).code == code
