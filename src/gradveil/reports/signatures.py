"""Signatures of a ledger's head, with ed25519 keys in OpenSSH's format and signatures in OpenSSH's (``ssh-keygen -Y``).

    signatures/<key>.txt       what is signed: how many lines the ledger had, and the hash of the last
    signatures/<key>.txt.sig   the signature

The head stands for every line before it and for every file that these lines name (manifest.py), so one signature covers
the directory. It can be checked without gradveil: ``ssh-keygen -Y verify -n gradveil``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradveil.accounting import files as _files
from gradveil.accounting._ledger_lines import Contents
from gradveil.accounting.ledger import FILE_NAME
from gradveil.accounting.manifest import SIGNATURES
from gradveil.errors import ConfigError, DataError, LedgerError
from gradveil.training.run_directory import write_whole

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

NAMESPACE = "gradveil"
_MAGIC, _KIND, _HASH = b"SSHSIG", b"ssh-ed25519", b"sha512"
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
_LIMIT = 1 << 16  # bytes of a key or signature file
_SIGNED = re.compile(r"gradveil ledger, format 1\nlines (\d{1,12})\nhead ([0-9a-f]{64})\n")


class NotSigned(ConfigError):
    """There is no signature by the key that was asked for."""

    exit_code = 1


@dataclass(frozen=True)
class Signature:
    """A signature that fits its key, and what it covers. ``later``: names of files that lines after it bind."""

    key: str  # its fingerprint
    lines: int
    later: tuple[str, ...]


def sign(root: Path, contents: Contents, key: Path, passphrase: Callable[[], str]) -> Path:
    """Sign the ledger of a run directory as it is; where the signature was written."""
    private = _private_key(key, passphrase)
    public = _blob(_KIND, private.public_key().public_bytes_raw())
    text = f"gradveil ledger, format 1\nlines {contents.length}\nhead {contents.head}\n".encode()
    signature = _blob(_KIND, private.sign(_to_sign(text)))
    whole = _MAGIC + struct.pack(">I", 1) + _blob(public, NAMESPACE.encode(), b"", _HASH, signature)
    coded = base64.b64encode(whole).decode()
    armoured = "\n".join([_BEGIN, *(coded[i : i + 70] for i in range(0, len(coded), 70)), _END, ""])
    folder = root / SIGNATURES
    folder.mkdir(exist_ok=True)
    path = folder / f"{hashlib.sha256(public).hexdigest()[:16]}.txt"
    write_whole(path, text)
    write_whole(path.with_suffix(".txt.sig"), armoured.encode())
    return path


def verify(root: Path, contents: Contents, keys: Path) -> Signature:
    """The signature of ``contents`` by one of the public keys in ``keys``; everything else is refused."""
    wanted = public_keys(keys)
    found = [path for path in sorted((root / SIGNATURES).glob("*.txt.sig")) if _signer(path) in wanted]
    if not found:
        others = ", ".join(fingerprint(_signer(path)) for path in sorted((root / SIGNATURES).glob("*.txt.sig")))
        raise NotSigned(
            f"{root} is not signed by {' or '.join(fingerprint(key) for key in wanted)} ({keys}); "
            f"{f'it is signed by {others}' if others else 'it has no signature'}. Sign it: gradveil sign {root} --key "
            "KEY"
        )
    path = found[-1]
    public, signature = _parts(path)
    text = _files.read_bytes(path.with_suffix(""), limit=_LIMIT)
    _check(public, signature, text, path)
    told = _SIGNED.fullmatch(text.decode(errors="replace"))
    if told is None:
        raise LedgerError(f"{path.with_suffix('')} does not say what was signed: it is not a file of gradveil sign.")
    lines, head = int(told[1]), told[2]
    after = lines_after(root, contents, head)
    if after is None or contents.length - len(after) != lines:
        raise LedgerError(
            f"ledger.jsonl is not the ledger that was signed ({path.name}): none of its lines {lines} has the hash "
            f"{head[:16]}. It was written anew, or cut off, after it was signed."
        )
    if any(kind != "file" for kind, _ in after):
        raise LedgerError(f"ledger.jsonl goes on after line {lines}, which was signed ({path.name}): sign it again.")
    return Signature(fingerprint(public), lines, tuple(name for _, name in after))


def lines_after(root: Path, contents: Contents, head: str) -> list[tuple[str, str]] | None:
    """Kind, and file if it names one, of each line after the one with this hash; None if no line has it."""
    found: list[tuple[str, str]] | None = None
    for number, raw in enumerate(_files.read_lines(root / FILE_NAME), start=1):
        if number > contents.length:
            break
        if found is not None:
            entry = json.loads(raw)
            short = isinstance(entry, list)  # a release, as what it does not share with the one before
            found.append(("next", "") if short else (str(entry["kind"]), str(entry["body"].get("path", ""))))
        elif contents.hashes[number - 1].startswith(head):
            found = []
    return found


def head_line(root: Path, contents: Contents, head: str) -> int:
    """The number of the line that has this hash; refused where none has."""
    if not re.fullmatch("[0-9a-f]{16,64}", head):
        raise ConfigError(f"{head!r} is not the hash of a line: give its 64 hexadecimal digits, or the first 16.")
    after = lines_after(root, contents, head)
    if after is None:
        raise LedgerError(
            f"no line of ledger.jsonl has the hash {head[:16]}...: it is another ledger, was written anew, or cut off."
        )
    return contents.length - len(after)


def public_keys(path: Path) -> list[bytes]:
    """The ed25519 keys in a .pub, authorized_keys or allowed_signers file."""
    try:
        text = _files.read_bytes(path, limit=_LIMIT).decode(errors="replace")
    except DataError as error:
        raise ConfigError(f"{error} Give a public key, such as id_ed25519.pub.") from None
    found = []
    for coded in re.findall(r"ssh-ed25519\s+([A-Za-z0-9+/=]+)", text):
        try:
            key = base64.b64decode(coded, validate=True)
            kind, raw = _unpacked(key, 2)
        except (binascii.Error, ValueError):
            continue
        if kind == _KIND and len(raw) == 32:
            found.append(key)
    if not found:
        why = (
            "It is a private key: give the .pub beside it."
            if "PRIVATE KEY" in text
            else "ssh-keygen -t ed25519 makes one."
        )
        raise ConfigError(f"{path} holds no public key of the kind ssh-ed25519. {why}")
    return found


def fingerprint(key: bytes) -> str:
    """As ssh-keygen -l prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def _private_key(path: Path, passphrase: Callable[[], str]) -> Ed25519PrivateKey:
    serialization, ed25519, unsupported = _cryptography()
    try:
        data = _files.read_bytes(path, limit=_LIMIT)
    except DataError as error:
        raise ConfigError(f"{error} Give a private key, such as ~/.ssh/id_ed25519.") from None
    password = None
    for attempt in range(2):
        try:
            found = serialization.load_ssh_private_key(data, password)
            break
        except TypeError:  # it is encrypted
            if attempt:
                raise ConfigError(f"{path} could not be opened with that passphrase.") from None
            password = passphrase().encode()
        except unsupported as error:
            raise ConfigError(f"{path} cannot be read: {error}. An encrypted key needs: pip install bcrypt") from None
        except ValueError as error:
            why = "the passphrase is wrong, or it is damaged" if password is not None else str(error).strip(".")
            raise ConfigError(
                f"{path} is no private key in OpenSSH's format ({why}). ssh-keygen -t ed25519 makes one."
            ) from None
    if not isinstance(found, ed25519.Ed25519PrivateKey):
        raise ConfigError(f"{path} is not an ed25519 key. Make one: ssh-keygen -t ed25519")
    return found


