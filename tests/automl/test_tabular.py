"""Features beside formulas, and estimators that choose themselves: what they find, keep, refuse."""

import json
from dataclasses import replace

import numpy as np
import pytest

import hetu as ht
from hetu.automl import Algorithm, AutoClassifier, AutoRegressor, RandomSampler
from hetu.automl.features import Features, TableReader, informative
from hetu.automl.tabular import auc, chosen_together, log_loss
from hetu.ml import GaussianNB, LogisticRegression, Ridge

WORDS = np.array(["red", "blue", "green"])


def table(rows=200, seed=0):
    """Two numbers, one of no use, and a word that matters; classes by their sum."""
    rng = np.random.default_rng(seed)
    word, near, far = rng.integers(0, 3, rows), rng.normal(size=rows), rng.normal(size=rows)
    y = (near + 1.5 * (word == 1) + 0.3 * rng.normal(size=rows) > 0.5).astype(int)
    return {"near": near, "far": far, "word": WORDS[word]}, np.array(["no", "yes"])[y]


def read(X, **options):
    reader = TableReader(**options)
    return reader, reader.read(X)


def test_tables_are_read_alike_from_all_that_holds_columns():
    X, _ = table()
    _, one = read(X)
    array = np.stack([X["near"], X["far"], X["word"]], axis=1, dtype=object, casting="unsafe")
    _, other = read(array)

    class Frame:
        def __init__(self):
            self.columns = [*X]

        def __getitem__(self, name):
            return X[name]

    _, third = read(Frame())
    for found in (other, third):
        np.testing.assert_array_equal(found.numbers, one.numbers)
        np.testing.assert_array_equal(found.codes, one.codes)
    _, coded = read(np.array([[1, 5], [2, 7]]), categorical=[1])
    assert coded.codes.tolist() == [[0], [1]] and coded.numbers.tolist() == [[1], [2]]


def test_words_that_fit_has_not_seen_are_no_column():
    reader, seen = read({"word": WORDS, "x": np.arange(3)})
    new = reader.read({"word": np.array(["blue", "pink"]), "x": np.arange(2)})
    assert new.codes[:, 0].tolist() == [0, -1]
    features, y = Features(), np.eye(3)
    features.fit_transform(seen, y)
    assert features.transform(new)[:, 1:].tolist() == [[1, 0, 0], [0, 0, 0]]
    features = Features(words="target")
    features.fit_transform(seen, y)
    np.testing.assert_allclose(features.transform(new)[1, 1:], y.mean(axis=0))


@pytest.mark.parametrize("words", ["one_hot", "target", "counts"])
def test_words_of_other_rows_alone_are_not_known(words):
    _, seen = read({"word": np.array(["a", "b", "a", "z"]), "x": np.arange(4)})
    features, y = Features(words=words), np.eye(4)[:, :2]
    features.fit_transform(seen[:3], y[:3])
    strange = replace(seen, codes=np.full_like(seen.codes, -1))
    np.testing.assert_array_equal(features.transform(seen)[3], features.transform(strange)[3])


@pytest.mark.parametrize("words", ["one_hot", "target", "counts"])
def test_a_table_without_words_has_its_numbers(words):
    _, numbers = read(np.arange(8.0).reshape(4, 2) ** 2)
    assert Features(words=words).fit_transform(numbers, np.eye(4)[:, :2]).shape == (4, 2)


def test_numbers_that_are_words_are_the_same_in_any_dtype():
    codes = np.array([[0, 5], [2, 7], [0, 7]])
    reader, whole = read(codes, categorical=[1])
    np.testing.assert_array_equal(reader.read(codes.astype(float)).codes, whole.codes)
    _, listed = read([["a", 1.5], ["b", 2.5]])
    assert listed.numbers.tolist() == [[1.5], [2.5]] and listed.codes.tolist() == [[0], [1]]


