"""Chess games: read from files, replayed by the rules of chess, written as text and read back.

Recipe and converter share the reader; training and inference share the formatter, because a model that learned
`1. e4` plays worse when it is asked with `1.e4`. Whatever is wrong with a game, the reader drops it as a whole, counts
the reason and goes on: python-chess's own PGN reader passes over text that it does not know, which would leave games
with moves missing.
"""

import codecs
import hashlib
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from common.arguments import UserError
from common.stopping import leave_with_parent

try:
    import chess
except ModuleNotFoundError as error:
    raise UserError(
        "Chess needs the package `chess` (python-chess), which is not installed: pip install -e .[chess]"
    ) from error

Notation = Literal["uci", "san"]
Phase = Literal["opening", "middlegame", "endgame"]

ROWS_PER_TASK = 50  # that a process replays at a time: a fifth of a second
MAX_EXAMPLES = 3  # positions kept for each reason
MAX_LINE_CHARACTERS = 2**20  # a line of the longest possible game has a tenth of that
SUFFIXES = (".pgn", ".parquet", ".jsonl", ".json", ".txt")
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".tar", ".tgz")
OPENING_PLIES = 20
ENDGAME_PIECES = 6

DRAW = "1/2-1/2"
RESULTS = {"1-0": "1-0", "0-1": "0-1", DRAW: DRAW, "1/2": DRAW, "½-½": DRAW, "½": DRAW, "*": "*"}
# Ends that a position shows; the names are those of chess.Termination, which LAION's rows use too.
ENDS = {
    "CHECKMATE": chess.Board.is_checkmate,
    "STALEMATE": chess.Board.is_stalemate,
    "INSUFFICIENT_MATERIAL": chess.Board.is_insufficient_material,
    "SEVENTYFIVE_MOVES": chess.Board.is_seventyfive_moves,
    "FIVEFOLD_REPETITION": chess.Board.is_fivefold_repetition,
    "FIFTY_MOVES": chess.Board.can_claim_fifty_moves,
    "THREEFOLD_REPETITION": chess.Board.can_claim_threefold_repetition,
}

# Reasons for dropping a game.
UNREADABLE = "unreadable text"
ILLEGAL = "illegal move"
OUT_OF_ORDER = "move numbers out of order"
NO_RESULT = "no result at the end (cut off?)"
UNFINISHED = "unfinished"
CONTRADICTION = "result contradicts the game"
VARIANT = "chess variant or set-up position"
NO_MOVES = "no moves"
DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class Game:
    """A whole, legal game from the standard position.

    moves: UCI, castling as the king's move (`e1g1`), promotion as `h7h8q`; result: `1-0`, `0-1`, `1/2-1/2`, or None
    where neither the source nor the final position says it; source: file and line or row.
    """

    moves: tuple[str, ...]
    result: str | None = None
    termination: str | None = None
    source: str = ""

    def to_row(self) -> dict[str, Any]:
        """The game in the form of laion/strategic_game_chess."""
        return {"Moves": list(self.moves), "Termination": self.termination, "Result": self.result}


