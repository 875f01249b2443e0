"""Small archives in the layouts of the packages that the benchmarks read."""

import gzip
import hashlib
import io
import json
import struct
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
from PIL import Image

from benchmarks import fetch
from benchmarks.readers import CLASSES


def tgz(files):
    """{path: bytes}, or {path: name that it is a symbolic link to}."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for path, blob in files.items():
            member = tarfile.TarInfo(path)
            if isinstance(blob, str):
                member.type, member.linkname = tarfile.SYMTYPE, blob
                tar.addfile(member)
            else:
                member.size = len(blob)
                tar.addfile(member, io.BytesIO(blob))
    return out.getvalue()


def zipped(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        for path, blob in files.items():
            packed.writestr(path, blob)
    return out.getvalue()


def place(monkeypatch, name, files, pack=tgz):
    """An archive with these files in the data's folder, in the cache under its own SHA-256."""
    package = fetch.PACKAGES[name]
    blob = pack({package.folder + path: content for path, content in files.items()})
    return place_blob(monkeypatch, name, blob)


def place_blob(monkeypatch, name, blob):
    changed = replace(fetch.PACKAGES[name], sha256=hashlib.sha256(blob).hexdigest())
    monkeypatch.setitem(fetch.PACKAGES, name, changed)
    file = fetch._place(changed)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(blob)
    return file


def picture(image, format="PNG"):
    out = io.BytesIO()
    Image.fromarray(image).save(out, format)
    return out.getvalue()


def idx(values):
    values = np.asarray(values, np.uint8)
    return (
        bytes([0, 0, 8, values.ndim])
        + struct.pack(f">{values.ndim}I", *values.shape)
        + bytes(values.tobytes())
    )


def noise(rng, label, *shape):
    """Random pixels, the first of which is the label."""
    image = rng.integers(0, 200, shape, dtype=np.uint8)
    image[0, 0] = label
    return image


def objects(rng):
    """30 training and 12 test images per class; the first test image is in train too."""
    test = [noise(rng, label, 32, 32, 3) for label in range(10) for _ in range(12)]
    train = [noise(rng, label, 32, 32, 3) for label in range(10) for _ in range(30)]
    train[5:6] = test[:1]
    batch = [picture(np.stack(part).reshape(-1, 1024, 3)) for part in (train[:150], train[150:])]
    return {
        "data_batch_1.png": batch[0],
        "data_batch_2.png": batch[1],
        "test_batch.png": picture(np.stack(test).reshape(-1, 1024, 3)),
        "train_lables.json": json.dumps([i // 30 for i in range(300)]).encode(),
        "test_lables.json": json.dumps([i // 12 for i in range(120)]).encode(),
    }


def digits(rng, ending=""):
    files = {}
    for part, n in (("train", 30), ("t10k", 12)):
        images = [noise(rng, label, 28, 28) for label in range(10) for _ in range(n)]
        files[f"{part}-images-idx3-ubyte{ending}"] = idx(images)
        files[f"{part}-labels-idx1-ubyte{ending}"] = idx([i // n for i in range(10 * n)])
    return {path: gzip.compress(blob) if ending else blob for path, blob in files.items()}


def products(rng):
    return digits(rng, ".gz")


def sketches(rng):
    """25 drawings per class, one empty and one nearly so; 20 × 20 pixels at the top left."""
    files = {}
    for name in CLASSES["sketches"]:
        ink = np.zeros((25, 28, 28))
        ink[:, :20, :20] = rng.random((25, 20, 20)) > 0.5
        ink[7] = 0
        ink[8] = 0
        ink[8, 3:5] = rng.random((2, 28)) > 0.6
        lines = "\n".join(json.dumps(drawing.ravel().tolist()) for drawing in ink)
        files[f"{name}.ndjson.gz"] = gzip.compress(lines.encode())
    return files


def drawings(rng):
    """20 per folder, 8 in "tools", and files that must be left out."""
    files = {}
    for label, folder in enumerate(CLASSES["drawings"]):
        for i in range(8 if folder == "tools" else 20):
            image = noise(rng, label, 40, 30, 4)
            image[..., 3] = 255
            files[f"{folder}/{i}.png"] = picture(image)
    files["buildings/0.png"] = files["people/stylized_yoga_person_1.png"] = files["food/0.png"]
    files["tools/weapons/0.png"] = picture(np.zeros((9, 9, 4), np.uint8))
    return files


def solar(rng):
    """80, 40, 20 and 60 cells, evenly lit: the darker, the more of a defect."""
    files, lines = {}, []
    for label, n in enumerate((80, 40, 20, 60)):
        for i in range(n):
            path = f"images/cell{label}{i:02}.png"
            image = np.full((300, 300), 200 - 50 * label, np.uint8)
            image[:150, :150] = rng.integers(0, 200)
            image[150:, 150:] = i
            files[path] = picture(image)
            lines.append(f"{path}  {label / 3:.16f}  {'mono' if i % 2 else 'poly'}")
    return files | {"labels.csv": ("\n".join(lines) + "\n").encode()}


def faces(rng):
    """Two stripes: the upper half has the person's brightness, the lower the picture's."""
    files = {"README": b"The ORL Database of Faces"}
    for person in range(40):
        for i in range(10):
            image = np.full((112, 92), 20 * i, np.uint8)
            image[:56] = 6 * person
            files[f"s{person + 1}/{i + 1}.pgm"] = picture(image, "PPM")
    return files


MAKERS = {m.__name__: m for m in (objects, products, digits, sketches, drawings, solar, faces)}
PACKS = {"solar": zipped}  # its package is a wheel


def place_small(monkeypatch, name, seed=0):
    """Place an archive in the domain's layout with a few images."""
    files = MAKERS[name](np.random.default_rng(seed))
    return place(monkeypatch, name, files, PACKS.get(name, tgz))
