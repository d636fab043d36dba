"""What a client sends is what the engine gets: byte for byte, or field for field where the dialect
adds some of its own. The engine here is scripted and tells what it was sent.
"""

from __future__ import annotations

import base64
import json

import pytest

from router.backends.body import fields_of
from router.testing.contract import CHAT, COMPLETIONS, JSON, Served

PIXEL = base64.b64encode(bytes(range(256)) * 300).decode()
TOOL = '{"type":"function","function":{"name":"f","strict":true,"parameters":{"type":"object"}}}'
SCHEMA = '{"name":"s","strict":true,"schema":{"type":"object","additionalProperties":false}}'


def talk(*messages: str) -> str:
    return f'"messages":[{",".join(messages)}]'


def user(content: str) -> str:
    return f'{{"role":"user","content":{content}}}'


HI = talk(user('"hi"'))
CALLED = """{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function",
"function":{"name":"f","arguments":"{\\"a\\": 1.0,  \\"b\\":\\"\\\\u00e9\\"}"}}]}"""
# The fields of a chat beside its model, as a client may write them.
CHATS: dict[str, str] = {
    "tools": f'{HI},"tools":[{TOOL}],"parallel_tool_calls":false',
    "tool choice": f"""{HI},"tools":[{TOOL}],
        "tool_choice":{{"type":"function","function":{{"name":"f"}}}}""",
    "tool calls": talk(
        user('"hi"'), CALLED, '{"role":"tool","tool_call_id":"c1","content":"{\\"r\\":1}"}'
    ),
    "old functions": f'{HI},"functions":[{{"name":"f"}}],"function_call":"auto"',
    "reasoning": talk(
        user('"hi"'), '{"role":"assistant","content":"a","reasoning_content":"b","reasoning":"c"}'
    )
    + ',"reasoning_effort":"low","chat_template_kwargs":{"enable_thinking":false}',
    "json schema": f'{HI},"response_format":{{"type":"json_schema","json_schema":{SCHEMA}}}',
    "guided decoding": f"""{HI},"guided_json":{{"type":"object"}},"guided_regex":"\\\\d+",
        "structured_outputs":{{"choice":["a","b"]}},"ebnf":"root ::= \\"x\\"" """,
    "log probabilities": f'{HI},"logprobs":true,"top_logprobs":20,"prompt_logprobs":null',
    "image data": talk(
        user(
            '[{"type":"text","text":"what?"},{"type":"image_url","image_url":'
            f'{{"url":"data:image/png;base64,{PIXEL}","detail":"low"}}}}]'
        )
    ),
    "audio": talk(
        user(f'[{{"type":"input_audio","input_audio":{{"data":"{PIXEL}","format":"wav"}}}}]')
    )
    + ',"modalities":["text","audio"],"audio":{"voice":"alloy","format":"mp3"}',
    "file": talk(user('[{"type":"file","file":{"file_data":"JVBERi0=","filename":"a.pdf"}}]')),
    "unicode": talk(user('"Grüße, 世界 \U0001f999 \u2028 \u00a0"')),
    "escapes": talk(user('"\\u00e9\\ud83e\\udd99\\/\\b\\f\\n\\r\\t\\u0000\\u2028\\""')),
    "numbers": f"""{HI},"temperature":1.0,"top_p":0.30000000000000004,"top_k":-0,
        "x":[1e400,1E-7,-0.0,1.50,123456789012345678901234567890,0.1e+2]""",
    "big seed": f'{HI},"seed":18446744073709551615',
    "logit bias": f'{HI},"logit_bias":{{"50256":-100,"1":0.5}}',
    "spacing": f' \n\t{HI} ,\r\n  "stop" : [ "\\n" , "END" ]  , "user":\t"u" ',
    "nulls and empties": f'{HI},"stop":null,"tools":[],"metadata":{{}},"extra":{{"a":null,"b":[]}}',
    "same name twice": f'{HI},"seed":1,"seed":2,"x":{{"a":1,"a":2}}',
    "names beyond ascii": f'{HI},"größe":1,"\U0001f999":{{"ключ":[]}},"":0',
    "fields of tomorrow": f'{HI},"future_field":{{"deep":[[[{{"a":[1.50,null,"é"]}}]]]}}',
    "service fields": f"""{HI},"metadata":{{"trace":"1"}},"store":false,"service_tier":"default",
        "prompt_cache_key":"k","safety_identifier":"s","verbosity":"low" """,
    "prediction": f'{HI},"prediction":{{"type":"content","content":"h"}},"web_search_options":{{}}',
    "stream options": f'{HI},"stream":true,"stream_options":{{"include_usage":true,"x":{{"y":1}}}}',
    "sampling beyond openai": f"""{HI},"min_p":0.05,"repetition_penalty":1.10,"ignore_eos":true,
        "min_tokens":0,"skip_special_tokens":false,"stop_token_ids":[2],"xtc_probability":0.0""",
    "developer role": talk('{"role":"developer","content":"d","name":"n"}', user('"hi"')),
    "long": talk(user(json.dumps("word " * 50_000))),
    "model in the middle": f'"max_tokens":4,"model":"%s","n":1,{HI}',
}
TEXTS: dict[str, str] = {
    "text": '"prompt":"Once upon a time","suffix":"The end.","best_of":1,"echo":false',
    "token ids": '"prompt":[1, 504,260,  1038],"return_token_ids":true',
    "log probabilities of a text": '"prompt":"a","logprobs":5',
}


