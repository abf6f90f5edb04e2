"""Let a model go on from prompts: an exported folder, or a training checkpoint of any layout as it stands.

    python tools/generate.py runs/gpt_shakespeare_124m --prompt "ROMEO:" --temperature 0.8 --top_k 200
    python tools/generate.py runs/t5_summarize_3b/model --prompt_file documents.txt --num_beams 4 > summaries.jsonl

Model and tokenizer are those of the folder; a run's folder stands for its newest complete checkpoint, or for its
exported model where it saved none. The text after --prompt is printed while it is generated; with the temperature and
the seed of the recipe it is the text that the recipe printed. For --prompt_file, a prompt in each line, standard output
has a line of JSON with the keys `prompt` and `text` for each. An encoder-decoder model reads the prompt, after the
prefix that it was trained with (`summarize: `) unless the prompt begins with it; a causal one
goes on with it, after the start token that the tokenizer puts before a text; where it puts none and the recipe began
documents with one (llama_pretrain, chess_finetune), write it: --prompt "<s>...".
"""

import argparse
import json
import sys
from pathlib import Path

from common.files import user_path

EXIT_ERROR = 1
EXIT_USAGE = 2


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=user_path, help="folder of an exported model, of a checkpoint, or of a run")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", help="text to go on from, or to read")
    prompts.add_argument(
        "--prompt_file", type=user_path, help="UTF-8 text with a prompt in each line that is not empty"
    )
    parser.add_argument("--max_new_tokens", type=int, default=200, help="at most, for each prompt; default: 200")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; default 0: the likeliest token")
    parser.add_argument("--top_k", type=int, default=0, help="sample from so many likeliest tokens; default 0: all")
    parser.add_argument("--top_p", type=float, default=1.0, help="sample from the likeliest tokens of this probability")
    parser.add_argument("--num_beams", type=int, default=1, help="default: 1, no beam search")
    parser.add_argument("--batch_size", type=int, default=8, help="prompts at a time; default: 8")
    parser.add_argument("--seed", type=int, default=0, help="of sampling; default: 0")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)  # before the imports, so that --help is quick

    import torch
    import transformers

    from common.arguments import UserError
    from common.generation import answer, encode, load
    from common.launch import RunFailed

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        check(args)
        prompts = [args.prompt] if args.prompt_file is None else read_prompts(args.prompt_file)
        model, tokenizer = load(args.model)
        for prompt in prompts:
            encode(model, tokenizer, prompt)  # what cannot be answered is known before the first answer
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(args.seed)
        settings = {"max_new_tokens": args.max_new_tokens, "num_beams": args.num_beams, "do_sample": False}
        if args.temperature > 0:
            settings |= {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
        if args.prompt_file is None:
            stream = args.num_beams == 1  # beams are known at the end only
            texts = answer(model, tokenizer, prompts, stream=stream, **settings)
            print("" if stream else texts[0])
            return 0
        for start in range(0, len(prompts), args.batch_size):
            batch = prompts[start : start + args.batch_size]
            for prompt, text in zip(batch, answer(model, tokenizer, batch, **settings), strict=True):
                print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False), flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (RunFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    return 0


def check(args: argparse.Namespace) -> None:
    """Raise `UserError` for settings that no generation can have."""
    from common.arguments import UserError

    for name in ("max_new_tokens", "num_beams", "batch_size"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}; it must be at least 1.")
    for name in ("temperature", "top_k", "seed"):
        if not getattr(args, name) >= 0:
            raise UserError(f"--{name} is {getattr(args, name)}; it must not be negative.")
    if args.seed >= 2**63:
        raise UserError(f"--seed is {args.seed}; it must be below 2**63.")
    if 0 < args.temperature < 1e-3:
        raise UserError(f"--temperature is {args.temperature}; 0 takes the likeliest token each time.")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top_p is {args.top_p}; it must be above 0 and at most 1.")
    if args.temperature == 0 and (args.top_k or args.top_p < 1):
        raise UserError("--top_k and --top_p limit what is sampled from: add --temperature 1, or drop them.")


def read_prompts(path: Path) -> list[str]:
    """Lines of the file, without empty ones; raises `UserError` when it cannot be read or there are none."""
    from common.arguments import UserError
    from common.files import bad_utf8_line

    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt_file {path} line {bad_utf8_line(path)}: not UTF-8 text; convert it.") from error
    except OSError as error:
        raise UserError(f"--prompt_file {path}: cannot be read ({error}); give a UTF-8 text file.") from error
    prompts = [line.removesuffix("\r") for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"--prompt_file {path}: no prompt in it; write one in each line.")
    return prompts


if __name__ == "__main__":
    sys.exit(main())
