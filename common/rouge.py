"""ROUGE as an `evaluate` metric without a network: built directly on `rouge_score`, never through `evaluate.load`."""

import re

import evaluate
from datasets import Features, Value
from rouge_score import rouge_scorer

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class Rouge(evaluate.Metric):
    """Mean F-measures of ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum over the examples, as fractions of 1.

    `compute(predictions=[...], references=[...], use_stemmer=False)` returns them by name, and agrees with ROUGE-1.5.5
    (its option -m is `use_stemmer=True`). ROUGE-Lsum takes each line of a text as a sentence; see
    `one_sentence_per_line`. Compute it on one process from gathered texts. Predictions stay in memory: `evaluate`'s
    default, a file with a lock in a shared cache folder, fails when several runs or nodes use the folder.
    """

    def __init__(self) -> None:
        super().__init__(keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="ROUGE: overlap of n-grams and longest common subsequences of a summary with its reference.",
            citation="Lin, C.-Y. (2004). ROUGE: A Package for Automatic Evaluation of Summaries.",
            inputs_description="predictions, references: lists of texts of equal length; use_stemmer: Porter stemming.",
            features=Features({"predictions": Value("string"), "references": Value("string")}),
        )

    def _compute(self, predictions: list[str], references: list[str], use_stemmer: bool = False) -> dict[str, float]:
        scorer = rouge_scorer.RougeScorer(ROUGE_TYPES, use_stemmer=use_stemmer)
        scores = [scorer.score(target=r, prediction=p) for p, r in zip(predictions, references, strict=True)]
        return {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE_TYPES}


def one_sentence_per_line(text: str) -> str:
    """Text with a line break after each sentence, for ROUGE-Lsum; line breaks that are there stay.

    T5's tokenizer has no line break, so a model cannot write one: split predictions and references alike.
    """
    return re.sub(r"(?<=[.!?])[^\S\n]+", "\n", text.strip())
