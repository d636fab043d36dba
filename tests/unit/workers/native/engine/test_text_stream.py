"""`TextStream`: what is sent never depends on how the text was cut into tokens."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.native.engine.text import TextStream
from workers.native.models.detokenizer import IncrementalDetokenizer
from workers.native.models.tokenizer import Tokenizer
from workers.native.testing.tiny_model import write_tiny_folder


class Pieces:
    """A detokenizer whose token i is the i-th piece; it holds back the last `late` characters."""

    def __init__(self, pieces: list[str], late: int = 0) -> None:
        self.pieces, self.late, self.held = pieces, late, ""

    def push(self, token_id: int) -> str:
        text = self.held + self.pieces[token_id]
        cut = len(text) - self.late
        ready, self.held = text[: max(cut, 0)], text[max(cut, 0) :]
        return ready

    def flush(self) -> str:
        rest, self.held = self.held, ""
        return rest


def cut_at_first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Read letter by letter; the stop string that is complete first ends the text before itself."""
    for end in range(1, len(text) + 1):
        hits = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(hits)], True
    return text, False


texts = st.text("ab", max_size=14)
stop_sets = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3).map(tuple)


@settings(max_examples=400, deadline=None)
@given(text=texts, stops=stop_sets, cuts=st.sets(st.integers(0, 14)), late=st.integers(0, 3))
def test_any_split_gives_the_text_before_the_first_stop(
    text: str, stops: tuple[str, ...], cuts: set[int], late: int
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    expected, stopped = cut_at_first_stop(text, stops)
    stream = TextStream(Pieces(pieces, late), stops)
    sent, fed = "", ""
    for number, piece in enumerate(pieces):
        sent += stream.feed(number)
        fed += piece
        assert expected.startswith(sent), "something was sent that belongs to a stop string"
        if stream.stopped:
            break
        held = len(fed) - len(sent)
        assert held <= late + max((len(stop) - 1 for stop in stops), default=0)
    sent += stream.finish()
    assert sent == expected
    assert stream.stopped == stopped
    assert stream.finish() == ""


def test_without_stop_strings_nothing_is_held() -> None:
    stream = TextStream(Pieces(["a", "", "bc"]), ())
    assert [stream.feed(number) for number in range(3)] == ["a", "", "bc"]
    assert stream.finish() == ""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_tiny_folder(tmp_path_factory.mktemp("model")))


@settings(max_examples=60, deadline=None)
@given(
    text=st.text("aé\N{SNOWMAN}\N{GRINNING FACE}", max_size=8),
    stops=st.lists(
        st.text("aé\N{SNOWMAN}\N{GRINNING FACE}", min_size=1, max_size=2), max_size=2
    ).map(tuple),
)
def test_characters_of_several_tokens(
    tokenizer: Tokenizer, text: str, stops: tuple[str, ...]
) -> None:
    expected, _ = cut_at_first_stop(text, stops)
    stream = TextStream(IncrementalDetokenizer(tokenizer), stops)
    sent = ""
    for token_id in tokenizer.encode(text):  # one token per byte
        more = stream.feed(token_id)
        assert "\N{REPLACEMENT CHARACTER}" not in more
        sent += more
        if stream.stopped:
            break
    assert sent + stream.finish() == expected


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer: Tokenizer) -> None:
    stream = TextStream(IncrementalDetokenizer(tokenizer), ("zz",))
    sent = "".join(stream.feed(token_id) for token_id in tokenizer.encode("z\N{SNOWMAN}")[:-1])
    assert sent + stream.finish() == "z\N{REPLACEMENT CHARACTER}"
