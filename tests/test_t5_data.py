"""The data half of recipes/t5_summarize.py: WikiHow's cleaning and splits, other sources, what ends up in a batch."""

import csv
import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from common import data
from common.arguments import UserError
from tests.conftest import REPOSITORY, load_recipe

RECIPE = REPOSITORY / "recipes" / "t5_summarize.py"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets_cache"))


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe(RECIPE)


def load(recipe: ModuleType, **arguments: Any) -> tuple[list[dict[str, str]], list[dict[str, str]], Counter[str]]:
    train, validation, left_out = recipe.load_articles(recipe.T5Arguments(**arguments))
    return list(train), list(validation), left_out


def write_csv(file: Path, rows: list[list[str]]) -> Path:
    with open(file, "w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows(rows)
    return file


def clean(
    recipe: ModuleType, text: Any, headline: Any, ratio: float = 0.75
) -> tuple[dict[str, str] | None, str | None]:
    return recipe.clean_article({"text": text, "headline": headline}, ["text", "headline"], ratio)


# ---------------------------------------------------------------------------------------------------------------------
# WikiHow


def test_real_row_of_wikihow_all(recipe: ModuleType, shared_data: Path) -> None:
    train, validation, left_out = load(recipe, train_file=str(shared_data / "wikihow" / "all" / "wikihowAll.csv"))
    assert train == validation and len(train) == 1  # its title is in both lists
    assert left_out == Counter()
    assert train[0]["summary"].splitlines() == [
        "Keep related supplies in the same area.",
        "Make an effort to clean a dedicated workspace after every session.",
        "Place loose supplies in large, clearly visible containers.",
        "Use clotheslines and clips to hang sketches, photos, and reference material.",
        "Use every inch of the room for storage, especially vertical space.",
        "Use chalkboard paint to make space for drafting ideas right on the walls.",
        "Purchase a label maker to make your organization strategy semi-permanent.",
        "Make a habit of throwing out old, excess, or useless stuff each month.",
    ]
    lines = train[0]["document"].splitlines()
    assert len(lines) == 17
    assert lines[0].startswith("If you're a photographer, keep all the necessary lens, cords, and batteries in")
    assert lines[4] == "Infrequent or secondary supplies area, tucked out of the way."
    assert lines[-1].endswith("next six months. Toss it.")
    assert not [line for line in lines if re.search(r"^[,; ]|[,; ]$|\w{3}[.!?],\s+[A-Z]", line)]
    # Words are all there and in order; only separators are gone.
    with open(shared_data / "wikihow" / "all" / "wikihowAll.csv", newline="", encoding="utf-8") as file:
        raw = next(csv.DictReader(file))
    assert re.findall(r"\w+", train[0]["document"]) == re.findall(r"\w+", raw["text"])
    assert re.findall(r"\w+", train[0]["summary"]) == re.findall(r"\w+", raw["headline"])


def test_real_row_of_wikihow_sep(recipe: ModuleType, shared_data: Path) -> None:
    train, _, _ = load(recipe, train_file=str(shared_data / "wikihow" / "sep" / "wikihowSep.csv"))
    assert train[0]["summary"] == "Sell yourself first."
    assert train[0]["document"].startswith("Before doing anything else, stop and sum up yourself as an artist.")
    assert train[0]["document"].endswith("the establishment of your credibility and reliability.")


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_cleaning_of_separators(recipe: ModuleType, line_break: str) -> None:
    text = "Fill it, slowly, with water...\n\n, Wait.;\n, Stir, e.g., Tea clockwise., Do you see foam?, Stop.;\n\n"
    row, reason = clean(
        recipe, text.replace("\n", line_break), "\nFill it.,\nAre you sure?,\n\nStop.".replace("\n", line_break)
    )
    assert reason is None
    assert row == {
        "document": "Fill it, slowly, with water.\nWait.\nStir, e.g., Tea clockwise.\nDo you see foam?\nStop.",
        "summary": "Fill it.\nAre you sure?\nStop.",
    }


@pytest.mark.parametrize(
    ("text", "headline", "reason"),
    [
        (None, "Do it.", "empty text"),
        (float("nan"), "Do it.", "empty text"),
        ("\n\n;\n", "Do it.", "empty text"),
        (" \r\n", "Do it.", "empty text"),
        ("A long text, which says a lot.", None, "empty summary"),
        ("A long text, which says a lot.", "\n.,\n", "empty summary"),
        ("x" * 100, "y" * 75, "summary not shorter than 0.75 x text"),
        ("x" * 100, "y" * 74, None),
        ("x" * 100 + "\n" * 50, "y" * 75, "summary not shorter than 0.75 x text"),  # blanks at the ends do not count
    ],
)
def test_dropped_rows_have_a_reason(recipe: ModuleType, text: Any, headline: Any, reason: str | None) -> None:
    row, found = clean(recipe, text, headline)
    assert found == reason
    assert (row is None) == (reason is not None)


def test_ratio_is_the_users(recipe: ModuleType) -> None:
    assert clean(recipe, "x" * 100, "y" * 90, ratio=1.0)[1] is None
    assert clean(recipe, "x" * 100, "y" * 50, ratio=0.5)[1] == "summary not shorter than 0.5 x text"


def test_official_splits(recipe: ModuleType, tmp_path: Path) -> None:
    titles = [
        "How to Clean a Cat's Bed1",
        "How to Use The Roost Café",
        "How to Rest",
        "How to Wait (Long)",
        "How to Test",
    ]
    rows = [[f"Step {i}.", title, f"Text number {i}. " * 5] for i, title in enumerate(titles)]
    file = write_csv(tmp_path / "wikihowAll.csv", [["headline", "title", "text"], *rows])
    (tmp_path / "all_train.txt").write_text("HowtoCleanaCatsBed1\nHowtoUseTheRoostCafé\nHowtoFly\n", encoding="utf-8")
    without_validation_list = load(recipe, train_file=str(file))
    assert (len(without_validation_list[0]), len(without_validation_list[1])) == (4, 1)  # seeded
    (tmp_path / "all_val.txt").write_text("HowtoWaitLong\n", encoding="utf-8")
    (tmp_path / "all_test.txt").write_text("HowtoTest\n", encoding="utf-8")
    for source in (file, tmp_path):
        train, validation, left_out = load(recipe, train_file=str(source))
        assert [row["summary"] for row in train] == ["Step 0.", "Step 1."]
        assert [row["summary"] for row in validation] == ["Step 3."]
        assert left_out == {"title in neither list": 2}
    # An explicit validation file takes the lists' place; what is in it is not trained on.
    own = write_csv(tmp_path / "own.csv", [["headline", "title", "text"], *rows[:2]])
    train, validation, left_out = load(recipe, train_file=str(file), validation_file=str(own))
    assert (len(train), len(validation), left_out) == (3, 2, {"copy of a validation document": 2})
    with pytest.raises(UserError, match="nothing to train on: the document of all 5 rows is in the validation rows"):
        load(recipe, train_file=str(file), validation_file=str(file))


def test_lists_of_another_dataset(recipe: ModuleType, tmp_path: Path) -> None:
    file = write_csv(
        tmp_path / "wikihowSep.csv", [["headline", "title", "text"], ["Do it.", "How to Do", "Text. " * 9]]
    )
    for name in ("train", "val"):
        (tmp_path / f"all_{name}.txt").write_text("HowtoFly\n")
    with pytest.raises(UserError, match=r"wikihowSep\.csv.*all_train\.txt"):
        load(recipe, train_file=str(file))


@pytest.mark.parametrize("name", ["wikihowAll.csv", "wikihowSep.csv"])
def test_missing_wikihow(recipe: ModuleType, tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError) as error:
        load(recipe, train_file=str(tmp_path / name))
    for part in (str(tmp_path / name), "headline, ", "by hand", "all_val.txt", "WikiHow-Dataset", "t5_summarize_demo"):
        assert part in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# Other sources


def test_copies_of_a_document_are_on_one_side(recipe: ModuleType, tmp_path: Path) -> None:
    rows = [{"document": f"Long text number {n // 2} of many.", "summary": f"Text {n}."} for n in range(40)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, validation, left_out = load(recipe, train_file=str(file), validation_size=0.25)
    assert len(validation) == 10
    assert not {row["document"] for row in train} & {row["document"] for row in validation}
    assert left_out["copy of a validation document"] == 30 - len(train) > 0


def test_embedded_articles_are_the_default(recipe: ModuleType) -> None:
    train, validation, left_out = load(recipe, validation_size=0.2)
    assert len(train) + len(validation) >= 60
    assert len(validation) == round(0.2 * (len(train) + len(validation)))
    assert left_out == {"empty text": 2, "summary not shorter than 0.75 x text": 1}
    assert not {row["document"] for row in train} & {row["document"] for row in validation}
    for row in train + validation:
        assert not re.search(r"(?m)^\W*$|^[,;]|[,;]$|\.,$", row["document"] + "\n" + row["summary"])
        assert all(line.endswith(".") for line in row["summary"].splitlines())
    assert load(recipe, validation_size=0.2, max_train_samples=7, max_eval_samples=3)[:2] == (train[:7], validation[:3])


def test_scitldr(recipe: ModuleType, shared_data: Path) -> None:
    train, validation, left_out = load(recipe, train_file=str(shared_data / "scitldr"))
    assert (len(train), len(validation)) == (1992 - left_out.total(), 619)
    assert train[0]["document"].startswith("Due to the success of deep learning to solving a variety of challenging")
    assert ". Particularly, the properties" in train[0]["document"]
    first = (
        "We devise adaptive loss scaling to improve mixed precision training that surpass the state-of-the-art results."
    )
    assert validation[0]["summary"] == first  # the first of its summaries


def test_named_columns_are_only_tidied(recipe: ModuleType, tmp_path: Path) -> None:
    rows = [["body", "short"], *([f" U.S., Canada,\r\n\r\n; and  {i} others" * 3, f"A, etc., {i},"] for i in range(8))]
    file = write_csv(tmp_path / "rows.csv", rows)
    train, validation, _ = load(recipe, train_file=str(file), document_column="body", summary_column="short")
    assert (len(train), len(validation)) == (7, 1)
    for row in train + validation:
        assert re.fullmatch(
            r"U\.S\., Canada,\n; and \d others(?: U\.S\., Canada,\n; and \d others){2}", row["document"]
        )
        assert re.fullmatch(r"A, etc\., \d,", row["summary"])


def test_bad_arguments(recipe: ModuleType, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "rows.csv", [["body", "short"], ["a", "b"]])
    with pytest.raises(UserError, match="no column 'text', 'headline'; it has body, short.*--document_column"):
        load(recipe, train_file=str(file))
    with pytest.raises(UserError, match="go together"):
        recipe.T5Arguments(document_column="body")
    with pytest.raises(UserError, match="not both"):
        load(recipe, train_file=str(file), dataset_name="a/b")
    with pytest.raises(UserError, match="--dataset_name nobody/nothing: the hub cannot be reached"):
        load(recipe, dataset_name="nobody/nothing")
    for bad in ({"num_beams": 0}, {"max_target_length": 1}, {"validation_size": 0}, {"max_new_tokens": -1}):
        with pytest.raises(UserError, match=next(iter(bad))):
            recipe.T5Arguments(**bad)


def test_batch_of_the_embedded_articles(recipe: ModuleType) -> None:
    """From the file to the tensors: prefix in front, end-of-sequence last, decoded text as it was written."""
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "recipes" / "samples" / "tokenizer")
    args = recipe.T5Arguments()
    train, _, _ = recipe.load_articles(args)
    encoded = data.tokenize_pairs(
        train,
        tokenizer,
        columns=("document", "summary"),
        source_prefix=args.source_prefix,
        max_source_length=args.max_source_length,
        max_target_length=args.max_target_length,
    )
    batch = data.Seq2SeqCollator(tokenizer, decoder_start_token_id=tokenizer.pad_token_id)([encoded[0], encoded[1]])
    for i in range(2):
        sources = batch["input_ids"][i][batch["attention_mask"][i].bool()]
        targets = batch["labels"][i][batch["labels"][i] != -100]
        assert tokenizer.decode(sources) == f"summarize: {train[i]['document']}{tokenizer.eos_token}"
        assert tokenizer.decode(targets) == f"{train[i]['summary']}{tokenizer.eos_token}"


def test_rouge_is_of_the_rows_that_were_generated_for(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"summary": [f"Put pot {number} on." for number in range(5)]})
    asked: dict[str, Any] = {}

    def generate(*args: Any, **settings: Any) -> list[str]:
        asked.update(settings)
        return ["Put pot 0 on.", "Put pot 1 on.", "Off it goes."]

    monkeypatch.setattr(recipe, "generate_texts", generate)
    monkeypatch.setattr(recipe, "sum_over_dataset", lambda *args: None)
    monkeypatch.setattr(recipe, "loss_and_accuracy", lambda sums: {"eval_loss": 1.0})
    args = recipe.T5Arguments(num_beams=3, max_new_tokens=7)
    metrics = recipe.evaluate(args, None, None, None, rows, object(), object())
    assert asked == {"max_new_tokens": 7, "num_beams": 3}
    assert metrics["eval_rouge_examples"] == 3 and metrics["eval_loss"] == 1.0
    assert [metrics[f"eval_{name}"] for name in ("rouge1", "rougeL", "rougeLsum")] == pytest.approx([2 / 3] * 3)
