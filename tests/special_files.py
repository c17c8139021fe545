"""Files that are none, each made at a path: what a reader must refuse at once."""

import os


def pipe(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


def sparse(path):
    with path.open("wb") as file:
        file.truncate(2**40)


def nowhere(path):
    path.symlink_to("nothing-here")


def folder(path):
    path.mkdir()
