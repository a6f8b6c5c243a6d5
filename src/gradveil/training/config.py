"""The settings of a training run: checked once, written to config.toml, read back. No torch.

Privacy settings, training settings and performance settings lie side by side; the seed is never written
to config.toml, which anyone may read, but to secret.json (mode 0600).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradveil.errors import ConfigError, DataError, UnknownNameError

# Steps, batch size: the paper's table of benchmark parameters; digits and location are ours.
DEFAULTS: dict[str, tuple[int, int]] = {
    "digits": (600, 64),
    "mnist": (10_000, 600),
    "fashion-mnist": (10_000, 600),
    "cifar10": (10_000, 500),
    "lfw": (6_000, 22),
    "purchase-10": (5_000, 100),
    "purchase-50": (5_000, 100),
    "location": (5_000, 40),
    "retail-10": (5_000, 100),
}

# Settings that came later: written down where they are not at their defaults, so that the digest of every earlier
# run, which its checkpoints carry, stays what it was.
_LATER = ("features", "calibrated", "average", "views", "augment", "noise", "accountant")


class RunConfig(BaseModel):
    """One training run, in full. ``steps`` and ``batch_size`` default to those of the data set."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    dataset: str = "digits"
    features: Literal["none", "scattering", "balanced-scattering", "centred-scattering"] = "none"
    model: str = "auto"
    strategy: str = "baseline"
    # privacy
    clip: float = 4.0
    sigma: float = 6.0
    epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # instead of sigma: it is calibrated to this
    calibrated: bool = False  # sigma was: set by training, never by hand
    delta: float = 1e-5
    sampling: str = "poisson"
    clipping: str = "per-layer"
    reading: Literal["example", "batch"] | None = None
    decay: str | None = None
    clip_decay: str | None = None
    clip_end: float | None = None
    sigma_decay: str | None = None
    sigma_end: float | None = None
    fixed_variance: bool = False
    options: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default_factory=dict)
    noise: Literal["auto", "lattice", "float"] = "auto"  # lattice: private in floating point too
    budget: float | None = None
    allow_unproved: bool = False
    accountant: Literal["PLD", "filter"] | None = None  # None: the strategy's own
    # training
    steps: int | None = None
    batch_size: int | None = None
    lr: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    activation: str = "relu"
    views: int = Field(default=1, ge=1)  # of an example, averaged before they are clipped
    augment: Literal["none", "flip", "shift", "flip-shift"] = "none"  # what the views are (augment.py)
    average: float = Field(default=0.0, ge=0, lt=1)  # decay of the moving average of the weights; 0: none is kept
    stop_at_accuracy: float | None = Field(default=None, gt=0, le=1)
    stop_data: Literal["private", "public"] = "private"
    # performance and bookkeeping: cannot change a result
    physical_batch_size: int | None = None
    device: str = "cpu"
    evaluate_every: int | None = Field(default=None, ge=1)
    checkpoint_every: int | None = Field(default=None, ge=1)
    data_dir: str | None = None
    about: dict[str, str] = Field(default_factory=dict)  # purpose, data, unit, tuning, sign_off: shown in the report

    def plan_settings(self) -> dict[str, Any]:
        """The public plan of the run: the arguments of :func:`gradveil.mechanism.strategies.parameters`."""
        names = ("strategy", "steps", "clip", "reading", "decay", "clip_decay", "clip_end", "sigma_decay", "sigma_end")
        sigma = None if self.awaits_sigma else self.sigma
        return {name: getattr(self, name) for name in (*names, "fixed_variance")} | {"sigma": sigma}

    @property
    def awaits_sigma(self) -> bool:
        """Whether sigma is still to be calibrated to the target epsilon."""
        return self.epsilon is not None and not self.calibrated

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> RunConfig:
        """Build a configuration; what is wrong with it is said in one :class:`ConfigError`."""
        for name in settings:
            if name not in cls.model_fields:
                raise UnknownNameError("setting", name, cls.model_fields)
        _check_noise(settings)
        try:
            config = cls(**settings)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(p) for p in e['loc'])}: {e['msg'][0].lower()}{e['msg'][1:]} (got {e['input']!r})"
                for e in error.errors()
            )
            raise ConfigError(f"the settings do not fit: {problems}.") from None
        _check_views(config)
        steps, batch_size = DEFAULTS.get(config.dataset, (1000, 64))
        filled = config.model_copy(
            update={
                "steps": config.steps if config.steps is not None else steps,
                "batch_size": config.batch_size if config.batch_size is not None else batch_size,
            }
        )
        assert filled.steps is not None
        every = max(1, filled.steps // 20)
        return filled.model_copy(
            update={
                "evaluate_every": filled.evaluate_every or every,
                "checkpoint_every": filled.checkpoint_every or every,
            }
        )

    def settings(self) -> dict[str, Any]:
        """Only what is set, as plain data."""
        unset = {name for name in _LATER if getattr(self, name) == type(self).model_fields[name].default}
        if self.awaits_sigma:
            unset.add("sigma")
        return {k: v for k, v in self.model_dump().items() if v is not None and v != {} and k not in unset}

    def digest(self) -> str:
        """A hash of everything that can change a result; checkpoints carry it."""
        free = ("about", "data_dir", "device", "evaluate_every", "checkpoint_every", "physical_batch_size")
        fixed = {k: v for k, v in self.settings().items() if k not in free}
        return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()

    def to_toml(self) -> str:
        """The text of config.toml."""
        settings = self.settings()
        tables = {name: settings.pop(name, {}) for name in ("options", "about")}
        lines = [f"{key} = {_toml(value)}" for key, value in settings.items()]
        for name, table in tables.items():
            if table:
                lines += ["", f"[{name}]", *(f"{_key(key)} = {_toml(value)}" for key, value in table.items())]
        return "\n".join(lines) + "\n"


def _check_noise(settings: Mapping[str, Any]) -> None:
    if settings.get("epsilon") is None:
        if settings.get("calibrated"):
            raise ConfigError(
                "calibrated says that sigma was found for a target epsilon, and none is given. Leave it out."
            )
        return
    if "sigma" in settings and not settings.get("calibrated"):
        raise ConfigError(
            f"sigma = {settings['sigma']!r} and epsilon = {settings['epsilon']!r} are both given, and each decides the "
            "other: sigma is calibrated so that the whole run spends epsilon. Give one of them."
        )


def _check_views(config: RunConfig) -> None:
    views, augment = config.views, config.augment
    if views == 1 and augment != "none":
        raise ConfigError(
            f"augment = {augment!r} was given with views = 1: the first view is the example itself, so nothing would "
            "be augmented. Give views = 2 or more."
        )
    if views > 1 and augment == "none":
        raise ConfigError(
            f"views = {views} was given without augment: the views of an example would all be the same. Give "
            "augment = 'flip', 'shift' or 'flip-shift'."
        )
    if config.features != "none" and augment != "none" and (augment, views) != ("flip", 2):
        raise ConfigError(
            f"features = {config.features!r} was given with augment = {augment!r} and views = {views}: features are "
            "computed once, before training. augment = 'flip' with views = 2 is what can be computed ahead."
        )


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    # JSON's strings, booleans and numbers are TOML's too, save that a TOML float needs a point or exponent.
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML: no surrogate pairs, no bare DEL
    return f"{text}.0" if isinstance(value, float) and not set(text) & set(".e") else text


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, as they are."""
    from gradveil.accounting import files  # brings numpy, which checking a name needs not

    try:
        return files.read_toml(path)
    except DataError as error:
        raise ConfigError(f"the configuration file {error}") from None
