"""`predict` of files and folders, its table and .csv, and images with alpha from `add` onwards."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import subprocess
import sys

import numpy as np
import pytest
from command import covnorm
from PIL import Image

from torch_covnorm import records
from torch_covnorm.data import load_sample
from torch_covnorm.engines.export import FORMAT


@pytest.fixture
def house(built, monkeypatch):
    """The folder of the built ecology and its images; tests leave them as they were."""
    monkeypatch.setenv("COVNORM_ECOLOGY", str(built[0] / "house"))
    return built[0]


@pytest.fixture
def folder(house, tmp_path):
    """A folder with six images on three levels, and files that are not images."""
    found = sorted((house / "photos").rglob("*.png"))
    places = ["b/2.png", "b/1.png", "a.png", "b/c/3.PNG", "z.png", "b/10.png"]
    for place, file in zip(places, found[::4], strict=False):
        (tmp_path / "in" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / place).write_bytes(file.read_bytes())
    for name in ("notes.txt", ".hidden.png", "b/table.csv"):
        (tmp_path / "in" / name).write_text("not an image")
    return tmp_path / "in"


SORTED = ["a.png", "b/1.png", "b/10.png", "b/2.png", "b/c/3.PNG", "z.png"]


def test_a_folder_is_searched_and_sorted_and_mixes_with_files(folder, house):
    single = sorted((house / "photos").rglob("*.png"))[1]
    ran = covnorm("predict", "clipart", single, folder, single, "--json")
    assert ran.code == 0, ran.err
    expected = [str(single), *(str(folder / name) for name in SORTED), str(single)]
    assert [row["file"] for row in ran.json] == expected
    assert ran.json[0] == ran.json[-1]
    assert all(set(row) == {"file", "label", "probability", "top"} for row in ran.json)
    assert len({row["probability"] for row in ran.json}) > 3
    (alone,) = covnorm("predict", "clipart", folder / "b" / "2.png", "--json").json
    assert alone["label"] == ran.json[4]["label"]
    assert alone["probability"] == pytest.approx(ran.json[4]["probability"], abs=1e-5)


def test_more_images_than_a_batch_are_all_answered(folder, monkeypatch):
    whole = covnorm("predict", "clipart", folder, "--json").json
    monkeypatch.setattr("torch_covnorm.cli.predict.BATCH", 4)
    ran = covnorm("predict", "clipart", folder, "--json")
    assert "6 images" in ran.err
    for row, other in zip(ran.json, whole, strict=True):
        assert (row["file"], row["label"]) == (other["file"], other["label"])
        assert row["probability"] == pytest.approx(other["probability"], abs=1e-5)


def test_an_unreadable_image_in_a_folder_is_reported_and_the_rest_is_answered(folder):
    (folder / "b" / "1.png").write_bytes(b"damaged")
    (folder / "b" / "5.png").write_bytes(b"")
    ran = covnorm("predict", "clipart", folder, "--json", "--quiet")
    assert ran.code == 2
    rest = [str(folder / name) for name in SORTED if name != "b/1.png"]
    assert [row["file"] for row in ran.json] == rest
    first, second = ran.err.splitlines()
    assert first.startswith(f"covnorm: {folder / 'b' / '1.png'}: not an image")
    assert second.startswith(f"covnorm: {folder / 'b' / '5.png'}: not an image: the file is empty")
    # A file that is named explicitly is an error at once, as before.
    ran = covnorm("predict", "clipart", folder / "a.png", folder / "b" / "1.png")
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.err.splitlines()) == 1
    (folder / "empty").mkdir()
    ran = covnorm("predict", "clipart", folder / "empty")
    assert (ran.code, ran.out) == (2, "")
    assert "empty: no images in this folder" in ran.err


def test_csv_has_the_answers_of_json(folder, tmp_path):
    (folder / 'b, "c".png').write_bytes((folder / "a.png").read_bytes())
    expected = covnorm("predict", "clipart", folder, "--json", "--top", 3).json
    ran = covnorm("predict", "clipart", folder, "--csv", tmp_path / "out.csv", "--top", 3)
    assert ran.code == 0, ran.err
    assert "out.csv (7 images)" in ran.out
    text = (tmp_path / "out.csv").read_text()
    assert text.startswith("file,label,probability,label_2,probability_2,label_3,probability_3\n")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 7
    for row, answer in zip(rows, expected, strict=True):
        assert (row["file"], row["label"]) == (answer["file"], answer["label"])
        assert float(row["probability"]) == answer["probability"]
        assert (row["label_3"], float(row["probability_3"])) == tuple(answer["top"][2].values())
    assert covnorm("predict", "clipart", folder, "--csv", "-", "--top", 3).out == text


def test_csv_beside_json_and_where_it_cannot_be_written(folder, tmp_path):
    both = covnorm("predict", "clipart", folder, "--csv", tmp_path / "out.csv", "--json")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert [row["file"] for row in rows] == [row["file"] for row in both.json]
    refused = covnorm("predict", "clipart", folder, "--csv", "-", "--json")
    assert (refused.code, refused.out) == (2, "")
    assert "Give --csv a file" in refused.err
    nowhere = covnorm("predict", "clipart", folder, "--csv", tmp_path / "no" / "o.csv")
    assert nowhere.code == 2
    assert "no/o.csv: No such file" in nowhere.err


def assert_whole(shown, answers):
    """Every answer stands in a line of its own: probability, label, file, then the others."""
    head, *lines = shown.splitlines()
    assert head.split() == ["probability", "%", "answer", "image", "next", "best"]
    for line, answer in zip(lines, answers, strict=True):
        chance, label, rest = line.split(maxsplit=2)
        assert (chance, label) == (f"{100 * answer['probability']:.1f}", answer["label"])
        file, others = rest.split(maxsplit=1)
        assert file == answer["file"]
        pairs = [f"{t['label']} {100 * t['probability']:.1f}" for t in answer["top"][1:]]
        assert others.rstrip() == ", ".join(pairs)


def test_the_table_begins_with_the_answer_and_is_never_cut(folder):
    deep = folder / ("long-name-" * 20) / ("another-" * 25)
    deep.mkdir(parents=True)
    (deep / "x.png").write_bytes((folder / "a.png").read_bytes())
    answers = covnorm("predict", "clipart", folder, "--json").json
    assert len(answers) == 7
    assert_whole(covnorm("predict", "clipart", folder).out, answers)


@pytest.mark.slow
def test_a_narrow_pipe_or_terminal_cuts_nothing(folder):
    command = [sys.executable, "-m", "torch_covnorm", "predict", "clipart", str(folder)]
    narrow = {**os.environ, "COLUMNS": "40"}
    answers = json.loads(
        subprocess.run([*command, "--json"], capture_output=True, check=True).stdout
    )
    piped = subprocess.run(command, capture_output=True, text=True, check=True, env=narrow)
    assert_whole(piped.stdout, answers)
    controller, terminal = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    assert os.get_terminal_size(terminal).columns == 40
    plain = {**os.environ, "NO_COLOR": "1", "TERM": "xterm"}
    plain.pop("COLUMNS", None)
    process = subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE, env=plain)
    os.close(terminal)
    seen = b""
    while True:
        try:
            data = os.read(controller, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        seen += data
    os.close(controller)
    assert process.communicate()[1] == b""
    assert process.returncode == 0
    text = seen.decode().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert_whole(text.replace("\r\n", "\n"), answers)


def test_a_row_of_any_length_is_printed_whole(capsys):
    from torch_covnorm.cli.screen import Screen, table

    long = "x" * 50_000
    Screen().result(None, table("", ("n", "text"), [(1.5, long), (10.0, "y")]))
    out = capsys.readouterr().out
    assert long in out
    assert "…" not in out
    assert [line.split()[0] for line in out.splitlines()] == ["n", "1.5", "10.0"]
    assert out.splitlines()[1].startswith("  1.5")  # aligned right, also in the first column


# ── alpha, from `add` onwards ────────────────────────────────────────────────────────────────────

BACKGROUND = "#0a7fc3"


def drawings(place):
    """Write real images as drawings with alpha: transparent where they were nearly white."""
    sample = load_sample("clipart")
    for i in range(24):
        rgb = sample.x_train[i, :, 10:54].permute(1, 2, 0).numpy()
        alpha = np.clip(4 * (255 - rgb.min(axis=2).astype(int)), 0, 255).astype(np.uint8)
        file = place / ("even" if i % 2 else "odd") / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.dstack([rgb, alpha])).save(file)
    return place


def by_hand(file, to):
    """Composite and letterbox with float64 and Pillow; write an opaque square of 32 pixels."""
    pixels = np.asarray(Image.open(file)).astype(np.float64)
    color, a = pixels[..., :3], pixels[..., 3:] / 255
    flat = np.rint(a * color + (1 - a) * np.array([0x0A, 0x7F, 0xC3])).astype(np.uint8)
    assert flat.shape == (44, 64, 3)
    small = Image.fromarray(flat).resize((32, 22), Image.Resampling.BILINEAR)
    square = Image.new("RGB", (32, 32), BACKGROUND)
    square.paste(small, (0, 5))
    square.save(to)
    return to


@pytest.mark.slow
def test_alpha_is_the_same_in_training_prediction_and_the_exported_record(tmp_path, monkeypatch):
    monkeypatch.setenv("COVNORM_ECOLOGY", str(tmp_path / "house"))
    images = drawings(tmp_path / "drawings")
    init = covnorm("init", tmp_path / "house", "--backbone", "resnet26", "--weights", "random")
    assert init.code == 0, init.err
    options = ("--size", 32, "--fit", "letterbox", "--background", BACKGROUND)
    quick = ("--epochs", 1, "--method", "bn", "--json")
    ran = covnorm("add", "icons", images, *options, *quick)
    assert ran.code == 0, ran.err
    assert f"letterbox; background {BACKGROUND}" in ran.err
    inputs = covnorm("show", "icons", "--json").json["preprocessing"]
    assert (inputs["size"], inputs["fit"], inputs["background"]) == (32, "letterbox", BACKGROUND)
    assert inputs["resize"] == "bilinear, antialias"
    assert covnorm("eval", "icons", "--json").json["accuracy"] == ran.json["accuracy"]["final"]
    files = sorted(images.rglob("*.png"))
    flat = [by_hand(file, tmp_path / f"{i}.png") for i, file in enumerate(files)]
    found = covnorm("predict", "icons", *files, "--json").json
    expected = covnorm("predict", "icons", *flat, "--json").json
    for row, other in zip(found, expected, strict=True):
        assert row["probability"] == pytest.approx(other["probability"], abs=0.02)
    opaque = []
    for i, file in enumerate(files):  # a control: without alpha, the probabilities differ
        opaque.append(tmp_path / f"opaque-{i}.png")
        Image.fromarray(np.asarray(Image.open(file))[..., :3].copy()).save(opaque[-1])
    wrong = covnorm("predict", "icons", *opaque, "--json").json
    differ = [abs(a["probability"] - b["probability"]) for a, b in zip(found, wrong, strict=True)]
    assert max(differ) > 0.02
    ran = covnorm("export", "icons", "--to", "state-dict", "--out", tmp_path / "out", "--json")
    record = records.read(tmp_path / "out" / "icons.safetensors.json", FORMAT)
    assert record["preprocessing"] == inputs
    assert covnorm("add", "x", images, "--background", "reddish", *quick).code == 2
