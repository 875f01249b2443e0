"""The Decathlon's score: the paper's rows, and files of predictions against files of labels."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from torch_covnorm import CovNormError
from torch_covnorm.data import (
    BASELINES,
    PUBLISHED,
    decathlon_score,
    read_annotations,
    score_predictions,
    score_results,
    write_predictions,
)

DOMAINS = [
    *("imagenet12", "aircraft", "cifar100", "daimlerpedcls", "dtd", "gtsrb"),
    *("vgg-flowers", "omniglot", "svhn", "ucf101"),
]
# Table 3 of the paper; its own rounding is why a few points are allowed.
ROWS = {
    "RA": ([59.67, 61.87, 81.20, 93.88, 57.13, 97.57, 81.67, 89.62, 96.13, 50.12], 2621),
    "DAN": ([57.74, 64.12, 80.07, 91.3, 56.54, 98.46, 86.05, 89.67, 96.77, 49.38], 2851),
    "Piggyback": ([57.69, 65.29, 79.87, 96.99, 57.45, 97.27, 79.09, 87.63, 97.24, 47.48], 2838),
    "CovNorm": ([60.37, 69.37, 81.34, 98.75, 59.95, 99.14, 83.44, 87.69, 96.55, 48.92], 3713),
}
TOLERANCE = 3


def row(name):
    return dict(zip(DOMAINS, ROWS[name][0], strict=True))


def naive(accuracies, factor=2, exponent=2, floor=True):
    """The formula again, with its constants as parameters."""
    total = 0.0
    for domain, accuracy in accuracies.items():
        worst = factor * (100 - BASELINES[domain])
        share = (worst - (100 - accuracy)) / worst
        total += 1000 * (max(0.0, share) if floor else share) ** exponent
    return total


@pytest.mark.parametrize("name", ROWS)
def test_the_papers_rows_come_out(name):
    score = decathlon_score(row(name))
    assert abs(score["total"] - ROWS[name][1]) <= TOLERANCE
    assert list(score["points"]) == DOMAINS
    assert score["total"] == pytest.approx(sum(score["points"].values()), abs=1e-9)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("wrong", [{"factor": 1}, {"exponent": 1}, {"exponent": 3}])
def test_control_another_formula_misses_the_papers_rows(name, wrong):
    assert abs(naive(row(name)) - ROWS[name][1]) <= TOLERANCE
    assert abs(naive(row(name), **wrong) - ROWS[name][1]) > 100


def test_the_baseline_has_2500_points_and_perfection_10000():
    assert decathlon_score(BASELINES)["total"] == pytest.approx(2500)
    assert decathlon_score(dict.fromkeys(DOMAINS, 100))["total"] == pytest.approx(10000)


def test_an_error_beyond_twice_the_baselines_gives_nothing_and_not_more_again():
    assert decathlon_score({"svhn": 93.1})["total"] == pytest.approx(0, abs=1e-9)
    assert decathlon_score({"svhn": 20})["total"] == 0
    assert naive({"svhn": 20}, floor=False) > 1000  # the square without the floor


def test_a_subset_is_scored_over_itself():
    one, two = decathlon_score({"dtd": 60}), decathlon_score({"dtd": 60, "svhn": 97})
    assert list(one["points"]) == ["dtd"]
    assert two["total"] == one["total"] + two["points"]["svhn"]


def test_other_baselines_bring_the_formula_to_other_domains():
    score = decathlon_score({"digits": 95}, baselines={"digits": 90, "fashion": 80})
    assert score["total"] == pytest.approx(1000 * (15 / 20) ** 2)
    with pytest.raises(CovNormError, match=r"svhn.*digits"):
        decathlon_score({"svhn": 95}, baselines={"digits": 90})


def test_numbers_of_numpy_are_numbers():
    assert decathlon_score({"dtd": np.float32(55.5)})["total"] == pytest.approx(
        decathlon_score({"dtd": 55.5})["total"]
    )


@pytest.mark.parametrize("value", [-0.1, 100.1, float("nan"), float("inf"), "97", None, True])
def test_an_invalid_percentage_is_an_error(value):
    with pytest.raises(CovNormError, match="svhn"):
        decathlon_score({"dtd": 50, "svhn": value})
    with pytest.raises(CovNormError, match="baseline of 'svhn'"):
        decathlon_score({"svhn": 50}, baselines={"svhn": value})


def test_other_bad_input_is_refused():
    with pytest.raises(CovNormError, match=r"'aircaft'.*did you mean 'aircraft'"):
        decathlon_score({"aircaft": 50})
    for empty in ({}, None, []):
        with pytest.raises(CovNormError, match="no accuracies"):
            decathlon_score(empty)
    with pytest.raises(CovNormError, match="100"):
        decathlon_score({"a": 50}, baselines={"a": 100})


def test_the_table_holds_the_published_sizes():
    assert PUBLISHED.keys() == BASELINES.keys()
    assert sum(classes for classes, *_ in PUBLISHED.values()) == 3128
    assert PUBLISHED["aircraft"] == (100, 3334, 3333, 3333)
    tests = [3333, 10000, 19600, 1880, 12630, 8115, 26032, 3783, 6149, 48238]
    assert [test for *_, test in PUBLISHED.values()] == tests


def test_importing_the_data_package_loads_no_image_library():
    code = "import sys, torch_covnorm.data; print('PIL' in sys.modules)"
    run = [sys.executable, "-c", code]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "False\n"


# ── files ───────────────────────────────────────────────────────────────────────────────────────

TRUTH = {11: 503, 12: 501, 13: 502, 14: 503}


def labels(folder, name="labels.json", truth=TRUTH, **changes):
    data = {
        "images": [{"id": i, "file_name": f"data/x/{i}.jpg"} for i in truth],
        "annotations": [{"image_id": i, "category_id": c} for i, c in reversed(truth.items())],
        "categories": [{"id": c, "name": f"n{c}"} for c in (501, 502, 503, 504)],
        **changes,
    }
    file = folder / name
    file.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    return file


def predictions(folder, predicted, name="predictions.json"):
    file = folder / name
    rows = predicted.items() if isinstance(predicted, dict) else predicted
    file.write_text(json.dumps([{"image_id": i, "category_id": c, "score": 1} for i, c in rows]))
    return file


def test_accuracy_is_by_image_id_and_not_by_order(tmp_path):
    predicted = {13: 501, 14: 503, 12: 501, 11: 503}
    got = score_predictions(predictions(tmp_path, predicted), labels(tmp_path))
    assert got == 75.0
    in_order = [a == b for a, b in zip(predicted.values(), TRUTH.values(), strict=True)]
    assert 100 * sum(in_order) / 4 != got


def test_all_right_is_100_and_all_wrong_is_0(tmp_path):
    file = labels(tmp_path)
    assert score_predictions(predictions(tmp_path, TRUTH), file) == 100.0
    assert score_predictions(predictions(tmp_path, dict.fromkeys(TRUTH, 504)), file) == 0.0


@pytest.mark.parametrize(
    ("predicted", "words"),
    [
        ({11: 503, 12: 501, 13: 502}, "1 of the 4 images.*14"),
        ([], "4 of the 4"),
        ({**TRUTH, 15: 501}, "image_id 15 is not in"),
        ([*TRUTH.items(), (11, 503)], "image_id 11 is predicted twice"),
        ({**TRUTH, 11: 2}, "category_id 2 .*not labels"),
        ({**TRUTH, 11: "503"}, "category_id"),
        ({**TRUTH, 11: None}, "category_id"),
        ({**TRUTH, 11: 503.0}, "category_id"),
        ({**TRUTH, 11: True}, "category_id"),
        ([*list(TRUTH.items())[1:], ("11", 503)], "image_id"),
    ],
)
def test_predictions_that_do_not_fit_the_labels_are_refused(predicted, words, tmp_path):
    with pytest.raises(CovNormError, match=rf"predictions\.json: .*{words}"):
        score_predictions(predictions(tmp_path, predicted), labels(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "null", '{"image_id": 1}', "[1]", "[null]", "\xff", "3"])
def test_malformed_files_are_named(text, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_bytes(text.encode("latin-1"))
    with pytest.raises(CovNormError, match=r"bad\.json"):
        score_predictions(bad, labels(tmp_path))
    with pytest.raises(CovNormError, match=r"bad\.json"):
        score_predictions(predictions(tmp_path, TRUTH), bad)


def test_a_file_nested_without_end_is_refused(tmp_path):
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 200_000)
    with pytest.raises(CovNormError, match=r"deep\.json"):
        score_predictions(deep, labels(tmp_path))


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(CovNormError, match=r"nowhere\.json"):
        score_predictions(predictions(tmp_path, TRUTH), tmp_path / "nowhere.json")
    with pytest.raises(CovNormError, match=r"nowhere\.json"):
        score_predictions(tmp_path / "nowhere.json", labels(tmp_path))
    with pytest.raises(CovNormError, match=": Is a directory"):
        score_predictions(predictions(tmp_path, TRUTH), tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"annotations": []}, "image 11 has no annotation.*stripped"),
        ({"annotations": None}, "stripped"),
        ({"annotations": [{"image_id": 99, "category_id": 501}]}, "image 99"),
        ({"annotations": [{"image_id": 11, "category_id": 501}] * 2}, "image 11 has two"),
        ({"annotations": {"image_id": 11}}, "list"),
        ({"images": None}, "images"),
        ({"images": [], "annotations": []}, "no images"),
        ({"images": [{"id": 11, "file_name": "a"}] * 2}, "11 occurs twice"),
        ({"images": [{"id": 11}]}, "11 has no file_name"),
        ({"images": [{"file_name": "a"}]}, "'id'"),
        ({"categories": [{"id": 501}] * 2}, "category id occurs twice"),
        ({"categories": ["a"]}, "categories must be objects"),
    ],
)
def test_invalid_annotation_files_are_errors(changes, words, tmp_path):
    with pytest.raises(CovNormError, match=rf"labels\.json: .*{words}"):
        score_predictions(predictions(tmp_path, TRUTH), labels(tmp_path, **changes))


def test_without_a_list_of_categories_any_category_may_be_predicted(tmp_path):
    file = labels(tmp_path, categories=None)
    assert score_predictions(predictions(tmp_path, {**TRUTH, 11: 7}), file) == 75.0


def test_annotations_keep_the_files_order_and_names(tmp_path):
    result = read_annotations(labels(tmp_path))
    assert next(iter(result.images.items())) == (11, "data/x/11.jpg")
    assert result.categories_of == TRUTH
    assert result.names[504] == "n504"


@pytest.mark.parametrize("layout", ["pairs", "folders"])
def test_the_score_of_many_files(layout, tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "l").mkdir()
    wrong = {"aircraft": {**TRUTH, 11: 504}, "dtd": {**TRUTH, 11: 504, 12: 504}}
    pairs = {}
    for name, predicted in wrong.items():
        files = predictions(tmp_path / "p", predicted, f"{name}.json")
        pairs[name] = (files, labels(tmp_path / "l", f"{name}_test.json"))
    labels(tmp_path / "l", "svhn_test.json")  # no predictions: it does not count
    got = (
        score_results(pairs) if layout == "pairs" else score_results(tmp_path / "p", tmp_path / "l")
    )
    assert got["accuracies"] == {"aircraft": 75.0, "dtd": 50.0}
    assert got["total"] == decathlon_score({"aircraft": 75.0, "dtd": 50.0})["total"]
    assert got["points"].keys() == {"aircraft", "dtd"}


def test_folders_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "l").mkdir()
    with pytest.raises(CovNormError, match="predictions"):
        score_results(tmp_path / "p", tmp_path / "l")
    with pytest.raises(CovNormError, match="labels"):
        score_results(tmp_path / "p")
    with pytest.raises(CovNormError, match="no accuracies"):
        score_results({})
    predictions(tmp_path / "p", TRUTH, "dtd.json")
    labels(tmp_path / "l", "dtd_val.json")
    with pytest.raises(CovNormError, match=r"dtd_test\.json"):  # never val in place of test
        score_results(tmp_path / "p", tmp_path / "l")
    assert score_results(tmp_path / "p", tmp_path / "l", part="val")["accuracies"]["dtd"] == 100
    predictions(tmp_path / "p", TRUTH, "dtdd.json")
    with pytest.raises(CovNormError, match=r"dtdd\.json.*did you mean 'dtd'"):
        score_results(tmp_path / "p", tmp_path / "l", part="val")


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_written_predictions_score_what_they_should(kind, tmp_path):
    ids, classes = kind(list(TRUTH)), kind([2, 0, 1, 0])  # the last is wrong
    file = write_predictions(tmp_path / "new" / "p.json", ids, classes, [501, 502, 503, 504])
    assert score_predictions(file, labels(tmp_path)) == 75.0
    assert json.loads(file.read_text())[0] == {"image_id": 11, "category_id": 503}
    plain = write_predictions(tmp_path / "q.json", ids, kind(list(TRUTH.values())))
    assert score_predictions(plain, labels(tmp_path)) == 100.0
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    ("ids", "values", "categories", "words"),
    [
        ([1, 2], [0], None, "2 image ids but 1"),
        ([1, 1], [0, 0], None, "twice"),
        ([1], [3], [7, 8, 9], "label 3, but there are 3"),
        ([1], [-1], [7, 8, 9], "label -1, but there are 3"),
        ([1], [0.5], None, "must be integers"),
        (torch.tensor([1.0]), [0], None, "must be integers"),
        (["1"], [0], None, "must be integers"),
    ],
)
def test_predictions_that_could_not_be_scored_are_not_written(
    ids, values, categories, words, tmp_path
):
    with pytest.raises(CovNormError, match=words):
        write_predictions(tmp_path / "p.json", ids, values, categories)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CovNormError, match=r"file/p\.json: "):
        write_predictions(tmp_path / "file" / "p.json", [1], [2])
