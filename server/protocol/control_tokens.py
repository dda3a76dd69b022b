"""Control tokens that a client spells in its messages are plain text.

A chat template writes control tokens (`<|im_end|>`) and the client's text into one string, and the tokenizer
can't tell who wrote what: a user could end its turn and begin one of the system's. So what a client's text
spells is hidden before the template is applied, and put back for a second tokenizer, which knows the control
tokens that the template wrote under other names and takes what looks like one for what it is: letters. It is
made and used only for prompts that need it; all others take vLLM's way.
"""

import asyncio
import dataclasses
import json
import re
import secrets
import threading
from collections.abc import Callable
from typing import Any

import orjson
import structlog
from tokenizers import Tokenizer
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.utils.async_utils import make_async
from vllm.utils.mistral import is_mistral_tokenizer

log = structlog.get_logger()

SPELLED = "A message spells a control token of the model."
MARKER = re.compile(r"[<\[{|◁].*[>\]}|▷]")
"""What added tokens that structure a prompt look like, also those that are not marked as special."""
KEPT_OF_ASSISTANT = "think"
"""Templates look for these tags in former answers; the client had them from the model."""
UNTOUCHED = ("role", "type")
TEXT_PARTS = ("text", "refusal", "thinking", "input_text", "output_text")


def keep_control_tokens(renderer: Any, *, hides_text: bool) -> None:
    """Lets `renderer` (vLLM's BaseRenderer) take control tokens in messages for text.

    `hides_text`: templates give text; where they give token ids (prompt embeddings), or the tokenizer is of a
    kind that can't be made twice, messages that spell a control token are refused instead.
    """
    tokenizer = renderer.tokenizer
    if tokenizer is None or is_mistral_tokenizer(
        tokenizer
    ):  # Mistral's own never reads control tokens in text
        return
    guard = _Guard(renderer, hides_text=hides_text and getattr(tokenizer, "is_fast", False))
    if guard.names:
        renderer.render_messages_async = guard.render_messages
        renderer._tokenize_prompt = guard.tokenize
        renderer._tokenize_prompt_async = make_async(guard.tokenize, executor=renderer._executor)