def _cryptography() -> tuple[Any, Any, Any]:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ConfigError(
            "signatures need the cryptography package, which is not installed: pip install 'gradveil[sign]'"
        ) from None
    return serialization, ed25519, UnsupportedAlgorithm


def _check(public: bytes, signature: bytes, text: bytes, path: Path) -> None:
    from cryptography.exceptions import InvalidSignature

    _, ed25519, _ = _cryptography()
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(_unpacked(public, 2)[1]).verify(signature, _to_sign(text))
    except InvalidSignature:
        raise LedgerError(
            f"{path.name} is not a signature of {path.with_suffix('').name}: one of them was changed."
        ) from None


def _signer(path: Path) -> bytes:
    return _parts(path)[0]


def _parts(path: Path) -> tuple[bytes, bytes]:
    """The key and the signature in an armoured file."""
    try:
        text = _files.read_bytes(path, limit=_LIMIT).decode()
        body = text.partition(_BEGIN)[2].partition(_END)[0]
        whole = base64.b64decode("".join(body.split()), validate=True)
        public, namespace, _, algorithm, signature = _unpacked(whole[len(_MAGIC) + 4 :], 5)
        kind, raw = _unpacked(signature, 2)
    except (ValueError, struct.error):
        raise LedgerError(f"{path} is damaged: it is not a signature in OpenSSH's format.") from None
    if (namespace, algorithm, kind) != (NAMESPACE.encode(), _HASH, _KIND) or not whole.startswith(_MAGIC):
        raise LedgerError(f"{path} is a signature for something else: {namespace.decode(errors='replace')!r:.80}.")
    return public, raw


def _to_sign(text: bytes) -> bytes:
    return _MAGIC + _blob(NAMESPACE.encode(), b"", _HASH, hashlib.sha512(text).digest())


def _blob(*parts: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


def _unpacked(data: bytes, count: int) -> Sequence[bytes]:
    found, at = [], 0
    for _ in range(count):
        (size,) = struct.unpack_from(">I", data, at)
        part = data[at + 4 : at + 4 + size]
        if len(part) != size:
            raise ValueError("it ends too early")
        found.append(part)
        at += 4 + size
    return found
