"""The catalogue: which data sets there are, what they hold, and which files they are read from. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from gradveil.errors import UnknownNameError
from gradveil.training.data._description import Description


def _idx_files(folder: str) -> tuple[tuple[str, ...], ...]:
    stems = (f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1"))
    return tuple((f"{folder}/{stem}", f"{folder}/{stem}.gz") for stem in stems)


_CIFAR_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_PURCHASE_FILES = tuple(f"purchase/{n}" for n in ("dataset_purchase", "dataset_purchase.csv", "purchase.csv"))
_SHOKRI = "https://github.com/privacytrustlab/datasets"


def _purchase(classes: int) -> Description:
    return Description(
        name=f"purchase-{classes}",
        title=f"Purchase: shopping histories, clustered into {classes} classes",
        kind="tabular",
        train=10_000,
        test=2_000,
        input_shape=(600,),
        classes=classes,
        formats="CSV: label, 600 binary columns",
        source=f"{_SHOKRI} (dataset_purchase.tgz, 197324 records)",
        licence="derived from Kaggle's Acquire Valued Shoppers Challenge, whose terms apply",
        files=(_PURCHASE_FILES,),
    )


_ALL = (
    Description(
        name="digits",
        title="Handwritten digits, 8x8, of scikit-learn",
        kind="image",
        train=1_347,
        test=450,
        input_shape=(1, 8, 8),
        classes=10,
        formats="comes with scikit-learn; no file needed",
        source="installed with gradveil (UCI Optical Recognition of Handwritten Digits, its test part)",
        licence="CC BY 4.0 (UCI Machine Learning Repository)",
    ),
    Description(
        name="mnist",
        title="MNIST handwritten digits",
        kind="image",
        train=60_000,
        test=10_000,
        input_shape=(1, 28, 28),
        classes=10,
        formats="idx, plain or .gz",
        source="https://ossci-datasets.s3.amazonaws.com/mnist/",
        licence="CC BY-SA 3.0 (LeCun, Cortes, Burges)",
        files=_idx_files("mnist"),
        downloadable=True,
    ),
    Description(
        name="fashion-mnist",
        title="Fashion-MNIST clothing",
        kind="image",
        train=60_000,
        test=10_000,
        input_shape=(1, 28, 28),
        classes=10,
        formats="idx, plain or .gz",
        source="https://github.com/zalandoresearch/fashion-mnist",
        licence="MIT (Zalando SE)",
        files=_idx_files("fashion_mnist"),
        downloadable=True,
    ),
    Description(
        name="cifar10",
        title="CIFAR-10 objects",
        kind="image",
        train=50_000,
        test=10_000,
        input_shape=(3, 32, 32),
        classes=10,
        formats="binary version: rows of label and 3072 bytes",
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence="no licence stated; cite Krizhevsky 2009",
        files=tuple((f"cifar10/cifar-10-batches-bin/{name}",) for name in _CIFAR_FILES),
        downloadable=True,
    ),
    Description(
        name="lfw",
        title="Labeled Faces in the Wild, people with at least 20 images",
        kind="image",
        train=2_267,
        test=756,
        input_shape=(3, 32, 32),
        classes=62,
        formats="one folder of .jpg or .png files per person, 250x250 or 32x32",
        source="http://vis-www.cs.umass.edu/lfw/ (lfw.tgz)",
        licence="for research; its site warns against any claim of commercial suitability",
        files=(("lfw/<Person_Name>/<Person_Name>_0001.jpg",),),
        downloadable=True,
    ),
    _purchase(10),
    _purchase(50),
    Description(
        name="location",
        title="Location: Foursquare check-ins in Bangkok",
        kind="tabular",
        train=4_008,
        test=1_002,
        input_shape=(446,),
        classes=30,
        formats='CSV: quoted label "1" to "30", 446 binary columns',
        source=f"{_SHOKRI} (dataset_location.tgz, file bangkok)",
        licence="published for research with Shokri et al. 2017; no licence stated",
        files=(("location/bangkok",),),
    ),
    Description(
        name="retail-10",
        title=(
            "Retail: real market baskets of FIMI, labels made by clustering into 10 classes; "
            "NOT Purchase, but a stand-in because Purchase could not be had"
        ),
        kind="tabular",
        train=10_000,
        test=2_000,
        input_shape=(600,),
        classes=10,
        formats="CSV: two labels (10 and 20 classes), 600 binary columns",
        source=(
            "the FIMI repository, http://fimi.uantwerpen.be/data/ (frequent itemset mining data sets, file retail, "
            "88162 baskets) by this rule: a line per basket that holds at least three of the 600 most frequent "
            "items (64185 baskets, in their order), a column per item, the most frequent first, and before them "
            "the k-means labels of these rows, from 0, for 10 and for 20 classes"
        ),
        licence="any use with acknowledgment and a copy of the work to Tom Brijs, who gave the baskets to FIMI",
        files=(("retail/retail600.csv",),),
        as_published=False,
    ),
)

CATALOGUE: Mapping[str, Description] = {description.name: description for description in _ALL}


def describe(name: str) -> Description:
    """The catalogue's entry, or an :class:`UnknownNameError` that names the near ones."""
    if name not in CATALOGUE:
        raise UnknownNameError("data set", name, CATALOGUE)
    return CATALOGUE[name]
