"""Train the small tokenizer of the sample data: byte-level BPE with T5's special tokens.

    python recipes/samples/train_tokenizer.py --output recipes/samples/tokenizer

The result depends on wikihow_articles.csv and the version of `tokenizers` alone: running the script again writes
the same files. All 256 bytes are in the vocabulary, so that any text can be encoded, nothing becomes <unk>, and
decoding gives back exactly what was encoded.
"""

import argparse
import csv
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SAMPLES = Path(__file__).resolve().parent
VOCAB_SIZE = 2048  # a multiple of 64, which embedding matrices divide well by
PAD, EOS, UNK, BOS = SPECIAL_TOKENS = ["<pad>", "</s>", "<unk>", "<s>"]  # ids 0 to 3; T5 fixes the first three


def read_texts(path: Path) -> list[str]:
    """Return the headline, title and text of every article."""
    with path.open(encoding="utf-8", newline="") as file:
        return [field for row in csv.DictReader(file) for field in (row["headline"], row["title"], row["text"])]


def train(texts: list[str]) -> Tokenizer:
    """Return a tokenizer that appends </s> to every sequence; <s> is there for causal models but is not added."""
    tokenizer = Tokenizer(models.BPE())
    # No space is added in front of the text, which decoding could not tell from a space that was there.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, output: Path) -> None:
    """Write the two files that `AutoTokenizer.from_pretrained(output)` reads."""
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNK,
        "model_max_length": 512,
        "model_input_names": ["input_ids", "attention_mask"],  # T5 and Llama take no token types
        "clean_up_tokenization_spaces": False,  # the clean-up drops spaces before punctuation when decoding
    }
    (output / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer of the sample data.")
    parser.add_argument("--output", type=Path, default=SAMPLES / "tokenizer", help="folder to write to")
    output = parser.parse_args().output
    tokenizer = train(read_texts(SAMPLES / "wikihow_articles.csv"))
    save(tokenizer, output)
    print(f"{tokenizer.get_vocab_size()} tokens written to {output}")


if __name__ == "__main__":
    main()
