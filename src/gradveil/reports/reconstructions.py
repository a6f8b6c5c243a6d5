"""What attacks got back, as the page shows it: figures and, where they may be shown, pictures."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradveil.accounting._rounding import at_most
from gradveil.errors import DataError
from gradveil.reports.facts import AttackFacts

if TYPE_CHECKING:
    import numpy as np


def number(value: object, digits: int = 4) -> str:
    """A number from a file, in words; a dash where there is none.

    >>> number(1e-5), number(None), number(float("inf"))
    ('1e-5', '-', 'infinite')
    """
    if value == "inf":
        return "infinite"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)
    if not math.isfinite(value):
        return "infinite"
    return re.sub(r"e([+-])0", r"e\1", f"{value:.{digits}g}")


@dataclass(frozen=True, kw_only=True)
class Frame:
    at: int  # iteration
    name: str
    image: str  # a data URI
    psnr: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One victim."""

    original: Frame
    frames: Sequence[Frame]
    found: Frame


@dataclass(frozen=True, kw_only=True)
class Trial:
    run: str
    style: int
    attack: AttackFacts
    figures: Sequence[tuple[str, str]]
    rows: Sequence[Row]
    problem: str = ""


def trial_of(label: str, style: int, attack: AttackFacts, examples: int) -> Trial:
    rows: Sequence[Row] = ()
    problem = ""
    if examples:
        try:
            rows = list(_rows(attack, examples))
        except (DataError, OSError, ValueError, KeyError, IndexError) as error:
            problem = f"Its images cannot be read: {error}"
        if not rows and not problem:
            problem = "No images were stored."
    return Trial(run=label, style=style, attack=attack, figures=_figures(attack), rows=rows, problem=problem)


def _figures(attack: AttackFacts) -> list[tuple[str, str]]:
    result, settings, bound = attack.result, attack.trial["settings"], attack.trial.get("success_bound")
    found = [("seen", f"{settings.get('view', '-')}, step {settings.get('step', '-')}")]
    alone = settings.get("batch", 1) == 1
    found.append(("victims", f"{settings.get('victims', '-')}, {'each alone' if alone else 'in batches'}"))
    if attack.psnr is not None:
        found.append(("PSNR, median", f"{attack.psnr:.1f} dB{_interval(result.get('psnr_median_interval'))}"))
        found.append(("best guess without it", f"{number(result.get('guess_psnr_median'), 3)} dB"))
        found.append(("worst 5 % of victims", f"{number(result.get('psnr_worst_5_percent'), 3)} dB"))
    elif "wrong_median" in result:
        found.append(
            ("wrong features, median", f"{number(result['wrong_median'])} of {number(result.get('features'))}")
        )
        found.append(("best guess without it", f"{number(result.get('guess_wrong_median'))} wrong"))
    found.append(("beats guessing by 6 dB", _share(result.get("success_rate"))))
    found.append(("proved limit on that", "none" if bound is None else f"at most {_share_at_most(bound)}"))
    found.append(("labels found", _share(result.get("labels_right"))))
    return found


def _share(value: object) -> str:
    return f"{100 * value:.3g} %" if isinstance(value, int | float) and math.isfinite(value) else "-"


def _share_at_most(value: object) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return f"{at_most(100 * value, digits=3)} %"


def _interval(value: object) -> str:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(v, int | float) for v in value):
        return f" ({value[0]:.1f} to {value[1]:.1f})"
    return ""


def _rows(attack: AttackFacts, examples: int) -> Iterable[Row]:
    pictures = attack.pictures()
    if "original" not in pictures or "found" not in pictures:
        return
    iterations = sorted(int(name.removeprefix("frame ")) for name in pictures if name.startswith("frame "))
    alone = attack.trial["settings"].get("batch") == 1  # in a batch it is not known which reconstruction is whose

    def frame(name: str, words: str, at: int, victim: int) -> Frame:
        near = _psnr(pictures[name][victim], pictures["original"][victim]) if alone and name != "original" else ""
        return Frame(at=at, name=words, image=_data_uri(pictures[name][victim]), psnr=near)

    for victim in range(min(examples, len(pictures["original"]))):
        yield Row(
            original=frame("original", "original", 0, victim),
            frames=[frame(f"frame {i}", f"iteration {i}", i, victim) for i in iterations],
            found=frame("found", "final", iterations[-1] if iterations else 0, victim),
        )


def _psnr(x: np.ndarray[Any, Any], truth: np.ndarray[Any, Any]) -> str:
    error = float(((x - truth) ** 2).mean())
    return f"{-10 * math.log10(error):.1f} dB" if error > 0 else "exact"


def _data_uri(image: np.ndarray[Any, Any]) -> str:
    """A (C, H, W) image in [0, 1] as PNG."""
    import numpy as np
    from PIL import Image

    pixels = (255 * np.clip(image, 0, 1)).round().astype(np.uint8)
    grey = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels.mean(0)
    whole = io.BytesIO()
    Image.fromarray(grey.astype(np.uint8)).save(whole, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(whole.getvalue()).decode()
