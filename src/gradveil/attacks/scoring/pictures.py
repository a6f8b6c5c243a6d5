"""Images of victims: side by side as PNG, and kept as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradveil.training.run_directory import write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from gradveil.attacks.trial import AttackResult

KEPT = 4  # victims

Line = tuple[str, Sequence[tuple[str, "Tensor"]]]  # what is written beside it, and images (C, H, W) with their titles


def draw_grid(lines: Sequence[Line], path: Path) -> None:
    """One row for each line; lines may be of different length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = max(len(pictures) for _, pictures in lines)
    figure, axes = plt.subplots(
        len(lines), columns, figsize=(1.1 * columns, 1.35 * len(lines)), squeeze=False, layout="constrained"
    )
    for row, (label, pictures) in zip(axes, lines, strict=True):
        for ax in row:
            ax.axis("off")
        for ax, (title, image) in zip(row, pictures, strict=False):
            ax.imshow(_pixels(image), cmap="gray", vmin=0, vmax=1)
            ax.set_title(title, fontsize=7)
        where: dict[str, Any] = {"transform": row[0].transAxes, "rotation": 90, "va": "center", "ha": "right"}
        row[0].text(-0.08, 0.5, label, fontsize=7, **where)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def keep_pictures(outcomes: Sequence[AttackResult], path: Path) -> None:
    """The first victims of every trial, over the iterations, for who may see them: mode 0600, training examples."""
    import io

    import numpy as np

    arrays: dict[str, Any] = {}
    for number, outcome in enumerate(outcomes):
        if outcome.secret.x.dim() != 5:
            continue
        shown = {"original": outcome.secret.x}
        shown |= {f"frame {i}": frame for i, frame in outcome.reconstruction.frames.items()}
        shown["found"] = outcome.reconstruction.x
        for name, x in shown.items():
            arrays[f"{number}/{name}"] = (
                x[:KEPT, 0].detach().clamp(0, 1).nan_to_num(0.5).cpu().numpy().astype("float32")
            )
    if arrays:
        whole = io.BytesIO()
        np.savez_compressed(whole, **arrays)
        write_whole(path, whole.getvalue(), mode=0o600)


def draw_frames(outcomes: Sequence[AttackResult], path: Path) -> None:
    """A row for each trial: the first victim's original, its reconstruction at some iterations, and the end."""
    lines = []
    for outcome in outcomes:
        if outcome.secret.x.dim() == 5:
            pictures = [("original", outcome.secret.x[0, 0])]
            pictures += [(str(i), frame[0, 0]) for i, frame in outcome.reconstruction.frames.items()]
            lines.append((outcome.trial.strategy, [*pictures, ("end", outcome.reconstruction.x[0, 0])]))
    if lines:
        path.touch(mode=0o600)  # it shows training examples
        path.chmod(0o600)
        draw_grid(lines, path)


def _pixels(image: Tensor) -> Any:
    image = image.detach().cpu().clamp(0, 1).float()
    if len(image) != 3:
        image = image.mean(0, keepdim=True)  # neither grey nor colours: what the channels have in common
    return image.permute(1, 2, 0).squeeze(2).numpy()