class _Guard:
    """Stands before one renderer."""

    def __init__(self, renderer: Any, *, hides_text: bool) -> None:
        self._render = renderer.render_messages_async
        self._tokenize = renderer._tokenize_prompt
        self._tokenizer = renderer.tokenizer
        self._hides_text = hides_text
        added = self._tokenizer.added_tokens_decoder
        spelled = {
            str(token.content): index
            for index, token in added.items()
            if token.content and (token.special or MARKER.fullmatch(token.content))
        }
        nonce = secrets.token_hex(8)
        self.names = {text: f"ctl{nonce}n{index:08d}x" for text, index in spelled.items()}
        """The names under which the second tokenizer knows them; nobody can guess one."""
        self._hidden_name = f"txt{nonce}n"
        self._spellings = _Spellings(self.names, self._hidden_name)
        self._assistant = _Spellings(
            [text for text in self.names if KEPT_OF_ASSISTANT not in text.lower()], self._hidden_name
        )
        self._template = re.compile("|".join(map(re.escape, sorted(self.names, key=len, reverse=True))))
        self._second: Tokenizer | None = None
        self._lock = threading.Lock()

    async def render_messages(self, messages: list[Any], params: Any) -> tuple[list[Any], Any]:
        """As BaseRenderer.render_messages_async; the prompt's text may hold hidden spellings."""
        hidden = [self._message(message) for message in messages]
        arguments = {name: self._spellings.hide(value) for name, value in params.chat_template_kwargs.items()}
        unchanged = all(new is old for new, old in zip(hidden, messages, strict=True))
        if unchanged and all(arguments[name] is old for name, old in params.chat_template_kwargs.items()):
            return await self._render(messages, params)
        if not self._hides_text:
            raise VLLMValidationError(SPELLED, parameter="messages")
        if self._second is None:  # short prompts are tokenised on the event loop: it must be there by then
            await asyncio.to_thread(self._plain_tokenizer)
        conversation, prompt = await self._render(
            hidden, dataclasses.replace(params, chat_template_kwargs=arguments)
        )
        return [self._spellings.show(message) for message in conversation], prompt

    def tokenize(self, prompt: TextPrompt, params: Any) -> TokensPrompt:
        """As BaseRenderer._tokenize_prompt, with what was hidden put back as plain text."""
        text = prompt["prompt"]
        if self._hidden_name not in text:
            return self._tokenize(prompt, params)
        renamed = self._template.sub(lambda found: self.names[found.group()], text)
        options = params.get_encode_kwargs()
        encoding = self._plain_tokenizer().encode(
            self._spellings.show(renamed), add_special_tokens=options["add_special_tokens"]
        )
        ids = encoding.ids
        if options["truncation"] and len(ids) > options["max_length"]:
            most = options["max_length"]
            ids = ids[-most:] if self._tokenizer.truncation_side == "left" else ids[:most]
        return TokensPrompt(prompt_token_ids=ids, **{**prompt, "prompt": self._spellings.show(text)})

    def _message(self, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        spellings = self._assistant if message.get("role") == "assistant" else self._spellings
        hidden = dict(message)
        changed = False
        for name, value in message.items():
            if name in UNTOUCHED or value is None:
                continue
            if name == "content" and not isinstance(value, str):
                value = message[name] = list(value)  # pydantic's iterators can be read once
                hidden[name] = _each(value, lambda part: _hidden_part(part, spellings))
            elif name == "tool_calls":
                hidden[name] = _each(value, lambda call: _hidden_call(call, spellings))
            else:
                hidden[name] = spellings.hide(value)
            changed = changed or hidden[name] is not value
        return hidden if changed else message

    def _plain_tokenizer(self) -> Tokenizer:
        with self._lock:
            if self._second is None:
                try:
                    self._second = _renamed(self._tokenizer.backend_tokenizer, self.names)
                except (RuntimeError, KeyError, TypeError) as error:
                    log.warning("control_tokens_are_refused", reason=str(error))
                    self._hides_text = False
                    raise VLLMValidationError(SPELLED, parameter="messages") from error
            return self._second


class _Spellings:
    """Finds control tokens in a client's text, whole ones and beginnings at its end, and hides them."""

    def __init__(self, texts: Any, hidden_name: str) -> None:
        self._starts = tuple({text[0] for text in texts})
        self._beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)
        self._whole = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")
        self._name = hidden_name
        self._hidden = re.compile(hidden_name + "([0-9a-f]+)x")

    def hide(self, value: Any) -> Any:
        """`value` with its texts (names of objects too) hidden; the same object where there is none."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, dict):
            pairs = [(self.hide(name), self.hide(item)) for name, item in value.items()]
            same = all(name in value and value[name] is item for name, item in pairs)
            return value if same else dict(pairs)
        return _each(value, self.hide) if isinstance(value, list) else value

    def _hide_text(self, text: str) -> str:
        if not any(start in text for start in self._starts):
            return text
        hidden = self._whole.sub(lambda found: self._encoded(found.group()), text)
        # Two fields may be joined without anything between: a beginning must not meet its end.
        for length in range(min(self._longest - 1, len(hidden)), 0, -1):
            if hidden[-length:] in self._beginnings:
                return hidden[:-length] + self._encoded(hidden[-length:])
        return hidden if hidden != text else text

    def _encoded(self, text: str) -> str:
        return f"{self._name}{text.encode().hex()}x"

    def show(self, value: Any) -> Any:
        """What `hide` made, as it was."""
        if isinstance(value, str):
            return self._hidden.sub(lambda found: bytes.fromhex(found.group(1)).decode(), value)
        if isinstance(value, dict):
            return {self.show(name): self.show(item) for name, item in value.items()}
        return [self.show(item) for item in value] if isinstance(value, list) else value


def _each(values: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    """`change` of every value; the same list where it changes none."""
    changed = [change(value) for value in values]
    return values if all(new is old for new, old in zip(changed, values, strict=True)) else changed


def _hidden_part(part: Any, spellings: _Spellings) -> Any:
    """A part of a content; media are left alone."""
    if isinstance(part, str):
        return spellings.hide(part)
    if not isinstance(part, dict):
        return part
    texts = {name: spellings.hide(value) for name, value in part.items() if name in TEXT_PARTS}
    return part if all(part[name] is text for name, text in texts.items()) else part | texts


def _hidden_call(call: Any, spellings: _Spellings) -> Any:
    """A tool call: its arguments are JSON, where a token may be spelled with escapes."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return spellings.hide(call)
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:
        return spellings.hide(call)
    if (hidden := spellings.hide(arguments)) is not arguments:
        text = orjson.dumps(hidden).decode()
        return spellings.hide(call | {"function": function | {"arguments": text}})
    return spellings.hide(call)


def _renamed(tokenizer: Tokenizer, names: dict[str, str]) -> Tokenizer:
    """The same tokenizer with the tokens `names` under their new names; each keeps its id.

    Raises RuntimeError where that did not work.
    """
    data = json.loads(tokenizer.to_str())
    ids = {text: tokenizer.token_to_id(text) for text in names}
    for token in data["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = data["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(text, text): index for text, index in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    renamed = Tokenizer.from_str(json.dumps(data))
    renamed.no_truncation()
    renamed.no_padding()
    for text, name in names.items():
        if renamed.encode(name, add_special_tokens=False).ids != [ids[text]]:
            raise RuntimeError(f"the control token {text!r} can't be given another name")
    return renamed
