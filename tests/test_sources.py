"""common/sources.py: examples, sources in every form, mixtures and streams that go on exactly."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from common import data, prepare, sources
from common.arguments import UserError
from common.losses import IGNORE_INDEX
from common.prepare import Settings
from common.sources import Mixture, SourceSampler, SourceSettings, SourceSpec, TokenRows, TokenStream, make_example
from tests.conftest import REPOSITORY

EOS, BOS = 1, 3


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets_cache"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(REPOSITORY / "recipes" / "samples" / "tokenizer")


@pytest.fixture
def settings(tokenizer: PreTrainedTokenizerBase) -> SourceSettings:
    return SourceSettings(tokenizer, max_seq_length=32, document_masking=True, text_column="text", seed=5)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "news.jsonl", 120, 1)


def write(path: Path, num_documents: int, seed: int) -> Path:
    rng = random.Random(seed)
    words = ["rice", "water", "boil", "the", "a", "of", "pot", "simmer", "é"]
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 40))) for _ in range(num_documents)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def spec(text: str, flag: str = "--train_file") -> SourceSpec:
    return SourceSpec(text, flag, 1.0)


def stream(settings: SourceSettings, file: Path, window: int = 1024) -> TokenStream:
    return sources.load_stream(spec(str(file)), settings, window)


def tokens(source: Any, start: int, end: int) -> list[list[int]]:
    return [source[index]["input_ids"].tolist() for index in range(start, end)]


# ---------------------------------------------------------------------------------------------------------------------
# Examples


def test_labels_and_positions_of_documents() -> None:
    row = make_example(np.array([7, 8, EOS, BOS, 9, EOS, EOS, 5], dtype=np.int32), None, EOS, document_masking=True)
    assert row["labels"].tolist() == [8, EOS, IGNORE_INDEX, 9, EOS, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    plain = make_example(np.array([7, 8, EOS, BOS, 9]), None, EOS, document_masking=False)
    assert plain["labels"].tolist() == [8, EOS, BOS, 9, IGNORE_INDEX] and "position_ids" not in plain
    given = make_example(np.array([7, 8, 9]), np.array([-100, -100, 9]), EOS, document_masking=False)
    assert given["labels"].tolist() == [IGNORE_INDEX, 9, IGNORE_INDEX]


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_document_does_not_see_the_one_before(kernel: str) -> None:
    """Its logits are those it has alone, whatever stands before it; without masking they are others."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation=kernel).eval()
    rng = np.random.default_rng(0)
    ours = np.array([BOS, *rng.integers(5, 50, 9), EOS])
    others = [np.array([BOS, *rng.integers(5, 50, 14), EOS]) for _ in range(2)]

    def logits(parts: list[np.ndarray], document_masking: bool) -> torch.Tensor:
        row = make_example(np.concatenate(parts), None, EOS, document_masking)
        batch = data.collate_windows([row, row])
        del batch["labels"]
        with torch.no_grad():
            return model(**batch, use_cache=False).logits[0, -len(ours) :]

    alone = logits([ours], True)
    for other in others:
        torch.testing.assert_close(logits([other, ours], True), alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits([other, others[0], ours], True), alone, rtol=1e-4, atol=1e-4)
    assert (logits([others[0], ours], False) - logits([others[1], ours], False)).abs().max() > 0.1


# ---------------------------------------------------------------------------------------------------------------------
# Forms of a source


