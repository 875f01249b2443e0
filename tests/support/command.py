"""Run the command in this process as a terminal would, and write small sets of real images."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from torch_covnorm.cli import main
from torch_covnorm.data import load_sample

QUICK = ("--epochs", 1, "--size", 32, "--threads", 2, "--quiet")  # settings of a short `add`


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def covnorm(*args: object) -> Ran:
    """Run `covnorm` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", ["covnorm", *map(str, args)]):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
    return Ran(code, out.getvalue(), err.getvalue())


def photos(folder: Path, n: int = 60, classes: int = 4, name: str = "clipart") -> Path:
    """Write a folder of real images with one folder per class."""
    sample = load_sample(name)
    chosen = (sample.y_train < classes).nonzero().flatten()[:n].tolist()
    for i in chosen:
        place = folder / sample.classes[int(sample.y_train[i])]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(sample.x_train[i].permute(1, 2, 0).numpy()).save(place / f"{i}.png")
    return folder


def npz(file: Path, n: int = 60, test: int = 30, name: str = "digits") -> Path:
    """Write an .npz of real images."""
    s = load_sample(name)
    x, y = s.x_train[:n].permute(0, 2, 3, 1).numpy(), s.y_train[:n].numpy()
    x_test, y_test = s.x_test[:test].permute(0, 2, 3, 1).numpy(), s.y_test[:test].numpy()
    np.savez(file, x_train=x, y_train=y, x_test=x_test, y_test=y_test, classes=s.classes)
    return file
