"""Chat templates: as transformers renders them, and safe with what clients send."""

import json
from pathlib import Path
from typing import Any

import pytest

from workers.native.models.chat_template import ChatTemplate
from workers.native.models.conversion import write_hf_folder
from workers.native.models.errors import ChatTemplateError
from workers.native.models.tokenizer import Tokenizer
from workers.native.testing.tiny_gguf import write_gguf

CHAT = [{"role": "user", "content": "<b> & \u00e9"}, {"role": "assistant", "content": "ok"}]
TEMPLATES = (
    "{% for m in messages %}\n  {% if m.role == 'user' %}\n    U:{{ m.content }}\n"
    "  {% else %}\n    A:{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    "{% if add_generation_prompt %}A:{% endif %}",
    "{{ bos_token }}{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}"
    "{% endfor %}{% generation %}x{% endgeneration %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ tools is none }}{{ flavour | default('plain') }}"
    "{{ strftime_now('%Y') | length }}",
)


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("generation", [True, False])
def test_renders_as_transformers(source: str, generation: bool) -> None:
    module = pytest.importorskip("transformers.utils.chat_template_utils")
    rendered = module.render_jinja_template(
        conversations=[CHAT],
        chat_template=source,
        add_generation_prompt=generation,
        bos_token="<s>",
        flavour="mint",
    )[0][0]
    ours = ChatTemplate(source, {"bos_token": "<s>"})
    assert ours.render(CHAT, add_generation_prompt=generation, flavour="mint") == rendered


def render(source: str, messages: list[dict[str, Any]]) -> str:
    return ChatTemplate(source, {}).render(messages)


def test_text_parts_become_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: list[dict[str, Any]] = [{"role": "u", "content": parts}, {"role": "u"}]
    messages.append({"role": "u", "content": None})
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert render(source, messages) == "[one\ntwo][][]"


@pytest.mark.parametrize(
    "messages, words",
    [
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content has a part"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "type 'text'"),
        ([{"role": "user", "content": ["loose"]}], "type None"),
        ([{"role": "user", "content": 7}], "neither a string nor a list"),
        ([{"content": "x"}], "messages[0] has no role"),
        ([{"role": 3, "content": "x"}], "has no role"),
    ],
)
def test_messages_that_cannot_be_read(messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        render("{{ messages[0].content }}", messages)
    assert words in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ 1 + messages[0].content }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ undefined_thing() }}",
    ],
)
def test_refusals_of_the_template_and_of_the_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="refused the messages"):
        render(source, [{"role": "user", "content": "x"}])


def test_a_template_that_does_not_parse() -> None:
    with pytest.raises(ChatTemplateError, match="does not parse"):
        ChatTemplate("{% if %}", {})


def test_where_the_template_is_found(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama")
    folder = write_hf_folder(tmp_path / "m.gguf", tmp_path / "hf")
    chat = [{"role": "user", "content": "hi"}]
    first = Tokenizer.from_folder(folder)
    assert first.apply_chat_template(chat) == "hi<|end|>"
    assert first.encode_chat(chat)[-1] == 0
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D{{ messages | length }}"},
    ]
    config["eos_token"] = {"content": "<|start|>", "special": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    named = Tokenizer.from_folder(folder)
    assert named.apply_chat_template(chat) == "D1"
    assert named.special_tokens["eos_token"] == "<|start|>"
    (folder / "chat_template.jinja").write_text("J{{ eos_token }}")
    assert Tokenizer.from_folder(folder).apply_chat_template(chat) == "J<|start|>"


def test_without_a_template(tmp_path: Path) -> None:
    write_gguf(tmp_path / "g.gguf", "gemma3")
    folder = write_hf_folder(tmp_path / "g.gguf", tmp_path / "g")
    tokenizer = Tokenizer.from_folder(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