@dataclass
class ReadReport:
    """What a reader kept and dropped; complete once the reader is exhausted."""

    num_games: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    num_recoded_lines: int = 0
    num_bytes_read: int = 0

    def drop(self, reason: str, example: str) -> None:
        self.dropped[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(example)

    def __str__(self) -> str:
        """One line, and one more for each reason with the first few positions."""
        lines = [f"{self.num_games:,} games kept, {self.dropped.total():,} dropped"]
        for reason, count in self.dropped.most_common():
            more = ", ..." if count > len(self.examples[reason]) else ""
            lines.append(f"  {count:,} {reason}: {', '.join(self.examples[reason])}{more}")
        if self.num_recoded_lines:
            lines.append(f"  {self.num_recoded_lines:,} lines that are not UTF-8 were read as Latin-1")
        return "\n".join(lines)


class _Dropped(Exception):
    """Why a game is dropped."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_games(paths: Iterable[str | Path], report: ReadReport | None = None, num_workers: int = 1) -> Iterator[Game]:
    """The whole, legal, distinct games of files and folders of files; `report` counts the dropped ones by reason.

    PGN (`.pgn`); parquet (`.parquet`) and JSON lines (`.jsonl`, `.json`) as `read_rows` takes them; any other file as
    PGN where a tag is near its beginning, else as one game a line (UCI or SAN, move numbers and result optional).
    Text is UTF-8, UTF-16 with a byte order mark, or line by line Latin-1. Memory grows with the number of games alone,
    by about 80 bytes for each, to know duplicates.
    Raises UserError for what is no file of games at all: missing, compressed, a damaged parquet file, no such columns.
    """
    report = ReadReport() if report is None else report
    files = (_read_file(file, report, num_workers) for file in list_files(paths))
    return _distinct(itertools.chain.from_iterable(files), report)


def read_rows(
    rows: Iterable[Mapping[str, Any]], source: str = "data", report: ReadReport | None = None, num_workers: int = 1
) -> Iterator[Game]:
    """As `read_games`, of rows: `Moves` (list of UCI or SAN moves) with `Termination` and `Result`, or `text`."""
    report = ReadReport() if report is None else report
    numbered = ((f"{source} row {number}", row) for number, row in enumerate(rows, 1))
    return _distinct(_replay(numbered, num_workers), report)


def game_rows(
    files: Sequence[tuple[str, int, int]] | None = None,
    rows: Iterable[Mapping[str, Any]] = (),
    source: str = "",
    max_games: int | None = None,
    num_workers: int = 1,
) -> Iterator[dict[str, str | None]]:
    """The first games of files (path, size, time of change), or else of rows, for a cached table.

    A row has `moves`, UCI with spaces between; the last one has the `report` instead.
    """
    report = ReadReport()
    if files is None:
        games = read_rows(rows, source, report, num_workers)
    else:
        games = read_games([file[0] for file in files], report, num_workers)
    for game in itertools.islice(games, max_games):
        yield {"moves": " ".join(game.moves), "report": None}
    yield {"moves": None, "report": str(report)}


def list_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files at the paths, of a folder those that end in `SUFFIXES`; raises UserError where there is none."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
            if not inside:
                raise UserError(f"{path}: the folder has no file ending in {', '.join(SUFFIXES)}")
            files += inside
        elif not path.exists():
            raise UserError(f"{path}: no such file or folder (looked for {path.absolute()})")
        elif path.suffix.lower() in COMPRESSED_SUFFIXES:
            raise UserError(f"{path}: decompress it first; expected is PGN, parquet, JSON lines or text")
        else:
            files.append(path)
    return files


_Outcome = tuple[str, Game | _Dropped]  # source of a game, and what came of it


def _distinct(outcomes: Iterable[_Outcome], report: ReadReport) -> Iterator[Game]:
    seen: set[int] = set()
    for source, game in outcomes:
        if isinstance(game, Game):
            digest = _digest(game.moves)
            if digest not in seen:
                seen.add(digest)
                report.num_games += 1
                yield game
                continue
            game = _Dropped(DUPLICATE)
        report.drop(game.reason, source + (f" ({game.detail})" if game.detail else ""))


def _replay(rows: Iterator[tuple[str, Any]], num_workers: int) -> Iterator[_Outcome]:
    """Games of (source, row), in their order, by so many processes."""
    if num_workers == 1:
        yield from map(_read_row, rows)
        return
    # Not a multiprocessing.Pool, which waits forever for a process that was killed.
    with ProcessPoolExecutor(num_workers, initializer=leave_with_parent) as pool:
        while block := list(itertools.islice(rows, 4 * ROWS_PER_TASK * num_workers)):
            yield from pool.map(_read_row, block, chunksize=ROWS_PER_TASK)


def _digest(moves: Sequence[str], key: str = "") -> int:
    """64 bits of a move list, the same on every machine. Ten million games share one with a probability of 3e-6."""
    return int.from_bytes(hashlib.blake2b(" ".join(moves).encode(), digest_size=8, key=key.encode()).digest())


class _GameReader:
    """One game as it is being read: moves are replayed one by one; after the first problem no more are taken."""

    # Signs that annotate and say nothing about moves. Not a lone letter (N: novelty): it may be a torn-off piece.
    _GLYPH = re.compile(r"(?:[!?]|\$\d+)+|\+-|-\+|\+/-|-/\+|\+?=\+?|[+=]/[=+]|\++|#|[±∓⩲⩱∞□⟳↑→⇆]|e\.?p\.?")
    _SUFFIX = re.compile(r"(?:[!?±∓⩲⩱∞□]+|\$\d+|e\.p\.)+$")
    _NUMBER = re.compile(r"(\d{1,4})(?:[.…]+|$)")
    _TOKEN = re.compile(r"\s+|[{}()]|;.*|[^\s{}();]+", re.DOTALL)

    def __init__(self, source: str, needs_result: bool) -> None:
        self.source = source
        self.needs_result = needs_result  # PGN ends every game with its result: one without was cut off
        self.headers: dict[str, str] = {}  # by name in lower case
        self.board = chess.Board()
        self.moves: list[str] = []
        self.result: str | None = None
        self.termination: str | None = None
        self.problem: _Dropped | None = None
        self.has_text = False
        self.starts_at_one = False
        self.in_comment = False
        self.variation_depth = 0

    @property
    def is_empty(self) -> bool:
        return not (self.has_text or self.headers)

    def fail(self, reason: str, detail: str = "") -> None:
        self.problem = self.problem or _Dropped(reason, detail)

    def read(self, line: str) -> str:
        """Take in a line of moves, comments and variations; return what follows the result on it."""
        position = 0
        while position < len(line):
            if self.in_comment:
                end = line.find("}", position)
                if end < 0:
                    break
                self.in_comment, position = False, end + 1
                continue
            match = self._TOKEN.match(line, position)
            assert match is not None
            token, position = match[0], match.end()
            if token == "{":
                self.in_comment = True
            elif token == "(":
                self.variation_depth += 1
            elif token == ")" and self.variation_depth:
                self.variation_depth -= 1
            elif token.isspace() or token[0] == ";" or self.variation_depth:
                continue
            elif token in RESULTS:
                self.result = RESULTS[token]
                return line[position:]
            else:
                self.has_text = True
                self._take(token)
        return ""

    def _take(self, token: str) -> None:
        number = self._NUMBER.match(token)
        if number and self.problem is None:
            if int(number[1]) != self.board.fullmove_number:
                self.fail(OUT_OF_ORDER, f"{token[:20]!a} where move {self.board.fullmove_number} is due")
            self.starts_at_one = self.starts_at_one or not self.moves
            token = token[number.end() :]
        if token.strip(".…") and not self._GLYPH.fullmatch(token):
            self.push(self._SUFFIX.sub("", token))

    def push(self, text: str) -> None:
        """Take in one move, in UCI or SAN."""
        if self.problem is not None:
            return
        detail = f"{text[:20]!a} at move {self.board.fullmove_number}, {chess.COLOR_NAMES[self.board.turn]}"
        try:
            # As SAN a text of this form could be a pawn's move only, and that one UCI says in the same way.
            move = self.board.parse_uci(text) if _UCI.fullmatch(text) else self.board.parse_san(text)
        except chess.InvalidMoveError:
            self.fail(UNREADABLE, detail)
        except (chess.IllegalMoveError, chess.AmbiguousMoveError):
            self.fail(ILLEGAL, detail)
        else:
            if not move:
                self.fail(ILLEGAL, detail)  # a null move (`--`)
                return
            self.moves.append(move.uci())
            self.board.push(move)

    def outcome(self) -> _Outcome:
        """The game, or why it is dropped."""
        try:
            return self.source, self._finish()
        except _Dropped as dropped:
            return self.source, dropped

    def _finish(self) -> Game:
        """The game; raises `_Dropped` where it is not a whole, legal one."""
        self._check_headers()
        if self.problem is not None:
            raise self.problem
        if self.needs_result and not self.headers and not self.starts_at_one:
            raise _Dropped(UNREADABLE, "neither tags nor move 1: the end of a game?")
        if self.in_comment or self.variation_depth:
            raise _Dropped(UNREADABLE, "a comment or variation that is never closed")
        if not self.moves:
            raise _Dropped(NO_MOVES)
        outcome = self.board.outcome()
        result, termination = self.result, self.termination
        end = "_".join((termination or "").upper().split())
        if outcome is None:
            if result == "*" or end == "UNTERMINATED":
                raise _Dropped(UNFINISHED, "result *" if result == "*" else f"Termination {end}")
            if result is None and self.needs_result:
                raise _Dropped(NO_RESULT)
        elif result not in (None, "*", outcome.result()):
            raise _Dropped(CONTRADICTION, f"{result} after {outcome.termination.name}")
        if end in ENDS:
            if not ENDS[end](self.board):
                raise _Dropped(CONTRADICTION, f"{end}, but the final position is not")
            if end != "CHECKMATE" and result not in (None, DRAW):
                raise _Dropped(CONTRADICTION, f"{result} by {end}")
        if outcome is not None:
            result = outcome.result()
            termination = end if end in ENDS else outcome.termination.name
        return Game(tuple(self.moves), result, termination, self.source)

    def _check_headers(self) -> None:
        variant = self.headers.get("variant", "").strip().lower()
        fen = self.headers.get("fen", chess.STARTING_FEN)
        # "From Position" is an ordinary game where the position is the usual one.
        if variant not in ("", "?", "standard", "chess", "normal", "from position"):
            self.problem = _Dropped(VARIANT, f"Variant {variant[:30]!a}")
        elif fen.split()[:4] != chess.STARTING_FEN.split()[:4]:
            self.problem = _Dropped(VARIANT, "FEN")
        elif "fen" not in self.headers and (self.headers.get("setup") == "1" or variant == "from position"):
            self.problem = _Dropped(VARIANT, "set-up position without a FEN")
        stated = RESULTS.get(self.headers.get("result", "").strip(), "*")
        if self.result is not None and stated not in ("*", self.result):
            self.fail(CONTRADICTION, f"header {stated}, moves end with {self.result}")
        elif self.result is None and stated != "*" and self.board.is_game_over():
            self.result = stated  # else the result after the moves is missing, and moves may be too
        if "termination" in self.headers:
            self.termination = self.headers["termination"].strip() or None


def _read_file(path: Path, report: ReadReport, num_workers: int) -> Iterator[_Outcome]:
    read_before, size = report.num_bytes_read, path.stat().st_size
    lines = _read_lines(path, report)
    match path.suffix.lower():
        case ".parquet":
            yield from _replay(_read_parquet(path, report), num_workers)
        case ".jsonl" | ".json":
            yield from _replay(_read_json_lines(lines, path), num_workers)
        case ".pgn":
            yield from map(_GameReader.outcome, _read_pgn(lines, str(path)))
        case _:
            head = list(itertools.islice(lines, 100))
            has_tags = any(_TAG.match(line) for _, line in head)
            lines = itertools.chain(head, lines)
            games = _read_pgn(lines, str(path)) if has_tags else _read_text(lines, path)
            yield from map(_GameReader.outcome, games)
    report.num_bytes_read = read_before + size


def _read_lines(path: Path, report: ReadReport) -> Iterator[tuple[int, str]]:
    """(number, text) of each line, whatever the encoding and the line ends."""
    read_before = report.num_bytes_read
    try:
        with open(path, "rb") as binary:
            is_utf16 = binary.peek(2).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            encoding, errors = ("utf-16", "replace") if is_utf16 else ("utf-8-sig", "surrogateescape")
            file = io.TextIOWrapper(binary, encoding, errors)
            for number in itertools.count(1):
                line = file.readline(MAX_LINE_CHARACTERS)
                if not line:
                    return
                if len(line) == MAX_LINE_CHARACTERS and line[-1] != "\n":
                    while line and line[-1] != "\n":
                        line = file.readline(MAX_LINE_CHARACTERS)
                    line = "<overlong-line>"  # no game has such a line; this text drops whatever it is part of
                if not line.isascii():
                    try:
                        line.encode()
                    except UnicodeEncodeError:  # bytes that are not UTF-8, which `surrogateescape` kept
                        line = line.encode(errors="surrogateescape").decode("latin-1")
                        report.num_recoded_lines += 1
                    line = line.lstrip("\ufeff")  # files that were joined have it in the middle too
                report.num_bytes_read = read_before + binary.tell()
                yield number, line.replace("\x1a", " ")  # the end mark of DOS files
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


# A tag with its value in quotes. Quotes inside are sometimes escaped and sometimes not.
_TAG = re.compile(r'\s*\[\s*(\w+)\s+"((?:[^"\\]|\\.|"(?!\s*\]))*)"\s*\]')
_TAG_START = re.compile(r"\s*\[\s*([A-Za-z]\w*)")
_TAGS_THAT_MATTER = ("variant", "fen", "setup")
_EVENT = re.compile(r'\s*\[\s*Event\s+"')  # the tag that every game begins with
_FIRST_MOVE = re.compile(r"\s*1\s*\.")


def _read_pgn(lines: Iterable[tuple[int, str]], name: str) -> Iterator[_GameReader]:
    """The games of PGN text, good or not, cut where one certainly ends: at its result, or at tags after moves."""
    game = _GameReader("", needs_result=True)
    after_blank = False
    for number, line in lines:
        tag = _TAG_START.match(line)
        is_blank = not line.strip()
        if game.in_comment:
            ends_here = _EVENT.match(line) is not None  # else a comment never closed would swallow the games after it
        elif is_blank:
            ends_here = game.has_text and not game.headers and not game.moves  # prose between games
        elif tag:
            # Tags after moves, or the same tag again: the game before has ended, with or without a result.
            ends_here = game.has_text or (tag[1].lower() in game.headers and (after_blank or tag[1] == "Event"))
        else:
            ends_here = after_blank and bool(game.moves) and _FIRST_MOVE.match(line) is not None  # a game without tags
        if ends_here:
            if not game.is_empty:
                yield game
            game = _GameReader("", needs_result=True)
        after_blank = is_blank
        if not game.in_comment:
            if line.startswith("%"):  # PGN's escape for lines that are no data
                continue
            if tag and game.is_empty:
                game.source = f"{name} line {number}"
            line = _read_tags(game, line)
        while line.strip():
            if game.is_empty:
                game.source = f"{name} line {number}"
            line = game.read(line)
            if game.result is not None:
                if not game.is_empty:
                    yield game
                game = _GameReader("", needs_result=True)
    if not game.is_empty:
        yield game


def _read_tags(game: _GameReader, line: str) -> str:
    """Take in the tags that a line begins with; return the rest of it."""
    while tag := _TAG_START.match(line):
        whole = _TAG.match(line)
        if whole is None:
            if tag[1].lower() in _TAGS_THAT_MATTER:
                game.fail(UNREADABLE, f"tag {line.strip()[:40]!a}")
            game.headers.setdefault(tag[1].lower(), "")
            return ""
        game.headers[whole[1].lower()] = whole[2]
        line = line[whole.end() :]
    return line


def _read_text(lines: Iterable[tuple[int, str]], path: Path) -> Iterator[_GameReader]:
    """One game a line; a line without a result is held back until the next one shows that it does not go on there."""
    held: _GameReader | None = None
    for number, line in lines:
        if not line.strip() or line.lstrip()[0] in "#%;":
            continue
        game = _GameReader(f"{path} line {number}", needs_result=False)
        _read_one(game, [line])
        if held is not None:
            goes_on = game.problem is not None and game.problem.reason == OUT_OF_ORDER and not game.moves
            if goes_on and held.result is None:
                held.fail(NO_RESULT, "goes on in the next line, where one game a line is expected")
            yield held
        held = game
    if held is not None:
        yield held


def _read_one(game: _GameReader, lines: Iterable[str]) -> None:
    for line in lines:
        rest = line if game.result is not None else game.read(line)
        if rest.strip():
            game.fail(UNREADABLE, f"{rest.strip()[:20]!a} after the result")


def _read_json_lines(lines: Iterable[tuple[int, str]], path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in lines:
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield f"{path} line {number}", row


def _read_parquet(path: Path, report: ReadReport) -> Iterator[tuple[str, Any]]:
    read_before, size = report.num_bytes_read, path.stat().st_size
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if not {"Moves", "text"} & set(names):
                raise UserError(f"{path}: no column 'Moves' or 'text'; it has {', '.join(names)}")
            columns = [name for name in ("Moves", "text", "Termination", "Result") if name in names]
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
                report.num_bytes_read = read_before + size * number // file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from error


def _read_row(source_and_row: tuple[str, Any]) -> _Outcome:
    source, row = source_and_row
    game = _GameReader(source, needs_result=False)
    if not isinstance(row, Mapping):
        game.fail(UNREADABLE, "one JSON object a line is expected")
        return game.outcome()
    moves, text = row.get("Moves"), row.get("text")
    if isinstance(moves, list) and all(isinstance(move, str) for move in moves):
        for move in moves:
            game.push(move.strip())
    elif isinstance(text := text if moves is None else moves, str):
        if text.lstrip("\ufeff \r\n").startswith("["):
            games = list(_read_pgn(enumerate(text.splitlines(), 1), ""))
            game = games[0]
            game.source = source
            if len(games) > 1:
                game.fail(UNREADABLE, "several games")
        else:
            _read_one(game, text.splitlines())
    else:
        game.fail(UNREADABLE, "no moves: `Moves` must be a list of moves, or `text` a text")
    result, termination = row.get("Result"), row.get("Termination")
    if isinstance(result, str) and result.strip():
        stated = RESULTS.get(result.strip())
        if stated is None:
            game.fail(UNREADABLE, f"Result {result[:20]!a}")
        elif game.result not in (None, stated):
            game.fail(CONTRADICTION, f"Result {stated}, moves end with {game.result}")
        elif not game.needs_result:
            game.result = stated
    if isinstance(termination, str):
        game.termination = termination.strip() or None
    return game.outcome()


# ---------------------------------------------------------------------------------------------------------------------
# Text


class MoveSpan(NamedTuple):
    """Where a move stands in a game's text: text[lead:end] is the move with the space and number before it, and these
    pieces, joined, are the whole text (so a window may be cut at any `lead`); text[start:end] is the move alone."""

    ply: int
    lead: int
    start: int
    end: int


def format_game(game: Game | Sequence[str], notation: Notation) -> str:
    """Text of a game: `e2e4 e7e5 g1f3` (uci) or `1. e4 e5 2. Nf3` (san)."""
    return format_with_spans(game, notation)[0]


def format_with_spans(game: Game | Sequence[str], notation: Notation) -> tuple[str, list[MoveSpan]]:
    """Text of a game as `format_game` writes it, and the span of characters of each move, in their order."""
    moves = game.moves if isinstance(game, Game) else game
    board = chess.Board()
    pieces: list[str] = []
    spans: list[MoveSpan] = []
    end = 0
    for ply, uci in enumerate(moves):
        before = _before_move(ply, notation)
        text = uci
        if notation == "san":
            move = chess.Move.from_uci(uci)
            text = board.san(move)
            board.push(move)
        pieces += before, text
        spans.append(MoveSpan(ply, end, end + len(before), end + len(before) + len(text)))
        end = spans[-1].end
    return "".join(pieces), spans


def format_prompt(moves: Sequence[str], notation: Notation) -> str:
    """Text after which the next move comes: `format_game(moves)`, then the next number in SAN, without a last space."""
    return (format_game(moves, notation) + _before_move(len(moves), notation)).rstrip()


def _before_move(ply: int, notation: Notation) -> str:
    space = " " if ply else ""
    return f"{space}{ply // 2 + 1}. " if notation == "san" and ply % 2 == 0 else space


def parse_game_text(text: str, notation: Notation) -> tuple[str, ...]:
    """UCI moves of a text as `format_game` writes it; raises ValueError naming the first token that is no move."""
    board = chess.Board()
    moves: list[str] = []
    for token in text.split():
        if notation == "san" and token == f"{board.fullmove_number}." and board.turn == chess.WHITE:
            continue
        move = parse_move(token, board, notation)
        if isinstance(move, str):
            raise ValueError(f"{token!r} at ply {len(moves)}: {move} ({notation}) in {board.fen()}")
        moves.append(move.uci())
        board.push(move)
    return tuple(moves)


_UCI = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")
_SAN = re.compile(r"(?:[NBRQK][a-h]?[1-8]?x?[a-h][1-8]|(?:[a-h]x)?[a-h][1-8](?:=?[NBRQ])?|O-O(?:-O)?|0-0(?:-0)?)[+#]?")
_MOVE_NUMBER = re.compile(r"\s*\d+\s*[.…][.…\s]*")
_MAX_MOVE_CHARACTERS = 7  # `Qa1xb2+`, `exd8=Q+`


def parse_move(text: str, board: chess.Board, notation: Notation) -> chess.Move | Literal["illegal", "unparsable"]:
    """The move that a text begins with; text after it does not count.

    A move number before it and spaces inside it (`N f6`, `e x d4`, `e8 = Q`, `e7e8 q`) are passed over. "unparsable":
    not written as a move; "illegal": written as one that is not legal here, or that in SAN fits several pieces.
    """
    number = _MOVE_NUMBER.match(text)
    text = text[number.end() :] if number else text
    pieces = (re.sub(r"\s*=\s*", "=", text) if notation == "san" else text).split()
    pattern = _SAN if notation == "san" else _UCI
    joined, is_move = "", False
    for piece in pieces:
        if len(joined) + len(piece) > _MAX_MOVE_CHARACTERS:
            break
        if is_move and not (notation == "uci" and piece in tuple("qrbn")):  # the promotion may follow after a space
            break
        joined += piece
        if pattern.fullmatch(joined):
            is_move = True
            try:
                return board.parse_san(joined) if notation == "san" else board.parse_uci(joined)
            except ValueError:
                continue
    return "illegal" if is_move else "unparsable"


def game_phase(board: chess.Board) -> Phase:
    """Phase of a position: opening in the first 20 plies, endgame with at most 6 pieces besides kings and pawns.

    The endgame is Lichess's (scalachess, Divider: majors and minors of both sides, at most 6).
    """
    if board.ply() < OPENING_PLIES:
        return "opening"
    pieces = chess.popcount(board.occupied & ~board.kings & ~board.pawns)
    return "endgame" if pieces <= ENDGAME_PIECES else "middlegame"


# ---------------------------------------------------------------------------------------------------------------------
# Split


def split_by_game(games: Iterable[Game | Sequence[str]], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of the training games and of the validation games, about `fraction` of all; each has at least one.

    The side of a game follows from its moves and the seed alone: it is the same whatever other games there are and in
    which order, and equal move lists are never on both sides. Raises UserError where there are not two different games.
    """
    assert 0 < fraction < 1
    digests = [_digest(game.moves if isinstance(game, Game) else game, key=f"split {seed}") for game in games]
    if len(set(digests)) < 2:
        raise UserError(f"{len(digests)} games with {len(set(digests))} different move lists cannot be split in two")
    # Few games may all fall on one side; then the one nearest to the bound changes over.
    bound = min(max(fraction * 2**64, min(digests) + 1), max(digests))
    train = [index for index, digest in enumerate(digests) if digest >= bound]
    validation = [index for index, digest in enumerate(digests) if digest < bound]
    return train, validation
