"""``gradveil init``: a training script for your own CSV file or folder of images, with a target epsilon."""

from __future__ import annotations

from pathlib import Path

import click

from gradveil.errors import ConfigError, RunDirectoryError

_TEMPLATES = Path(__file__).parent / "templates"


@click.command("init")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--csv", type=click.Path(path_type=Path), metavar="FILE", help="A table with a header; one row a record.")
@click.option("--label", help="With --csv: the column that is to be predicted.")
@click.option("--images", type=click.Path(path_type=Path), metavar="FOLDER", help="Images, in one sub-folder a class.")
@click.option(
    "--size", default=32, show_default=True, help="With --images: pixels on a side, to which they are scaled."
)
@click.option("--epsilon", type=float, default=3.0, show_default=True, help="The proved epsilon of the whole training.")
def command(folder: Path, csv: Path | None, label: str | None, images: Path | None, size: int, epsilon: float) -> None:
    """Write FOLDER/private_training.py: data, model and private loop, yours to change. Then: python private_training.py

    It trains once with sigma calibrated to --epsilon, keeps a full run directory beside it, and says which command
    comes next. Columns are scaled by the bounds that you write into the script, never by statistics of the data.
    """
    if (csv is None) == (images is None):
        raise ConfigError("give either --csv FILE with --label COLUMN, or --images FOLDER.")
    if not epsilon > 0 or size < 4:
        raise ConfigError(f"epsilon is {epsilon:g} and size {size}: give a positive epsilon and at least 4 pixels.")
    script = folder / "private_training.py"
    if script.exists():
        raise RunDirectoryError(f"{script} exists: it is not written over. Give another folder.")
    template = f"{'images' if images is not None else 'csv'}.py.txt"
    values = {"EPSILON": repr(epsilon), "SIZE": repr(size)}
    if csv is not None:
        values |= {"FILE": repr(str(csv.resolve())), "LABEL": repr(label), "COLUMNS": repr(_columns(csv, label))}
    if images is not None:
        if not images.is_dir() or not any(path.is_dir() for path in images.iterdir()):
            raise ConfigError(f"{images} is not a folder with one sub-folder for each class.")
        values["FILE"] = repr(str(images.resolve()))
    text = (_TEMPLATES / template).read_text()
    for name, value in values.items():
        text = text.replace(f"<<{name}>>", value)
    folder.mkdir(parents=True, exist_ok=True)
    script.write_text(text)
    click.echo(script)
    click.echo(
        f"next: look at the bounds and the model in it, then: cd {folder} && python private_training.py", err=True
    )


def _columns(path: Path, label: str | None) -> list[str]:
    import csv

    if label is None:
        raise ConfigError("--csv needs --label, the column that is to be predicted.")
    try:
        with open(path, newline="") as file:
            header = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a table: {error}.") from None
    if label not in header:
        raise ConfigError(f"{path} has no column {label!r}. Its columns: {', '.join(header)[:300]}.")
    return [name for name in header if name != label]