async def assert_untouched(served: Served, path: str, fields: str) -> None:
    """Send these fields, and compare with what the engine was sent."""
    text = fields.replace("%s", served.model)
    if "%s" not in fields:
        text = f'{text},"max_tokens":4,"model":"{served.model}"'
    body = f"{{{text}}}".encode()
    answer = await served.router.client.post(path, content=body, headers=JSON)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-splitserve-plan"] == served.plan
    assert served.received is not None, "this engine does not tell what it was sent"
    received = served.received()
    assert received.path == path
    assert received.headers["content-length"] == str(len(received.body))
    if not served.added:
        assert received.body == body
        return
    sent, got = fields_of(body), fields_of(received.body)
    assert served.added <= got.keys()
    kept = [(name, bytes(raw)) for name, raw in got.items() if name not in served.added]
    assert kept == [(name, bytes(raw)) for name, raw in sent.items()]


@pytest.mark.parametrize("name", CHATS)
async def test_a_chats_fields_reach_the_engine(served: Served, name: str) -> None:
    await assert_untouched(served, CHAT, CHATS[name])


@pytest.mark.parametrize("name", TEXTS)
async def test_a_completions_fields_reach_the_engine(served: Served, name: str) -> None:
    await assert_untouched(served, COMPLETIONS, TEXTS[name])


async def test_headers_reach_the_engine_but_for_keys_of_this_hop(served: Served) -> None:
    sent = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "openai-beta": "a=v2",
        "x-session-id": "s",
        "x-odd": 'a "b", c;d=\u00e9',
        "authorization": "Bearer of the client",
        "x-data-parallel-rank": "3",
        "x-request-id": "chosen by the client",
    }
    body = f'{{{HI},"model":"{served.model}"}}'.encode()
    raw = [(name.encode(), value.encode("latin-1")) for name, value in {**JSON, **sent}.items()]
    answer = await served.router.client.post(CHAT, content=body, headers=raw)
    assert answer.status_code == 200
    assert served.received is not None
    got = served.received().headers
    assert {name: got.get(name) for name in list(sent)[:4]} == {
        name: sent[name] for name in list(sent)[:4]
    }
    assert "authorization" not in got
    assert "x-data-parallel-rank" not in got
    assert got["x-request-id"] != sent["x-request-id"]


async def test_the_query_reaches_the_engine(served: Served) -> None:
    body = f'{{{HI},"model":"{served.model}"}}'.encode()
    path = CHAT + "?api-version=2024-10-21&x=%2F+%C3%A9"
    answer = await served.router.client.post(path, content=body, headers=JSON)
    assert answer.status_code == 200
    assert served.received is not None
    assert served.received().path == path