@pytest.mark.parametrize("missing", [None, np.nan, ""])
def test_a_missing_word_is_the_empty_one(missing):
    reader, _ = read({"word": np.array(["red", missing, "blue", "None", "nan"], object)})
    assert reader.words["word"].tolist() == ["", "None", "blue", "nan", "red"]
    assert reader.read({"word": np.array([None, np.nan], object)}).codes.tolist() == [[0], [0]]
    _, mixed = read({"code": np.array([2, None, 2.0, True, 1], object)}, categorical=["code"])
    assert mixed.codes[:, 0].tolist() == [2, 0, 2, 1, 1]


def test_each_class_is_learned_and_held_back():
    X = np.random.default_rng(0).normal(size=(60, 2))
    y = np.repeat([0, 1, 2], [2, 30, 28])
    for held in (0.1, 0.25, 0.9):
        model = AutoClassifier(held=held)
        parts = model._divided(model._targets(y, len(y)))
        assert sorted(np.concatenate(parts)) == [*range(60)] and all({*y[part]} == {0, 1, 2} for part in parts)
    few = AutoClassifier(trials=4, algorithms=SMALL, schedule=ht.automl.ASHA(least=0.2, most=1.0)).fit(X, y)
    assert not any(trial.error for trial in few.search_.trials) and few.predict_proba(X).shape == (60, 3)


def test_means_of_targets_leave_the_row_out():
    """A word that each row has alone tells nothing of its own target."""
    rng = np.random.default_rng(0)
    _, own = read({"word": np.array([f"w{k}" for k in range(500)])})
    y = rng.integers(0, 2, 500).astype(float)[:, None]
    made = Features(words="target").fit_transform(own, y)
    assert informative(made, y)[0] < 0.02


def test_numbers_are_scaled_by_the_rows_of_fit():
    X = {"x": np.array([1.0, 3.0, 2.0, 100.0])}
    reader, seen = read(X)
    y, new = np.ones((4, 1)), reader.read({"x": np.array([2.5, -5.0])})
    features = Features("ranks")
    assert features.fit_transform(seen, y)[:, 0].tolist() == [-0.5, 0.0, -0.25, 0.25]
    assert features.transform(new)[:, 0].tolist() == [0.0, -0.5]
    logs = np.log1p(X["x"] - 1)
    np.testing.assert_allclose(Features("log").fit_transform(seen, y)[:, 0], (logs - logs.mean()) / logs.std())


def test_columns_that_tell_most_stay():
    X, y = table()
    _, seen = read(X)
    features = Features(keep=0.4)
    made = features.fit_transform(seen, (y == "yes").astype(float)[:, None])
    assert features.kept.tolist() == [0, 2] and made.shape == (200, 2)  # near, and blue


# -- estimators ------------------------------------------------------------------------------------------------

SMALL = {
    "bayes": Algorithm(GaussianNB, {"var_smoothing": ht.automl.Float(1e-9, 1.0, log=True)}),
    "logistic": Algorithm(LogisticRegression, {"C": ht.automl.Float(1e-3, 10.0, log=True)}),
}


def test_a_classifier_chooses_itself():
    (X, y), (new, wanted) = table(), table(seed=1)
    model = AutoClassifier(trials=14, algorithms=SMALL).fit(X, y)
    assert model.score(new, wanted) > 0.95 and (model.predict(new) == wanted).mean() > 0.85
    assert sum(weight for _, weight in model.ensemble_) == pytest.approx(1) and len(model.search_.trials) == 14
    np.testing.assert_allclose(model.predict_proba(new).sum(axis=1), 1)
    again = AutoClassifier(trials=14, algorithms=SMALL).fit(X, y)
    np.testing.assert_array_equal(again.predict_proba(new), model.predict_proba(new))
    assert {*model.why()} == {*model.search_.space.names}


def test_a_regressor_chooses_itself():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 4))
    y = X @ [1.0, 2.0, 0.0, 0.0] + 0.1 * rng.normal(size=200)
    small = {"ridge": Algorithm(Ridge, {"alpha": ht.automl.Float(1e-3, 1e3, log=True)})}
    model = AutoRegressor(trials=12, algorithms=small).fit(X[:150], y[:150])
    assert model.score(X[150:], y[150:]) > 0.95 and model.predict(X).shape == (200,)


