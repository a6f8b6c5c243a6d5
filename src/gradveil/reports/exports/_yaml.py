"""Plain data as YAML: block style, strings in JSON's quotes, which are YAML's too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def to_yaml(value: Any, indent: int = 0) -> str:
    """Text that any YAML reader gives back as ``value``.

    >>> print(to_yaml({"a": {"b": [1, "x: y"]}, "c": 1e-05}), end="")
    a:
      b:
        - 1
        - "x: y"
    c: 1.0e-05
    """
    pad = " " * indent
    if isinstance(value, Mapping):
        return "".join(f"{pad}{_key(k)}:{_nested(v, indent)}" for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "".join(f"{pad}-{_item(v, indent)}" for v in value)
    return f"{pad}{_scalar(value)}\n"


def _nested(value: Any, indent: int) -> str:
    if isinstance(value, Mapping | list | tuple) and value:
        return "\n" + to_yaml(value, indent + 2)
    return f" {_scalar(value)}\n"


def _item(value: Any, indent: int) -> str:
    if isinstance(value, Mapping | list | tuple) and value:
        return " " + to_yaml(value, indent + 2).lstrip(" ")
    return f" {_scalar(value)}\n"


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _scalar(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")  # YAML 1.1 takes 1e-05 for a string
    return text
