"""Data sets: what gradveil can train on, where the files are, and a strict reader for each public format.

>>> from gradveil.training import data
>>> digits = data.load("digits")
>>> digits.input_shape, digits.classes, len(digits.train), len(digits.test)
((1, 8, 8), 10, 1347, 450)

Importing this package imports neither torch nor numpy: the catalogue must be quick to list.
"""

from gradveil.training.data._catalogue import CATALOGUE
from gradveil.training.data._dataset import DataSet
from gradveil.training.data._description import Description, data_directory
from gradveil.training.data._download import download
from gradveil.training.data._load import load

__all__ = ["CATALOGUE", "DataSet", "Description", "data_directory", "download", "load"]
