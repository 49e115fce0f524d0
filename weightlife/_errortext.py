# SPDX-License-Identifier: Apache-2.0
"""How an error is written as one line of text, and read back from it.

A host passes a worker's exception on as text only, often quoted, cut, or inside another message, so the text
itself is the format::

    [WL201] 2 tensors did not arrive (model=M, layer=layers.0, tensors=[a, b, +12 more], session=s1; next: resend)

Three rules make it safe to read. The context is always there and always the *last* parenthesis of the line.
Values in it are percent-encoded wherever a character could be taken for syntax, for a terminal command or
for markup: names come out of checkpoint files and are hostile. And nothing that looks like a code or a
context survives inside a message or a hint, so an error that quotes another one is still itself.

Standard library only; ``errors`` holds the tree and uses this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "HINT_CHARS",
    "MESSAGE_CHARS",
    "NAME_CHARS",
    "TENSORS_SHOWN",
    "Parsed",
    "clean",
    "find",
    "names",
    "prose",
    "render",
    "safe_text",
]

NAME_CHARS = 160
"""Longest name that is shown; the middle goes, since both ends of a dotted name tell something."""
MESSAGE_CHARS = 2000
HINT_CHARS = 500
TENSORS_SHOWN = 8

# Compiled by the first error that is read or shown (1 ms, which no start-up pays); `re` keeps them.
_CODE = r"\[(WL\d{3})\]"
_TAIL = r"\((?=(?:model|layer|tensors|session)=|next:)"
_FIELD = r"(model|layer|session)=([^\s,;()\[\]]*)"
_TENSORS = r"tensors=\[([^\s,;()\[\]]*(?:, [^,;()\[\]]*)*)(\]?)"
_OMITTED = r"\+(\d{1,9}) more"
# Alone on its line, as Python prints it: a message that quotes the phrase is one line with more on it.
_CHAINED = (
    r"(?m)^[ \t|]*(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):[ \t]*$"
)
_NEXT = "next: "
# Bare in a value besides ASCII letters and digits: nothing that this format, a quoted Python or JSON string,
# or HTML gives a meaning to.
_BARE = frozenset("._-:/@#*=~$!^+")


def clean(text: object, limit: int = NAME_CHARS) -> str:
    """``text`` on one line: control, bidirectional and other invisible characters escaped, the middle cut out."""
    raw = str(text)
    if not raw.isprintable():
        raw = " | ".join(line.strip() for line in raw.splitlines() if line.strip()) or raw
        raw = "".join(ch if ch.isprintable() else _escape(ch) for ch in raw.replace("\t", " "))
    return _shorten(raw, limit)


def names(items: Iterable[object], limit: int = TENSORS_SHOWN) -> str:
    """A list of names for people: at most ``limit`` of them, then ``and 12 more``."""
    shown: list[str] = []
    more = 0
    for item in items:
        if len(shown) < limit:
            shown.append(clean(item))
        else:
            more += 1
    if not more:
        return ", ".join(shown)
    return f"{', '.join(shown)} and {more} more" if shown else f"{more} names"


def _escape(ch: str) -> str:
    point = ord(ch)
    if point < 0x100:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def _shorten(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head = (limit - 3) // 2
    return f"{text[:head]}...{text[len(text) - (limit - 3 - head) :]}"


def prose(text: object, limit: int) -> str:
    """Free text with everything defused that the parser would take for a code or for the context."""
    line = re.sub(_CODE, r"\1:", clean(text, 4 * limit).strip())
    return _shorten(re.sub(_TAIL, "( ", line), limit).strip()


def _encode(value: object) -> str:
    """A value of the context: percent-encoded UTF-8 outside letters, digits and a few marks."""
    text = _shorten(str(value), NAME_CHARS)
    if re.fullmatch(_CODE, f"[{text}]"):  # a lone tensor stands in brackets, as a code does
        return f"%{ord(text[0]):02X}{text[1:]}"
    return "".join(
        ch
        if (ch.isascii() and ch.isalnum()) or ch in _BARE
        else "".join(f"%{byte:02X}" for byte in ch.encode("utf-8", "surrogatepass"))
        for ch in text
    )


def _decode(text: str) -> str:
    try:
        return unquote(text, errors="surrogatepass")
    except UnicodeDecodeError:  # not ours, or damaged on the way
        return text


def _encode_hint(hint: str) -> str:
    """Brackets of a hint stay when they are balanced (the parser counts them), else they are encoded."""
    text = re.sub(r"%(?=[0-9A-Fa-f]{2})", "%25", hint)
    depth = 0
    for ch in text:
        depth += (ch == "(") - (ch == ")")
        if depth < 0:
            break
    return text if depth == 0 else text.replace("(", "%28").replace(")", "%29")


def _decode_hint(text: str) -> str:
    return re.sub(r"%(25|28|29)", lambda match: chr(int(match[1], 16)), text)


@dataclass
class Parsed:
    """What one line of error text says; empty where it says nothing or was cut."""

    code: str
    message: str
    fields: dict[str, str] = field(default_factory=dict)
    tensors: list[str] = field(default_factory=list)
    omitted: int = 0
    hint: str = ""


def render(
    code: str,
    message: str,
    fields: Iterable[tuple[str, str]],
    tensors: tuple[str, ...],
    omitted: int,
    hint: str,
) -> str:
    """The line for one error; ``fields`` are shown in the order given, empty ones left out."""
    items = {key: f"{key}={_encode(value)}" for key, value in fields if value}
    if tensors or omitted:
        shown = [_encode(name) for name in tensors[:TENSORS_SHOWN]]
        more = len(tensors) - len(shown) + omitted
        listed = ", ".join([*shown, f"+{more} more"] if more else shown)
        session = items.pop("session", None)
        items["tensors"] = f"tensors=[{listed}]"
        if session:
            items["session"] = session
    context = ", ".join(items.values())
    return f"[{code}] {message} ({context}{'; ' if context else ''}{_NEXT}{_encode_hint(hint)})"


def find(text: str, known: Iterable[str]) -> Parsed | None:
    """The first error in ``text`` whose code is in ``known``; of a chained traceback, in its last part."""
    codes = frozenset(known)
    for part in reversed(re.split(_CHAINED, text)):
        for match in re.finditer(_CODE, part):
            if match[1] in codes:
                return _parse(match[1], part[match.end() :].split("\n", 1)[0])
    return None


def _parse(code: str, line: str) -> Parsed:
    # the next code in the same line belongs to another error
    following = re.search(_CODE, line)
    if following is not None:
        line = line[: following.start()]
    tail = re.search(_TAIL, line)
    if tail is None:
        return Parsed(code, line.strip())
    result = Parsed(code, line[: tail.start()].strip())
    body, whole = _balanced(line[tail.end() :])
    _parse_context(result, body, whole)
    return result


def _balanced(text: str) -> tuple[str, bool]:
    """What stands before the bracket that closes the context, and whether there is one."""
    depth = 1
    for index, ch in enumerate(text):
        depth += (ch == "(") - (ch == ")")
        if depth == 0:
            return text[:index], True
    return text, False


def _parse_context(result: Parsed, body: str, whole: bool) -> None:
    """Read ``key=value, ...; next: hint``; a last value that a cut may have shortened is dropped."""
    position = 0
    while not body.startswith(_NEXT, position):
        match = re.compile(_FIELD).match(body, position) or re.compile(_TENSORS).match(body, position)
        if match is None:
            return
        end = match.end()
        ended = body.startswith((", ", "; "), end) or (whole and end == len(body))
        if match.re.pattern == _TENSORS:
            closed = bool(match[2])
            items = match[1].split(", ")
            _take_tensors(result, items if closed else items[:-1])
            ended = ended and closed
        elif ended:
            result.fields[match[1]] = _decode(match[2])
        if not ended or end == len(body):
            return
        position = end + 2
    result.hint = _decode_hint(body[position + len(_NEXT) :])


def _take_tensors(result: Parsed, items: list[str]) -> None:
    for item in items:
        count = re.fullmatch(_OMITTED, item)
        if count is not None:
            result.omitted = int(count[1])
        elif item:
            result.tensors.append(_decode(item))


def safe_text(error: BaseException | None) -> str:
    """An exception in words, also where its own ``__str__`` raises; nothing for None."""
    if error is None:
        return ""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - a client's exception must not keep an abort from ending
        return type(error).__name__
