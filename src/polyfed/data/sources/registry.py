"""Registers every data source under its name."""

from polyfed.data.pooled_dataset import Source
from polyfed.data.sources.arrays import Npz, Parquet
from polyfed.data.sources.blobs import Blobs
from polyfed.data.sources.folders import ImageFolder, ImageTable
from polyfed.data.sources.published.heart import Heart
from polyfed.data.sources.published.mosaics import FashionMosaics
from polyfed.data.sources.published.tweets import Sentiment140
from polyfed.data.sources.published.vision import CIFAR10, CIFAR100, EMNIST, MNIST, Digits, FashionMNIST
from polyfed.data.sources.published.xray import ChestXray14
from polyfed.data.sources.table_file import TableFile
from polyfed.data.sources.tagged_sentences import TaggedSentences

SOURCES: dict[str, type[Source]] = {
    "digits": Digits,
    "heart": Heart,
    "fashion_mnist": FashionMNIST,
    "fashion_mosaics": FashionMosaics,
    "blobs": Blobs,
    "mnist": MNIST,
    "emnist": EMNIST,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "sentiment140": Sentiment140,
    "chest_xray14": ChestXray14,
    "parquet": Parquet,
    "imagefolder": ImageFolder,
    "image_table": ImageTable,
    "npz": Npz,
    "table": TableFile,
    "tagged_sentences": TaggedSentences,
}
