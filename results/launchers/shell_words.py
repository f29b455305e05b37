"""Cuts a shell script into statements of raw words, quotes and dollar signs still in them. Expands nothing.

Knows quotes, comments, line continuations, `$(...)`, `${...}`, arrays in brackets and here-documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Document", "Statement", "Word", "statements"]

_PAIRS = {"(": ")", "{": "}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A raw word and the line it starts on."""

    text: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The body of a here-document; `expands`: its parameters are those of the script."""

    text: str
    line: int
    expands: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """Words up to a line break, a semicolon or an operator."""

    words: tuple[Word, ...]
    document: Document | None = None
    joined: str = ""  # `||` or `&&`, where another statement follows on that


@dataclass(slots=True)
class _Scan:
    text: str
    at: int = 0
    line: int = 1

    def step(self, count: int = 1) -> str:
        """Passes over some characters."""
        passed = self.text[self.at : self.at + count]
        self.line += passed.count("\n")
        self.at += count
        return passed


def statements(text: str) -> Iterator[Statement]:
    """Every statement that has words."""
    scan = _Scan(text)
    words: list[Word] = []
    pending: list[tuple[str, bool, bool]] = []
    while scan.at < len(text):
        c = text[scan.at]
        if text.startswith("\\\n", scan.at):
            scan.step(2)
        elif c in " \t\r":
            scan.step()
        elif c == "#":
            end = text.find("\n", scan.at)
            scan.step((len(text) if end < 0 else end) - scan.at)
        elif text.startswith("<<", scan.at) and not text.startswith("<<<", scan.at):
            pending.append(_delimiter(scan))
        elif c in "\n;&|()":
            is_redirected = c == "&" and text.startswith("&>", scan.at)
            joined = text[scan.at : scan.at + 2] if text[scan.at : scan.at + 2] in {"||", "&&"} else ""
            scan.step(len(joined) or 1)
            if is_redirected:
                continue
            document = None
            if c == "\n" and pending:
                document = [_body(scan, *mark) for mark in pending][-1]
                pending = []
            if words and (c == "\n" or not pending):
                yield Statement(words=tuple(words), document=document, joined=joined)
                words = []
        elif c in "<>":
            if words and words[-1].text.isdecimal() and text[scan.at - 1].isdecimal():
                words.pop()  # the number of a stream, as in 2>&1
            operator = scan.step()
            while scan.at < len(text) and text[scan.at] in ">|&":
                operator += scan.step()
            words.append(Word(text=operator, line=scan.line))
        else:
            line = scan.line
            words.append(Word(text=_word(scan), line=line))
    if words:
        yield Statement(words=tuple(words))


def _word(scan: _Scan) -> str:
    """One raw word: up to a blank or an operator outside quotes and brackets."""
    text, start = scan.text, scan.at
    out = ""
    while scan.at < len(text):
        c = text[scan.at]
        if text.startswith("\\\n", scan.at):
            scan.step(2)
        elif c == "\\":
            out += scan.step(2)
        elif c in "'\"`":
            out += _quotes(scan, c)
        elif c == "$" and scan.at + 1 < len(text) and text[scan.at + 1] in _PAIRS:
            out += scan.step()
            out += _brackets(scan)
        elif c == "(" and out.endswith("=") and scan.at > start:
            out += _brackets(scan)
        elif c in " \t\r\n;&|()<>":
            break
        else:
            out += scan.step()
    return out


def _quotes(scan: _Scan, quote: str) -> str:
    out = scan.step()
    while scan.at < len(scan.text) and scan.text[scan.at] != quote:
        is_escape = quote != "'" and scan.text[scan.at] == "\\"
        if is_escape and scan.text.startswith("\\\n", scan.at):
            scan.step(2)
        else:
            out += scan.step(2 if is_escape else 1)
    return out + scan.step()


def _brackets(scan: _Scan) -> str:
    """From an opening bracket to the one that closes it; comments in an array's lines are left out."""
    opening = scan.text[scan.at]
    closing, depth, out = _PAIRS[opening], 0, ""
    while scan.at < len(scan.text):
        c = scan.text[scan.at]
        if c in "'\"":
            out += _quotes(scan, c)
            continue
        if c == "#" and opening == "(" and out[-1:] in {" ", "\t", "\n", "("} and not out.endswith("(("):
            while scan.at < len(scan.text) and scan.text[scan.at] != "\n":
                scan.step()
            continue
        depth += (c == opening) - (c == closing)
        out += scan.step()
        if depth == 0:
            return out
    return out


def _delimiter(scan: _Scan) -> tuple[str, bool, bool]:
    """The word that ends a here-document, whether its tabs go, and whether it expands."""
    scan.step(2)
    strips = scan.text.startswith("-", scan.at)
    scan.step(int(strips))
    while scan.at < len(scan.text) and scan.text[scan.at] in " \t":
        scan.step()
    raw = _word(scan)
    plain = raw.strip("'\"").replace("\\", "")
    return plain, strips, plain == raw


def _body(scan: _Scan, delimiter: str, strips: bool, expands: bool) -> Document:
    line, out = scan.line, []
    while scan.at < len(scan.text):
        end = scan.text.find("\n", scan.at)
        end = len(scan.text) if end < 0 else end
        text = scan.text[scan.at : end]
        scan.step(end + 1 - scan.at)
        text = text.lstrip("\t") if strips else text
        if text.rstrip("\r") == delimiter:
            break
        out.append(text + "\n")
    return Document(text="".join(out), line=line, expands=expands)