def test_files_folders_and_streams_give_the_same_sequences(
    settings: SourceSettings, file: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = sources.load_source(spec(str(file)), settings)["train"]
    prepare.prepare({"train": [file]}, tmp_path / "prepared", tokenizer, Settings("text", 32))
    folder = sources.load_source(spec(str(tmp_path / "prepared")), settings)["train"]
    plain = datasets.Dataset.from_dict({"input_ids": folder.rows["input_ids"][:]})
    plain.save_to_disk(tmp_path / "plain")
    other = sources.load_source(spec(str(tmp_path / "plain")), settings)["train"]
    expected = tokens(rows, 0, len(rows))
    assert len(expected) > 60
    assert tokens(folder, 0, len(folder)) == tokens(other, 0, len(other)) == expected
    # A window as long as the corpus: the order of prepared data, over epochs.
    sampler = SourceSampler(Mixture([rows], [1.0]), 7, 5)
    mixture = Mixture([stream(settings, file)], [1.0])
    streamed = SourceSampler(mixture, 7, 5, 70)
    for step in range(3 * len(rows) // 7):
        assert [mixture[i]["input_ids"].tolist() for i in streamed.indices(step).tolist()] == [
            expected[i] for i in sampler.indices(step).tolist()
        ]
        assert streamed.names(step) == [name.replace(".jsonl", "") for name in sampler.names(step)]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
def test_every_token_comes_once_an_epoch(num_processes: int, settings: SourceSettings, file: Path) -> None:
    rows = sources.load_source(spec(str(file)), settings)["train"]
    rows = rows.select(range(len(rows) // 12 * 12))
    sampler = SourceSampler(Mixture([rows], [1.0]), 12, 5)
    seen: Counter[tuple[int, ...]] = Counter()
    for step in range(len(rows) // 12):
        for process in range(num_processes):
            for micro_batch in sampler.micro_batches(step, process, num_processes, 12 // num_processes):
                seen.update(tuple(rows[index]["input_ids"].tolist()) for index in micro_batch)
    assert seen == Counter(tuple(row) for row in tokens(rows, 0, len(rows)))


def test_seed_folder_with_labels_and_padding(settings: SourceSettings, tmp_path: Path) -> None:
    content = {
        "input_ids": [[5, 6, 7, 8], [5, 6, 7, 0]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 0]],
        "labels": [[-100, 6, 7, 8], [5, -100, 7, -100]],
    }
    split = datasets.Dataset.from_dict(content)
    datasets.DatasetDict({"train": split, "valid": split}).save_to_disk(tmp_path / "own")
    loaded = sources.load_source(spec(str(tmp_path / "own")), settings)
    assert list(loaded) == ["train", "validation"]
    assert [row["input_ids"].tolist() for row in map(loaded["train"].__getitem__, range(2))] == [
        [5, 6, 7, 8],
        [5, 6, 7],
    ]
    assert [row["labels"].tolist() for row in map(loaded["train"].__getitem__, range(2))] == [
        [6, 7, 8, -100],
        [-100, 7, -100],
    ]
    assert loaded["train"].names(1) == ["own row 1"]
    gaps = datasets.Dataset.from_dict({"input_ids": [[5, 6]], "attention_mask": [[0, 1]]})
    with pytest.raises(UserError, match="x row 0: its attention_mask has gaps"):
        TokenRows(gaps, "x", settings.tokenizer, 8, False)[0]


def test_rows_are_known_by_their_form_too(settings: SourceSettings, file: Path) -> None:
    """Documents that see each other make other examples of the same tokens."""
    rows = [
        sources.load_source(spec(str(file)), replace(settings, document_masking=masking))["train"]
        for masking in (True, False)
    ]
    assert len({data.describe_contents(Mixture([each], [1.0])) for each in rows}) == 2
    sizes: dict[str, Any] = {"process_index": 0, "num_processes": 1, "per_device_batch_size": 2}
    assert len({data.EvalBatches(each, data.collate_windows, **sizes).description for each in rows}) == 2


def test_splits_that_are_missing_or_too_many(settings: SourceSettings, tmp_path: Path) -> None:
    split = datasets.Dataset.from_dict({"input_ids": [[5, 6]]})
    for name, splits, said in (
        ("held", {"valid": split}, "it has no split train"),
        ("both", {"train": split, "valid": split, "validation": split}, "both a split valid and a split validation"),
        ("none", {"train": datasets.Dataset.from_dict({"input_ids": []})}, "a dataset in it has no rows"),
    ):
        datasets.DatasetDict(splits).save_to_disk(tmp_path / name)
        with pytest.raises(UserError, match=said):
            sources.load_source(spec(str(tmp_path / name)), settings)


def test_splits_that_were_saved_one_by_one(settings: SourceSettings, tmp_path: Path) -> None:
    for name in ("train", "validation"):
        datasets.Dataset.from_dict({"input_ids": [[5, 6]]}).save_to_disk(tmp_path / name)
    with pytest.raises(
        UserError, match=r"without dataset_dict.json, train, validation in it are .*/train, to its flag"
    ):
        sources.load_source(spec(str(tmp_path)), settings)
    assert len(sources.load_source(spec(str(tmp_path / "train")), settings)["train"]) == 1


def test_what_is_no_such_folder(settings: SourceSettings, file: Path, tmp_path: Path) -> None:
    def load(**columns: Any) -> None:
        folder = tmp_path / f"folder{len(list(tmp_path.iterdir()))}"
        datasets.Dataset.from_dict(columns).save_to_disk(folder)
        sources.load_source(spec(str(folder)), settings)

    with pytest.raises(UserError, match=r"rows of up to 33 tokens, more than --max_seq_length 32"):
        load(input_ids=[[5] * 33])
    with pytest.raises(UserError, match=r"nothing can be predicted in its train split, no row has two tokens"):
        load(input_ids=[[5], [6]])
    with pytest.raises(UserError, match=r"nothing can be predicted in its train split, all labels are -100"):
        load(input_ids=[[5, 6]], labels=[[-100, -100]])
    with pytest.raises(UserError, match=r"row 0: input_ids has 5000, which is no token of the tokenizer's 2048"):
        load(input_ids=[[5, 5000]])
    for columns, words in (
        ({"input_ids": [[5, -5]]}, r"row 0: input_ids has -5"),
        ({"input_ids": [[5, 6]], "labels": [[-100, 5000]]}, r"row 0: labels has 5000"),
        ({"input_ids": [[5, 6]], "labels": [[5]]}, r"row 0: 1 labels for 2 input_ids"),
        ({"input_ids": [[5], None]}, r"row 1: input_ids is null"),
        ({"input_ids": ["a"]}, r"input_ids is of type string"),
        ({"input_ids": [5]}, r"input_ids is of type int\d+; expected"),
        ({"input_ids": [[0.5]]}, r"input_ids is of type list.*expected a list of integers"),
    ):
        with pytest.raises(UserError, match=words):
            load(**columns)
    in_the_middle = datasets.Dataset.from_dict({"input_ids": [[5, 5]] * 301 + [[5, 5000]] + [[5, 5]] * 298})
    in_the_middle.save_to_disk(tmp_path / "in_the_middle")
    rows = sources.load_source(spec(str(tmp_path / "in_the_middle")), settings)["train"]
    with pytest.raises(UserError, match=r"in_the_middle row 301: input_ids has 5000"):
        rows[301]
    with pytest.raises(UserError, match=r"a tokenized dataset has input_ids; this one has text"):
        load(text=["a"])
    other = AutoTokenizer.from_pretrained(REPOSITORY / "recipes" / "samples" / "tokenizer", bos_token="</s>")
    prepare.prepare({"train": [file]}, tmp_path / "prepared", other, Settings("text", 32))
    with pytest.raises(UserError, match="prepared with another tokenizer"):
        sources.load_source(spec(str(tmp_path / "prepared")), settings)


def test_validation_and_bits_per_byte(settings: SourceSettings, file: Path, tmp_path: Path) -> None:
    own = sources.load_source(spec(str(file)), settings.setting_aside(0.2))
    report = prepare.read_report(own["validation"].folder)["splits"]["validation"]  # type: ignore[arg-type]
    assert (
        sum(map(len, tokens(own["validation"], 0, len(own["validation"])))) == report["tokens"]
    )  # the rest is not dropped
    by_counts = own["validation"].targets_per_byte()
    assert by_counts == pytest.approx((report["tokens"] - report["documents"]) / report["bytes"])
    # Start tokens of documents are predicted where these see each other.
    plain = sources.load_source(spec(str(file)), replace(settings.setting_aside(0.2), document_masking=False))
    by_plain = plain["validation"].targets_per_byte()
    assert by_plain == pytest.approx(report["tokens"] / report["bytes"])
    plain["validation"].folder = None
    assert plain["validation"].targets_per_byte() == pytest.approx(by_plain, rel=0.05)
    few = own["validation"].select(range(2))
    decoded = [settings.tokenizer.decode(few[index]["input_ids"][1:], skip_special_tokens=True) for index in range(2)]
    bos = settings.tokenizer.bos_token_id
    num_targets = sum(int((few[index]["input_ids"][1:] != bos).sum()) for index in range(2))
    assert few.targets_per_byte() == num_targets / len("".join(decoded).encode()) != by_counts
    # Text that is not scored is not counted.
    rows: dict[str, list[Any]] = {name: few.rows[name][:] * 2 for name in ("input_ids",)}
    rows["labels"] = [*few.rows["input_ids"][:], *([-100] * len(row) for row in few.rows["input_ids"][:])]
    masked = TokenRows(datasets.Dataset.from_dict(rows), "x", settings.tokenizer, 32, settings.document_masking)
    assert masked.targets_per_byte() == few.targets_per_byte()
    own["validation"].folder = None
    assert own["validation"].targets_per_byte() == pytest.approx(by_counts, rel=0.01)
    held = str(write(tmp_path / "held.jsonl", 9, 2))
    (train,), validation = sources.load_sources([spec(str(file))], settings, held)
    assert validation is not None
    assert len(train) > len(own["train"]) and 0 < len(validation) < 12
    assert (
        sources.load_held_out(str(tmp_path / "held.jsonl"), "--forgetting_dataset", settings).rows["input_ids"][:]
        == (validation.rows["input_ids"][:])
    )


def test_hub_dataset(settings: SourceSettings, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.load_dataset("json", data_files=str(file))
    load = datasets.load_dataset
    expected = sources.load_source(spec(str(file)), settings)["train"]
    monkeypatch.setattr(
        datasets, "load_dataset",
        lambda *args, streaming=False, **kwargs: load("json", data_files=str(file), split="train", streaming=True)
        if streaming else rows,
    )  # fmt: skip
    found = sources.load_source(spec("someone/news", "--dataset_name"), settings)["train"]
    assert found.name == "news" and tokens(found, 0, len(found)) == tokens(expected, 0, len(expected))
    by_network = sources.load_stream(spec("someone/news", "--dataset_name"), settings, 10)
    own = stream(settings, file, 10)
    tokens(own, 0, 25)
    assert tokens(by_network, 0, 25) == tokens(stream(settings, file, 10), 0, 25)
    state = json.loads(json.dumps(by_network.state(25)))
    again = sources.load_stream(spec("someone/news", "--dataset_name"), settings, 10)
    again.restore(state)
    assert tokens(again, 25, 400) == tokens(own, 25, 400), "also in the epochs after"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_held_out_documents_are_trained_on_in_no_source(
    settings: SourceSettings, tmp_path: Path, num_workers: int
) -> None:
    """Copies in other sources, and in the same one, of what is set aside or of a file of its own."""
    settings = replace(settings, num_workers=num_workers)
    shared = [f"Boil pot number {number} of the rice." for number in range(200)]
    own = [f"Simmer the water of pot {number}." for number in range(200)]
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    for file, lines in ((first, shared), (second, own + shared)):
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    specs = [spec(str(first)), spec(str(second))]

    def documents(rows: list[list[int]]) -> set[str]:
        text = settings.tokenizer.decode([token for row in rows for token in row])
        parts = text.replace(settings.tokenizer.bos_token, "").split(settings.tokenizer.eos_token)
        return {part.strip() for part in parts} & {*shared, *own}

    def texts(rows: TokenRows) -> set[str]:
        return documents(rows.rows["input_ids"][:])

    rows, validation = sources.load_sources(specs, settings.setting_aside(0.1), None)
    assert validation is not None and 8 < len(held_out := texts(validation)) < 40 and held_out <= set(shared)
    assert not held_out & texts(rows[0]) and not held_out & texts(rows[1])
    assert len(texts(rows[1])) > 300 and rows[1].folder is not None
    dropped = prepare.report_of(rows[1].folder, "train").dropped
    assert len(held_out) <= dropped[prepare.HELD_OUT] < 80 and "documents that are held out" in str(rows[1])
    assert dropped[prepare.NO_TEXT] == 0

    copies = tmp_path / "copies.jsonl"  # with other blanks
    copies.write_text("".join(json.dumps({"text": text.replace(" ", "  ") + "\n"}) + "\n" for text in shared))
    rows, _ = sources.load_sources([specs[0], spec(str(copies))], settings.setting_aside(0.1), None)
    assert rows[1].folder is not None
    assert prepare.report_of(rows[1].folder, "train").dropped[prepare.HELD_OUT] == len(held_out)

    own_share = Settings("text", settings.max_seq_length, validation_size=0.2, seed=settings.seed + 1)
    prepare.prepare({"train": [first]}, tmp_path / "prepared", settings.tokenizer, own_share, num_workers)
    rows, validation = sources.load_sources(
        [spec(str(tmp_path / "prepared")), specs[1]], settings.setting_aside(0.1), None
    )
    assert validation is not None and len(held_out := texts(validation)) > 20
    assert not held_out & texts(rows[0]) and not held_out & texts(rows[1])

    apart = tmp_path / "held.jsonl"
    apart.write_text("".join(json.dumps({"text": text}) + "\n" for text in shared[::20] + own[::20]))
    rows, validation = sources.load_sources(specs, settings.setting_aside(0.1), str(apart))
    assert validation is not None and len(held_out := texts(validation)) >= 19
    for source, number in zip(rows, (10, 20), strict=True):
        assert source.folder is not None and not held_out & texts(source)
        assert prepare.report_of(source.folder, "train").dropped[prepare.HELD_OUT] == number
    stream = sources.load_stream(specs[1], settings, 1024, str(apart))
    seen = documents(tokens(stream, 0, 100))
    assert len(seen) > 50 and not held_out & seen
    assert "without 20 documents" in stream.contents
    other = sources.load_stream(specs[1], settings, 1024, str(write(tmp_path / "other.jsonl", 20, 3)))
    assert "without 20 documents" in other.contents and other.contents != stream.contents

    loads: list[Any] = [sources.load_sources, lambda *args: sources.load_stream(specs[0], settings, 9, args[2])]
    for load in loads:
        with pytest.raises(UserError, match=f"{first} is both trained on and the validation text"):
            load(specs, settings, str(first))
    second.write_text("".join(json.dumps({"text": f" {text}\n"}) + "\n" for text in shared))
    with pytest.raises(UserError, match=f"{first}: all its documents are held out for validation"):
        sources.load_sources(specs[:1], settings, str(second))


def test_tokenized_text_is_not_compared_with_held_out_text_and_says_so(
    settings: SourceSettings, tmp_path: Path
) -> None:
    train, held_out, other = (write(tmp_path / f"{name}.jsonl", 60, 1) for name in ("train", "held", "other"))
    held_out.write_text("".join(train.read_text().splitlines(keepends=True)[:9]))
    own = prepare.Settings("text", settings.max_seq_length)
    splits = {"train": [train], "validation": [held_out]}
    prepare.prepare(splits, tmp_path / "apart", settings.tokenizer, own, 1)
    prepare.prepare({"train": [train]}, tmp_path / "all", settings.tokenizer, own, 1)
    prepare.prepare({"train": [train]}, tmp_path / "share", settings.tokenizer, replace(own, validation_size=0.2), 1)
    remark = ", not compared with the validation text"

    def remarks(*names: str, validation: Path | None = None) -> list[bool]:
        specs = [spec(str(tmp_path / name)) for name in names]
        rows, _ = sources.load_sources(specs, settings, str(validation) if validation else None)
        assert [str(source).endswith(remark) for source in rows] == [
            str(source.select(range(1))).endswith(remark) for source in rows
        ]
        return [str(source).endswith(remark) for source in rows]

    assert remarks("all", "other.jsonl") == [False, False], "nothing is held out"
    assert remarks("all", "other.jsonl", validation=held_out) == [True, False]
    assert remarks("apart", "other.jsonl", validation=held_out) == [False, False], "prepared without it"
    assert remarks("apart", "all", "other.jsonl") == [False, True, False]
    assert remarks("share", "all", "other.jsonl") == [False, True, False]
    assert remarks("train.jsonl", validation=tmp_path / "apart") == [True]
    rows, _ = sources.load_sources([spec(str(tmp_path / "apart")), spec(str(other))], settings, None)
    assert rows[1].folder is not None
    assert prepare.report_of(rows[1].folder, "train").dropped[prepare.HELD_OUT] >= 9


# ---------------------------------------------------------------------------------------------------------------------
# Streams


@pytest.mark.parametrize("window", [1, 10, 1000])
def test_stream_goes_on_exactly_twice_in_a_row(window: int, settings: SourceSettings, file: Path) -> None:
    """Over the ends of windows and epochs, from a state that went through a checkpoint."""
    expected = tokens(stream(settings, file, window), 0, 300)
    assert len({tuple(row) for row in expected[:60]}) == 60
    for first, second in ((0, 1), (7, 8), (33, 120), (95, 260)):
        source = stream(settings, file, window)
        assert tokens(source, 0, first) == expected[:first]
        for start, end in ((first, second), (second, 300)):
            state = json.loads(json.dumps(source.state(start)))
            source = stream(settings, file, window)
            source.restore(state)
            assert tokens(source, start, end) == expected[start:end]


def test_a_stream_is_known_by_all_that_its_order_follows_from(settings: SourceSettings, file: Path) -> None:
    other = write(file.with_name("other.jsonl"), 5, 1)
    streams = [
        stream(settings, file, 10), stream(settings, file, 11), stream(settings, other, 10),
        stream(replace(settings, max_seq_length=16), file, 10),
        stream(replace(settings, document_masking=not settings.document_masking), file, 10),
    ]  # fmt: skip
    assert len({data.describe_contents(source) for source in streams}) == 5
    assert data.describe_contents(streams[0]) == data.describe_contents(stream(settings, file, 10))
    text = write(file, 20_000, 1).read_text()
    assert len(text) > 2 * sources.NUM_SAMPLES * sources.SAMPLE_BYTES
    description = data.describe_contents(stream(settings, file, 10))
    file.write_text(text.replace("pot", "pan"))
    assert description != data.describe_contents(stream(settings, file, 10)), "edited, at the same size"
    file.write_text(text)
    assert description == data.describe_contents(stream(settings, file, 10)), "whenever it was written"


def test_a_stream_that_was_looked_at_begins_anew(settings: SourceSettings, file: Path) -> None:
    source = stream(settings, file, 1)
    first = tokens(source, 0, 40)
    assert tokens(source, 0, 40) == first


def test_names_of_a_batch_that_is_larger_than_windows(settings: SourceSettings, file: Path) -> None:
    sampler = SourceSampler(Mixture([stream(settings, file, 2)], [1.0]), 8, 5, 80)
    for step in range(6):
        rows = [sampler.mixture[index] for index in sampler.indices(step).tolist()]
        source = sampler.mixture.sources[0]
        assert len(rows) == 8 and all(source.names(index) for index in sampler.indices(step).tolist())


def test_a_source_that_a_checkpoint_has_not_begins_at_its_beginning(settings: SourceSettings, file: Path) -> None:
    other = write(file.with_name("web.jsonl"), 30, 3)
    rows = sources.load_source(spec(str(file)), settings)["train"]
    before = SourceSampler(Mixture([rows], [1.0]), 4, 5).state(3)
    now = SourceSampler(Mixture([stream(settings, file, 10), stream(settings, other, 10)], [0.5, 0.5]), 4, 5, 80)
    now.restore(json.loads(json.dumps(before)))
    assert all(len(now.mixture[index]["input_ids"]) == 32 for index in now.indices(3).tolist())


def test_windows_are_shuffled_and_lose_nothing(settings: SourceSettings, file: Path) -> None:
    rows = sources.load_source(spec(str(file)), settings)["train"]
    in_order = tokens(rows, 0, len(rows))
    both = tokens(stream(settings, file, 10), 0, 2 * len(rows))
    for found in (both[: len(rows)], both[len(rows) :]):
        places = [in_order.index(row) for row in found]
        assert sorted(places) == list(range(len(rows))) and places != sorted(places)
        # A window has ten sequences and those that its last document fills: nothing moves farther.
        assert max(abs(place - index) for index, place in enumerate(places)) < 15


def test_stream_that_is_too_short(settings: SourceSettings, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("few words")
    with pytest.raises(UserError, match=r"a: \d+ tokens do not fill one sequence of --max_seq_length 32"):
        stream(settings, tmp_path / "a.txt")[0]
    with pytest.raises(UserError, match="is read without --streaming"):
        datasets.Dataset.from_dict({"input_ids": [[5]]}).save_to_disk(tmp_path / "x")
        sources.load_stream(spec(str(tmp_path / "x")), settings, 10)


# ---------------------------------------------------------------------------------------------------------------------
# Mixtures


def test_weights_are_met_and_follow_from_the_step() -> None:
    sizes, weights = [100, 50, 30, 9], [0.7, 0.2, 0.07, 0.03]
    starts = [0, 100, 150, 180]

    def make() -> data.MixtureSampler:
        orders = [data.EpochOrder(size, 5 + number) for number, size in enumerate(sizes)]
        return data.MixtureSampler(orders, starts, weights, 8, 5, 140)

    sampler = make()
    batches = [sampler.indices(step) for step in range(1000)]
    drawn = np.searchsorted(starts, np.concatenate(batches), side="right") - 1
    for number, weight in enumerate(weights):
        assert (drawn == number).sum() / len(drawn) == pytest.approx(weight, rel=0.01)
        # Each source in whole epochs: none of its examples is ahead of another by more than one.
        counts = np.bincount(np.concatenate(batches)[drawn == number] - starts[number], minlength=sizes[number])
        assert counts.max() - counts.min() <= 1
    for step in (999, 0, 500, 501, 17):
        assert (make().indices(step) == batches[step]).all() and (sampler.indices(step) == batches[step]).all()
        assert (make().counts(step) == np.bincount(drawn[: step * 8], minlength=4)).all()


def test_an_earlier_step_costs_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loader workers are asked for batches ahead of the step that the log counts."""
    sampler = data.MixtureSampler([data.EpochOrder(9, 3), data.EpochOrder(5, 4)], [0, 9], [3.0, 1.0], 4, 3, 10)
    forward = [sampler.counts(step).tolist() for step in range(6000)]
    num_places, find_sources = 0, sampler._sources

    def counting(start: int, end: int) -> np.ndarray:
        nonlocal num_places
        num_places += end - start
        return find_sources(start, end)

    monkeypatch.setattr(sampler, "_sources", counting)
    for step in (5990, 5995, 5980, 5981):
        assert sampler.counts(step).tolist() == forward[step]
    assert num_places == (9 + 5 + 15 + 1) * 4


def test_one_source_alone_is_the_step_sampler() -> None:
    mixture = data.MixtureSampler([data.EpochOrder(10, 3)], [0], [2.0], 4, 3, 10)
    plain = data.StepSampler(10, 4, 3)
    assert all((mixture.indices(step) == plain.indices(step)).all() for step in range(12))


def test_sources_of_the_same_length_have_orders_of_their_own(settings: SourceSettings, file: Path) -> None:
    rows = sources.load_source(spec(str(file)), settings)["train"]
    first, second = SourceSampler(Mixture([rows, rows], [0.5, 0.5]), 4, 5).orders
    assert first(0, len(rows)).tolist() != second(0, len(rows)).tolist()


def test_mixture_of_a_stream_and_rows_reports_and_resumes(settings: SourceSettings, file: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "web.jsonl", 200, 3)

    def make() -> SourceSampler:
        mixture = Mixture([stream(settings, file, 10), stream(settings, other, 20)], [0.75, 0.25])
        return SourceSampler(mixture, 8, 5, 80)

    def read(sampler: SourceSampler, start: int, end: int) -> list[list[int]]:
        return [
            sampler.mixture[index]["input_ids"].tolist()
            for step in range(start, end)
            for index in sampler.indices(step).tolist()
        ]

    whole = make()
    expected = read(whole, 0, 40)
    counts = whole.report(40)
    assert counts.keys() == {"num_sequences/news", "num_sequences/web"} and sum(counts.values()) == 320
    assert counts["num_sequences/news"] == pytest.approx(240, abs=2)
    sampler = make()
    read(sampler, 0, 13)
    for start, end in ((13, 21), (21, 40)):
        state = json.loads(json.dumps(sampler.state(start)))
        sampler = make()
        sampler.restore(state)
        assert read(sampler, start, end) == expected[start * 8 : end * 8]
    assert all(name.startswith(("news:", "web:")) or name == "..." for name in sampler.names(39))


def test_an_unfinished_preparation_is_named(settings: SourceSettings, tmp_path: Path) -> None:
    """Its report is a JSON file, and must not be taken for text."""
    (tmp_path / prepare.REPORT).write_text("{}")
    with pytest.raises(UserError, match="its preparation is not complete; run the same tools/prepare_data.py"):
        sources.load_held_out(str(tmp_path), "--validation_file", settings)
