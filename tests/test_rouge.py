import json
from pathlib import Path

import pytest

from common.rouge import Rouge, one_sentence_per_line


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def rouge() -> Rouge:
    return Rouge()


@pytest.fixture(scope="module")
def folder(shared_data: Path) -> Path:
    return shared_data / "rouge"


def test_hand_computed(rouge: Rouge) -> None:
    # "the cat sat" / "the cat is here": 2 of 3 and 2 of 4 words, F = 2 * (2/3 * 1/2) / (2/3 + 1/2) = 4/7;
    # bigrams: 1 of 2 and 1 of 3, F = 2/5. The second pair shares nothing, so the means are half of that.
    scores = rouge.compute(predictions=["the cat sat", "blue"], references=["The cat is here.", "red"])
    assert scores == pytest.approx({"rouge1": 2 / 7, "rouge2": 1 / 5, "rougeL": 2 / 7, "rougeLsum": 2 / 7})


def test_lsum_takes_lines_as_sentences(rouge: Rouge) -> None:
    # The example of the ROUGE paper, section 3.2: the union of both sentences' subsequences has 4 of the 5 words.
    prediction, reference = "w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", "w1 w2 w3 w4 w5"
    scores = rouge.compute(predictions=[prediction], references=[reference])
    assert scores["rougeLsum"] == pytest.approx(2 * 0.8 * 0.4 / (0.8 + 0.4))
    swapped = rouge.compute(predictions=["One two.\nThree four."], references=["Three four.\nOne two."])
    assert swapped["rougeLsum"] == 1.0
    assert swapped["rougeL"] == 0.5


def test_stemmer(rouge: Rouge) -> None:
    texts = {"predictions": ["running ads"], "references": ["run ad"]}
    assert rouge.compute(**texts)["rouge1"] == 0.0
    assert rouge.compute(**texts, use_stemmer=True)["rouge1"] == pytest.approx(1 / 2)  # words up to 3 letters stay


def test_empty_prediction(rouge: Rouge) -> None:
    assert set(rouge.compute(predictions=["", "..."], references=["a b", "a b"]).values()) == {0.0}


def test_one_sentence_per_line() -> None:
    assert one_sentence_per_line(" Mix it.  Wait 2.5 hours!\nServe ") == "Mix it.\nWait 2.5 hours!\nServe"


def test_published_values_of_1000_pairs(rouge: Rouge, folder: Path) -> None:
    texts = {
        "predictions": read_lines(folder / "prediction_large.txt"),
        "references": read_lines(folder / "target_large.txt"),
    }
    assert len(texts["references"]) == 1000
    plain = rouge.compute(**texts)
    assert round(plain["rouge1"], 5) == 0.38553
    assert {k: round(100 * plain[k], 2) for k in ("rouge1", "rouge2", "rougeLsum")} == {
        "rouge1": 38.55,
        "rouge2": 22.14,
        "rougeLsum": 38.32,
    }
    stemmed = rouge.compute(**texts, use_stemmer=True)
    assert round(stemmed["rouge1"], 5) == 0.40512
    assert stemmed["rougeL"] == pytest.approx(0.40265, abs=1e-5)
    # Medians of 1000 resamplings, so near the means only.
    bootstrap = json.loads((folder / "expected_bootstrap_results.json").read_text())
    assert {k: 100 * plain[k] for k in bootstrap} == pytest.approx(bootstrap, abs=0.1)


# F-measures that ROUGE-1.5.5 itself gives for the two pairs of prediction.txt and target.txt (rouge_score's own tests).
ROUGE_155 = {
    ("rouge1", False): (0.51163, 0.50000),
    ("rouge1", True): (0.51163, 0.52941),
    ("rouge2", False): (0.39024, 0.36364),
    ("rouge2", True): (0.39024, 0.36364),
    ("rougeL", False): (0.51163, 0.50000),
}


@pytest.mark.parametrize(("name", "use_stemmer"), ROUGE_155)
def test_agrees_with_rouge_155(rouge: Rouge, folder: Path, name: str, use_stemmer: bool) -> None:
    pairs = zip(read_lines(folder / "prediction.txt"), read_lines(folder / "target.txt"), strict=True)
    for (prediction, target), expected in zip(pairs, ROUGE_155[name, use_stemmer], strict=True):
        scores = rouge.compute(predictions=[prediction], references=[target], use_stemmer=use_stemmer)
        assert scores[name] == pytest.approx(expected, abs=6e-6)


def test_lsum_agrees_with_rouge_155(rouge: Rouge, folder: Path) -> None:
    prediction = (folder / "prediction_multi.0.txt").read_text(encoding="utf-8")
    target = (folder / "target_multi.0.txt").read_text(encoding="utf-8")
    scores = rouge.compute(predictions=[prediction], references=[target], use_stemmer=True)
    assert scores["rougeLsum"] == pytest.approx(0.47205, abs=6e-6)
