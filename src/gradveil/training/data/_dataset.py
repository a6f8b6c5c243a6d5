"""What a loaded data set is, and what the readers hand over before it becomes tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from gradveil.training.data._description import Description, Kind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor
    from torch.utils.data import TensorDataset


class Parts(NamedTuple):
    """What a reader returns: raw values (to be divided by ``scale``), labels from 0, and a note."""

    x_train: npt.NDArray[np.uint8]
    y_train: npt.NDArray[np.int64]
    x_test: npt.NDArray[np.uint8]
    y_test: npt.NDArray[np.int64]
    classes: int
    scale: int
    note: str


@dataclass(frozen=True, kw_only=True, eq=False)
class DataSet:
    """A data set in memory: float32 inputs in [0, 1] (images as NCHW), int64 labels in 0 .. classes - 1.

    ``note`` says what the data are and how they were split.
    """

    name: str
    x_train: Tensor = field(repr=False)
    y_train: Tensor = field(repr=False)
    x_test: Tensor = field(repr=False)
    y_test: Tensor = field(repr=False)
    classes: int
    input_shape: tuple[int, ...]
    kind: Kind
    note: str

    @property
    def train(self) -> TensorDataset:
        """Training inputs and labels as a torch data set."""
        from torch.utils.data import TensorDataset

        return TensorDataset(self.x_train, self.y_train)

    @property
    def test(self) -> TensorDataset:
        """Test inputs and labels as a torch data set."""
        from torch.utils.data import TensorDataset

        return TensorDataset(self.x_test, self.y_test)


def assemble(description: Description, parts: Parts) -> DataSet:
    """Turn raw parts into tensors."""
    import numpy as np
    import torch

    def inputs(raw: npt.NDArray[np.uint8]) -> Tensor:
        # Divided in numpy, which leaves a fresh array: torch warns about one that views a read-only buffer.
        return torch.from_numpy(np.divide(raw, np.float32(parts.scale), dtype=np.float32))

    return DataSet(
        name=description.name,
        x_train=inputs(parts.x_train),
        y_train=torch.from_numpy(parts.y_train),
        x_test=inputs(parts.x_test),
        y_test=torch.from_numpy(parts.y_test),
        classes=parts.classes,
        input_shape=tuple(parts.x_train.shape[1:]),
        kind=description.kind,
        note=parts.note,
    )
