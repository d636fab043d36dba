"""Model lists as servers really send them."""

from __future__ import annotations

import pytest

from router.backends.model_list import ModelCard, context_tokens, parse_models


@pytest.mark.parametrize(
    "body, cards",
    [
        (b'{"object":"list","data":[{"id":"a"},{"id":"b"}]}', [("a", 0), ("b", 0)]),
        (b'{"data":null}', []),
        (b'{"data":[]}', []),
        (b'{"data":null,"models":[{"name":"a"}]}', [("a", 0)]),
        (b'{"models":[{"model":"a:7b","name":"x"}]}', [("a:7b", 0)]),
        (b'[{"id":"a","context_length":8192}]', [("a", 8192)]),
        (b'{"data":["a","b"]}', [("a", 0), ("b", 0)]),
        (b'{"data":[{"id":"a","max_model_len":2048}]}', [("a", 2048)]),
        (b'{"data":[{"id":"a","context_window":131072}]}', [("a", 131072)]),
        (b'{"data":[{"id":"a","meta":{"n_ctx_train":4096}}]}', [("a", 4096)]),
        (b'{"data":[{"id":"a","meta":null,"max_model_len":null}]}', [("a", 0)]),
        (
            b'{"data":[{"id":"a","max_context_length":8,"loaded_context_length":4}]}',
            [("a", 4)],
        ),
        (b'{"data":[{"id":"a","context_length":"big"}]}', [("a", 0)]),
        (b'{"data":[{"id":"a","context_length":true}]}', [("a", 0)]),
        (b'{"data":[{"id":"a","context_length":-1,"max_model_len":0}]}', [("a", 0)]),
        (b'{"data":[{"id":"a"},{"id":"b"},{"id":"a","context_length":3}]}', [("a", 3), ("b", 0)]),
    ],
)
def test_lists(body: bytes, cards: list[tuple[str, int]]) -> None:
    assert [(card.name, card.context_tokens) for card in parse_models(body)] == cards


@pytest.mark.parametrize(
    "body, why",
    [
        (b"<html>", "no JSON"),
        (b"{}", "neither data nor models"),
        (b'{"data":{"id":"a"}}', "no list"),
        (b'"a"', "no list"),
        (b'{"data":[{"object":"model"}]}', "names no model"),
        (b'{"data":[""]}', "names no model"),
        (b'{"data":[{"id":7}]}', "names no model"),
        (b'{"data":[null]}', "names no model"),
    ],
)
def test_what_is_no_list(body: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_models(body)


def test_the_context_is_that_of_the_model_in_question() -> None:
    cards = (ModelCard("a", 8), ModelCard("b", 32), ModelCard("c"))
    assert context_tokens(cards, "a") == 8
    assert context_tokens(cards, "c") == 0
    assert context_tokens(cards, "") == 32
    assert context_tokens((), "") == 0
