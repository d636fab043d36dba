"""Token ids against transformers, and streaming text against decoding at once."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from workers.native.model_store import ModelFolder
from workers.native.models.conversion import write_hf_folder
from workers.native.models.detokenizer import IncrementalDetokenizer
from workers.native.models.errors import InvalidModelError, TextError, UnsupportedModelError
from workers.native.models.tokenizer import Tokenizer
from workers.native.testing.tiny_gguf import write_gguf

TEXTS = (
    "Hello world",
    "  two  spaces   three    four",
    "1234567 12.5e-3 0x1F \N{ARABIC-INDIC DIGIT THREE} \N{VULGAR FRACTION ONE HALF}",
    "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f600",
    "def f(x):\n\treturn x  # ok\n\n\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<start_of_turn>user\n hi<end_of_turn> <table>",
    "\n\n\n\n  \t\t x\r\n",
    "\u200b\ufeffa\u0301 \U0001d518 \x00\x01",
    "a'll don't I'M WE'VE",
    "   ",
    " ",
    "",
    "\u2581\u2581 \u2581x",
    "x" * 50,
)
# transformers does not know SmolLM2's rule that every digit, of any script, stands alone.
ASCII_DIGITS_ONLY = tuple(text for text in TEXTS if "\N{VULGAR FRACTION ONE HALF}" not in text)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    found = {}
    for architecture in ("llama", "gemma3"):
        path = folder / f"{architecture}.gguf"
        write_gguf(path, architecture)
        found[architecture] = Tokenizer.from_folder(write_hf_folder(path, folder / architecture))
    return found


@pytest.mark.parametrize("name, texts", [("smollm2-135m", ASCII_DIGITS_ONLY)])
def test_ids_equal_transformers_on_the_gguf(
    name: str,
    texts: tuple[str, ...],
    real_model: Callable[[str], ModelFolder],
    real_gguf: Callable[[str], Path],
) -> None:
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.from_folder(real_model(name).path)
    gguf = real_gguf(name)
    theirs = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for text in texts:
        assert ours.encode(text) == theirs(text).input_ids, text


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_the_written_folder_works_in_transformers(
    name: str, real_model: Callable[[str], ModelFolder]
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = real_model(name).path
    ours = Tokenizer.from_folder(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token == ours.special_tokens["eos_token"]
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        bare = ours.encode(text, add_special_tokens=False)
        assert bare == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    if ours.has_chat_template:
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.apply_chat_template(messages) == text


def test_known_ids_of_smollm2(real_model: Callable[[str], ModelFolder]) -> None:
    """Also what llama.cpp's server gives: each digit alone, also other scripts' digits."""
    tokenizer = Tokenizer.from_folder(real_model("smollm2-135m").path)
    half = "12 \N{VULGAR FRACTION ONE HALF}"
    pieces = [tokenizer.token_text(token) for token in tokenizer.encode(half)]
    assert pieces == ["1", "2", " ", "\N{VULGAR FRACTION ONE HALF}"]
    assert tokenizer.encode("<|im_start|>user") == [1, 4093]
    assert tokenizer.vocab_size == 49152


def test_gemma_rules(tiny: dict[str, Tokenizer]) -> None:
    tokenizer = tiny["gemma3"]
    ids = tokenizer.encode("the  the\n\nquick\u00fc")
    assert ids[0] == 2
    assert tokenizer.decode(ids) == "the  the\n\nquick\u00fc"
    assert tokenizer.encode("the", add_special_tokens=False) == ids[1:2]
    assert [tokenizer.token_bytes(token) for token in ids[-2:]] == [b"\xc3", b"\xbc"]
    assert tokenizer.token_text(ids[-1]) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(ids[-1])


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_streamed_text_is_decoded_text(
    architecture: str, tiny: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = tiny[architecture]
    low = st.integers(0, 40) | st.integers(0, tokenizer.vocab_size + 3)
    ids = data.draw(st.lists(low, max_size=30))
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_streamed_text_of_real_tokenizers(
    name: str, real_model: Callable[[str], ModelFolder]
) -> None:
    tokenizer = Tokenizer.from_folder(real_model(name).path)

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.integers(0, 600) | st.integers(0, tokenizer.vocab_size), max_size=20))
    def same(ids: list[int]) -> None:
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)

    same()
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_text_survives_and_no_half_character_is_shown(
    text: str, tiny: dict[str, Tokenizer]
) -> None:
    tokenizer = tiny["llama"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = [detokenizer.push(token) for token in ids]
    if "\N{REPLACEMENT CHARACTER}" not in text and not any(map(tokenizer.is_special, ids)):
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(shown)
        assert "".join(shown) + detokenizer.flush() == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def stripping_tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    vocab = {"\u2581a": 0, "\u2581\u2581": 1, "b": 2, "<0x20>": 3, "<0xE2>": 4, "<s>": 5}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.decoder = decoder
    fast.add_special_tokens(["<s>"])
    return Tokenizer(fast)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
             decoders.Strip(" ", 1, 0)]
        ),
        decoders.Metaspace(),
    ],
    ids=["llama-2", "metaspace"],
)  # fmt: skip
def test_a_leading_space_is_stripped_once_and_only_at_the_start(decoder: decoders.Decoder) -> None:
    tokenizer = stripping_tokenizer(decoder)
    for ids in ([0, 0], [5, 0, 2], [1, 0], [2, 0], [0], [5]):
        assert streamed(tokenizer, ids) == tokenizer.decode(ids), ids
    continued = IncrementalDetokenizer(tokenizer, at_text_start=False)
    assert continued.push(0) + continued.flush() == " a"


def test_byte_runs_wait_for_their_end() -> None:
    sequence = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = stripping_tokenizer(sequence)
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(token) for token in (4, 3)] == ["", ""]
    assert detokenizer.push(2) == "\N{REPLACEMENT CHARACTER}" * 2 + "b"


def test_unknown_decoders_are_refused() -> None:
    fast = FastTokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match=r"WordPiece.*supported: ByteLevel"):
        Tokenizer(fast)
    fast.decoder = None
    with pytest.raises(UnsupportedModelError, match="null"):
        Tokenizer(fast)


def test_bad_files_and_bad_text(tmp_path: Path, tiny: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidModelError, match="not readable"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(TextError, match="character 1"):
        tiny["llama"].encode("a\ud800b")
