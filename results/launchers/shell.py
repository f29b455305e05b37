"""Reads a shell script as far as its words are determined: variables, arrays, defaults, arithmetic, here-documents.

Runs nothing. What only a run could tell (a command's output, the environment, an assignment under a condition) stays
open: the word carries a mark with the variable's name, and whoever needs the word says which variable is missing.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from results.launchers.open_words import mark as _mark
from results.launchers.open_words import open_names
from results.launchers.shell_conditions import BRANCHING, Branches, Truth
from results.launchers.shell_words import Statement, Word, statements

__all__ = ["Command", "Script", "read_script"]

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PREFIXES = frozenset({"{", "}", "!", "export", "readonly", "local", "declare", "exec"})
_SIMPLE = re.compile(r"[A-Za-z_]\w*|[0-9]+|[@*#?!$-]")
_BRACED = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*])(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_OPERATORS = {ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__, ast.FloorDiv: int.__floordiv__,
              ast.Mod: int.__mod__}  # fmt: skip
_MOST_WORDS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command with its words expanded; `line` is where it starts, `lines` where each word stands."""

    words: tuple[str, ...]
    lines: tuple[int, ...]

    @property
    def line(self) -> int:
        """Where it starts."""
        return self.lines[0]


@dataclass(slots=True)
class Script:
    """What a script runs, and the files that it writes from here-documents, by their expanded names."""

    commands: list[Command] = field(default_factory=list)
    files: dict[str, tuple[str, int]] = field(default_factory=dict)
    variables: dict[str, list[str]] = field(default_factory=dict)


def read_script(text: str, defined: Mapping[str, str] | None = None) -> Script:
    r"""The commands of a script; `defined` are variables of the environment.

    >>> script = read_script("TP=${TP:-8}; A=(--a $((TP * 2))); run ${A[@]} \\\n --b $TP")
    >>> script.commands[0].words
    ('run', '--a', '16', '--b', '8')
    >>> script = read_script("T=fp8; A=(--a); if [[ $T == fp8 ]]; then A+=(--b); else A=(--c); fi; run ${A[@]}")
    >>> script.commands[0].words
    ('run', '--a', '--b')
    """
    script = Script(variables={name: [value] for name, value in (defined or {}).items()})
    fixed = frozenset(defined or {})
    branches = Branches()
    for statement in statements(text):
        words = list(statement.words)
        while words and (words[0].text in BRANCHING or words[0].text in _PREFIXES):
            word = words.pop(0)
            if word.text in {"for", "select"} and words:
                script.variables[words[0].text] = [_mark(words[0].text)]
                words = []
            branches.enter(word.text)
        if branches.asks:
            branches.ask([_joined(script, word.text) for word in words], statement.joined)
        elif words and branches.state is not Truth.NO:
            _run(script, statement, words, is_certain=branches.state is Truth.YES, fixed=fixed)
    return script


def _joined(script: Script, raw: str) -> str:
    """A word of a condition: quoted blanks and all."""
    return " ".join(_fields(script, raw, one=True))


def _run(script: Script, statement: Statement, words: list[Word], *, is_certain: bool, fixed: frozenset[str]) -> None:
    """Assignments change the variables; the rest is a command."""
    while words and (found := _ASSIGNMENT.fullmatch(words[0].text)):
        name, plus, raw = found.groups()
        value = _array(script, raw) if raw.startswith("(") else [" ".join(_fields(script, raw, one=True))]
        if plus:
            before = script.variables.get(name, [])
            value = before + value if raw.startswith("(") else ["".join([*before, *value])]
        if name not in fixed:  # what --define gives stands
            kept = script.variables.get(name, []) if plus and raw.startswith("(") else []
            script.variables[name] = value if is_certain else [*kept, _mark(name)]
        words = words[1:]
    out: list[str] = []
    lines: list[int] = []
    for word in words:
        fields = _fields(script, word.text)
        out += fields
        lines += [word.line] * len(fields)
        if len(out) > _MOST_WORDS:
            raise ValueError(f"line {word.line}: a command must have at most {_MOST_WORDS} words")
    if statement.document is not None and (target := _target(out)) is not None:
        body = _text(script, statement.document.text) if statement.document.expands else statement.document.text
        script.files[target] = (body, statement.document.line)
    if out:
        script.commands.append(Command(words=tuple(out), lines=tuple(lines)))


def _target(words: list[str]) -> str | None:
    """The file that a here-document goes to: what follows `>`."""
    return next((words[i + 1] for i, w in enumerate(words[:-1]) if w in {">", ">|"}), None)


def _array(script: Script, raw: str) -> list[str]:
    inner = raw[1:-1] if raw.endswith(")") else raw[1:]
    return [f for s in statements(inner) for word in s.words for f in _fields(script, word.text)]