def test_a_search_of_models_goes_on_from_its_log(tmp_path):
    X, y = table()
    options = {"algorithms": SMALL, "log": tmp_path / "log.jsonl", "sampler": RandomSampler()}
    AutoClassifier(trials=4, **options).fit(X, y)
    first = (tmp_path / "log.jsonl").read_text()
    model = AutoClassifier(trials=7, **options).fit(X, y)
    text = (tmp_path / "log.jsonl").read_text()
    assert text.startswith(first) and len(model.search_.trials) == 7
    begun = [json.loads(line)["begin"]["number"] for line in text.splitlines() if "begin" in line]
    assert begun == [*range(7)]
    with pytest.raises(ht.errors.CheckpointError, match="of another search: task"):
        AutoClassifier(trials=7, **options).fit(X, y[::-1])


def test_an_ensemble_is_no_worse_than_its_best():
    rng = np.random.default_rng(0)
    y = np.eye(2)[rng.integers(0, 2, 300)]
    shares = [np.clip(0.5 + 0.2 * (y - 0.5) + 0.2 * rng.normal(size=y.shape), 0.01, 0.99) for _ in range(8)]
    weights = chosen_together(shares, y, log_loss, 20)
    together = sum(weight * each for weight, each in zip(weights, shares))
    assert log_loss(y, together) > max(log_loss(y, each) for each in shares) and sum(w > 0 for w in weights) > 2
    assert auc(y, together) > max(auc(y, each) for each in shares)


@pytest.mark.parametrize(
    "change, told",
    [
        ({"X": {"a": np.array([1.0, np.nan] * 100)}}, "NaN or infinity in column a"),
        ({"X": {"a": [1.0, None] * 100}}, "NaN or infinity in column a"),
        ({"X": [[1.0, None]] * 200}, "NaN or infinity in column x1"),
        ({"X": {"a": np.ma.masked_equal([1, 2] * 100, 2)}}, "column a contains masked values"),
        ({"X": np.ma.masked_equal([[1, 2]] * 200, 2)}, "Input X contains masked values"),
        ({"y": np.ma.masked_equal([0, 1] * 100, 1)}, "Input y contains masked values"),
        ({"X": {"a": np.ones(200), "b": np.ones(3)}}, "of one length"),
        ({"X": np.ones(200)}, "a table of shape"),
        ({"y": np.zeros(200)}, "classes of \\[200\\] rows"),
        ({"y": np.arange(7)}, "inconsistent numbers of samples"),
        ({"metric": "auk"}, "pass metric as 'auc' or 'accuracy'"),
        ({"held": 0.001}, "hold back some"),
        ({"categorical": ["wrod"]}, "(?s)no column 'wrod'.*did you mean 'word'"),
        ({"categorical": [3]}, "no column 3\n"),
        ({"categorical": [-1]}, "no column -1\n"),
    ],
)
def test_what_does_not_fit_is_told(change, told):
    X, y = table()
    X, y = change.pop("X", X), change.pop("y", y)
    with pytest.raises(ht.errors.HetuError, match=told):
        AutoClassifier(trials=2, algorithms=SMALL, **change).fit(X, y if len(y) != 7 else np.arange(7) % 2)


def test_a_model_shows_what_is_not_as_it_is_by_default():
    model = AutoClassifier(trials=2, categorical=["word"])
    assert repr(model) == "AutoClassifier(trials=2, categorical=['word'])"


def test_what_fit_has_not_seen_is_told():
    X, y = table()
    model = AutoClassifier(trials=2, algorithms=SMALL)
    with pytest.raises(ht.errors.HetuError, match="not fitted"):
        model.predict(X)
    model.fit(X, y)
    with pytest.raises(ht.errors.DataError, match="a class that fit has not seen"):
        model.score(X, np.full(200, "maybe"))
    with pytest.raises(ht.errors.ShapeError, match="columns"):
        model.predict({"far": X["far"], "near": X["near"], "word": X["word"]})
    with pytest.raises(ht.errors.DataError, match="column near"):
        model.predict(X | {"near": np.full(200, "?")})