def _fields(script: Script, raw: str, *, one: bool = False) -> list[str]:
    """A raw word, quotes and all, as the words it becomes; `one`: as an assignment sees it."""
    done: list[str] = []
    now, is_open, at = "", False, 0
    while at < len(raw):
        c = raw[at]
        if c == "'":
            end = raw.find("'", at + 1)
            end = len(raw) if end < 0 else end
            now, is_open, at = now + raw[at + 1 : end], True, end + 1
        elif c == '"':
            end = _closing_quote(raw, at + 1)
            inside = raw[at + 1 : end]
            parts = _quoted(script, inside)
            now += parts[0] if parts else ""
            is_open = is_open or bool(parts)
            for part in parts[1:]:
                done.append(now)
                now = part
            at = end + 1
        elif c == "\\" and at + 1 < len(raw):
            now, is_open, at = now + raw[at + 1], True, at + 2
        elif c == "$" or c == "`":
            values, at = _parameter(script, raw, at)
            pieces = [" ".join(values)] if one else [p for value in values for p in (value.split() or [""])]
            for i, piece in enumerate(pieces):
                if i:
                    done.append(now)
                    now = ""
                now += piece
                is_open = is_open or bool(piece)
        else:
            now, is_open, at = now + c, True, at + 1
    return [*done, now] if is_open or now else done


def _quoted(script: Script, inside: str) -> list[str]:
    """What stands between double quotes: one word, but for an array's `[@]`, which gives one each."""
    if (found := re.fullmatch(r"\$\{([A-Za-z_]\w*)\[@\]\}|\$@", inside)) is not None:
        return script.variables.get(found[1], [_mark(found[1])]) if found[1] else []
    return [_text(script, inside)]


def _text(script: Script, inside: str) -> str:
    """A text with its parameters expanded and nothing split."""
    out, at = "", 0
    while at < len(inside):
        if inside[at] == "\\" and at + 1 < len(inside) and inside[at + 1] in '$`"\\\n':
            out, at = out + inside[at + 1].strip("\n"), at + 2
        elif inside[at] in "$`":
            values, at = _parameter(script, inside, at)
            out += " ".join(values)
        else:
            out, at = out + inside[at], at + 1
    return out


def _closing_quote(raw: str, at: int) -> int:
    while at < len(raw) and raw[at] != '"':
        at += 2 if raw[at] == "\\" else 1
    return min(at, len(raw))


def _parameter(script: Script, raw: str, at: int) -> tuple[list[str], int]:
    """The values of what starts with a dollar sign, or a command's output, and where it ends."""
    if raw[at] == "`":
        end = raw.find("`", at + 1)
        return [_mark("$(...)")], (len(raw) if end < 0 else end + 1)
    if raw.startswith("$((", at):
        end = raw.find("))", at)
        end = len(raw) if end < 0 else end
        return [_arithmetic(script, raw[at + 3 : end])], end + 2
    if raw.startswith("$(", at):
        return [_mark("$(...)")], _matching(raw, at + 1, "(", ")") + 1
    if raw.startswith("${", at):
        end = _matching(raw, at + 1, "{", "}")
        return _braced(script, raw[at + 2 : end]), end + 1
    found = _SIMPLE.match(raw, at + 1)
    if found is None:
        return ["$"], at + 1
    return _value(script, found[0]), found.end()


def _value(script: Script, name: str) -> list[str]:
    if name in {"@", "*"}:
        return []  # arguments of the script: there are none
    if name == "#":
        return ["0"]
    return script.variables.get(name, [_mark(name)])[:1] or [""]


def _braced(script: Script, inner: str) -> list[str]:
    found = _BRACED.fullmatch(inner)
    if found is None:
        return [_mark(re.match(r"\w*", inner)[0] or inner)]  # type: ignore[index]  # matches the empty text
    count, name, every, operator, rest = found.groups()
    known = script.variables.get(name)
    if count:
        is_known = known is not None and not any(map(open_names, known))
        return [str(len(known)) if every else str(len(known[0]))] if is_known and known else [_mark(name)]
    is_set = known is not None and (not (operator or "").startswith(":") or known != [""])
    if operator in {":-", "-", ":=", "="} and (not is_set or (known and open_names(known[0]))):
        value = [" ".join(_fields(script, rest, one=True))]
        if operator.endswith("="):
            script.variables[name] = value
        return value
    if operator in {":+", "+"}:
        return [_text(script, rest)] if is_set else []
    if known is None:
        return [] if name in {"@", "*"} else [_mark(name)]
    return list(known) if every else known[:1] or [""]


def _matching(raw: str, at: int, opening: str, closing: str) -> int:
    depth = 0
    for i in range(at, len(raw)):
        depth += (raw[i] == opening) - (raw[i] == closing)
        if depth == 0:
            return i
    return len(raw)


def _arithmetic(script: Script, text: str) -> str:
    """Whole numbers with + - * / % and brackets; a mark where a variable is not determined."""
    expanded = _text(script, text)
    if names := open_names(expanded):
        return _mark(names[0])
    named = re.sub(r"[A-Za-z_]\w*", lambda m: " ".join(_value(script, m[0])) or "0", expanded)
    if names := open_names(named):
        return _mark(names[0])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return str(_evaluate(ast.parse(named.replace("/", "//").strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return _mark(f"(({text.strip()}))")


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("not whole-number arithmetic")
